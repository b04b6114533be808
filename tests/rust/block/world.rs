//! A pool under random operations, beside the naive model and a cache whose contents are followed token by
//! token.

use super::model::Model;
use super::op::{Kind, Op, Setup};
use super::{HASH_KEY, ids};
use pagedkv::block::{BlockPool, BlockState, BlockTable, OutOfBlocks, PoolConfig, PrefixHit};
use pagedkv::ids::BlockId;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

const SALTS: [&[u8]; 3] = [b"", b"\0", b"tenant"];

/// A sequence: its table, its tokens, and how many of them have been computed.
struct Sequence {
    salt: u8,
    tokens: Vec<u32>,
    num_computed: usize,
    /// End of the positions that the step in preparation computes, if it computes any.
    scheduled: Option<usize>,
    table: BlockTable,
    /// What the cache would hold differs between epochs, as it does when weights are exchanged.
    epoch: u64,
}

/// A pool, its model, and the cache.
pub(crate) struct World {
    setup: Setup,
    pool: BlockPool,
    pub(crate) model: Model,
    sequences: BTreeMap<usize, Sequence>,
    num_made: usize,
    /// What was written at each slot: a fingerprint of everything that the entry depends on.
    cache: Vec<u64>,
    copies: Vec<(BlockId, BlockId)>,
    hit: PrefixHit,
}

/// Fingerprint of the cache entry of the last token.
fn entry(salt: u8, epoch: u64, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (salt, epoch, tokens).hash(&mut hasher);
    hasher.finish()
}

fn narrow(len: usize) -> u32 {
    u32::try_from(len).expect("small numbers")
}

impl World {
    pub(crate) fn new(setup: Setup) -> Self {
        let Setup {
            num_blocks,
            block_size,
            prefix_caching,
            partial_matching,
            eviction,
            degenerate_hash,
        } = setup;
        let config = PoolConfig {
            num_blocks,
            block_size,
            prefix_caching,
            partial_matching,
            eviction,
            hash_key: HASH_KEY,
        };
        Self {
            setup,
            pool: if degenerate_hash {
                BlockPool::with_degenerate_hash(config)
            } else {
                BlockPool::new(config)
            },
            model: Model::new(setup),
            sequences: BTreeMap::new(),
            num_made: 0,
            cache: vec![0; ((num_blocks + 1) * block_size) as usize],
            copies: Vec::new(),
            hit: PrefixHit::default(),
        }
    }

    fn size(&self) -> usize {
        self.setup.block_size as usize
    }

    /// Tokens over an alphabet so small that prompts share prefixes: only the ends of a block differ,
    /// and its middle.
    fn tokens(&self, positions: std::ops::Range<usize>, mut draw: u64) -> Vec<u32> {
        let mut token = |position: usize| {
            if ![0, self.size() / 2, self.size() - 1].contains(&(position % self.size())) {
                return 7;
            }
            draw = draw.rotate_right(2);
            u32::from(draw & 3 == 3)
        };
        positions.map(&mut token).collect()
    }

    /// A sequence that the step in preparation does not compute.
    fn pick(&self, op: Op) -> Option<usize> {
        let resting = self
            .sequences
            .iter()
            .filter(|(_, sequence)| sequence.scheduled.is_none());
        let keys: Vec<usize> = resting.map(|(&key, _)| key).collect();
        keys.get(op.pick as usize % keys.len().max(1)).copied()
    }

    pub(crate) fn apply(&mut self, op: Op) {
        match (op.kind, self.pick(op)) {
            (Kind::Admit, _) => self.admit(op),
            (Kind::EndStep, _) => self.end_step(),
            (Kind::ClearPrefix, _) if op.draw.is_multiple_of(16) => {
                assert_eq!(self.pool.clear_prefix(), self.model.clear_prefix());
            }
            (Kind::Release, _) => {
                // Half the time the newest, which the step in preparation may be about to compute.
                let keys: Vec<usize> = self.sequences.keys().copied().collect();
                let newest = keys.len().saturating_sub(1);
                let idx = if op.draw.is_multiple_of(2) {
                    newest
                } else {
                    op.pick as usize % keys.len().max(1)
                };
                if let Some(&key) = keys.get(idx) {
                    self.release(key);
                }
            }
            (Kind::Extend, Some(key)) => self.extend(key, op),
            (Kind::Publish, Some(key)) => self.publish(key),
            (Kind::Finish, Some(key)) => self.finish_one(key),
            (Kind::Fork, Some(key)) => self.fork(key),
            (Kind::Truncate | Kind::ReleaseTail, Some(key)) => self.shorten(key, op),
            _ => {}
        }
        self.check(op);
    }

