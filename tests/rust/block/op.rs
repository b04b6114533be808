//! What a random run is made of.

use pagedkv::block::Eviction;

/// Size and behaviour of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) num_blocks: u32,
    pub(crate) block_size: u32,
    pub(crate) prefix_caching: bool,
    pub(crate) partial_matching: bool,
    pub(crate) eviction: Eviction,
    pub(crate) degenerate_hash: bool,
}

/// One operation: what to do, and numbers from which its arguments are drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) pick: u32,
    pub(crate) draw: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Admit,
    Extend,
    Publish,
    Fork,
    Truncate,
    ReleaseTail,
    /// Publishes the tail and releases.
    Finish,
    Release,
    ClearPrefix,
    EndStep,
}

/// How often each kind comes.
const WEIGHTS: [(Kind, u32); 10] = [
    (Kind::Admit, 8),
    (Kind::Extend, 4),
    (Kind::Publish, 6),
    (Kind::Fork, 1),
    (Kind::Truncate, 1),
    (Kind::ReleaseTail, 1),
    (Kind::Finish, 6),
    (Kind::Release, 4),
    (Kind::ClearPrefix, 1),
    (Kind::EndStep, 5),
];

/// A kind for a random number.
pub(crate) fn kind(number: u32) -> Kind {
    let mut rest = number % WEIGHTS.iter().map(|(_, weight)| weight).sum::<u32>();
    for (kind, weight) in WEIGHTS {
        match rest.checked_sub(weight) {
            Some(less) => rest = less,
            None => return kind,
        }
    }
    unreachable!("the number is below the sum of the weights")
}
