//! What each tenant has of the budget of holds, so that none takes all of it.
//!
//! A tenant that was named in the configuration is one, whichever salts it uses; of all others every salt is one. Blocks
//! are found within the namespace of a salt alone, so no two tenants hold the same one.

use std::collections::BTreeMap;

use crate::block::{Share, find_share};

/// Whose blocks they are.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tenant {
    /// Place in the configuration.
    Named(usize),
    Salt(Vec<u8>),
}

/// Blocks of one tenant. What several of its holds share counts once.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Account {
    pub(super) held: u32,
    pub(super) promised: u32,
}

/// The accounts that are not empty.
#[derive(Debug)]
pub(super) struct Accounts {
    named: Vec<Share>,
    /// Blocks that a tenant may have; None: as many as the budget allows.
    most: Option<u32>,
    by_tenant: BTreeMap<Tenant, Account>,
}

impl Accounts {
    pub(super) const fn new(named: Vec<Share>, most: Option<u32>) -> Self {
        Self {
            named,
            most,
            by_tenant: BTreeMap::new(),
        }
    }

    /// Accounts of the same tenants without any blocks.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.named.clone(), self.most)
    }

    /// Blocks that one tenant may have, if that is less than the budget.
    pub(super) const fn most(&self) -> Option<u32> {
        self.most
    }

    /// The account of whoever uses a salt.
    pub(super) fn of(&self, salt: &[u8]) -> Account {
        let account = self.by_tenant.get(&self.tenant(salt));
        account.copied().unwrap_or_default()
    }

    /// Blocks that whoever uses a salt may have besides, as far as the budget allows.
    pub(super) fn num_left(&self, salt: &[u8]) -> u32 {
        let Account { held, promised } = self.of(salt);
        self.most.map_or(u32::MAX, |most| most - held - promised)
    }

    /// Changes the account of whoever uses a salt.
    pub(super) fn change(&mut self, salt: &[u8], change: impl FnOnce(&mut Account)) {
        let tenant = self.tenant(salt);
        let account = self.by_tenant.entry(tenant.clone()).or_default();
        change(account);
        if *account == Account::default() {
            self.by_tenant.remove(&tenant);
        }
    }

    fn tenant(&self, salt: &[u8]) -> Tenant {
        find_share(&self.named, salt).map_or_else(|| Tenant::Salt(salt.to_vec()), Tenant::Named)
    }

    /// Checks the accounts against others that were counted anew.
    pub(super) fn check(&self, counted: &Self) -> Result<(), String> {
        if counted.by_tenant != self.by_tenant {
            let (counted, kept) = (&counted.by_tenant, &self.by_tenant);
            return Err(format!("tenants hold {counted:?}, counted as {kept:?}"));
        }
        let most = self.most.unwrap_or(u32::MAX);
        let over = |account: &&Account| account.held + account.promised > most;
        match self.by_tenant.values().find(over) {
            Some(account) => Err(format!("a tenant has {account:?}, {most} blocks are allowed")),
            None => Ok(()),
        }
    }
}
