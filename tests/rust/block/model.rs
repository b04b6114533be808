//! The pool and its tables again, naively: what is derived is searched for, never kept. It predicts every
//! block id.

mod eviction;

use super::op::Setup;
use super::weights::{NUM_CLASSES, Weights};
use pagedkv::block::Eviction;
use std::collections::BTreeMap;

/// A published prefix: salt, and all tokens from the start to the end of the block.
pub(crate) type Prefix = (u8, Vec<u32>);

/// A refusal: blocks needed, blocks available.
pub(crate) type Refused = (u32, u32);

/// What a sequence holds.
#[derive(Clone)]
pub(crate) struct Table {
    pub(crate) salt: u8,
    pub(crate) blocks: Vec<u32>,
    num_published: usize,
    epoch: u64,
}

/// The naive pool.
pub(crate) struct Model {
    size: usize,
    caching: bool,
    partial: bool,
    pub(crate) epoch: u64,
    pub(crate) num_evictions: u64,
    /// What came about, and how often: a random run is worth what it reaches.
    pub(crate) events: BTreeMap<&'static str, u32>,
    pub(crate) free: Vec<u32>,
    /// In the order in which they went idle, or are to be treated as if they had: block, clock at that time.
    idle: Vec<(u32, u64)>,
    /// Policy `turn` or not; how often requests came back to each block; the weights; blocks handed out.
    counts_turns: bool,
    turns: BTreeMap<u32, usize>,
    weights: Weights,
    clock: u64,
    pub(crate) leases: Vec<u32>,
    pub(crate) published: BTreeMap<u32, Prefix>,
    pub(crate) tables: BTreeMap<usize, Table>,
}

impl Model {
    pub(crate) fn new(setup: Setup) -> Self {
        Self {
            size: setup.block_size as usize,
            caching: setup.prefix_caching,
            partial: setup.partial_matching,
            epoch: 0,
            num_evictions: 0,
            events: BTreeMap::new(),
            free: (1..=setup.num_blocks).rev().collect(),
            idle: Vec::new(),
            counts_turns: setup.eviction == Eviction::Turn,
            turns: BTreeMap::new(),
            weights: Weights::new(setup.num_blocks),
            clock: 0,
            leases: Vec::new(),
            published: BTreeMap::new(),
            tables: BTreeMap::new(),
        }
    }

    fn count(&mut self, event: &'static str) {
        *self.events.entry(event).or_default() += 1;
    }

    pub(crate) fn num_tables(&self, block: u32) -> u32 {
        let holders = self.tables.values().filter(|table| table.blocks.contains(&block));
        u32::try_from(holders.count()).expect("few tables")
    }

    pub(crate) fn num_leases(&self, block: u32) -> u32 {
        let leases = self.leases.iter().filter(|&&leased| leased == block);
        u32::try_from(leases.count()).expect("few leases")
    }

    pub(crate) fn num_available(&self) -> u32 {
        u32::try_from(self.free.len() + self.idle.len()).expect("a small pool")
    }

    pub(crate) fn is_writable(&self, block: u32) -> bool {
        self.num_tables(block) == 1 && !self.published.contains_key(&block)
    }

    fn find(&self, salt: u8, prefix: &[u32]) -> Option<u32> {
        let is_it = |(_, known): &(&u32, &Prefix)| known.0 == salt && known.1 == prefix;
        self.published.iter().find(is_it).map(|(&block, _)| block)
    }

    fn parent(&self, block: u32) -> Option<u32> {
        let (salt, prefix) = self.published.get(&block)?;
        self.find(*salt, &prefix[..(prefix.len() - 1) / self.size * self.size])
    }

    /// Published blocks that continue `block`, however far.
    fn descendants(&self, block: u32) -> Vec<u32> {
        let Some((salt, prefix)) = self.published.get(&block) else {
            return Vec::new();
        };
        if !prefix.len().is_multiple_of(self.size) {
            return Vec::new();
        }
        let continues =
            |known: &Prefix| known.0 == *salt && known.1.len() > prefix.len() && known.1.starts_with(prefix);
        self.published
            .iter()
            .filter(|(_, known)| continues(known))
            .map(|(&block, _)| block)
            .collect()
    }

