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