    /// A prompt and its salt: one time in three what is published already, to its last token.
    fn prompt(&self, op: Op) -> (u8, Vec<u32>) {
        let mut known = self.model.published.values();
        if op.draw.is_multiple_of(3)
            && let Some((salt, prefix)) = known.nth(op.pick as usize % known.len().max(1))
        {
            return (*salt, prefix.clone());
        }
        let salt = usize::try_from(op.draw >> 62).expect("two bits") % SALTS.len();
        let len = 1 + op.pick as usize % (6 * self.size());
        (
            u8::try_from(salt).expect("few salts"),
            self.tokens(0..len, op.draw),
        )
    }

    /// A new sequence takes up what is known of its prompt, and a first part of the rest is scheduled.
    fn admit(&mut self, op: Op) {
        let (salt, tokens) = self.prompt(op);
        let len = tokens.len();
        let root = self.pool.root(SALTS[usize::from(salt)]);
        let mut table = BlockTable::new(root, &mut self.pool);
        self.pool.release_root(root);

        self.pool.lookup(root, &tokens, &mut self.hit);
        let known = self.hit.num_tokens as usize;
        let num_computed = known.min(len - 1);
        let end = num_computed + 1 + usize::from(op.pick.to_be_bytes()[1]) % (len - num_computed);
        let (pool, hit) = (&mut self.pool, &self.hit);
        let cost = table.admission_cost(pool, hit, narrow(num_computed), narrow(end));

        let before = pool.clone();
        let num_copies = self.copies.len();
        let result = table.admit(pool, hit, narrow(num_computed), narrow(end), &mut self.copies);
        let key = self.num_made;
        let expected = self.model.admit(key, (salt, &tokens), num_computed, end);
        let admitted = self.compare(num_copies, &before, cost, result, expected);
        if admitted {
            let epoch = self.model.epoch;
            let scheduled = Some(end);
            self.sequences.insert(
                key,
                Sequence {
                    salt,
                    tokens,
                    num_computed,
                    scheduled,
                    table,
                    epoch,
                },
            );
            self.num_made += 1;
        } else {
            assert!(table.is_empty());
            table.release(&mut self.pool);
            if let Some((&oldest, _)) = self.sequences.first_key_value() {
                self.release(oldest);
            }
        }
    }

    /// Schedules more of the prompt, or generated tokens.
    fn extend(&mut self, key: usize, op: Op) {
        let more = 1 + usize::try_from(op.draw >> 32).expect("a small number") % (2 * self.size());
        let len = self.sequences[&key].tokens.len();
        let generated = self.tokens(len..len + more, op.draw);
        let sequence = self.sequences.get_mut(&key).expect("a live sequence");
        let start = sequence.num_computed;
        if start == len {
            sequence.tokens.extend(generated);
        }
        let end = (start + more).min(sequence.tokens.len());
        let cost = sequence.table.cost(&self.pool, narrow(start), narrow(end));

        let before = self.pool.clone();
        let held = ids(sequence.table.blocks());
        let num_copies = self.copies.len();
        let result = sequence
            .table
            .reserve(&mut self.pool, narrow(start), narrow(end), &mut self.copies);
        let now = ids(sequence.table.blocks());
        if result.is_ok() {
            sequence.scheduled = Some(end);
            let num_new = now
                .iter()
                .enumerate()
                .filter(|&(idx, block)| held.get(idx) != Some(block))
                .count();
            assert_eq!(cost, narrow(num_new), "the cost is what was taken");
        } else {
            assert_eq!(now, held);
            sequence.tokens.truncate(len);
        }
        let expected = self.model.reserve(key, start, end);
        self.compare(num_copies, &before, cost, result, expected);
    }

    /// Compares the result of an operation that may want blocks with the model's. A failure must have changed
    /// nothing.
    fn compare(
        &self,
        num_copies: usize,
        before: &BlockPool,
        cost: u32,
        result: Result<(), OutOfBlocks>,
        expected: Result<Vec<(u32, u32)>, (u32, u32)>,
    ) -> bool {
        assert_eq!(result.is_ok(), cost <= before.num_available(), "the cost decides");
        match (result, expected) {
            (Ok(()), Ok(copies)) => {
                let made: Vec<(u32, u32)> = self.copies[num_copies..]
                    .iter()
                    .map(|pair| (pair.0.0, pair.1.0))
                    .collect();
                assert_eq!(made, copies);
                true
            }
            (Err(OutOfBlocks { needed, available }), Err(refused)) => {
                assert_eq!((needed, available), refused);
                assert_eq!((needed, available), (cost, before.num_available()));
                assert!(self.pool == *before, "a refusal changed the pool");
                assert_eq!(self.copies.len(), num_copies);
                false
            }
            (result, expected) => panic!("{result:?}, but the model says {expected:?}"),
        }
    }

