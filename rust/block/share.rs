//! Shares: what the cache keeps for tenants that were named in advance. A share has idle lists of its own, a
//! floor of blocks and a weight; all tenants that were not named have the first share together.
//!
//! The floor is soft. While a tenant has no more published blocks than its floor, its idle blocks are taken
//! only where no other idle block is left: floors decide who gives, never whether somebody gets.

/// Shares that can be named, at most: every eviction looks at all of them.
pub const MAX_SHARES: usize = 63;

/// Weights are given in parts of this.
pub const WEIGHT_ONE: u32 = 1024;

/// What the cache keeps for one tenant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Share {
    /// The tenant's salt.
    pub salt: Vec<u8>,
    /// Whether all salts that begin with `salt` are the tenant's.
    pub is_prefix: bool,
    /// Published blocks up to which its idle ones are evicted last.
    pub floor: u32,
    /// How fast its idle blocks age beside those of others, in parts of [`WEIGHT_ONE`].
    pub weight: u32,
}

/// The place among `named` of the share of a salt: its own, or else one whose name it begins with.
pub fn find_share(named: &[Share], salt: &[u8]) -> Option<usize> {
    let is_own = |share: &Share| share.salt == salt;
    let is_longer = |share: &Share| share.is_prefix && salt.starts_with(&share.salt);
    let own = named.iter().position(is_own);
    own.or_else(|| named.iter().position(is_longer))
}

/// How one share stands.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ShareCounts {
    /// Blocks that a lookup can find.
    pub num_published: u32,
    /// Idle blocks that were taken for something else.
    pub num_evictions: u64,
}

/// All shares. Which one a published block counts to is in its node.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Shares {
    /// The named ones, from index 1.
    named: Vec<Share>,
    pub(super) counts: Vec<ShareCounts>,
}

impl Shares {
    pub(super) fn new(named: Vec<Share>) -> Self {
        assert!(named.len() <= MAX_SHARES, "there are {} shares", named.len());
        Self {
            counts: vec![ShareCounts::default(); named.len() + 1],
            named,
        }
    }

    /// Named shares and the common one.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// The share of a salt; see [`find_share`].
    pub(super) fn of_salt(&self, salt: &[u8]) -> u8 {
        find_share(&self.named, salt).map_or(0, |place| u8::try_from(place + 1).expect("few shares"))
    }

    /// A block was published.
    #[inline]
    pub(super) fn add(&mut self, share: u8) {
        self.counts[usize::from(share)].num_published += 1;
    }

    /// A block is not published any more.
    #[inline]
    pub(super) fn remove(&mut self, share: u8) {
        self.counts[usize::from(share)].num_published -= 1;
    }

    /// What ages are multiplied with to compare those of two shares.
    #[inline]
    pub(super) fn weight(&self, share: usize) -> u64 {
        share
            .checked_sub(1)
            .map_or(WEIGHT_ONE, |place| self.named[place].weight)
            .into()
    }

    /// Whether a share with so many published blocks gives before those within their floors do.
    #[inline]
    pub(super) fn is_above_floor(&self, share: usize, num_published: u32) -> bool {
        share
            .checked_sub(1)
            .is_none_or(|place| num_published > self.named[place].floor)
    }

    /// Nothing is published any more.
    pub(super) fn clear(&mut self) {
        for counts in &mut self.counts {
            counts.num_published = 0;
        }
    }

    /// Checks the counts against the shares of the blocks that are published.
    pub(super) fn check(&self, published: impl Iterator<Item = u8>) -> Result<(), String> {
        let mut counted = vec![0; self.len()];
        for share in published {
            counted[usize::from(share)] += 1;
        }
        let reported: Vec<u32> = self.counts.iter().map(|counts| counts.num_published).collect();
        if counted == reported {
            Ok(())
        } else {
            Err(format!(
                "published blocks by share are {counted:?}, reported as {reported:?}"
            ))
        }
    }
}
