//! The children of a node in the order of their tokens: which of them begins like a given text, exactly, in
//! O(log n) at any fan-out.
//!
//! A treap (Seidel and Aragon, "Randomized Search Trees", 1996) threaded through the nodes: a search tree by
//! tokens, compared as lists, and a heap by a priority that follows from the block's number. So the same
//! children always form the same tree, and a lone child costs what it cost on a list. Every child knows the one
//! that it hangs below, so that taking it out needs no search: O(1) on average, at any fan-out.
//!
//! Of all children the one with the longest common prefix stands directly before or directly after the text:
//! whatever lies between the text and a child has at least their common prefix.

use std::cmp::Ordering;

use super::prefix::{Parent, PrefixIndex};
use crate::ids::BlockId;

/// A place that names a node of a treap; 0 names none.
#[derive(Clone, Copy)]
enum Link {
    Top(Parent),
    Left(u32),
    Right(u32),
}

impl Link {
    /// The node that has this place; 0 for the top.
    fn holder(self) -> u32 {
        match self {
            Self::Top(_) => 0,
            Self::Left(node) | Self::Right(node) => node,
        }
    }
}

/// A child, and how many tokens it has in common with the text from its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Neighbour {
    pub(super) block: BlockId,
    pub(super) num_common: usize,
}

/// The children on both sides of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Neighbours {
    /// The last one that is not greater; it may be equal.
    pub(super) before: Option<Neighbour>,
    /// The first one that is greater.
    pub(super) after: Option<Neighbour>,
}

impl Neighbours {
    /// The one with more in common; the one before if both have as much.
    pub(super) fn closest(self) -> Option<Neighbour> {
        let num_common = |side: Option<Neighbour>| side.map_or(0, |neighbour| neighbour.num_common);
        if num_common(self.after) > num_common(self.before) {
            self.after
        } else {
            self.before
        }
    }
}

/// Tokens that two lists have in common from their start.
fn num_common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

impl PrefixIndex {
    /// The children of `parent` on both sides of `tokens`.
    pub(super) fn neighbours(&self, parent: Parent, tokens: &[u32]) -> Neighbours {
        let mut found = Neighbours::default();
        let mut at = self.first_child(parent);
        while let Some(block) = at {
            // Whatever is left lies between the two, and so has what both of them have in common with it.
            let known = match found {
                Neighbours {
                    before: Some(before),
                    after: Some(after),
                } => before.num_common.min(after.num_common),
                _ => 0,
            };
            let child = self.tokens(block);
            let num_common = known + num_common(&child[known..], &tokens[known..]);
            let neighbour = Some(Neighbour { block, num_common });
            let node = &self.nodes[block.index()];
            let next = if child.get(num_common) <= tokens.get(num_common) {
                found.before = neighbour;
                node.right
            } else {
                found.after = neighbour;
                node.left
            };
            at = (next != 0).then_some(BlockId(next));
        }
        found
    }

    /// Hangs a node, whose parent and tokens are set already, among its siblings. None of them has its tokens.
    /// Most have no siblings.
    #[inline]
    pub(super) fn link(&mut self, block: BlockId, parent: Parent) {
        let top = self.top_mut(parent);
        if *top == 0 {
            *top = block.0;
        } else {
            self.link_among(block, parent);
        }
    }

    fn link_among(&mut self, block: BlockId, parent: Parent) {
        let mut at = Link::Top(parent);
        loop {
            let next = self.target(at);
            if next == 0 || self.priority(next) < self.priority(block.0) {
                break;
            }
            at = self.side(next, block);
        }
        // What hung here is split in two by the new node: what is less goes to its left.
        let mut rest = self.target(at);
        self.hang(at, block.0);
        let (mut left, mut right) = (Link::Left(block.0), Link::Right(block.0));
        while rest != 0 {
            let inner = self.side(rest, block);
            let hook = match inner {
                Link::Right(_) => &mut left,
                _ => &mut right,
            };
            let place = std::mem::replace(hook, inner);
            self.hang(place, rest);
            rest = self.target(inner);
        }
        self.hang(left, 0);
        self.hang(right, 0);
    }

    /// Takes a node out from among its siblings.
    #[inline]
    pub(super) fn unlink(&mut self, block: BlockId, parent: Parent) {
        if self.nodes[block.index()].has_siblings() {
            self.unlink_among(block, parent);
        } else {
            *self.top_mut(parent) = 0;
        }
    }

