//! Fair shares among tenants, by a virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
//! 2024): whoever was served least goes first, and a tenant that was away saves nothing up.
//!
//! A tenant is a salt: the same bytes that keep its cache apart.

use std::collections::BTreeMap;

/// What one computed prompt token counts. Tokens found in the cache cost nothing.
pub(super) const PROMPT_WEIGHT: u64 = 1;
/// What one generated token counts: it occupies a place in a step of its own.
pub(super) const OUTPUT_WEIGHT: u64 = 2;

/// Index of a tenant while it has requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct TenantIdx(u32);

impl TenantIdx {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u32::MAX);

    pub(super) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

#[derive(Debug)]
struct Tenant {
    salt: Box<[u8]>,
    /// Service that it got, weighted.
    served: u64,
    num_requests: u32,
}

/// The tenants that have requests, and those that left with more service than the least served one.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    slots: Vec<Option<Tenant>>,
    by_salt: BTreeMap<Box<[u8]>, TenantIdx>,
}

impl Tenants {
    /// Takes in a request of a tenant. One that comes back starts level with the least served of the present ones.
    pub(super) fn enter(&mut self, salt: &[u8]) -> TenantIdx {
        let idx = self
            .by_salt
            .get(salt)
            .copied()
            .unwrap_or_else(|| self.insert(salt));
        if self.of(idx).num_requests == 0 {
            let level = self.least_served().unwrap_or(0);
            let tenant = self.of_mut(idx);
            tenant.served = tenant.served.max(level);
        }
        self.of_mut(idx).num_requests += 1;
        idx
    }

    /// A request of the tenant ended.
    pub(super) fn leave(&mut self, idx: TenantIdx) {
        let tenant = self.of_mut(idx);
        tenant.num_requests -= 1;
        if tenant.num_requests == 0 {
            self.forget_level();
        }
    }

    /// Adds service that a tenant got.
    pub(super) fn charge(&mut self, idx: TenantIdx, num_prompt_tokens: u32, num_output_tokens: u32) {
        let cost =
            u64::from(num_prompt_tokens) * PROMPT_WEIGHT + u64::from(num_output_tokens) * OUTPUT_WEIGHT;
        self.of_mut(idx).served += cost;
    }

    /// Service that a tenant got.
    pub(super) fn served(&self, idx: TenantIdx) -> u64 {
        self.of(idx).served
    }

    fn least_served(&self) -> Option<u64> {
        let present = self
            .slots
            .iter()
            .flatten()
            .filter(|tenant| tenant.num_requests > 0);
        present.map(|tenant| tenant.served).min()
    }

    /// Forgets those who are away and would come back at the common level anyway.
    fn forget_level(&mut self) {
        let level = self.least_served().unwrap_or(u64::MAX);
        for slot in &mut self.slots {
            if let Some(gone) = slot.take_if(|tenant| tenant.num_requests == 0 && tenant.served <= level) {
                self.by_salt.remove(&gone.salt);
            }
        }
    }

    fn insert(&mut self, salt: &[u8]) -> TenantIdx {
        let at = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let idx = TenantIdx(u32::try_from(at).expect("fewer tenants than requests"));
        self.slots[at] = Some(Tenant {
            salt: salt.into(),
            served: 0,
            num_requests: 0,
        });
        self.by_salt.insert(salt.into(), idx);
        idx
    }

    fn of(&self, idx: TenantIdx) -> &Tenant {
        self.slots[idx.0 as usize]
            .as_ref()
            .expect("a tenant with requests is remembered")
    }

    fn of_mut(&mut self, idx: TenantIdx) -> &mut Tenant {
        self.slots[idx.0 as usize]
            .as_mut()
            .expect("a tenant with requests is remembered")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_was_away_saves_nothing_up() {
        let mut tenants = Tenants::default();
        let busy = tenants.enter(b"busy");
        tenants.charge(busy, 100, 50);
        assert_eq!(tenants.served(busy), 200);
        let late = tenants.enter(b"late");
        assert_eq!(tenants.served(late), 200);
    }

    #[test]
    fn leaving_and_coming_back_wipes_nothing_out() {
        let mut tenants = Tenants::default();
        let (greedy, modest) = (tenants.enter(b"greedy"), tenants.enter(b"modest"));
        tenants.charge(greedy, 500, 0);
        tenants.charge(modest, 10, 0);
        tenants.leave(greedy);
        let greedy = tenants.enter(b"greedy");
        assert_eq!(tenants.served(greedy), 500);
    }

    #[test]
    fn nobody_is_remembered_when_all_have_left() {
        let mut tenants = Tenants::default();
        for salt in 0u8..100 {
            let idx = tenants.enter(&[salt]);
            tenants.charge(idx, u32::from(salt), 1);
            tenants.leave(idx);
        }
        assert!(tenants.by_salt.is_empty());
        assert_eq!(tenants.slots.len(), 1, "slots are used again");
    }

    #[test]
    fn salts_are_compared_whole() {
        let mut tenants = Tenants::default();
        let idx = [b"".as_slice(), b"a", b"a\0", b"ab"].map(|salt| tenants.enter(salt));
        assert_eq!(idx.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
    }
}
