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

use super::flat::{FlatTable, prefetch};
use super::hash::BlockHasher;
use super::pool::count;
use super::root::{RootId, Roots};
use crate::ids::BlockId;

/// How many blocks ahead of its probe a slot of the hash table is fetched, and a candidate's node and tokens.
const SLOT_AHEAD: usize = 8;
const NODE_AHEAD: usize = 4;

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

/// A block: what the index knows of it, all zero while it is not published, and who holds it. Both lie together
/// because both are asked for whenever a block changes hands; a node is half a cache line.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Node {
    pub(super) hash: u64,
    /// [`Parent::number`], 0 while the block is not published.
    pub(super) parent: u32,
    /// The top of the treap of its children, and its own place among its siblings, by block id; 0 is nobody.
    pub(super) first_child: u32,
    pub(super) left: u32,
    pub(super) right: u32,
    /// Number of tokens that the node stands for; a full block has `block_size`.
    pub(super) fill_len: u16,
    /// How many later requests came back to the block, up to the last class.
    pub(super) num_turns: u8,
    /// Whether a step under way, or a copy of another thread, reads the block.
    pub(super) is_leased: bool,
    /// Tables that hold the block.
    pub(super) num_tables: u32,
}

impl Node {
    /// Whether anybody keeps the block from being taken.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.num_tables > 0 || self.is_leased
    }

    /// What is left of it when it is not published any more.
    #[inline]
    fn unpublished(self) -> Self {
        Self {
            is_leased: self.is_leased,
            num_tables: self.num_tables,
            ..Self::default()
        }
    }
}

/// Whether two blocks have the same tokens: line by line without a branch in between, since the comparison of arrays
/// becomes a call, which costs more than comparing so few bytes.
#[inline]
fn are_equal(one: &[u32], other: &[u32]) -> bool {
    let (lines, rest) = one.as_chunks::<LINE_TOKENS>();
    let (other_lines, other_rest) = other.as_chunks::<LINE_TOKENS>();
    let is_same_line = |(one, other): (&[u32; LINE_TOKENS], &[u32; LINE_TOKENS])| {
        let differing = one
            .iter()
            .zip(other)
            .fold(0, |bits, (one, other)| bits | (one ^ other));
        differing == 0
    };
    lines.len() == other_lines.len()
        && lines.iter().zip(other_lines).all(is_same_line)
        && rest.iter().eq(other_rest)
}

/// All published blocks.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PrefixIndex {
    pub(super) hasher: BlockHasher,
    pub(super) table: FlatTable,
    pub(super) nodes: Vec<Node>,
    pub(super) roots: Roots,
    /// The sibling that a block hangs below in the treap of its parent's children, 0 for the one on top and for
    /// whatever is not published. Apart from the nodes, because a lone child never needs it.
    pub(super) above: Vec<u32>,
    /// Tokens of the published blocks, `block_size` to a block, after some padding: with it, blocks of 16 begin
    /// with a cache line.
    tokens: Vec<u32>,
    padding: usize,
    /// log2 of the block size.
    shift: u32,
}

impl PrefixIndex {
    pub(super) fn new(hasher: BlockHasher, num_blocks: u32, block_size: u32) -> Self {
        let num_nodes = num_blocks as usize + 1;
        let tokens = vec![0; (num_nodes * block_size as usize) + LINE_TOKENS];
        let padding = tokens.as_ptr().align_offset(LINE_TOKENS * size_of::<u32>());
        Self {
            hasher,
            table: FlatTable::new(num_blocks),
            nodes: vec![Node::default(); num_nodes],
            roots: Roots::default(),
            above: vec![0; num_nodes],
            tokens,
            padding: padding.min(LINE_TOKENS),
            shift: block_size.trailing_zeros(),
        }
    }