    /// The blocks that hold the longest known prefix, and its length.
    pub(crate) fn lookup(&self, salt: u8, tokens: &[u32]) -> (Vec<u32>, usize) {
        let ends = (1..=tokens.len() / self.size).map(|num_blocks| num_blocks * self.size);
        let mut blocks: Vec<u32> = ends.map_while(|end| self.find(salt, &tokens[..end])).collect();
        let mut known = blocks.len() * self.size;
        if self.partial
            && self.caching
            && let Some((block, len, num_common)) = self.closest(salt, tokens, known)
            && (num_common == len
                || known + num_common + 1 >= tokens.len()
                || num_common >= 2.max(self.size / 32))
        {
            blocks.push(block);
            known += num_common;
        }
        (blocks, known)
    }

    /// The block behind `start` tokens that has the most in common with what follows there, how many tokens it
    /// holds, and how many are common; among equals the last one that is not greater, or else the first.
    fn closest(&self, salt: u8, tokens: &[u32], start: usize) -> Option<(u32, usize, usize)> {
        let rest = &tokens[start..tokens.len().min(start + self.size)];
        let mut siblings: Vec<(&[u32], u32)> = Vec::new();
        for (&block, (of, prefix)) in &self.published {
            if *of == salt
                && (start + 1..=start + self.size).contains(&prefix.len())
                && prefix[..start] == tokens[..start]
            {
                siblings.push((&prefix[start..], block));
            }
        }
        let common = |own: &[u32]| own.iter().zip(rest).take_while(|(a, b)| a == b).count();
        let most = siblings
            .iter()
            .map(|(own, _)| common(own))
            .max()
            .filter(|&most| most > 0)?;
        siblings.retain(|(own, _)| common(own) == most);
        siblings.sort_unstable();
        let before = siblings.iter().rfind(|(own, _)| *own <= rest);
        let &(own, block) = before.or(siblings.first())?;
        Some((block, own.len(), most))
    }

    /// Whether a block that is not full holds only what a longer one begins with.
    fn is_extended(&self, block: u32) -> bool {
        let (salt, own) = &self.published[&block];
        let end = (own.len() - 1) / self.size * self.size + self.size;
        let extends = |known: &Prefix| {
            known.0 == *salt && known.1.len() > own.len() && known.1.len() <= end && known.1.starts_with(own)
        };
        self.published.values().any(extends)
    }

    fn is_idle(&self, block: u32) -> bool {
        self.idle.iter().any(|&(idle, _)| idle == block)
    }

    fn unpublish(&mut self, block: u32) -> bool {
        self.turns.remove(&block);
        self.published.remove(&block).is_some()
    }

    /// Called after a holder of `block` went.
    fn released(&mut self, block: u32) {
        if self.num_tables(block) == 0 && self.num_leases(block) == 0 {
            if self.published.contains_key(&block) && self.is_extended(block) {
                self.count("tail dropped when held no more");
                self.unpublish(block);
            }
            if self.published.contains_key(&block) {
                self.idle.push((block, self.clock));
            } else {
                self.free.push(block);
            }
        }
    }

    fn cost(&self, blocks: &[u32], num_computed: usize, num_tokens: usize) -> u32 {
        if num_computed == num_tokens {
            return 0;
        }
        let replaced = blocks[num_computed / self.size..]
            .iter()
            .filter(|&&block| !self.is_writable(block))
            .count();
        let growth = num_tokens.div_ceil(self.size).saturating_sub(blocks.len());
        u32::try_from(replaced + growth).expect("a small pool")
    }

