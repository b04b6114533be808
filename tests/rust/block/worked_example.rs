//! The worked example of ARCHITECTURE.md: ten blocks of four tokens. The numbered steps are the rows of its
//! table.

use super::{found, idle, ids, lookup, pool, text};
use pagedkv::block::{BlockPool, BlockState, BlockTable, OutOfBlocks, RootId};
use pagedkv::ids::BlockId;

struct Example {
    pool: BlockPool,
    root: RootId,
    /// Copies of the step in preparation.
    copies: Vec<(BlockId, BlockId)>,
}

impl Example {
    /// A new sequence takes up what is known of `prompt`, from which `num_computed` tokens need no computing.
    fn ask(&mut self, prompt: &[u32], num_computed: u32) -> Result<BlockTable, OutOfBlocks> {
        let mut table = BlockTable::new(self.root, &mut self.pool);
        let hit = lookup(&self.pool, self.root, prompt);
        let num_tokens = u32::try_from(prompt.len()).expect("few tokens");
        let admitted = table.admit(&mut self.pool, &hit, num_computed, num_tokens, &mut self.copies);
        if admitted.is_err() {
            table.release(&mut self.pool);
        }
        admitted.map(|()| table)
    }

    /// Makes room for one generated token after `num_computed` ones.
    fn generate(&mut self, table: &mut BlockTable, num_computed: u32) {
        let room = table.reserve(&mut self.pool, num_computed, num_computed + 1, &mut self.copies);
        room.expect("the pool has room");
        self.pool.check().expect("the invariants hold");
    }

    /// Runs the step, and returns its copies.
    fn step(&mut self) -> Vec<(u32, u32)> {
        self.pool.end_step();
        self.copies.drain(..).map(|(from, to)| (from.0, to.0)).collect()
    }

    fn refs<const N: usize>(&self, blocks: [u32; N]) -> [u32; N] {
        blocks.map(|block| self.pool.ref_count(BlockId(block)))
    }
}

#[test]
fn worked_example() {
    let mut pool = pool(10, 4);
    let root = pool.root(b"");
    let mut example = Example {
        pool,
        root,
        copies: Vec::new(),
    };
    let (alice, bob) = share_copy_and_merge(&mut example);
    let (bob, carol) = fork(&mut example, bob);
    finish(&mut example, [alice, bob, carol]);
    evict_and_refuse(&mut example);
}

fn share_copy_and_merge(example: &mut Example) -> (BlockTable, BlockTable) {
    // 1. Alice asks with tokens 1..10. Nothing is known; three blocks are taken, and two of them become full.
    let mut alice = example.ask(&text(1, 10), 0).expect("the pool has room");
    assert_eq!((ids(alice.blocks()), example.step()), (vec![1, 2, 3], vec![]));
    alice.publish(&mut example.pool, &text(1, 10), 10);
    assert_eq!((alice.num_published(), alice.slot(9)), (2, 3 * 4 + 1));

    // 2. Bob asks with tokens 1..8. All are known, but the last one must be computed again for its logits. It
    //    lies in block 2, which is published: the block is copied before it is written.
    assert_eq!(found(&example.pool, example.root, &text(1, 8)), [1, 2]);
    let mut bob = example.ask(&text(1, 8), 7).expect("the pool has room");
    assert_eq!(ids(bob.blocks()), [1, 4]);
    // Block 2 is held by Alice and by the copy.
    assert_eq!(example.refs([1, 2, 3, 4]), [2, 2, 1, 1]);
    assert_eq!(example.step(), [(2, 4)]);

    // 3. The step is committed. Block 4 turns out equal to block 2: Bob takes that one, and 4 is free again.
    bob.publish(&mut example.pool, &text(1, 8), 8);
    assert_eq!(
        (ids(bob.blocks()), example.refs([1, 2, 3, 4])),
        (vec![1, 2], [2, 2, 1, 0])
    );
    assert_eq!(example.pool.state(BlockId(4)), BlockState::Free);

    // 4. Bob generates token 9, which opens a new block.
    example.generate(&mut bob, 8);
    assert_eq!((ids(bob.blocks()), example.step()), (vec![1, 2, 4], vec![]));
    (alice, bob)
}

fn fork(example: &mut Example, mut bob: BlockTable) -> (BlockTable, BlockTable) {
    // 5. Carol is forked from Bob and shares all of his blocks, the partial one too.
    let mut carol = bob.fork(&mut example.pool);
    assert_eq!(
        (ids(carol.blocks()), example.refs([1, 2, 4])),
        (vec![1, 2, 4], [3, 3, 2])
    );

    // 6. Both generate token 10. The first to write the shared block copies it; the other writes in place.
    example.generate(&mut carol, 9);
    example.generate(&mut bob, 9);
    assert_eq!(
        (ids(carol.blocks()), ids(bob.blocks())),
        (vec![1, 2, 5], vec![1, 2, 4])
    );
    assert_eq!(example.step(), [(4, 5)]);
    (bob, carol)
}

fn finish(example: &mut Example, tables: [BlockTable; 3]) {
    // 7. All three end. Partial blocks are free; full ones stay findable, the tail to be evicted first.
    for mut table in tables {
        table.release(&mut example.pool);
        example.pool.check().expect("the invariants hold");
    }
    assert_eq!(
        (
            idle(&example.pool),
            example.pool.num_free(),
            example.pool.num_owned()
        ),
        (vec![2, 1], 8, 0)
    );
}

fn evict_and_refuse(example: &mut Example) {
    // 8. Dave asks with 36 other tokens, which need 9 blocks. Eight are free; the ninth is evicted: block 2,
    //    the tail of the idle chain. Block 1 stays findable.
    let mut dave = example.ask(&text(101, 136), 0).expect("the pool has room");
    assert_eq!(ids(dave.blocks()), [5, 4, 3, 6, 7, 8, 9, 10, 2]);
    assert_eq!((example.pool.num_evictions(), idle(&example.pool)), (1, vec![1]));

    // 9. Erin asks with tokens 1..8. Block 1 is found, but it is idle: taking it up costs a block too. Two
    //    are needed, one is there, and nothing changes.
    let before = example.pool.clone();
    assert_eq!(found(&example.pool, example.root, &text(1, 8)), [1]);
    assert_eq!(
        example.ask(&text(1, 8), 4),
        Err(OutOfBlocks {
            needed: 2,
            available: 1
        })
    );
    assert!(example.pool == before);

    // 10. Dave is aborted before anything of his was published, and Erin goes in.
    dave.release(&mut example.pool);
    let mut erin = example.ask(&text(1, 8), 4).expect("the pool has room");
    assert_eq!((ids(erin.blocks()), example.pool.num_free()), (vec![1, 5], 8));
    erin.release(&mut example.pool);
    example.pool.check().expect("the invariants hold");
}
