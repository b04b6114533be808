//! Random operations with pins and sessions: the rules hold after every one of them, every request ends, lookups
//! change nothing, and the sessions are those of a model that knows nothing of blocks.

use std::collections::BTreeMap;

use pagedkv::config::CoreConfig;
use pagedkv::error::HoldError;
use pagedkv::ids::RequestId;
use pagedkv::sched::{HoldKey, HoldKind, SamplingParams};
use proptest::prelude::*;

use crate::holds::{TTL_MS, key, sizes, submit_keeping};
use crate::simulator::{Simulator, greedy, prompt};

const SALTS: [&[u8]; 2] = [b"", b"t"];
const NAMES: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Debug)]
enum Operation {
    Keep {
        name: HoldKey,
        seed: u32,
        len: usize,
        max_tokens: u32,
        append: bool,
    },
    Submit {
        salt: usize,
        seed: u32,
        len: usize,
        max_tokens: u32,
    },
    Step,
    FailStep,
    Abort(usize),
    Finish {
        which: usize,
        num_tokens: u32,
    },
    Delete(HoldKey),
    Fork(HoldKey, usize),
    Pass(u64),
    Lookup {
        salt: usize,
        seed: u32,
        len: usize,
    },
    Reset,
    Reload(u64),
}

fn names() -> impl Strategy<Value = HoldKey> {
    let kind = prop_oneof![1 => Just(HoldKind::Pin), 2 => Just(HoldKind::Session)];
    (kind, 0..SALTS.len(), 0..NAMES.len()).prop_map(|(kind, salt, name)| key(kind, SALTS[salt], NAMES[name]))
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let keep = (names(), 0u32..3, 1usize..24, 1u32..10, any::<bool>()).prop_map(
        |(name, seed, len, max_tokens, append)| {
            let is_pin = name.kind == HoldKind::Pin;
            let max_tokens = if is_pin { 1 } else { max_tokens };
            Operation::Keep {
                name,
                seed,
                len,
                max_tokens,
                append: append && !is_pin,
            }
        },
    );
    let submit = (0..SALTS.len(), 0u32..3, 1usize..40, 1u32..20).prop_map(|(salt, seed, len, max_tokens)| {
        Operation::Submit {
            salt,
            seed,
            len,
            max_tokens,
        }
    });
    let operation = prop_oneof![
        8 => keep,
        4 => submit,
        24 => Just(Operation::Step),
        1 => Just(Operation::FailStep),
        2 => any::<usize>().prop_map(Operation::Abort),
        3 => (any::<usize>(), 1u32..8).prop_map(|(which, num_tokens)| Operation::Finish { which, num_tokens }),
        2 => names().prop_map(Operation::Delete),
        2 => (names(), 0..NAMES.len()).prop_map(|(name, to)| Operation::Fork(name, to)),
        4 => (0..TTL_MS).prop_map(Operation::Pass),
        4 => (0..SALTS.len(), 0u32..3, 1usize..40)
            .prop_map(|(salt, seed, len)| Operation::Lookup { salt, seed, len }),
        1 => Just(Operation::Reset),
        1 => (0u64..3).prop_map(Operation::Reload),
    ];
    prop::collection::vec(operation, 1..150)
}

/// What a session should be.
#[derive(Clone, Debug)]
struct Expected {
    tokens: Vec<u32>,
    answer_to: RequestId,
    prompt_len: usize,
    expires_at_ms: u64,
}

struct Submitted {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
    /// The session that it leaves behind.
    session: Option<HoldKey>,
    /// Where its answer was ended from outside.
    cut: Option<usize>,
    was_aborted: bool,
    has_ended: bool,
}

struct World {
    simulator: Simulator,
    submitted: Vec<Submitted>,
    sessions: BTreeMap<HoldKey, Expected>,
    now_ms: u64,
}

