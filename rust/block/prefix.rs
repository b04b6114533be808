//! The prefix index: a radix tree whose edges are blocks, found through a flat hash table.
//!
//! A published block is a node. Its parent is the block before it, or the root of its namespace; its hash chains
//! the hashes of both. A lookup hashes all blocks of a prompt first, then probes one after another with the
//! memory of the next ones already on its way, and accepts a node only if hash, parent and tokens are equal.
//! By induction over the chain a hit is exact, whatever the hash function does.
//!
//! What follows the full blocks is looked for among the children of the last one, which are ordered by their
//! tokens (see [`super::siblings`]): the one with the longest common prefix gives its beginning. Nodes may hold
//! less than a block, the tail of a sequence that ended; they have no children.

use super::flat::FlatTable;
use super::hash::BlockHasher;
use super::memory::{array, prefetch};
use super::node::{Node, block_ids};
use super::pool::count;
use super::root::{RootId, Roots};
use crate::ids::BlockId;

/// How many blocks ahead of its probe a slot of the hash table is fetched, and a candidate's node and tokens.
const SLOT_AHEAD: usize = 16;
const NODE_AHEAD: usize = 8;

/// Tokens in a cache line.
const LINE_TOKENS: usize = 16;

/// Set in the number of a node that is a root.
const ROOT_BIT: u32 = 1 << 31;

/// What comes before a block: the root of its namespace, or a published block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parent {
    /// The block is the first one in a namespace.
    Root(RootId),
    /// The block follows this one.
    Block(BlockId),
}

impl Parent {
    /// The parent as one number. Never 0, because the null block is nobody's parent.
    #[inline]
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Root(root) => root.0 | ROOT_BIT,
            Self::Block(block) => block.0,
        }
    }

    /// Inverse of [`Self::number`]; `None` for 0.
    #[inline]
    pub(super) fn from_number(number: u32) -> Option<Self> {
        if number & ROOT_BIT != 0 {
            Some(Self::Root(RootId(number & !ROOT_BIT)))
        } else if number != 0 {
            Some(Self::Block(BlockId(number)))
        } else {
            None
        }
    }
}

/// The result of a lookup. Reusable: a lookup overwrites it and keeps its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrefixHit {
    /// The published blocks that hold the longest known prefix, in order. Only the beginning of the last one
    /// may be what was asked for; the others match as a whole.
    pub blocks: Vec<BlockId>,
    /// Tokens of the known prefix.
    pub num_tokens: u32,
    /// How many of `blocks` match as a whole.
    pub num_full: u32,
    /// Chained hashes of all full blocks that were asked for, found or not.
    pub hashes: Vec<u64>,
    /// How many of `blocks` are idle: taking them up costs capacity as an allocation does.
    pub num_idle: u32,
    /// Whether the blocks are taken up by a sequence that only lost its own: then no request came back to them, and
    /// the policy of eviction learns nothing. Set by the caller.
    pub is_resumed: bool,
}

/// Whether two lines have the same tokens, without a branch in between.
#[inline]
fn are_equal_lines((one, other): (&[u32; LINE_TOKENS], &[u32; LINE_TOKENS])) -> bool {
    let mut differing = 0;
    for (one, other) in one.iter().zip(other) {
        differing |= one ^ other;
    }
    differing == 0
}

/// Whether two blocks of the same length have the same tokens. The comparison of slices would be a call, which costs
/// more than comparing so few bytes.
#[expect(
    clippy::inline_always,
    reason = "the loop of a lookup, where a call costs as much as the work"
)]
#[inline(always)]
fn are_equal(one: &[u32], other: &[u32]) -> bool {
    let (lines, rest) = one.as_chunks();
    let (other_lines, other_rest) = other.as_chunks();
    lines.iter().zip(other_lines).all(are_equal_lines) && (rest.is_empty() || rest.iter().eq(other_rest))
}

