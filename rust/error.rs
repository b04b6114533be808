//! Errors that a caller can act on. What must never happen is an assertion instead.

use std::fmt;

/// A size that the core cannot be built with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InvalidConfig {
    /// The option's name.
    pub field: &'static str,
    /// What was given.
    pub value: u64,
    /// What would have been accepted.
    pub allowed: String,
}

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, allowed: {}", self.field, self.value, self.allowed)
    }
}

impl std::error::Error for InvalidConfig {}

/// Why a request was not accepted.
#[derive(Clone, PartialEq, Debug)]
pub enum SubmitError {
    /// It can never be served as it is; the message names the field, the value and what is allowed.
    Invalid(String),
    /// As many requests as the core accepts are in flight.
    QueueFull {
        /// The number of requests that may be in flight.
        capacity: u32,
    },
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(message) => f.write_str(message),
            Self::QueueFull { capacity } => write!(
                f,
                "{capacity} requests are in flight, as many as are accepted; try again later"
            ),
        }
    }
}

impl std::error::Error for SubmitError {}

/// `schedule`, `commit` and `fail_step` were called out of turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepError {
    /// The step in flight must be committed or failed first.
    InFlight {
        /// Its number.
        step_id: u64,
    },
    /// No step is in flight, or another one.
    NotInFlight {
        /// The number that was given.
        step_id: u64,
    },
    /// Every row needs exactly one token.
    RowCount {
        /// Tokens given.
        given: usize,
        /// Rows of the step.
        rows: usize,
    },
    /// Every row of a beam needs its candidates.
    CandidateCount {
        /// Candidates given.
        given: usize,
        /// Rows of beams in the step.
        rows: usize,
        /// Candidates needed of each.
        per_row: usize,
    },
    /// The arena is shorter than `arena_len` words.
    ArenaTooSmall {
        /// Words given.
        given: usize,
        /// Words needed.
        needed: usize,
    },
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InFlight { step_id } => {
                write!(f, "step {step_id} is in flight: commit it or fail it first")
            }
            Self::NotInFlight { step_id } => write!(f, "step {step_id} is not in flight"),
            Self::RowCount { given, rows } => write!(f, "{given} tokens for a step of {rows} rows"),
            Self::CandidateCount { given, rows, per_row } => {
                write!(
                    f,
                    "{given} candidates for {rows} rows of beams that need {per_row} each"
                )
            }
            Self::ArenaTooSmall { given, needed } => {
                write!(f, "the arena holds {given} words, {needed} are needed")
            }
        }
    }
}

impl std::error::Error for StepError {}

/// Why a pin or a session cannot be had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HoldError {
    /// There is none of this name, or it has expired.
    NotFound {
        /// "pin" or "session".
        noun: &'static str,
        /// The name that was asked for.
        name: String,
    },
    /// A request is continuing the session.
    Busy {
        /// The session's name.
        name: String,
    },
    /// The name is taken.
    Exists {
        /// The session's name.
        name: String,
    },
    /// Blocks of the cache may be kept only up to a budget.
    OverBudget {
        /// "pin" or "session".
        noun: &'static str,
        /// Blocks that it needs at most, beyond those that are held already.
        needed: u32,
        /// Tokens in a block.
        block_size: u32,
        /// Whether the numbers are those of the tenant alone.
        of_tenant: bool,
        /// Blocks that all, or those of the tenant, may have together.
        budget: u32,
        /// Blocks that are held.
        held: u32,
        /// Blocks set aside for requests that run.
        promised: u32,
    },
    /// There are too many, whatever their size.
    TooMany {
        /// How many there may be.
        most: usize,
    },
    /// They have too many tokens together, blocks or no blocks.
    TooManyTokens {
        /// How many they may have before another one is made.
        most: usize,
    },
    /// It cannot be: the message names the field, the value and what is allowed.
    Invalid(String),
}

impl fmt::Display for HoldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { noun, name } => write!(f, "there is no {noun} {name:?}; it may have expired"),
            Self::Busy { name } => write!(
                f,
                "session {name:?} is being continued by another request; one at a time can"
            ),
            Self::Exists { name } => write!(f, "there is a session {name:?} already; delete it first"),
            Self::OverBudget {
                noun,
                needed,
                block_size,
                of_tenant,
                budget,
                held,
                promised,
            } => {
                let whose = if *of_tenant {
                    "a tenant's pins and sessions may have (max_pinned_blocks_per_tenant)"
                } else {
                    "pins and sessions may have together (max_pinned_blocks)"
                };
                let left = budget - held - promised;
                write!(
                    f,
                    "the {noun} needs up to {needed} more blocks of {block_size} tokens, but of the {budget} that \
                     {whose} {held} are held and {promised} promised, so {left} are left"
                )
            }
            Self::TooMany { most } => {
                write!(f, "there are {most} pins and sessions, as many as there may be")
            }
            Self::TooManyTokens { most } => write!(
                f,
                "pins and sessions have {most} tokens and more together, as many as they may have"
            ),
            Self::Invalid(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for HoldError {}
