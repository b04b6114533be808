//! Which block is handed out next: a free one, or the idle one that goes first.

use super::{Model, NUM_CLASSES};

impl Model {
    pub(super) fn turn(&self, block: u32) -> usize {
        self.turns.get(&block).copied().unwrap_or(0)
    }

    /// A request takes a block up again.
    pub(super) fn come_back(&mut self, block: u32) {
        let class = self.turn(block);
        if let Some(at) = self.idle.iter().position(|&(idle, _)| idle == block) {
            let (_, since) = self.idle.remove(at);
            self.weights.hit(class, self.clock - since);
        }
        if self.counts_turns {
            self.turns.insert(block, (class + 1).min(NUM_CLASSES - 1));
        }
    }

    /// Which of some idle blocks goes first: the one with the greatest weighted age, among equals the one that came
    /// back less often, then the one that went idle first.
    fn oldest(&self, idle: &[(u32, u64)], now: u64) -> usize {
        let rank = |at: &usize| {
            let (block, since) = idle[*at];
            let class = self.turn(block);
            let age = self.weights.weighted(class, now - since);
            (std::cmp::Reverse(age), class, *at)
        };
        (0..idle.len()).min_by_key(rank).expect("the cost was available")
    }

    /// The idle blocks in the order in which they would go if no time passed.
    pub(crate) fn idle_order(&self) -> Vec<u32> {
        let mut rest = self.idle.clone();
        std::iter::from_fn(|| {
            (!rest.is_empty()).then(|| {
                let at = self.oldest(&rest, self.clock);
                rest.remove(at).0
            })
        })
        .collect()
    }

    pub(super) fn allocate(&mut self) -> u32 {
        self.clock += 1;
        if let Some(block) = self.free.pop() {
            return block;
        }
        // The allocation that needs the block is not over yet.
        let now = self.clock - 1;
        let at = self.oldest(&self.idle, now);
        let (block, since) = self.idle.remove(at);
        let class = self.turn(block);
        if self.weights.evicted(class, now - since) {
            self.count("weights adapted");
        }
        if at > 0 {
            self.count("evicted out of turn");
        }
        for lost in self.descendants(block) {
            assert!(
                self.num_tables(lost) == 0 && self.num_leases(lost) > 0,
                "only a fenced block loses its parent"
            );
            self.unpublish(lost);
            self.count("a fenced block lost its parent");
        }
        self.unpublish(block);
        self.num_evictions += 1;
        self.count("evicted");
        block
    }
}
