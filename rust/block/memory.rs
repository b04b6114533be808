//! Large arrays, and fetching from them ahead of use.
//!
//! Whoever evicts or looks up goes through arrays of the pool at random. With pages of 4 KB nearly every access to one of
//! some 10 MB needs a page table as well, which waits for memory as the access does.

/// Bytes of a large page.
const PAGE_BYTES: usize = 2 << 20;

/// A vector of `len` copies of `item`, on large pages as far as it fills some and the system has them.
pub(super) fn array<T: Copy>(item: T, len: usize) -> Vec<T> {
    let mut array = Vec::with_capacity(len);
    advise(array.spare_capacity_mut());
    array.resize(len, item);
    array
}

/// Asks for large pages under what has not been touched yet.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise<T>(memory: &mut [T]) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let first = start.align_offset(PAGE_BYTES);
    let num_bytes = size_of_val(memory).saturating_sub(first) / PAGE_BYTES * PAGE_BYTES;
    if num_bytes > 0 {
        // SAFETY: advice on whole pages of memory of ours. Where the system does not follow it, pages are small.
        unsafe { libc::madvise(start.wrapping_add(first).cast(), num_bytes, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise<T>(_: &mut [T]) {}

/// Fetches the cache line of `slice[index]` ahead of its use. A hint: it does nothing where the target has no
/// such instruction in stable Rust, or where there is no such item.
#[inline]
pub(super) fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching reads no memory that the program can see, and does nothing at an address where there is
        // none.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(index).cast()) }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (slice, index);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_of_any_length_is_filled() {
        for len in [0, 1, PAGE_BYTES / 8 * 3 + 5] {
            let array = array(7_u64, len);
            assert_eq!(
                (array.len(), array.iter().filter(|&&item| item == 7).count()),
                (len, len)
            );
        }
    }
}
