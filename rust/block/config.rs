//! Size and behaviour of a pool, and what is allowed.

/// Largest block, in tokens.
const MAX_BLOCK_SIZE: u32 = 1024;

/// Size and behaviour of a pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Usable blocks; the null block is one more.
    pub num_blocks: u32,
    /// Tokens in a block, a power of two from 1 to 1024.
    pub block_size: u32,
    /// Whether blocks are published and found again.
    pub prefix_caching: bool,
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
            hash_key: [0; 4],
        }
        .validate()
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