    fn publish(&mut self, key: usize) {
        let Sequence {
            tokens,
            num_computed,
            table,
            ..
        } = self.sequences.get_mut(&key).expect("a live sequence");
        table.publish(&mut self.pool, tokens, narrow(*num_computed));
        self.model.publish(key, tokens, *num_computed);
    }

    fn fork(&mut self, key: usize) {
        let parent = &self.sequences[&key];
        let table = parent.table.fork(&mut self.pool);
        let child = Sequence {
            tokens: parent.tokens.clone(),
            table,
            ..*parent
        };
        self.sequences.insert(self.num_made, child);
        self.model.fork(key, self.num_made);
        self.num_made += 1;
    }

    /// Takes tokens back, or gives up the last blocks and keeps the tokens.
    fn shorten(&mut self, key: usize, op: Op) {
        let sequence = self.sequences.get_mut(&key).expect("a live sequence");
        if matches!(op.kind, Kind::Truncate) {
            let len = 1 + op.pick as usize % sequence.tokens.len();
            sequence.tokens.truncate(len);
            sequence.num_computed = sequence.num_computed.min(len);
            sequence.table.truncate(&mut self.pool, narrow(len));
            self.model.truncate(key, len);
        } else {
            let num_blocks = op.pick % (sequence.table.len() + 1);
            let num_held = (num_blocks * self.setup.block_size) as usize;
            sequence.num_computed = sequence.num_computed.min(num_held);
            sequence.table.release_tail(&mut self.pool, num_blocks);
            self.model.release_tail(key, num_blocks as usize);
        }
        if sequence.table.is_empty() {
            sequence.epoch = self.model.epoch;
        }
    }

    /// Ends a sequence that the step in preparation does not compute, and keeps its tail.
    fn finish_one(&mut self, key: usize) {
        let sequence = self.sequences.get_mut(&key).expect("a live sequence");
        let num_computed = sequence.num_computed;
        let (pool, tokens) = (&mut self.pool, &sequence.tokens);
        sequence.table.publish_tail(pool, tokens, narrow(num_computed));
        self.model.publish_tail(key, tokens, num_computed);
        self.check_state();
        self.release(key);
    }

    /// Ends a sequence, whatever it is doing. Copies into its blocks are not wanted any more.
    fn release(&mut self, key: usize) {
        let mut sequence = self.sequences.remove(&key).expect("a live sequence");
        self.copies
            .retain(|(_, to)| !sequence.table.blocks().contains(to));
        sequence.table.release(&mut self.pool);
        self.model.release(key);
    }

    /// Runs the step: all copies at once, then all writes.
    fn end_step(&mut self) {
        let size = self.size();
        let sources: BTreeSet<BlockId> = self.copies.iter().map(|pair| pair.0).collect();
        let mut targets = BTreeSet::new();
        for (from, to) in self.copies.drain(..) {
            assert!(
                !sources.contains(&to) && targets.insert(to),
                "the order of copies would matter at {to:?}"
            );
            self.cache
                .copy_within(from.index() * size..(from.index() + 1) * size, to.index() * size);
        }
        let mut written = BTreeSet::new();
        for sequence in self.sequences.values_mut() {
            let Some(end) = sequence.scheduled.take() else {
                continue;
            };
            for position in sequence.num_computed..end {
                let slot =
                    usize::try_from(sequence.table.slot(narrow(position))).expect("slots are not negative");
                assert!(
                    self.pool.is_writable(BlockId(narrow(slot / size))),
                    "slot {slot} may not be written"
                );
                assert!(written.insert(slot), "slot {slot} is written twice");
                self.cache[slot] = entry(sequence.salt, sequence.epoch, &sequence.tokens[..=position]);
            }
            sequence.num_computed = end;
        }
        self.pool.end_step();
        self.model.end_step();
    }

    fn check(&self, op: Op) {
        self.pool.check().expect("the invariants hold");
        self.check_state();
        self.check_index();
        self.check_lookup(op);
        for sequence in self.sequences.values() {
            for position in 0..sequence.num_computed {
                let expected = entry(sequence.salt, sequence.epoch, &sequence.tokens[..=position]);
                assert_eq!(
                    self.read(sequence, position),
                    expected,
                    "position {position} has a wrong entry"
                );
            }
        }
    }

