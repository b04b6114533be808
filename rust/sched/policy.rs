//! The scheduler's choices, as functions of numbers alone: how much room running sequences are left to grow, who is
//! served next, when a wait has been long enough, who gives up blocks, and whether these are moved or computed again.

use crate::config::HostTier;

use super::queues::QueueKey;

/// Steps of growth for which admission leaves room.
const GROWTH_HORIZON: u32 = 32;
/// Waiting sequences that may be passed over in one step because they do not fit.
pub(super) const MAX_PASSED: usize = 8;
/// Steps in which a sequence may be passed over before blocks are kept for it.
const PATIENCE_STEPS: u32 = 64;
/// Admissions of others that a sequence may see before blocks are kept for it, whatever its priority.
const PATIENCE_ADMISSIONS: u64 = 1024;
/// Steps for which a sequence waits for a block that another one computes.
pub(super) const MAX_DEFERRALS: u32 = 8;
/// Preemptions after which a sequence is spared as long as there is another victim.
const MAX_PREEMPTIONS: u32 = 3;

/// Blocks to leave free when something is admitted beside running sequences: what each of them can grow by in the
/// next [`GROWTH_HORIZON`] steps, and at least one percent of the pool. `num_tokens_left`: what each may still
/// generate.
pub(super) fn growth_margin(
    num_tokens_left: impl Iterator<Item = u32>,
    num_blocks: u32,
    block_size: u32,
) -> u32 {
    let growth: u32 = num_tokens_left
        .map(|left| left.min(GROWTH_HORIZON).div_ceil(block_size))
        .sum();
    growth.max(num_blocks / 100)
}

/// What decides who of the waiting is looked at next; the least one is. Within a tenant the keys decide alone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Turn {
    priority: i32,
    served: u64,
    key: QueueKey,
}

/// The place of a tenant's first waiting sequence among those of the other tenants.
pub(super) const fn turn(key: QueueKey, served: u64) -> Turn {
    Turn {
        priority: key.priority,
        served,
        key,
    }
}

/// Whether a sequence has waited so long that nobody may be admitted before it any more.
pub(super) const fn is_starved(num_passed: u32, num_admitted_since: u64) -> bool {
    num_passed > PATIENCE_STEPS || num_admitted_since > PATIENCE_ADMISSIONS
}

/// Whose blocks are taken first, as a rank: the greatest is taken. Of what may be taken at all, that is whoever has
/// lost blocks less than [`MAX_PREEMPTIONS`] times, and among those the last in the queue's order.
pub(super) const fn victim_rank(key: QueueKey, num_preemptions: u32) -> (bool, QueueKey) {
    (num_preemptions < MAX_PREEMPTIONS, key)
}

/// Whether what a victim has computed is moved to host memory, and later back, rather than computed again. Both take
/// as long as there is to do; on equal terms it is computed, which needs no room.
pub(super) fn is_moving_cheaper(host: &HostTier, num_tokens: u32, num_blocks: u32) -> bool {
    let computing = u64::from(num_tokens) * u64::from(host.compute_token_ns);
    let moving = 2 * u64::from(num_blocks) * u64::from(host.move_block_ns);
    moving < computing
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(priority: i32, arrival: u64) -> QueueKey {
        QueueKey {
            priority,
            arrival,
            sample_index: 0,
        }
    }

    proptest! {
        #[test]
        fn the_margin_covers_every_sequences_next_block(
            left in prop::collection::vec(0u32..100, 0..50), num_blocks in 1u32..5000, log_size in 0u32..9,
        ) {
            let size = 1 << log_size;
            let margin = growth_margin(left.iter().copied(), num_blocks, size);
            let growing = u32::try_from(left.iter().filter(|&&left| left > 0).count()).unwrap();
            prop_assert!(margin >= growing && margin >= num_blocks / 100);
            prop_assert!(margin <= (num_blocks / 100).max(growing * GROWTH_HORIZON.div_ceil(size)));
        }

        #[test]
        fn priority_comes_before_service_and_service_before_arrival(
            a in (-3i32..3, 0u64..5, 0u64..5), b in (-3i32..3, 0u64..5, 0u64..5),
        ) {
            let order = turn(key(a.0, a.2), a.1).cmp(&turn(key(b.0, b.2), b.1));
            prop_assert_eq!(order, a.cmp(&b));
        }

        #[test]
        fn who_lost_little_is_taken_before_who_lost_much(
            a in (-3i32..3, 0u64..9, 0u32..6), b in (-3i32..3, 0u64..9, 0u32..6),
        ) {
            let (rank_a, rank_b) = (victim_rank(key(a.0, a.1), a.2), victim_rank(key(b.0, b.1), b.2));
            if a.2 < MAX_PREEMPTIONS && b.2 >= MAX_PREEMPTIONS {
                prop_assert!(rank_a > rank_b);
            } else if (a.2 < MAX_PREEMPTIONS) == (b.2 < MAX_PREEMPTIONS) {
                prop_assert_eq!(rank_a.cmp(&rank_b), (a.0, a.1).cmp(&(b.0, b.1)));
            }
        }
    }

    #[test]
    fn the_cheaper_way_back_is_chosen() {
        let host = HostTier {
            num_blocks: 100,
            compute_token_ns: 10,
            move_block_ns: 20,
        };
        assert!(is_moving_cheaper(&host, 5, 1));
        assert!(!is_moving_cheaper(&host, 4, 1), "equal terms");
        assert!(!is_moving_cheaper(&host, 16, 5));
        assert!(!is_moving_cheaper(&host, 0, 0));
        let slow = HostTier {
            compute_token_ns: u32::MAX,
            move_block_ns: u32::MAX,
            ..host
        };
        assert!(is_moving_cheaper(&slow, 1 << 24, 1 << 20));
    }

    #[test]
    fn patience_ends() {
        assert!(!is_starved(PATIENCE_STEPS, PATIENCE_ADMISSIONS));
        assert!(is_starved(PATIENCE_STEPS + 1, 0));
        assert!(is_starved(0, PATIENCE_ADMISSIONS + 1));
    }
}
