//! The counters of the core. The owner counts in a plain [`Stats`] and publishes it once a step in a
//! [`StatsCell`]; whoever answers a scrape reads that.

use super::snapshot::SnapshotCell;

/// Defines the struct, its field names and both conversions from one list.
macro_rules! stats {
    ($($(#[$doc:meta])+ $field:ident,)+) => {
        /// What happened since start (counts), and how things stand now (`num_*`, `blocks_*`,
        /// `wasted_slots`).
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct Stats {
            $($(#[$doc])+ pub $field: u64,)+
        }

        impl Stats {
            /// The names of the fields, in order.
            pub const FIELDS: [&'static str; NUM_FIELDS] = [$(stringify!($field)),+];

            /// The values of the fields, in the order of [`Self::FIELDS`].
            pub const fn as_array(&self) -> [u64; NUM_FIELDS] {
                [$(self.$field),+]
            }

            /// The inverse of [`Self::as_array`].
            pub const fn from_array(values: [u64; NUM_FIELDS]) -> Self {
                let [$($field),+] = values;
                Self { $($field),+ }
            }
        }

        const NUM_FIELDS: usize = [$(stringify!($field)),+].len();
    };
}

stats! {
    /// Steps committed.
    steps,
    /// Tokens computed, of prompts and of generation.
    scheduled_tokens,
    /// Prompt tokens computed for the first time. Those found in the cache are prefix hits.
    prompt_tokens,
    /// Tokens generated.
    generation_tokens,
    /// Of those, tokens beyond a stop string that was found outside.
    discarded_tokens,
    /// Rows sampled for nothing, in a step that was built before the one that ended their sequences was committed.
    void_rows,
    /// Prompt tokens looked up in the prefix index, at first admission only.
    prefix_queries,
    /// Of those, tokens found.
    prefix_hits,
    /// Tokens that were computed again after a preemption.
    recomputed_tokens,
    /// Tokens that a preempted sequence found in the prefix index when it came back.
    recompute_hits,
    /// Sequences that lost blocks to another.
    preemptions,
    /// Idle blocks whose content was given up.
    evictions,
    /// Blocks copied before a write.
    copies,
    /// Sequences ended by a stop token or a stop string.
    finished_stop,
    /// Sequences ended by their length.
    finished_length,
    /// Sequences ended by an abort.
    finished_abort,
    /// Sequences ended by an error.
    finished_error,
    /// Sequences running now.
    num_running,
    /// Sequences waiting now.
    num_waiting,
    /// Usable blocks of the pool (the null block is not one).
    blocks_total,
    /// Blocks that hold nothing.
    blocks_free,
    /// Blocks that nobody holds, with published content.
    blocks_idle,
    /// Blocks that somebody holds.
    blocks_owned,
    /// Blocks that nobody holds, waiting for a step or a copy in flight.
    blocks_fenced,
    /// Token slots of running sequences' blocks that hold no token.
    wasted_slots,
    /// Of the owned blocks, those that pins and sessions hold.
    blocks_pinned,
    /// Blocks set aside for the pins and sessions that running requests will leave behind.
    blocks_promised,
    /// Blocks that pins and sessions may have together.
    blocks_pin_budget,
    /// Pins now.
    num_pins,
    /// Sessions now.
    num_sessions,
}

/// The last published [`Stats`].
#[derive(Debug, Default)]
pub struct StatsCell {
    words: SnapshotCell<NUM_FIELDS>,
}

impl StatsCell {
    /// A cell that reads as zeros until the first publication.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the snapshot. Owner only; never waits for a reader.
    pub fn publish(&self, stats: &Stats) {
        self.words.publish(&stats.as_array());
    }

    /// The last snapshot, whole. Any thread; never makes the owner wait.
    pub fn read(&self) -> Stats {
        Stats::from_array(self.words.read())
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_are_in_the_same_order() {
        let stats = Stats {
            steps: 1,
            prefix_hits: 2,
            wasted_slots: 3,
            ..Stats::default()
        };
        let value = |name| {
            let idx = Stats::FIELDS.iter().position(|field| *field == name).unwrap();
            stats.as_array()[idx]
        };
        assert_eq!(
            [value("steps"), value("prefix_hits"), value("wasted_slots")],
            [1, 2, 3]
        );
        assert_eq!(value("copies"), 0);
        assert_eq!(Stats::from_array(stats.as_array()), stats);
    }

    #[test]
    fn reads_the_last_publication() {
        let cell = StatsCell::new();
        assert_eq!(cell.read(), Stats::default());
        for steps in 1..5 {
            let stats = Stats {
                steps,
                scheduled_tokens: 10 * steps,
                ..Stats::default()
            };
            cell.publish(&stats);
            assert_eq!(cell.read(), stats);
        }
    }
}