    /// Adds a table that takes up what is known of `tokens[..num_computed]`.
    pub(crate) fn admit(
        &mut self,
        key: usize,
        prefix: (u8, &[u32]),
        num_computed: usize,
        num_tokens: usize,
    ) -> Result<Vec<(u32, u32)>, Refused> {
        let (salt, tokens) = prefix;
        let (mut blocks, known) = self.lookup(salt, tokens);
        if blocks.len() * self.size > known {
            let last = blocks[blocks.len() - 1];
            let len = self.published[&last].1.len();
            self.count(match (len == known, len.is_multiple_of(self.size)) {
                (true, _) => "found a whole tail",
                (false, true) => "found the beginning of a block",
                (false, false) => "found the beginning of a tail",
            });
        }
        blocks.truncate(num_computed.div_ceil(self.size));
        let num_idle = blocks.iter().filter(|&&block| self.is_idle(block)).count();
        let growth = num_tokens.div_ceil(self.size) - blocks.len();
        let copied = usize::from(!num_computed.is_multiple_of(self.size));
        let needed = u32::try_from(num_idle + growth + copied).expect("a small pool");
        if needed > self.num_available() {
            self.count("refused");
            return Err((needed, self.num_available()));
        }
        if num_idle > 0 {
            self.count("took up idle blocks");
        }
        for &block in &blocks {
            self.come_back(block);
        }
        let table = Table {
            salt,
            num_published: blocks.len(),
            blocks,
            epoch: self.epoch,
        };
        self.tables.insert(key, table);
        let copies = self.reserve(key, num_computed, num_tokens);
        Ok(copies.expect("the blocks were counted"))
    }

    pub(crate) fn reserve(
        &mut self,
        key: usize,
        num_computed: usize,
        num_tokens: usize,
    ) -> Result<Vec<(u32, u32)>, Refused> {
        let old = self.tables[&key].blocks.clone();
        let needed = self.cost(&old, num_computed, num_tokens);
        if needed > self.num_available() {
            self.count("refused");
            return Err((needed, self.num_available()));
        }
        let mut copies = Vec::new();
        if num_computed == num_tokens {
            return Ok(copies);
        }
        let first = num_computed / self.size;
        for idx in (first..old.len()).rev() {
            if !self.is_writable(old[idx]) {
                let new = self.allocate();
                self.table(key).blocks[idx] = new;
                if idx == first && !num_computed.is_multiple_of(self.size) {
                    self.count("copied");
                    self.leases.push(old[idx]);
                    copies.push((old[idx], new));
                }
                self.released(old[idx]);
            }
        }
        while self.tables[&key].blocks.len() * self.size < num_tokens {
            let new = self.allocate();
            self.table(key).blocks.push(new);
        }
        let table = self.table(key);
        table.num_published = table.num_published.min(first);
        Ok(copies)
    }

    fn table(&mut self, key: usize) -> &mut Table {
        self.tables.get_mut(&key).expect("a live table")
    }

    pub(crate) fn fork(&mut self, key: usize, child: usize) {
        let table = self.tables[&key].clone();
        self.tables.insert(child, table);
    }

    pub(crate) fn publish(&mut self, key: usize, tokens: &[u32], num_computed: usize) {
        if !self.caching || self.tables[&key].epoch != self.epoch {
            return;
        }
        for idx in self.tables[&key].num_published..num_computed / self.size {
            let Table { salt, ref blocks, .. } = self.tables[&key];
            let own = blocks[idx];
            let prefix = &tokens[..(idx + 1) * self.size];
            match self.find(salt, prefix) {
                Some(known) if known != own => {
                    if self.num_tables(own) > 1 {
                        self.count("not merged, because shared");
                        return;
                    }
                    self.count("merged");
                    self.idle.retain(|&(block, _)| block != known);
                    self.table(key).blocks[idx] = known;
                    self.released(own);
                }
                Some(_) => {}
                None => self.publish_one(own, salt, prefix),
            }
            self.table(key).num_published = idx + 1;
        }
    }

    /// Makes a block findable. What it begins with needs no idle block of its own.
    fn publish_one(&mut self, block: u32, salt: u8, prefix: &[u32]) {
        self.published.insert(block, (salt, prefix.to_vec()));
        let dropped: Vec<u32> = self
            .idle
            .iter()
            .map(|&(idle, _)| idle)
            .filter(|&idle| self.is_extended(idle))
            .collect();
        for idle in dropped {
            self.count("tail dropped when idle");
            self.idle.retain(|&(other, _)| other != idle);
            self.unpublish(idle);
            self.free.push(idle);
        }
    }

