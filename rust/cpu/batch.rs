//! The block tables of one step, checked once before a kernel trusts them.
//!
//! The arrays are sections of the step's arena (`rust/sched/step.rs`). A kernel follows raw addresses computed from
//! them, so that a wrong number must be an error here and not a read outside the cache.

use super::InvalidArgument;

/// Which tokens of the step belong to which sequence, and where the cache holds a sequence. S sequences.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[S + 1]`: the tokens of sequence s are `query_start[s]..query_start[s + 1]`.
    pub query_start: &'a [i32],
    /// `[S]`: tokens of the sequence in the cache once the step is done, those of the step included.
    pub seq_lens: &'a [i32],
    /// `[S + 1]`: the table of sequence s is `block_ids[table_start[s]..table_start[s + 1]]`.
    pub table_start: &'a [i32],
    /// The tables one after another.
    pub block_ids: &'a [i32],
}

/// One sequence of a batch, widened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence<'a> {
    /// Index of its first token in the step.
    pub(crate) query_start: usize,
    /// Tokens in the step.
    pub(crate) query_len: usize,
    /// Tokens in the cache.
    pub(crate) seq_len: usize,
    /// The blocks that hold them.
    pub(crate) table: &'a [i32],
}

/// Widens an entry that `check` has seen.
#[inline]
fn index(value: i32) -> usize {
    usize::try_from(value).expect("checked: no entry is negative")
}

impl<'a> Batch<'a> {
    /// Number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.seq_lens.len()
    }

    /// Where the table of a sequence is in `block_ids`. The batch must have passed `check`.
    #[inline]
    pub(crate) fn table(&self, idx: usize) -> std::ops::Range<usize> {
        index(self.table_start[idx])..index(self.table_start[idx + 1])
    }

    /// One sequence. The batch must have passed `check`.
    #[inline]
    pub(crate) fn sequence(&self, idx: usize) -> Sequence<'a> {
        let query_start = index(self.query_start[idx]);
        Sequence {
            query_start,
            query_len: index(self.query_start[idx + 1]) - query_start,
            seq_len: index(self.seq_lens[idx]),
            table: &self.block_ids[self.table(idx)],
        }
    }

    /// Refuses whatever would lead a kernel outside `num_tokens` tokens or `num_blocks` blocks of `block_size` slots.
    ///
    /// # Errors
    /// The first entry that does.
    pub fn check(
        &self,
        num_tokens: usize,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<(), InvalidArgument> {
        check_starts("query_start", self.query_start, self.num_sequences(), num_tokens)?;
        check_starts(
            "table_start",
            self.table_start,
            self.num_sequences(),
            self.block_ids.len(),
        )?;
        for (idx, &seq_len) in self.seq_lens.iter().enumerate() {
            let query_len = index(self.query_start[idx + 1]) - index(self.query_start[idx]);
            let num_slots = (index(self.table_start[idx + 1]) - index(self.table_start[idx])) * block_size;
            if !usize::try_from(seq_len).is_ok_and(|len| (query_len..=num_slots).contains(&len)) {
                let allowed = format!("{query_len} (tokens in the step) to {num_slots} (slots in the table)");
                return Err(InvalidArgument::new(format!("seq_lens[{idx}]"), seq_len, allowed));
            }
        }
        let outside = |&id: &i32| !usize::try_from(id).is_ok_and(|id| id < num_blocks);
        if let Some(idx) = self.block_ids.iter().position(outside) {
            let field = format!("block_ids[{idx}]");
            return Err(InvalidArgument::new(
                field,
                self.block_ids[idx],
                format!("0 to {}", num_blocks - 1),
            ));
        }
        Ok(())
    }
}

/// Refuses a list of starts that does not rise from 0 to `end` in `num_sequences` steps.
fn check_starts(name: &str, starts: &[i32], num_sequences: usize, end: usize) -> Result<(), InvalidArgument> {
    if starts.len() != num_sequences + 1 {
        let allowed = format!("{} (one more than seq_lens)", num_sequences + 1);
        return Err(InvalidArgument::new(
            format!("length of {name}"),
            starts.len(),
            allowed,
        ));
    }
    if starts[0] != 0 {
        return Err(InvalidArgument::new(format!("{name}[0]"), starts[0], "0"));
    }
    if let Some(idx) = starts.windows(2).position(|pair| pair[1] < pair[0]) {
        let allowed = format!("at least {}, the entry before", starts[idx]);
        return Err(InvalidArgument::new(
            format!("{name}[{}]", idx + 1),
            starts[idx + 1],
            allowed,
        ));
    }
    let last = starts[num_sequences];
    if usize::try_from(last) != Ok(end) {
        return Err(InvalidArgument::new(
            format!("{name}[{num_sequences}]"),
            last,
            format!("{end}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Batch<'static> = Batch {
        query_start: &[0, 1, 4],
        seq_lens: &[9, 3],
        table_start: &[0, 3, 4],
        block_ids: &[5, 1, 2, 7],
    };

    fn refusal(batch: Batch<'_>) -> String {
        batch.check(4, 8, 4).unwrap_err().to_string()
    }

    #[test]
    fn a_sound_batch_passes_and_is_read_back() {
        GOOD.check(4, 8, 4).unwrap();
        let second = GOOD.sequence(1);
        assert_eq!(
            (second.query_start, second.query_len, second.seq_len, second.table),
            (1, 3, 3, &[7][..])
        );
        Batch {
            query_start: &[0],
            seq_lens: &[],
            table_start: &[0],
            block_ids: &[],
        }
        .check(0, 1, 1)
        .unwrap();
    }

    #[test]
    fn every_lie_is_named() {
        assert_eq!(
            refusal(Batch {
                block_ids: &[5, 1, 8, 7],
                ..GOOD
            }),
            "block_ids[2] is 8, allowed: 0 to 7"
        );
        assert_eq!(
            refusal(Batch {
                block_ids: &[-1, 1, 2, 7],
                ..GOOD
            }),
            "block_ids[0] is -1, allowed: 0 to 7"
        );
        assert!(
            refusal(Batch {
                seq_lens: &[13, 3],
                ..GOOD
            })
            .starts_with("seq_lens[0] is 13, allowed: 1")
        );
        assert!(
            refusal(Batch {
                seq_lens: &[9, 2],
                ..GOOD
            })
            .starts_with("seq_lens[1] is 2, allowed: 3")
        );
        assert!(
            refusal(Batch {
                query_start: &[0, 5, 4],
                ..GOOD
            })
            .starts_with("query_start[2] is 4")
        );
        assert!(
            refusal(Batch {
                query_start: &[1, 1, 4],
                ..GOOD
            })
            .starts_with("query_start[0] is 1")
        );
        assert!(
            refusal(Batch {
                query_start: &[0, 1, 3],
                ..GOOD
            })
            .starts_with("query_start[2] is 3, allowed: 4")
        );
        assert!(
            refusal(Batch {
                table_start: &[0, 4],
                ..GOOD
            })
            .starts_with("length of table_start is 2")
        );
    }
}
