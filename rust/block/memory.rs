//! Large arrays, and fetching from them ahead of use.
//!
//! Whoever evicts or looks up goes through arrays of the pool at random. With pages of 4 KB nearly every access to one of
//! some 10 MB needs a page table as well, which waits for memory as the access does.

use crate::memory::advise_large_pages;

/// A vector of `len` copies of `item`, on large pages as far as it fills some and the system has them.
pub(super) fn array<T: Copy>(item: T, len: usize) -> Vec<T> {
    let mut array = Vec::with_capacity(len);
    let spare = array.spare_capacity_mut();
    // SAFETY: the vector's own memory.
    unsafe { advise_large_pages(spare.as_mut_ptr().cast(), size_of_val(spare)) };
    array.resize(len, item);
    array
}

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
    use crate::memory::LARGE_PAGE_BYTES;

    #[test]
    fn an_array_of_any_length_is_filled() {
        for len in [0, 1, LARGE_PAGE_BYTES / 8 * 3 + 5] {
            let array = array(7_u64, len);
            assert_eq!(
                (array.len(), array.iter().filter(|&&item| item == 7).count()),
                (len, len)
            );
        }
    }
}
