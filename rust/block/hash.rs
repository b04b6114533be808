//! The chained hash of the prefix index: a keyed 64-bit fold over a block's tokens and its parent's hash.
//!
//! The hash decides where the index looks, never what it answers, so it needs speed and a key (against
//! prompts built to collide), not cryptographic strength. The fold is of the wyhash class: 64x64 -> 128 bit
//! products, halves xored.

use super::root::Namespace;

/// Tokens taken by one round of the fold.
const ROUND_TOKENS: usize = 16;

/// Hashes blocks and namespaces under the key of this process. A copy of the pool's hashes prompts on the threads
/// that bring them: what comes out depends on key, namespace and tokens alone.
#[derive(Clone, PartialEq, Eq)]
pub struct BlockHasher {
    key: [u64; 4],
    /// Test hook: every hash is zero, so that only the comparison of tokens and parent tells blocks apart.
    degenerate: bool,
}

impl BlockHasher {
    pub(super) fn new(key: [u64; 4], degenerate: bool) -> Self {
        Self { key, degenerate }
    }

    /// Chained hashes of the full blocks of a prompt, as [`super::BlockPool::extend_hashes`] gives them.
    pub fn prompt(&self, namespace: &Namespace<'_>, tokens: &[u32], block_size: u32) -> Vec<u64> {
        let mut hashes = Vec::new();
        self.extend(self.root(&namespace.key()), tokens, block_size, &mut hashes);
        hashes
    }

    /// Appends the hashes of the full blocks of `tokens` that are missing; `root` is where the chain starts.
    pub(super) fn extend(&self, root: u64, tokens: &[u32], block_size: u32, hashes: &mut Vec<u64>) {
        let size = block_size as usize;
        let mut hash = hashes.last().copied().unwrap_or(root);
        let missing = tokens.get(hashes.len() * size..).unwrap_or(&[]);
        if size == ROUND_TOKENS && !self.degenerate {
            // The usual size: one round to a block, without the questions that `block` asks about it.
            let (blocks, _) = missing.as_chunks();
            hashes.extend(blocks.iter().map(|words| {
                hash = self.round(hash ^ ROUND_TOKENS as u64, words);
                hash
            }));
            return;
        }
        hashes.extend(missing.chunks_exact(size).map(|block| {
            hash = self.block(hash, block);
            hash
        }));
    }

    /// Hash of the root of a namespace, given by its key: where the chain of its first block starts. The length is part of the hash.
    pub(super) fn root(&self, key: &[u8]) -> u64 {
        if self.degenerate {
            return 0;
        }
        let mut hash = self.key[0] ^ key.len() as u64;
        for chunk in key.chunks(ROUND_TOKENS * 4) {
            let mut words = [0; ROUND_TOKENS];
            for (word, bytes) in words.iter_mut().zip(chunk.chunks(4)) {
                let mut padded = [0; 4];
                padded[..bytes.len()].copy_from_slice(bytes);
                *word = u32::from_le_bytes(padded);
            }
            hash = self.round(hash, &words);
        }
        hash
    }

    /// Hash of a block that follows the block or root with hash `parent`. The length is part of the hash.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a lookup, where a call costs as much as the work"
    )]
    #[inline(always)]
    pub(super) fn block(&self, parent: u64, tokens: &[u32]) -> u64 {
        if self.degenerate {
            return 0;
        }
        let (rounds, rest) = tokens.as_chunks::<ROUND_TOKENS>();
        let mut hash = parent ^ tokens.len() as u64;
        for words in rounds {
            hash = self.round(hash, words);
        }
        if !rest.is_empty() {
            let mut padded = [0; ROUND_TOKENS];
            padded[..rest.len()].copy_from_slice(rest);
            hash = self.round(hash, &padded);
        }
        hash
    }

    /// A part of the key, for numbers beside the hash that nobody is to foresee.
    pub(super) fn salt(&self) -> u32 {
        u32::try_from(self.key[1] >> 32).expect("half a word")
    }

    /// Folds one round of tokens into `hash`. Four of its products do not depend on `hash`, so those of the next rounds
    /// can be computed meanwhile, and a chain costs the latency of one product a round.
    #[inline]
    fn round(&self, hash: u64, words: &[u32; ROUND_TOKENS]) -> u64 {
        let [k0, k1, k2, k3] = self.key;
        let pair = |i: usize| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32;
        let a = fold(pair(0) ^ k0, pair(1) ^ k1);
        let b = fold(pair(2) ^ k1, pair(3) ^ k2);
        let c = fold(pair(4) ^ k2, pair(5) ^ k3);
        let d = fold(pair(6) ^ k3, pair(7) ^ k0);
        fold(hash ^ (a ^ c ^ k1), b ^ d ^ k3)
    }
}

/// Both halves of the 128-bit product, xored.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves of the product are wanted apart"
)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const KEY: [u64; 4] = [
        0x243f_6a88_85a3_08d3,
        0x1319_8a2e_0370_7344,
        0xa409_3822_299f_31d0,
        0x082e_fa98_ec4e_6c89,
    ];

    #[test]
    fn every_token_the_parent_the_length_and_the_key_change_the_hash() {
        let hasher = BlockHasher::new(KEY, false);
        for len in [1, 2, 4, 8, 16, 32, 1024] {
            let tokens = vec![7; len];
            let mut seen = HashSet::from([hasher.block(1, &tokens)]);
            for i in 0..len {
                for bit in [0, 31] {
                    let mut changed = tokens.clone();
                    changed[i] ^= 1 << bit;
                    assert!(
                        seen.insert(hasher.block(1, &changed)),
                        "len {len}: token {i}, bit {bit}"
                    );
                }
            }
            assert!(seen.insert(hasher.block(2, &tokens)));
            assert!(seen.insert(BlockHasher::new([1, 2, 3, 4], false).block(1, &tokens)));
        }
        assert_ne!(hasher.block(1, &[5]), hasher.block(1, &[5, 0]));
    }

    #[test]
    fn salts_are_framed_by_their_length() {
        let hasher = BlockHasher::new(KEY, false);
        let salts: [&[u8]; 7] = [b"", b"\0", b"\0\0", b"a", b"a\0", b"ab", &[0; 65]];
        assert_eq!(
            salts
                .iter()
                .map(|salt| hasher.root(salt))
                .collect::<HashSet<_>>()
                .len(),
            salts.len()
        );
    }

    #[test]
    fn both_halves_of_the_hash_spread() {
        let hasher = BlockHasher::new(KEY, false);
        let mut low = HashSet::new();
        let mut high = HashSet::new();
        for token in 0..4096_u32 {
            let hash = hasher.block(0, &[token; 16]);
            low.insert(hash & 0xffff);
            high.insert(hash >> 48);
        }
        // 4096 balls in 65536 bins: 3971 distinct ones are expected, with a deviation of about 11.
        assert!(
            low.len() > 3900 && high.len() > 3900,
            "{} {}",
            low.len(),
            high.len()
        );
    }

    #[test]
    fn degenerate_hash_is_constant() {
        let hasher = BlockHasher::new(KEY, true);
        assert_eq!(hasher.root(b"a"), hasher.block(3, &[1, 2]));
    }
}
