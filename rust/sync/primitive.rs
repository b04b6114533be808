//! Atomics, cells, locks: std in the product, loom in its models. The rest of `sync` imports them from here
//! alone, so that the code the models check is the code that ships.

pub(super) use imp::{Arc, AtomicPtr, AtomicU32, AtomicU64, Condvar, Mutex, UnsafeCell, fence};
pub(super) use std::sync::atomic::Ordering;

/// A value alone on its cache line, so that writing it does not slow the readers of its neighbours.
/// 128 bytes, because x86 fetches lines in pairs and some ARM cores have lines that long.
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub(super) T);

#[cfg(not(pagedkv_loom))]
#[expect(
    clippy::disallowed_types,
    reason = "the one place that names the atomics of std"
)]
mod imp {
    pub(crate) use std::sync::atomic::{AtomicPtr, fence};
    pub(crate) use std::sync::{Arc, Condvar, Mutex};

    // Aliases instead of re-exports: the lint that keeps atomics out of other modules sees through a
    // re-export.
    pub(crate) type AtomicU32 = std::sync::atomic::AtomicU32;
    pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;

    /// `std::cell::UnsafeCell` behind loom's interface: access in closures, so that loom can see its extent.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Calls `access` with a pointer for reading. The caller vouches that nobody writes meanwhile.
        #[inline]
        pub(crate) fn with<R>(&self, access: impl FnOnce(*const T) -> R) -> R {
            access(self.0.get())
        }

        /// Calls `access` with a pointer for writing. The caller vouches that nobody else reads or writes
        /// meanwhile.
        #[inline]
        pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
            access(self.0.get())
        }
    }
}

#[cfg(pagedkv_loom)]
mod imp {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, fence};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex};
}