impl World {
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Keep {
                name,
                seed,
                len,
                max_tokens,
                append,
            } => {
                self.keep(name, &prompt(*seed, *len), *max_tokens, *append);
            }
            Operation::Submit {
                salt,
                seed,
                len,
                max_tokens,
            } => {
                let (prompt, params) = (prompt(*seed, *len), greedy(*max_tokens));
                let edge = self.simulator.scheduler.edge();
                let id = edge.submit(prompt.clone(), params.clone(), SALTS[*salt].to_vec());
                if let Ok(id) = id {
                    self.note(id, prompt, params, None);
                }
            }
            Operation::Step => drop(self.simulator.step()),
            Operation::FailStep => drop(self.simulator.fail()),
            Operation::Abort(which) => {
                if let Some(at) = which.checked_rem(self.submitted.len()) {
                    let one = &mut self.submitted[at];
                    one.was_aborted |= !one.has_ended;
                    self.simulator.scheduler.edge().abort(one.id);
                }
            }
            Operation::Finish { which, num_tokens } => self.finish(*which, *num_tokens as usize),
            Operation::Delete(name) => {
                let known = self.simulator.scheduler.delete_hold(name).is_ok();
                if name.kind == HoldKind::Session {
                    assert_eq!(known, self.sessions.remove(name).is_some());
                    if known {
                        self.forget_promises(name);
                    }
                }
            }
            Operation::Fork(name, to) => self.fork(name, NAMES[*to]),
            Operation::Pass(ms) => {
                self.now_ms += ms;
                self.simulator.scheduler.set_time(self.now_ms);
                self.sessions
                    .retain(|_, session| session.expires_at_ms > self.now_ms);
            }
            Operation::Lookup { salt, seed, len } => self.look_up(SALTS[*salt], &prompt(*seed, *len)),
            Operation::Reset => drop(self.simulator.scheduler.reset_prefix_cache()),
            Operation::Reload(epoch) => self.simulator.scheduler.set_model_epoch(*epoch),
        }
        self.simulator.check();
        self.note_ends();
        self.compare();
    }

    fn note(&mut self, id: RequestId, prompt: Vec<u32>, params: SamplingParams, session: Option<HoldKey>) {
        self.submitted.push(Submitted {
            id,
            prompt,
            params,
            session,
            cut: None,
            was_aborted: false,
            has_ended: false,
        });
    }

    fn keep(&mut self, name: &HoldKey, tokens: &[u32], max_tokens: u32, append: bool) {
        let params = greedy(max_tokens);
        let is_session = name.kind == HoldKind::Session;
        match submit_keeping(&mut self.simulator, name.clone(), tokens, &params, append) {
            Ok((id, whole)) => {
                if append {
                    assert!(whole.starts_with(&self.sessions[name].tokens));
                }
                self.note(id, whole, params, is_session.then(|| name.clone()));
            }
            Err(HoldError::NotFound { .. }) => assert!(append && !self.sessions.contains_key(name)),
            Err(HoldError::Busy { .. }) => assert!(append),
            Err(HoldError::OverBudget { .. }) => return,
            Err(HoldError::Invalid(message)) => {
                assert!(
                    message.contains("maximum context") || message.contains("in flight"),
                    "{message}"
                );
            }
            Err(error) => panic!("{error}"),
        }
        // Whoever was promised a session has used it, also if the request was refused afterwards.
        if let Ok(held) = self.simulator.scheduler.hold(name)
            && is_session
        {
            self.sessions.get_mut(name).unwrap().expires_at_ms = held.expires_at_ms;
        }
    }

    fn fork(&mut self, name: &HoldKey, to: &str) {
        if name.kind == HoldKind::Pin {
            return;
        }
        let fork = HoldKey {
            name: to.to_owned(),
            ..name.clone()
        };
        match self.simulator.scheduler.fork_session(name, to, None) {
            Ok(held) => {
                let session = Expected {
                    expires_at_ms: held.expires_at_ms,
                    ..self.sessions[name].clone()
                };
                assert_eq!(held.expires_at_ms, self.now_ms + TTL_MS);
                assert!(self.sessions.insert(fork, session).is_none());
            }
            Err(HoldError::NotFound { .. }) => assert!(!self.sessions.contains_key(name)),
            Err(HoldError::Exists { .. }) => assert!(self.sessions.contains_key(&fork)),
            Err(error) => panic!("{error}"),
        }
    }

    /// Ends an answer as the caller of a stop string would, once it has seen the tokens.
    fn finish(&mut self, which: usize, num_tokens: usize) {
        let Some(at) = which.checked_rem(self.submitted.len()) else {
            return;
        };
        let one = &mut self.submitted[at];
        let seen = self.simulator.generated.get(&(one.id, 0)).map_or(0, Vec::len);
        if one.cut.is_some() || seen < num_tokens {
            return;
        }
        one.cut = Some(num_tokens);
        let num_tokens_u32 = u32::try_from(num_tokens).unwrap();
        self.simulator.scheduler.edge().finish(one.id, 0, num_tokens_u32);
        for session in self
            .sessions
            .values_mut()
            .filter(|session| session.answer_to == one.id)
        {
            session.tokens.truncate(session.prompt_len + num_tokens);
        }
        // The end is there once any command looks at it; here, once it is reported.
        self.simulator.schedule_soon();
    }

    fn look_up(&mut self, salt: &[u8], tokens: &[u32]) {
        let scheduler = &mut self.simulator.scheduler;
        let (pool, stats) = (scheduler.pool().clone(), scheduler.edge().stats());
        let holds = |scheduler: &mut pagedkv::sched::Scheduler| {
            SALTS.map(|salt| [HoldKind::Pin, HoldKind::Session].map(|kind| scheduler.holds(salt, kind)))
        };
        let found = scheduler.lookup(salt, tokens);
        assert!(*scheduler.pool() == pool, "a lookup changed the pool");
        assert_eq!(scheduler.edge().stats(), stats);
        assert_eq!(
            found.num_cached_tokens,
            scheduler.lookup(salt, tokens).num_cached_tokens
        );
        let before = holds(scheduler);
        scheduler.lookup(salt, tokens);
        assert_eq!(holds(scheduler), before);
    }

    fn forget_promises(&mut self, name: &HoldKey) {
        for one in &mut self.submitted {
            one.session.take_if(|session| session == name);
        }
    }

    /// Brings what ended to the model.
    fn note_ends(&mut self) {
        for (id, _) in std::mem::take(&mut self.simulator.ends) {
            let reason = self.simulator.ended[&(id, 0)];
            let one = self.submitted.iter_mut().find(|one| one.id == id).unwrap();
            if std::mem::replace(&mut one.has_ended, true) || reason > 2 || one.was_aborted {
                continue;
            }
            let Some(name) = one.session.take() else {
                continue;
            };
            let generated = &self.simulator.generated[&(one.id, 0)];
            let generated = &generated[..one.cut.unwrap_or(generated.len()).min(generated.len())];
            let session = Expected {
                tokens: [one.prompt.as_slice(), generated].concat(),
                answer_to: one.id,
                prompt_len: one.prompt.len(),
                expires_at_ms: self.now_ms + TTL_MS,
            };
            self.sessions.insert(name, session);
        }
    }

    fn compare(&mut self) {
        for salt in SALTS {
            let held = self.simulator.scheduler.holds(salt, HoldKind::Session);
            let own = self.sessions.iter().filter(|(name, _)| name.salt == salt);
            let mut expected: Vec<_> = own
                .map(|(name, session)| (name.name.clone(), session.tokens.len(), session.expires_at_ms))
                .collect();
            let mut seen: Vec<_> = held
                .into_iter()
                .map(|held| (held.name, held.num_tokens as usize, held.expires_at_ms))
                .collect();
            expected.sort();
            seen.sort();
            assert_eq!(seen, expected);
        }
        for (name, session) in &self.sessions {
            assert_eq!(
                self.simulator.scheduler.hold_tokens(name).unwrap(),
                session.tokens
            );
        }
    }
}

