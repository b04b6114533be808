//! Views of tensors: an address with a shape, strides and an element type.
//!
//! Strides count elements, the last dimension is dense, and every offset is computed in `usize`, which is 64 bits wide
//! wherever caches are large. A view owns nothing: whoever builds one promises that the memory outlives the call.

use super::InvalidArgument;
use super::element::Dtype;

/// `[num_rows, width]`: one row a token, with dense rows.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView {
    /// The first element.
    pub address: *mut u8,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Rows.
    pub num_rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
}

// SAFETY: a view is an address; the functions that follow it are unsafe and state who may access what.
unsafe impl Send for MatrixView {}
// SAFETY: as above.
unsafe impl Sync for MatrixView {}

impl MatrixView {
    /// Bytes of the elements of a row.
    #[inline]
    pub(crate) fn row_bytes(&self) -> usize {
        self.width * self.dtype.size()
    }

    /// Address of a row's first element.
    #[inline]
    pub(crate) fn row(&self, row: usize) -> *mut u8 {
        debug_assert!(row < self.num_rows);
        self.at(row, 0)
    }

    /// Address of an element. It may be one behind the last.
    #[inline]
    pub(crate) fn at(&self, row: usize, column: usize) -> *mut u8 {
        self.address
            .wrapping_add((row * self.row_stride + column) * self.dtype.size())
    }

    /// Refuses another shape or element type than that of `other`, which is called `other_name`.
    pub(crate) fn check_like(
        &self,
        name: &str,
        other: &Self,
        other_name: &str,
    ) -> Result<(), InvalidArgument> {
        if (self.num_rows, self.width, self.dtype) == (other.num_rows, other.width, other.dtype) {
            return Ok(());
        }
        let show = |view: &Self| format!("[{}, {}] of {:?}", view.num_rows, view.width, view.dtype);
        let allowed = format!("that of {other_name}, {}", show(other));
        Err(InvalidArgument::new(
            format!("shape of {name}"),
            show(self),
            allowed,
        ))
    }
}

/// `[num_tokens, num_heads, head_dim]`: queries, keys or values of a step, or the place of a result.
#[derive(Clone, Copy, Debug)]
pub struct RowsView {
    /// The first element.
    pub address: *mut u8,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Tokens.
    pub num_tokens: usize,
    /// Heads of a token.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements from a token to the next.
    pub token_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
}

// SAFETY: a view is an address; the functions that follow it are unsafe and state who may access what.
unsafe impl Send for RowsView {}
// SAFETY: as above.
unsafe impl Sync for RowsView {}

impl RowsView {
    /// Address of a head's first element.
    #[inline]
    pub(crate) fn row(&self, token: usize, head: usize) -> *mut u8 {
        debug_assert!(token < self.num_tokens && head < self.num_heads);
        let offset = token * self.token_stride + head * self.head_stride;
        self.address.wrapping_add(offset * self.dtype.size())
    }

    /// Refuses another shape than `[num_tokens, num_heads, head_dim]`.
    pub(crate) fn check_shape(&self, name: &str, expected: [usize; 3]) -> Result<(), InvalidArgument> {
        let shape = [self.num_tokens, self.num_heads, self.head_dim];
        if shape == expected {
            return Ok(());
        }
        Err(InvalidArgument::new(
            format!("shape of {name}"),
            format!("{shape:?}"),
            format!("{expected:?}"),
        ))
    }
}

/// `[num_blocks, num_kv_heads, block_size, head_dim]`: the key cache or the value cache of one layer.
#[derive(Clone, Copy, Debug)]
pub struct CacheView {
    /// The first element.
    pub address: *mut u8,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Blocks, the null block included.
    pub num_blocks: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Slots of a block.
    pub block_size: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements from a block to the next.
    pub block_stride: usize,
    /// Elements from a head to the next.
    pub head_stride: usize,
    /// Elements from a slot to the next.
    pub slot_stride: usize,
}

// SAFETY: a view is an address; the functions that follow it are unsafe and state who may access what.
unsafe impl Send for CacheView {}
// SAFETY: as above.
unsafe impl Sync for CacheView {}

impl CacheView {
    /// Address of the first element of a slot of one head.
    #[inline]
    pub(crate) fn row(&self, block: usize, kv_head: usize, offset: usize) -> *mut u8 {
        debug_assert!(block < self.num_blocks && kv_head < self.num_kv_heads && offset < self.block_size);
        let elements = block * self.block_stride + kv_head * self.head_stride + offset * self.slot_stride;
        self.address.wrapping_add(elements * self.dtype.size())
    }

    /// Refuses a pair of caches that differ in shape or type, or that have no slot or no head.
    pub(crate) fn check_pair(keys: &Self, values: &Self) -> Result<(), InvalidArgument> {
        let shape = |cache: &Self| {
            [
                cache.num_blocks,
                cache.num_kv_heads,
                cache.block_size,
                cache.head_dim,
            ]
        };
        if shape(keys) != shape(values) {
            let expected = format!("that of key_cache, {:?}", shape(keys));
            return Err(InvalidArgument::new(
                "shape of value_cache",
                format!("{:?}", shape(values)),
                expected,
            ));
        }
        if keys.dtype != values.dtype {
            let expected = format!("that of key_cache, {:?}", keys.dtype);
            return Err(InvalidArgument::new(
                "dtype of value_cache",
                format!("{:?}", values.dtype),
                expected,
            ));
        }
        if shape(keys).contains(&0) {
            return Err(InvalidArgument::new(
                "shape of key_cache",
                format!("{:?}", shape(keys)),
                "no zero in it",
            ));
        }
        Ok(())
    }
}