    pub(crate) fn publish_tail(&mut self, key: usize, tokens: &[u32], num_computed: usize) {
        let table = &self.tables[&key];
        let num_full = num_computed / self.size;
        if !self.caching
            || !self.partial
            || table.epoch != self.epoch
            || table.num_published != num_full
            || num_computed.is_multiple_of(self.size)
        {
            return;
        }
        let (salt, own) = (table.salt, table.blocks[num_full]);
        if !self.is_writable(own) {
            return;
        }
        let closest = self.closest(salt, &tokens[..num_computed], num_full * self.size);
        if closest.is_some_and(|(_, _, num_common)| num_full * self.size + num_common == num_computed) {
            self.count("tail known already");
            return;
        }
        self.count("tail published");
        self.publish_one(own, salt, &tokens[..num_computed]);
    }

    fn unpublish_sole(&mut self, block: u32) {
        let sole = self.num_tables(block) == 1 && self.descendants(block).is_empty();
        if sole && self.unpublish(block) {
            self.count("unpublished");
        }
    }

    pub(crate) fn truncate(&mut self, key: usize, num_tokens: usize) {
        while self.tables[&key].blocks.len() > num_tokens.div_ceil(self.size) {
            let block = self.tables[&key].blocks[self.tables[&key].blocks.len() - 1];
            self.unpublish_sole(block);
            self.table(key).blocks.pop();
            self.released(block);
        }
        if let Some(&across) = self.tables[&key].blocks.get(num_tokens / self.size) {
            self.unpublish_sole(across);
        }
        self.shortened(key, num_tokens / self.size);
    }

    pub(crate) fn release_tail(&mut self, key: usize, num_blocks: usize) {
        while self.tables[&key].blocks.len() > num_blocks {
            let block = self
                .table(key)
                .blocks
                .pop()
                .expect("there are more than num_blocks");
            self.released(block);
        }
        self.shortened(key, num_blocks);
    }

    fn shortened(&mut self, key: usize, num_blocks: usize) {
        let epoch = self.epoch;
        let table = self.table(key);
        table.num_published = table.num_published.min(num_blocks);
        if table.blocks.is_empty() {
            table.epoch = epoch;
        }
    }

    pub(crate) fn release(&mut self, key: usize) {
        self.release_tail(key, 0);
        self.tables.remove(&key);
    }

    pub(crate) fn end_step(&mut self) {
        for block in std::mem::take(&mut self.leases) {
            self.settle(block);
        }
    }

    /// A block whose lease ended goes before its parent if that is idle, and so does a parent in the same
    /// position.
    fn settle(&mut self, block: u32) {
        if self.num_tables(block) > 0 || self.is_idle(block) || self.free.contains(&block) {
            return;
        }
        if !self.published.contains_key(&block) {
            self.free.push(block);
            return;
        }
        if self.is_extended(block) {
            self.count("tail dropped when held no more");
            self.unpublish(block);
            self.free.push(block);
            return;
        }
        let parent = self.parent(block);
        if let Some(parent) = parent {
            self.settle(parent);
        }
        let at = self
            .idle
            .iter()
            .position(|&(idle, _)| Some(idle) == parent)
            .unwrap_or(self.idle.len());
        let mut since = self.clock;
        if let Some(&(parent, age)) = self.idle.get(at) {
            self.count("idle before its parent");
            since = age;
            self.turns.insert(block, self.turn(parent));
        }
        self.idle.insert(at, (block, since));
    }

    pub(crate) fn clear_prefix(&mut self) -> u32 {
        let forgotten = u32::try_from(self.published.len()).expect("a small pool");
        // Class by class, each in order of age.
        let mut idle: Vec<u32> = self.idle.iter().map(|(block, _)| *block).collect();
        idle.sort_by_key(|&block| self.turn(block));
        self.free.append(&mut idle);
        self.idle.clear();
        self.turns.clear();
        self.published.clear();
        self.epoch += 1;
        forgotten
    }
}
