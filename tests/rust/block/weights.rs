//! The weights of policy `turn` again, straight from the formula.

pub(crate) const NUM_CLASSES: usize = 4;

/// What is learned of each class: weight in parts of 4096, late hits, evictions.
pub(crate) struct Weights {
    num_blocks: u64,
    classes: [(u64, u64, u64); NUM_CLASSES],
    /// Weighted age of the block evicted last.
    last: Option<u64>,
    num_evictions: u64,
}

impl Weights {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks: num_blocks.into(),
            classes: [(4096, 0, 0); NUM_CLASSES],
            last: None,
            num_evictions: 0,
        }
    }

    pub(crate) fn weighted(&self, class: usize, age: u64) -> u64 {
        age * self.classes[class].0
    }

    pub(crate) fn hit(&mut self, class: usize, age: u64) {
        if let Some(last) = self.last
            && last > 0
            && 3 * self.weighted(class, age) > last
        {
            self.classes[class].1 += 1;
        }
    }

    /// Returns whether the weights changed hands.
    pub(crate) fn evicted(&mut self, class: usize, age: u64) -> bool {
        self.last = Some(self.weighted(class, age));
        self.classes[class].2 += 1;
        self.num_evictions += 1;
        let due = self.num_evictions.is_multiple_of((self.num_blocks / 4).max(1024));
        if due {
            self.adapt();
        }
        due
    }

    fn adapt(&mut self) {
        let prior = self.num_blocks / 8 + 128;
        let hits: u64 = self.classes.iter().map(|class| class.1).sum();
        let evictions: u64 = self.classes.iter().map(|class| class.2).sum();
        let gain = |(weight, hits_here, evictions_here): (u64, u64, u64)| {
            let assumed = prior * hits * 65_536 / (hits + evictions);
            (hits_here * 65_536 + assumed) / (hits_here + evictions_here + prior) * weight
        };
        let first = gain(self.classes[0]);
        for class in 1..NUM_CLASSES {
            let (own, weight) = (gain(self.classes[class]), self.classes[class].0);
            let change = 3 * weight * own.abs_diff(first) / (own + first).max(1) / 8;
            let moved = if own > first {
                weight - change
            } else {
                weight + change
            };
            self.classes[class].0 = moved.max(512).min(self.classes[class - 1].0);
        }
        for (_, hits, evictions) in &mut self.classes {
            *hits -= *hits / 8;
            *evictions -= *evictions / 8;
        }
    }
}