fn world(num_blocks: u32, block_size: u32, [budget, per_tenant]: [u32; 2], overlap: bool) -> World {
    let sizes = CoreConfig {
        max_pinned_blocks_per_tenant: (per_tenant <= budget).then_some(per_tenant),
        max_num_seqs: 5,
        max_num_batched_tokens: 24,
        ..sizes(num_blocks, block_size, budget)
    };
    World {
        simulator: Simulator::with_overlap(sizes, overlap),
        submitted: Vec::new(),
        sessions: BTreeMap::new(),
        now_ms: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_operations_with_holds_keep_the_rules(
        operations in operations(),
        num_unpinned in 10u32..20,
        max_pinned_blocks in 0u32..24,
        per_tenant in 0u32..30,
        block_size in prop_oneof![Just(2u32), Just(4), Just(8)],
        overlap in any::<bool>(),
    ) {
        let budgets = [max_pinned_blocks, per_tenant];
        let mut world = world(num_unpinned + max_pinned_blocks, block_size, budgets, overlap);
        for operation in &operations {
            world.apply(operation);
        }
        world.simulator.run(20_000);
        world.note_ends();
        world.compare();
        for one in &world.submitted {
            prop_assert!(one.has_ended);
            if one.cut.is_none() && !one.was_aborted && world.simulator.ended[&(one.id, 0)] < 3 {
                world.simulator.assert_complete((one.id, 0), &one.prompt, &one.params);
            }
        }
        // All of it expires into ordinary eviction.
        world.simulator.scheduler.set_time(world.now_ms + TTL_MS + 1);
        world.simulator.check();
        world.simulator.assert_empty();
    }
}
