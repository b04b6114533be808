//! The memory of packed weights: large pieces that the system backs with large pages.
//!
//! A product of one row streams the weights once, and with pages of 4 KB the processor spends a quarter of that time on
//! looking addresses up: measured on two cores, 256 MB are read with 20 GB/s, and with 25 GB/s from pages of 2 MB (9.4
//! and 13.2 on one). Weights of a layer are smaller than such a page, so they share chunks.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::memory::{CACHE_LINE_BYTES, LARGE_PAGE_BYTES, advise_large_pages};

/// Bytes of a chunk that weights share.
const CHUNK_BYTES: usize = 32 << 20;
/// Weights below this have memory of their own: they fit in a cache.
const SMALL_BYTES: usize = 256 << 10;

/// The chunk that the next weight may go into, if anyone still uses it, and its bytes in use.
static CURRENT: Mutex<(Weak<Chunk>, usize)> = Mutex::new((Weak::new(), 0));

struct Chunk {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a chunk is an address; `Memory` says who accesses what.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(num_bytes: usize, alignment: usize) -> Self {
        let layout =
            Layout::from_size_align(num_bytes, alignment).expect("a chunk is smaller than the address space");
        // SAFETY: the size is not zero.
        let Some(address) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: memory of ours. Small chunks have no whole page.
        unsafe { advise_large_pages(address.as_ptr(), num_bytes) };
        Self { address, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody holds a part of it any more.
        unsafe { dealloc(self.address.as_ptr(), self.layout) };
    }
}

/// A part of a chunk that belongs to one weight.
pub(in crate::cpu) struct Memory {
    chunk: Arc<Chunk>,
    offset: usize,
    num_bytes: usize,
}

impl Memory {
    /// So many bytes, at least one, aligned to a cache line, with anything in them.
    pub(in crate::cpu) fn new(num_bytes: usize) -> Self {
        if num_bytes < SMALL_BYTES {
            let chunk = Arc::new(Chunk::new(num_bytes.max(1), CACHE_LINE_BYTES));
            return Self {
                chunk,
                offset: 0,
                num_bytes,
            };
        }
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, used) = &mut *current;
        let shared = chunk
            .upgrade()
            .filter(|chunk| chunk.layout.size() - *used >= num_bytes);
        let shared = shared.unwrap_or_else(|| {
            let size = num_bytes.max(CHUNK_BYTES).next_multiple_of(LARGE_PAGE_BYTES);
            let fresh = Arc::new(Chunk::new(size, LARGE_PAGE_BYTES));
            (*chunk, *used) = (Arc::downgrade(&fresh), 0);
            fresh
        });
        let offset = *used;
        *used = (offset + num_bytes)
            .next_multiple_of(CACHE_LINE_BYTES)
            .min(shared.layout.size());
        Self {
            chunk: shared,
            offset,
            num_bytes,
        }
    }

    /// The first byte. Whoever writes answers for nobody else accessing what is written.
    pub(in crate::cpu) fn address(&self) -> *mut u8 {
        self.chunk.address.as_ptr().wrapping_add(self.offset)
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_lie_apart_and_aligned() {
        let sizes = [1, 64, 300 << 10, (1 << 20) + 7, 40 << 20, 3 << 20, 31 << 20];
        let all: Vec<Memory> = sizes.map(Memory::new).into();
        let mut ranges: Vec<_> = all
            .iter()
            .map(|memory| (memory.address().addr(), memory.num_bytes()))
            .collect();
        ranges.sort_unstable();
        for (memory, size) in all.iter().zip(sizes) {
            assert_eq!(
                (memory.num_bytes(), memory.address().addr() % CACHE_LINE_BYTES),
                (size, 0)
            );
            assert!(memory.offset + size <= memory.chunk.layout.size());
        }
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0);
        }
    }
}
