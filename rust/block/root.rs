//! Roots: one per namespace, the parent of every first block in it.
//!
//! Namespaces are disjoint because their roots are different nodes, told apart by the bytes of their keys and
//! not by a hash of them. A root lives as long as somebody holds it or a published block descends from it.

use std::collections::HashMap;

/// A namespace of the prefix index. Valid while held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct RootId(pub(super) u32);

/// What keys and values depend on beside the tokens: nothing is shared between two namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Namespace<'a> {
    /// The client's secret, empty for what all clients share.
    pub salt: &'a [u8],
    /// The adapter that changes the weights, empty without one.
    pub adapter: &'a [u8],
    /// Counts how often the weights were exchanged.
    pub model_epoch: u64,
}

impl Namespace<'_> {
    /// The namespace as one string of bytes. The salt is framed by its length and the epoch has a fixed one, so
    /// two namespaces never have the same key.
    pub(crate) fn key(&self) -> Vec<u8> {
        let salt_len = self.salt.len() as u64;
        [
            &salt_len.to_le_bytes(),
            self.salt,
            &self.model_epoch.to_le_bytes(),
            self.adapter,
        ]
        .concat()
    }
}

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Root {
    /// [`Namespace::key`].
    pub(super) key: Box<[u8]>,
    /// Start of the hash chain.
    pub(super) hash: u64,
    /// The top of the treap of first blocks, 0 if there is none.
    pub(super) first_child: u32,
    /// The share that its blocks count to.
    pub(super) share: u8,
    /// Tables and callers that will come back to this root.
    pub(super) num_holds: u32,
}

/// The roots, in slots that are reused.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct Roots {
    slots: Vec<Option<Root>>,
    unused: Vec<u32>,
    by_key: HashMap<Box<[u8]>, RootId>,
}

impl Roots {
    /// Takes a hold on the root of `key`, which is made with `hash` and `share` if there is none.
    pub(super) fn hold(&mut self, key: &[u8], hash: u64, share: u8) -> RootId {
        if let Some(&root) = self.by_key.get(key) {
            self.get_mut(root).num_holds += 1;
            return root;
        }
        let root = Root {
            key: key.into(),
            hash,
            first_child: 0,
            share,
            num_holds: 1,
        };
        let id = if let Some(id) = self.unused.pop() {
            self.slots[id as usize] = Some(root);
            RootId(id)
        } else {
            let id = u32::try_from(self.slots.len()).expect("roots are fewer than sequences and blocks");
            self.slots.push(Some(root));
            RootId(id)
        };
        self.by_key.insert(key.into(), id);
        id
    }

    /// The root of `key`, if there is one.
    pub(super) fn find(&self, key: &[u8]) -> Option<RootId> {
        self.by_key.get(key).copied()
    }

    /// Forgets the root if nobody holds it and nothing descends from it.
    pub(super) fn drop_if_unused(&mut self, id: RootId) {
        let root = self.get(id);
        if root.num_holds == 0 && root.first_child == 0 {
            let root = self.slots[id.0 as usize].take().expect("the root was just read");
            self.by_key.remove(&root.key);
            self.unused.push(id.0);
        }
    }

    #[inline]
    pub(super) fn get(&self, id: RootId) -> &Root {
        self.slots[id.0 as usize]
            .as_ref()
            .expect("a root is used while it is held")
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: RootId) -> &mut Root {
        self.slots[id.0 as usize]
            .as_mut()
            .expect("a root is used while it is held")
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// The live roots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (RootId, &Root)> {
        (0..)
            .map(RootId)
            .zip(&self.slots)
            .filter_map(|(id, root)| Some((id, root.as_ref()?)))
    }

    /// Checks that the slots and the keys name each other, and that no root outlives its use.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut num_live = 0;
        for (id, root) in self.iter() {
            num_live += 1;
            if self.by_key.get(&root.key) != Some(&id) {
                return Err(format!("root {} is not found by its key", id.0));
            }
            if root.num_holds == 0 && root.first_child == 0 {
                return Err(format!("root {} outlived its use", id.0));
            }
        }
        if num_live != self.by_key.len() || num_live + self.unused.len() != self.slots.len() {
            return Err(format!(
                "roots: {num_live} live, {} by key, {} slots",
                self.by_key.len(),
                self.slots.len()
            ));
        }
        Ok(())
    }
}
