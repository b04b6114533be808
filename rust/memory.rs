//! How the machine hands memory over: in cache lines, on pages. Used by `block` and `cpu`.

/// Bytes of a cache line, which memory hands over at once.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// Bytes of a large page.
pub(crate) const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Asks for large pages under the whole ones of `num_bytes` at `start`. To be called before they are touched. It is
/// advice: where the system does not follow it, pages are small.
///
/// # Safety
/// The memory is allocated.
pub(crate) unsafe fn advise_large_pages(start: *mut u8, num_bytes: usize) {
    let skipped = start.align_offset(LARGE_PAGE_BYTES);
    let num_bytes = num_bytes.saturating_sub(skipped) / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    if num_bytes == 0 {
        return;
    }
    #[cfg(all(target_os = "linux", not(miri)))]
    // SAFETY: advice on whole pages, for which the caller vouches; it changes nothing that they hold.
    unsafe {
        libc::madvise(start.wrapping_add(skipped).cast(), num_bytes, libc::MADV_HUGEPAGE);
    }
}
