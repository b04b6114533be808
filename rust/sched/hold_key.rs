//! How tenants name pins and sessions, and what they see of them.

/// What kind of thing is kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum HoldKind {
    /// The blocks of a prompt.
    Pin,
    /// The tokens of a conversation, and those of its blocks that are still there.
    Session,
}

impl HoldKind {
    /// What users call it.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Pin => "pin",
            Self::Session => "session",
        }
    }
}

/// A hold's name. Every tenant has its own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct HoldKey {
    /// The tenant.
    pub salt: Vec<u8>,
    /// Pins and sessions of the same name have nothing to do with each other.
    pub kind: HoldKind,
    /// The name that the tenant chose.
    pub name: String,
}

/// A hold as its owner sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HoldView {
    /// The name that the tenant chose.
    pub name: String,
    /// Tokens of the prompt, or of the conversation.
    pub num_tokens: u32,
    /// Blocks that are held for it.
    pub num_blocks: u32,
    /// When it ends unless it is used, in told time.
    pub expires_at_ms: u64,
}
