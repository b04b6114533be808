//! Identities. A newtype per kind, so that a block can never be taken for a sequence.

/// Index of a block in the pool. Block 0 is the null block: it pads tables and is never owned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The null block.
    pub const NULL: Self = Self(0);

    /// The block's position in per-block arrays.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a block in host memory, where preempted sequences are parked. There is no null block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct HostBlockId(pub u32);

impl HostBlockId {
    /// The block's position in per-block arrays.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Public identity of a request: the generation of its flag slot in the high half, the slot in the low half.
/// A slot is reused with a new generation, so an id that outlived its request names nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct RequestId(pub u64);

impl RequestId {
    /// Joins a slot and its generation.
    #[inline]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self(((generation as u64) << 32) | slot as u64)
    }

    /// The flag slot.
    #[inline]
    pub const fn slot(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    /// How many requests held the slot before.
    #[inline]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}