    /// What the sequence will read at a position once the copies of the step have been made.
    fn read(&self, sequence: &Sequence, position: usize) -> u64 {
        let (idx, offset) = (position / self.size(), position % self.size());
        let held = sequence.table.blocks()[idx];
        let copied = self.copies.iter().find(|(_, to)| *to == held);
        self.cache[copied.map_or(held, |&(from, _)| from).index() * self.size() + offset]
    }

    /// Same tables, same holders, same lists in the same order.
    fn check_state(&self) {
        let (pool, model) = (&self.pool, &self.model);
        for (key, sequence) in &self.sequences {
            assert_eq!(
                ids(sequence.table.blocks()),
                model.tables[key].blocks,
                "table {key}"
            );
        }
        for block in 1..=self.setup.num_blocks {
            let (num_tables, num_leases) = (model.num_tables(block), model.num_leases(block));
            let id = BlockId(block);
            assert_eq!(pool.ref_count(id), num_tables + num_leases, "block {block}");
            assert_eq!(pool.is_writable(id), model.is_writable(block), "block {block}");
            let state = match (num_tables, num_leases) {
                (0, 0) if model.published.contains_key(&block) => BlockState::Idle,
                (0, 0) => BlockState::Free,
                (0, _) => BlockState::Fenced,
                _ => BlockState::Owned,
            };
            assert_eq!(pool.state(id), state, "block {block}");
        }
        assert_eq!(
            pool.idle_blocks().map(|block| block.0).collect::<Vec<_>>(),
            model.idle_order()
        );
        assert_eq!(pool.num_free(), narrow(model.free.len()));
        assert_eq!(pool.num_evictions(), model.num_evictions);
    }

    /// The same blocks are published, with the right contents, and no namespace is left over.
    fn check_index(&self) {
        let size = self.size();
        assert_eq!(self.pool.num_published(), narrow(self.model.published.len()));
        for (&block, (salt, prefix)) in &self.model.published {
            let start = (prefix.len() - 1) / size * size;
            assert_eq!(self.pool.published_tokens(BlockId(block)), Some(&prefix[start..]));
            for (offset, position) in (start..prefix.len()).enumerate() {
                let expected = entry(*salt, self.model.epoch, &prefix[..=position]);
                assert_eq!(
                    self.cache[block as usize * size + offset],
                    expected,
                    "block {block} offers wrong contents"
                );
            }
        }
        let of_tables = self.model.tables.values().map(|table| table.salt);
        let salts: BTreeSet<u8> = of_tables
            .chain(self.model.published.values().map(|known| known.0))
            .collect();
        assert_eq!(self.pool.num_roots(), narrow(salts.len()));
    }

    /// A lookup finds the longest published match, under every salt, and changes nothing.
    fn check_lookup(&self, op: Op) {
        let tokens = self.tokens(
            0..op.draw.leading_ones() as usize + 5 * self.size(),
            op.draw.reverse_bits(),
        );
        let mut pool = self.pool.clone();
        for (salt, bytes) in (0..).zip(SALTS) {
            let root = pool.root(bytes);
            let before = pool.clone();
            let mut hit = PrefixHit::default();
            pool.lookup(root, &tokens, &mut hit);
            assert!(pool == before);
            let (blocks, num_tokens) = self.model.lookup(salt, &tokens);
            assert_eq!((ids(&hit.blocks), hit.num_tokens as usize), (blocks, num_tokens));
            let idle = hit
                .blocks
                .iter()
                .filter(|&&block| pool.state(block) == BlockState::Idle);
            assert_eq!(hit.num_idle, narrow(idle.count()));
            let num_hashes = if self.setup.prefix_caching {
                tokens.len() / self.size()
            } else {
                0
            };
            assert_eq!(hit.hashes.len(), num_hashes);
        }
    }

    /// Ends everything. Nothing may be left in use.
    pub(crate) fn finish(mut self) {
        while let Some((&key, _)) = self.sequences.first_key_value() {
            self.release(key);
        }
        self.end_step();
        self.pool.check().expect("the invariants hold");
        assert_eq!((self.pool.num_owned(), self.pool.num_fenced()), (0, 0));
        assert_eq!(self.pool.num_available(), self.setup.num_blocks);
        self.pool.clear_prefix();
        assert_eq!(
            (self.pool.num_free(), self.pool.num_roots()),
            (self.setup.num_blocks, 0)
        );
    }
}