    fn unlink_among(&mut self, block: BlockId, parent: Parent) {
        let above = self.nodes[block.index()].above;
        let mut at = match above {
            0 => Link::Top(parent),
            _ if self.target(Link::Left(above)) == block.0 => Link::Left(above),
            _ => Link::Right(above),
        };
        let node = &self.nodes[block.index()];
        let (mut left, mut right) = (node.left, node.right);
        // Both sides become one tree in its place.
        while left != 0 && right != 0 {
            if self.priority(left) > self.priority(right) {
                self.hang(at, left);
                at = Link::Right(left);
                left = self.target(at);
            } else {
                self.hang(at, right);
                at = Link::Left(right);
                right = self.target(at);
            }
        }
        self.hang(at, left | right);
    }

    /// Puts a node, or nobody, in a place.
    fn hang(&mut self, at: Link, node: u32) {
        *self.target_mut(at) = node;
        if node != 0 {
            self.nodes[node as usize].above = at.holder();
        }
    }

    /// On which side of the node `other` the node `block` belongs.
    fn side(&self, other: u32, block: BlockId) -> Link {
        match self.tokens(block).cmp(self.tokens(BlockId(other))) {
            Ordering::Less => Link::Left(other),
            _ => Link::Right(other),
        }
    }

    fn target(&self, link: Link) -> u32 {
        match link {
            Link::Top(parent) => self.first_child(parent).map_or(0, |child| child.0),
            Link::Left(node) => self.nodes[node as usize].left,
            Link::Right(node) => self.nodes[node as usize].right,
        }
    }

    #[inline]
    fn top_mut(&mut self, parent: Parent) -> &mut u32 {
        match parent {
            Parent::Root(root) => &mut self.roots.get_mut(root).first_child,
            Parent::Block(block) => &mut self.nodes[block.index()].first_child,
        }
    }

    fn target_mut(&mut self, link: Link) -> &mut u32 {
        match link {
            Link::Top(parent) => self.top_mut(parent),
            Link::Left(node) => &mut self.nodes[node as usize].left,
            Link::Right(node) => &mut self.nodes[node as usize].right,
        }
    }

    /// A number that nobody can choose by choosing tokens, different for every block: the finalizer of
    /// `MurmurHash3`, a bijection, over the block's number and this process's key.
    fn priority(&self, node: u32) -> u32 {
        let mut word = node ^ self.hasher.salt();
        word = (word ^ (word >> 16)).wrapping_mul(0x85eb_ca6b);
        word = (word ^ (word >> 13)).wrapping_mul(0xc2b2_ae35);
        word ^ (word >> 16)
    }

    /// Checks the treap of the children of `parent` and returns how many there are.
    pub(super) fn check_children(&self, parent: Parent) -> Result<u32, String> {
        let mut in_order: Vec<BlockId> = Vec::new();
        let mut path: Vec<BlockId> = Vec::new();
        let mut at = self.target(Link::Top(parent));
        while at != 0 || !path.is_empty() {
            if at == 0 {
                let Some(block) = path.pop() else { break };
                in_order.push(block);
                at = self.nodes[block.index()].right;
            } else {
                if path.len() + in_order.len() >= self.nodes.len() {
                    return Err(format!("the children of {parent:?} are linked in a ring"));
                }
                path.push(BlockId(at));
                at = self.nodes[at as usize].left;
            }
        }
        for &block in &in_order {
            let node = &self.nodes[block.index()];
            if node.parent != parent.number() {
                return Err(format!(
                    "block {} is among the children of {parent:?} but names another parent",
                    block.0
                ));
            }
            for child in [node.left, node.right].into_iter().filter(|&child| child != 0) {
                if self.priority(child) > self.priority(block.0) {
                    return Err(format!("block {child} hangs below block {}, not above", block.0));
                }
                if self.nodes[child as usize].above != block.0 {
                    return Err(format!(
                        "block {child} does not know that it hangs below block {}",
                        block.0
                    ));
                }
            }
        }
        let top = self.target(Link::Top(parent));
        let above = self.nodes[top as usize].above;
        if above != 0 {
            return Err(format!("block {top} is on top and hangs below block {above}"));
        }
        for pair in in_order.windows(2) {
            if self.tokens(pair[0]) >= self.tokens(pair[1]) {
                return Err(format!("blocks {} and {} are out of order", pair[0].0, pair[1].0));
            }
        }
        Ok(u32::try_from(in_order.len()).expect("fewer children than blocks"))
    }
}
