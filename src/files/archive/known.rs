//! A bounded memory of names: what an archive has made, however many members it has.
//!
//! A name takes the same few bytes whatever its length, and they are charged to the tenant. Beyond the bound names are
//! forgotten, so nothing that must not fail may depend on them. No file is touched here.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use crate::error::Result;
use crate::limits::ledger::{Charge, Item, Ledger};

/// What is known of some names of the archive, up to a bound.
pub(super) struct Known<T> {
    /// By the hash of the name, which a secret makes unpredictable.
    values: HashMap<u64, T>,
    hasher: RandomState,
    most: usize,
    charge: Charge,
}

impl<T: Copy> Known<T> {
    /// Bytes that a value takes: a table is between half and seven eighths full, or twice that while it
    /// grows.
    const BYTES: usize = 3 * (size_of::<(u64, T)>() + 1);

    pub(super) fn new(most: usize, ledger: &Arc<Ledger>) -> Result<Self> {
        Ok(Self {
            values: HashMap::new(),
            hasher: RandomState::new(),
            most,
            charge: ledger.charge(Item::Bodies, 0)?,
        })
    }

    pub(super) fn get(&self, parts: &[&[u8]]) -> Option<T> {
        if self.values.is_empty() {
            return None;
        }
        self.values.get(&self.hasher.hash_one(parts)).copied()
    }

    pub(super) fn add(&mut self, parts: &[&[u8]], value: T) {
        let count = self.values.len() + 1;
        if count <= self.most && self.charge.set(count * Self::BYTES).is_ok() {
            self.values.insert(self.hasher.hash_one(parts), value);
        }
    }

    /// Forgets a name. Returns whether it was known.
    pub(super) fn remove(&mut self, parts: &[&[u8]]) -> bool {
        !self.values.is_empty() && self.values.remove(&self.hasher.hash_one(parts)).is_some()
    }
}