/// All published blocks.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PrefixIndex {
    pub(super) hasher: BlockHasher,
    pub(super) table: FlatTable,
    /// By block id. After those of the blocks come some that close the idle lists.
    pub(super) nodes: Vec<Node>,
    pub(super) num_blocks: u32,
    pub(super) roots: Roots,
    /// Tokens of the published blocks, `block_size` to a block, after some padding: with it, blocks of 16 begin
    /// with a cache line.
    tokens: Vec<u32>,
    padding: usize,
    /// log2 of the block size.
    shift: u32,
}

impl PrefixIndex {
    /// An index of `num_blocks` blocks and the null block, with `num_ends` more nodes for the idle lists.
    pub(super) fn new(hasher: BlockHasher, num_blocks: u32, num_ends: usize, block_size: u32) -> Self {
        let num_nodes = num_blocks as usize + 1;
        let tokens = array(0, num_nodes * block_size as usize + LINE_TOKENS);
        let padding = tokens.as_ptr().align_offset(LINE_TOKENS * size_of::<u32>());
        Self {
            hasher,
            table: FlatTable::new(num_blocks),
            nodes: array(Node::default(), num_nodes + num_ends),
            num_blocks,
            roots: Roots::default(),
            tokens,
            padding: padding.min(LINE_TOKENS),
            shift: block_size.trailing_zeros(),
        }
    }

    #[inline]
    pub(super) fn is_published(&self, block: BlockId) -> bool {
        self.nodes[block.index()].is_published()
    }

    /// The parent of a published block.
    #[inline]
    pub(super) fn parent(&self, block: BlockId) -> Option<Parent> {
        Parent::from_number(self.nodes[block.index()].parent)
    }

    /// Tokens of a published block.
    #[inline]
    pub(super) fn tokens(&self, block: BlockId) -> &[u32] {
        let start = self.start(block);
        &self.tokens[start..start + usize::from(self.nodes[block.index()].fill_len)]
    }

    /// Where the tokens of a block begin.
    #[inline]
    fn start(&self, block: BlockId) -> usize {
        self.padding + (block.index() << self.shift)
    }

    /// Some child: the top of their treap.
    #[inline]
    pub(super) fn first_child(&self, parent: Parent) -> Option<BlockId> {
        let child = match parent {
            Parent::Root(root) => self.roots.get(root).first_child,
            Parent::Block(block) => self.nodes[block.index()].first_child,
        };
        (child != 0).then_some(BlockId(child))
    }

    /// Whether a node that is the top of its siblings' treap has no siblings.
    #[inline]
    pub(super) fn is_only_child(&self, top: BlockId) -> bool {
        let node = &self.nodes[top.index()];
        (node.left, node.right) == (0, 0)
    }

    /// Whether a node holds less than a block.
    #[inline]
    pub(super) fn is_partial(&self, block: BlockId) -> bool {
        usize::from(self.nodes[block.index()].fill_len) < 1 << self.shift
    }

    /// Whether a longer sibling begins with all tokens of a node, which then gives nothing that the other one
    /// does not.
    pub(super) fn is_extended(&self, block: BlockId) -> bool {
        let parent = self.parent(block).expect("the block is published");
        let tokens = self.tokens(block);
        self.neighbours(parent, tokens)
            .after
            .is_some_and(|after| after.num_common == tokens.len())
    }

    /// The partial node whose tokens are the beginning of those of another child of `parent`, if there is one.
    pub(super) fn extended_by(&self, parent: Parent, tokens: &[u32]) -> Option<BlockId> {
        let before = self.neighbours(parent, tokens).before?;
        let len = usize::from(self.nodes[before.block.index()].fill_len);
        (before.num_common == len && len < tokens.len()).then_some(before.block)
    }

    /// Hash of the chain that ends with `parent`.
    #[inline]
    pub(super) fn chain_hash(&self, parent: Parent) -> u64 {
        match parent {
            Parent::Root(root) => self.roots.get(root).hash,
            Parent::Block(block) => self.nodes[block.index()].hash,
        }
    }

    /// The node with this hash, parent (as a number) and tokens.
    pub(super) fn find(&self, hash: u64, parent: u32, tokens: &[u32]) -> Option<BlockId> {
        let mut candidates = self.table.candidates(hash);
        candidates.find(|&block| self.is_node(block, hash, parent, tokens))
    }

