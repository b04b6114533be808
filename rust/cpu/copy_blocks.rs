//! Copies of whole blocks: within caches, for copy-on-write, and between the caches and those of host memory. The callers
//! are the bindings of `copy_blocks` and `swap_blocks`.
//!
//! Within a cache all sources are as they were before the call, also where a block is both the source of one copy and
//! the destination of another.

use std::collections::HashSet;

use super::InvalidArgument;
use super::pool;

/// Bytes a nanosecond and a thread, for the estimate of a call's duration.
const BYTES_PER_NS: usize = 4;

/// `[num_blocks, ...]`: a cache whose blocks are dense.
#[derive(Clone, Copy, Debug)]
pub struct BlocksView {
    /// The first byte of block 0.
    pub address: *mut u8,
    /// Blocks, the null block included.
    pub num_blocks: usize,
    /// Bytes from a block to the next.
    pub block_stride_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
}

// SAFETY: a view is an address; `copy_blocks` is unsafe and states who may access it.
unsafe impl Send for BlocksView {}
// SAFETY: as above.
unsafe impl Sync for BlocksView {}

impl BlocksView {
    /// The first byte of a block.
    fn block(&self, block: i32) -> *mut u8 {
        let block = usize::try_from(block).expect("checked: no block id is negative");
        self.address.wrapping_add(block * self.block_stride_bytes)
    }
}

/// Blocks that all of the caches have.
fn num_common(caches: &[BlocksView]) -> usize {
    let num_blocks = caches.iter().map(|cache| cache.num_blocks);
    num_blocks.min().unwrap_or(usize::MAX)
}

/// Refuses blocks that a cache does not have, and two copies into one block. `sources` are read and `destinations`
/// written; within caches they are the same.
///
/// # Errors
/// The first such copy.
pub fn check(
    sources: &[BlocksView],
    destinations: &[BlocksView],
    copies: &[[i32; 2]],
) -> Result<(), InvalidArgument> {
    let limits = [num_common(sources), num_common(destinations)];
    let mut written = HashSet::with_capacity(copies.len());
    for (idx, copy) in copies.iter().enumerate() {
        for (&block, num_blocks) in copy.iter().zip(limits) {
            if !usize::try_from(block).is_ok_and(|block| block < num_blocks) {
                let allowed = format!("blocks 0 to {}", num_blocks.saturating_sub(1));
                return Err(InvalidArgument::new(
                    format!("copies[{idx}]"),
                    format!("{copy:?}"),
                    allowed,
                ));
            }
        }
        if !written.insert(copy[1]) {
            let allowed = "destinations that no other copy has";
            return Err(InvalidArgument::new(
                format!("copies[{idx}]"),
                format!("{copy:?}"),
                allowed,
            ));
        }
    }
    Ok(())
}

/// A guess at the duration on the present number of threads.
pub fn estimated_ns(caches: &[BlocksView], copies: &[[i32; 2]]) -> u64 {
    let bytes: usize = caches.iter().map(|cache| cache.block_bytes * copies.len()).sum();
    (bytes / BYTES_PER_NS / pool::num_threads()) as u64
}

/// Copies block `source` to block `destination` in every cache, for every `[source, destination]`.
///
/// # Safety
/// The arguments passed `check`; the views are valid and do not overlap, and for the length of the call nobody else
/// accesses the blocks.
pub unsafe fn copy_blocks(caches: &[BlocksView], copies: &[[i32; 2]]) {
    let sources: HashSet<i32> = copies.iter().map(|copy| copy[0]).collect();
    let chained = copies.iter().any(|copy| sources.contains(&copy[1]));
    let mut caches_left = caches.to_vec();
    pool::for_each(&mut caches_left, estimated_ns(caches, copies), |cache| {
        // SAFETY: the caller vouches for the cache, and a cache is one thread's.
        unsafe {
            if chained {
                copy_chained(cache, copies);
            } else {
                copy_disjoint(cache, cache, copies);
            }
        }
    });
}

/// Copies block `from` of each cache to block `to` of the one in host memory, or the other way round, for every
/// `[from, to]`. `pairs_of_caches`: source and destination.
///
/// # Safety
/// The arguments passed `check`; the views are valid, none overlaps another, and for the length of the call nobody else
/// accesses the blocks.
pub unsafe fn swap_blocks(pairs_of_caches: &mut [[BlocksView; 2]], copies: &[[i32; 2]]) {
    let sources: Vec<BlocksView> = pairs_of_caches.iter().map(|pair| pair[0]).collect();
    pool::for_each(
        pairs_of_caches,
        estimated_ns(&sources, copies),
        |[source, destination]| {
            // SAFETY: the caller vouches for the caches, and a pair of caches is one thread's.
            unsafe { copy_disjoint(source, destination, copies) }
        },
    );
}

/// Copies blocks none of which is both source and destination.
unsafe fn copy_disjoint(from: &BlocksView, to: &BlocksView, copies: &[[i32; 2]]) {
    for &[source, destination] in copies {
        // SAFETY: each block is in its cache, and they differ.
        unsafe {
            std::ptr::copy_nonoverlapping(from.block(source), to.block(destination), from.block_bytes);
        }
    }
}

/// Copies by way of a buffer that holds all of the sources.
unsafe fn copy_chained(cache: &BlocksView, copies: &[[i32; 2]]) {
    let mut buffer = Vec::with_capacity(copies.len() * cache.block_bytes);
    for &[source, _] in copies {
        // SAFETY: the block is in the cache.
        buffer
            .extend_from_slice(unsafe { std::slice::from_raw_parts(cache.block(source), cache.block_bytes) });
    }
    for (&[_, destination], bytes) in copies.iter().zip(buffer.chunks_exact(cache.block_bytes)) {
        // SAFETY: the block is in the cache, and the buffer is elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), cache.block(destination), cache.block_bytes) };
    }
}