    #[inline]
    pub(super) fn is_published(&self, block: BlockId) -> bool {
        self.nodes[block.index()].parent != 0
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

    /// Turn class of a published block.
    #[inline]
    pub(super) fn class(&self, block: BlockId) -> usize {
        self.nodes[block.index()].num_turns.into()
    }

    /// Hash of the chain that ends with `parent`.
    #[inline]
    pub(super) fn chain_hash(&self, parent: Parent) -> u64 {
        match parent {
            Parent::Root(root) => self.roots.get(root).hash,
            Parent::Block(block) => self.nodes[block.index()].hash,
        }
    }

    /// The node with this hash, parent and tokens.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a lookup, where a call costs as much as the work"
    )]
    #[inline(always)]
    pub(super) fn find(&self, hash: u64, parent: Parent, tokens: &[u32]) -> Option<BlockId> {
        let parent = parent.number();
        self.table.find(hash, |block| {
            let node = &self.nodes[block.index()];
            node.hash == hash && node.parent == parent && are_equal(self.tokens(block), tokens)
        })
    }

    /// Fills in the longest chain of nodes that matches the hashes, which are those of all full blocks.
    pub(super) fn probe(&self, root: RootId, tokens: &[u32], hit: &mut PrefixHit) {
        hit.blocks.reserve(hit.hashes.len());
        let mut parent = Parent::Root(root);
        for (idx, block) in tokens.chunks_exact(1 << self.shift).enumerate() {
            if let Some(&ahead) = hit.hashes.get(idx + SLOT_AHEAD) {
                self.table.prefetch(ahead);
            }
            if let Some(candidate) = hit
                .hashes
                .get(idx + NODE_AHEAD)
                .and_then(|&ahead| self.table.guess(ahead))
            {
                prefetch(&self.nodes, candidate.index());
                prefetch(&self.tokens, self.start(candidate));
            }
            let Some(found) = self.find(hit.hashes[idx], parent, block) else {
                break;
            };
            hit.num_idle += u32::from(!self.nodes[found.index()].is_held());
            hit.blocks.push(found);
            parent = Parent::Block(found);
        }
        hit.num_full = count(hit.blocks.len());
        hit.num_tokens = hit.num_full << self.shift;
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
        *node = Node {
            hash,
            parent: parent.number(),
            fill_len: u16::try_from(tokens.len()).expect("a block has at most 1024 tokens"),
            ..node.unpublished()
        };
        let start = self.start(block);
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        self.link(block, parent);
        self.table.insert(hash, block);
    }

    /// Takes a leaf out of the index: hash entry, links and node go together.
    pub(super) fn remove(&mut self, block: BlockId) {
        let node = self.nodes[block.index()];
        let parent = Parent::from_number(node.parent).expect("only a published block is unpublished");
        assert!(
            node.first_child == 0,
            "block {} was unpublished before its children",
            block.0
        );
        self.unlink(block, parent);
        self.nodes[block.index()] = node.unpublished();
        self.table.remove(node.hash, block);
        if let Parent::Root(root) = parent {
            self.roots.drop_if_unused(root);
        }
    }

    /// Fetches the node of a block ahead of its use.
    #[inline]
    pub(super) fn prefetch_node(&self, block: BlockId) {
        prefetch(&self.nodes, block.index());
        prefetch(&self.above, block.index());
    }

    /// Fetches what [`Self::remove`] of a published block will touch beside its node.
    #[inline]
    pub(super) fn prefetch_removal(&self, block: BlockId) {
        let node = &self.nodes[block.index()];
        self.table.prefetch(node.hash);
        // What is not a block's number, a root's for instance, is no place among the nodes and fetches nothing.
        for number in [node.parent, node.left, node.right, self.above[block.index()]] {
            prefetch(&self.nodes, number as usize);
        }
    }

    /// Takes every node out. Roots that nobody holds go with them.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        self.above.fill(0);
        for node in &mut self.nodes {
            *node = node.unpublished();
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
        for (id, node) in (0..).map(BlockId).zip(&self.nodes) {
            let Some(parent) = Parent::from_number(node.parent) else {
                if *node != node.unpublished() {
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
        for id in (0..count(self.nodes.len())).map(BlockId) {
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
        let found = self.find(hash, parent, tokens);
        if found != Some(id) {
            return Err(format!("a search for block {} finds {found:?}", id.0));
        }
        Ok(())
    }
}