    /// Whether a block is the node with this hash, parent and tokens.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a lookup, where a call costs as much as the work"
    )]
    #[inline(always)]
    fn is_node(&self, block: BlockId, hash: u64, parent: u32, tokens: &[u32]) -> bool {
        let node = &self.nodes[block.index()];
        node.hash == hash
            && node.parent == parent
            && usize::from(node.fill_len) == tokens.len()
            && are_equal(&self.tokens[self.start(block)..][..tokens.len()], tokens)
    }

    /// Fills in the longest chain of nodes that matches the hashes, which are those of all full blocks.
    pub(super) fn probe(&self, root: RootId, tokens: &[u32], hit: &mut PrefixHit) {
        let parent = Parent::Root(root).number();
        // The usual size as a constant spares the comparison of tokens its loop.
        if 1 << self.shift == LINE_TOKENS {
            self.follow(parent, tokens, LINE_TOKENS, hit);
        } else {
            self.follow(parent, tokens, 1 << self.shift, hit);
        }
        hit.num_full = count(hit.blocks.len());
        hit.num_tokens = hit.num_full << self.shift;
    }

    /// Appends to `hit` what follows `parent`, block by block of `size` tokens. Some blocks ahead of its turn, each is
    /// guessed to be the one in the home slot of its hash; only where that is not so, it is searched for.
    #[expect(clippy::inline_always, reason = "for the sake of a constant size")]
    #[inline(always)]
    fn follow(&self, mut parent: u32, tokens: &[u32], size: usize, hit: &mut PrefixHit) {
        hit.blocks.reserve(hit.hashes.len());
        let mut guesses = [BlockId::NULL; NODE_AHEAD];
        for ((idx, &hash), block) in hit.hashes.iter().enumerate().zip(tokens.chunks_exact(size)) {
            if let Some(&ahead) = hit.hashes.get(idx + SLOT_AHEAD) {
                self.table.prefetch(ahead);
            }
            let mut guess = guesses[idx % NODE_AHEAD];
            if let Some(&ahead) = hit.hashes.get(idx + NODE_AHEAD) {
                let next = self.table.guess(ahead);
                prefetch(&self.nodes, next.index());
                prefetch(&self.tokens, self.start(next));
                guesses[idx % NODE_AHEAD] = next;
            }
            if !self.is_node(guess, hash, parent, block) {
                let Some(found) = self.find(hash, parent, block) else {
                    break;
                };
                guess = found;
            }
            hit.num_idle += u32::from(!self.nodes[guess.index()].is_held());
            hit.blocks.push(guess);
            parent = guess.0;
        }
    }

    /// Adds to a lookup the child of its last block that has the most in common with the tokens which follow.
    pub(super) fn look_up_partial(&self, root: RootId, tokens: &[u32], hit: &mut PrefixHit) {
        let parent = hit
            .blocks
            .last()
            .map_or(Parent::Root(root), |&last| Parent::Block(last));
        let rest = &tokens[hit.num_tokens as usize..];
        let rest = &rest[..rest.len().min(1 << self.shift)];
        let Some(closest) = self.neighbours(parent, rest).closest() else {
            return;
        };
        let known = hit.num_tokens as usize + closest.num_common;
        let is_whole = closest.num_common == self.tokens(closest.block).len();
        if closest.num_common > 0
            && (is_whole || known + 1 >= tokens.len() || closest.num_common >= self.least_partial())
        {
            hit.num_idle += u32::from(!self.nodes[closest.block.index()].is_held());
            hit.blocks.push(closest.block);
            hit.num_tokens = count(known);
        }
    }

    /// Tokens below which the beginning of a block is not worth its copy: moving a block of 256 costs about as
    /// much as computing one token, and admission needs a block more. A lone first token, which all prompts of
    /// a model may have in common, never is.
    fn least_partial(&self) -> usize {
        ((1 << self.shift) / 32).max(2)
    }

    /// Makes `block` a node. There must be no equal node.
    pub(super) fn insert(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[u32]) {
        let node = &mut self.nodes[block.index()];
        node.hash = hash;
        node.parent = parent.number();
        node.fill_len = u16::try_from(tokens.len()).expect("a block has at most 1024 tokens");
        let start = self.start(block);
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        self.link(block, parent);
        self.table.insert(hash, block);
    }

    /// Takes a leaf out of the index: hash entry, links and node go together.
    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) {
        let node = &self.nodes[block.index()];
        let hash = node.hash;
        let parent = Parent::from_number(node.parent).expect("only a published block is unpublished");
        assert!(
            node.first_child == 0,
            "block {} was unpublished before its children",
            block.0
        );
        self.unlink(block, parent);
        self.nodes[block.index()].unpublish();
        self.table.remove(hash, block);
        if let Parent::Root(root) = parent {
            self.roots.drop_if_unused(root);
        }
    }

    /// Fetches the node of a block ahead of its use.
    #[inline]
    pub(super) fn prefetch_node(&self, block: BlockId) {
        prefetch(&self.nodes, block.index());
    }

    /// Fetches what [`Self::remove`] of a published block will touch beside its node.
    #[inline]
    pub(super) fn prefetch_removal(&self, block: BlockId) {
        let node = &self.nodes[block.index()];
        self.table.prefetch_removal(node.hash);
        // What is not a block's number, a root's for instance, is no place among the nodes and fetches nothing.
        prefetch(&self.nodes, node.parent as usize);
        if node.has_siblings() {
            for number in [node.left, node.right, node.above] {
                prefetch(&self.nodes, number as usize);
            }
        }
    }

    /// Takes every node out. Roots that nobody holds go with them.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        for node in &mut self.nodes {
            node.unpublish();
        }
        let roots: Vec<RootId> = self.roots.iter().map(|(id, _)| id).collect();
        for root in roots {
            self.roots.get_mut(root).first_child = 0;
            self.roots.drop_if_unused(root);
        }
    }

    /// Checks that nodes, hash table and treaps tell the same tree.
    pub(super) fn check(&self) -> Result<(), String> {
        self.table.check()?;
        self.roots.check()?;
        let mut num_published = 0;
        for id in block_ids(self.num_blocks) {
            let node = &self.nodes[id.index()];
            let Some(parent) = Parent::from_number(node.parent) else {
                let mut unpublished = *node;
                unpublished.unpublish();
                if *node != unpublished {
                    return Err(format!("block {} was unpublished in part", id.0));
                }
                continue;
            };
            num_published += 1;
            self.check_node(id, parent)?;
        }
        if num_published != self.table.len() {
            return Err(format!(
                "{num_published} blocks published, {} in the hash table",
                self.table.len()
            ));
        }
        let mut num_children = 0;
        for (id, _) in self.roots.iter() {
            num_children += self.check_children(Parent::Root(id))?;
        }
        for id in block_ids(self.num_blocks) {
            num_children += self.check_children(Parent::Block(id))?;
        }
        if num_children != num_published {
            return Err(format!(
                "{num_published} blocks published, {num_children} among the children"
            ));
        }
        Ok(())
    }

    /// Checks one node: a live parent, the right hash, and that it is found.
    fn check_node(&self, id: BlockId, parent: Parent) -> Result<(), String> {
        if let Parent::Block(parent) = parent
            && !self.is_published(parent)
        {
            return Err(format!(
                "block {} is published under block {}, which is not",
                id.0, parent.0
            ));
        }
        let tokens = self.tokens(id);
        if tokens.is_empty() || tokens.len() > 1 << self.shift {
            return Err(format!(
                "block {} is published with {} tokens",
                id.0,
                tokens.len()
            ));
        }
        if self.is_partial(id) && self.first_child(Parent::Block(id)).is_some() {
            return Err(format!("block {} is not full and has children", id.0));
        }
        let hash = self.nodes[id.index()].hash;
        if hash != self.hasher.block(self.chain_hash(parent), tokens) {
            return Err(format!("block {} has a wrong hash", id.0));
        }
        let found = self.find(hash, parent.number(), tokens);
        if found != Some(id) {
            return Err(format!("a search for block {} finds {found:?}", id.0));
        }
        Ok(())
    }
}
