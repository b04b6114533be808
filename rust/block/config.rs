//! Size and behaviour of a pool, and what is allowed.

use std::str::FromStr;

/// Largest block, in tokens.
const MAX_BLOCK_SIZE: u32 = 1024;

/// Which idle block is taken when no block is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// The one that was not used for longest.
    Lru,
    /// The same, but blocks to which requests came back seem younger, as much as the pool learned that it pays.
    #[default]
    Turn,
}

impl FromStr for Eviction {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "lru" => Ok(Self::Lru),
            "turn" => Ok(Self::Turn),
            _ => Err(format!("eviction is {name:?}; allowed: \"lru\", \"turn\"")),
        }
    }
}

/// Size and behaviour of a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Usable blocks; the null block is one more.
    pub num_blocks: u32,
    /// Tokens in a block, a power of two from 1 to 1024.
    pub block_size: u32,
    /// Whether blocks are published and found again.
    pub prefix_caching: bool,
    /// Whether a match may end inside a block: its beginning is copied. Without it only whole blocks are found,
    /// as published comparisons of eviction policies count them.
    pub partial_matching: bool,
    /// Which idle block is taken when no block is free.
    pub eviction: Eviction,
    /// Key of the prefix hash. Drawn at random once per process, so that collisions cannot be prepared.
    pub hash_key: [u64; 4],
}

impl PoolConfig {
    /// Checks the sizes.
    ///
    /// # Errors
    /// Names the field, its value and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let Self {
            num_blocks,
            block_size,
            ..
        } = *self;
        if !block_size.is_power_of_two() || block_size > MAX_BLOCK_SIZE {
            return Err(format!(
                "block_size is {block_size}; allowed: a power of two from 1 to {MAX_BLOCK_SIZE}"
            ));
        }
        // Slots travel as int32, and those of the null block count.
        let most = i32::MAX.unsigned_abs() / block_size - 1;
        if num_blocks == 0 || num_blocks > most {
            return Err(format!(
                "num_blocks is {num_blocks}; allowed with blocks of {block_size}: 1 to {most}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validate(num_blocks: u32, block_size: u32) -> Result<(), String> {
        PoolConfig {
            num_blocks,
            block_size,
            prefix_caching: true,
            partial_matching: true,
            eviction: Eviction::Turn,
            hash_key: [0; 4],
        }
        .validate()
    }

    #[test]
    fn policies_have_names() {
        assert_eq!(
            ["lru", "turn"].map(str::parse),
            [Ok(Eviction::Lru), Ok(Eviction::Turn)]
        );
        assert_eq!(
            "fifo".parse::<Eviction>(),
            Err("eviction is \"fifo\"; allowed: \"lru\", \"turn\"".to_owned())
        );
    }

    #[test]
    fn sizes_are_bounded_by_what_a_slot_can_say() {
        for block_size in [1, 2, 16, 1024] {
            assert_eq!(validate(1, block_size), Ok(()));
            let most = i32::MAX.unsigned_abs() / block_size - 1;
            assert_eq!(validate(most, block_size), Ok(()));
            let too_many = validate(most + 1, block_size).unwrap_err();
            assert!(too_many.contains(&format!("1 to {most}")), "{too_many}");
        }
        assert_eq!(
            validate(0, 2048).unwrap_err(),
            "block_size is 2048; allowed: a power of two from 1 to 1024"
        );
        assert!(validate(8, 0).is_err() && validate(8, 12).is_err() && validate(0, 16).is_err());
    }
}
