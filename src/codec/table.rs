//! A map with little code: a vector of entries, in the order of their keys.
//!
//! The standard library has 2 to 5 KiB of code for each pair of types that it maps. Here adding one entry takes time in
//! proportion to all, so a table that a client fills is made of its entries at once.

use std::borrow::Borrow;
use std::mem;

use serde::{Serialize, Serializer};

use super::sort::sort_by;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table<K, V>(Vec<(K, V)>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> Table<K, V> {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The entry with the least key.
    pub fn first(&self) -> Option<(&K, &V)> {
        self.iter().next()
    }

    /// All entries, in the order of their keys.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }
}

impl<K: Ord, V> Table<K, V> {
    /// Where a key is, or would be.
    fn place<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.0
            .binary_search_by(|(other, _)| other.borrow().cmp(key))
    }

    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.place(key).ok().map(|place| &self.0[place].1)
    }

    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.place(key).ok().map(|place| &mut self.0[place].1)
    }

    /// The first entry whose key is this one or a later one.
    pub fn first_from(&self, key: &K) -> Option<(&K, &V)> {
        let place = self.place(key).unwrap_or_else(|place| place);
        self.0.get(place).map(|(key, value)| (key, value))
    }

    /// Sets the value of a key.
    pub fn insert(&mut self, key: K, value: V) {
        match self.place(&key) {
            Ok(place) => self.0[place].1 = value,
            Err(place) => self.0.insert(place, (key, value)),
        }
    }

    /// Takes a key out, with its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let place = self.place(key).ok()?;
        Some(self.0.remove(place).1)
    }

    /// The value of a key, which is the default one if the key is new.
    pub fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        let place = self.place(&key).unwrap_or_else(|place| {
            self.0.insert(place, (key, V::default()));
            place
        });
        &mut self.0[place].1
    }
}

impl<K: Ord, V> From<Vec<(K, V)>> for Table<K, V> {
    /// Of several entries with one key the last counts.
    fn from(mut entries: Vec<(K, V)>) -> Self {
        sort_by(&mut entries, |(one, _), (other, _)| one.cmp(other));
        entries.dedup_by(|later, kept| {
            let is_same = later.0 == kept.0;
            if is_same {
                mem::swap(later, kept);
            }
            is_same
        });
        Self(entries)
    }
}

impl<K, V> IntoIterator for Table<K, V> {
    type Item = (K, V);
    type IntoIter = std::vec::IntoIter<(K, V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<K: Serialize, V: Serialize> Serialize for Table<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_in_order_and_found() {
        let mut table = Table::new();
        for key in ["m", "a", "z", "a", "q"] {
            *table.get_or_default(key.to_owned()) += 1;
        }
        let all: Vec<_> = table.iter().map(|(key, value)| (&**key, *value)).collect();
        assert_eq!(all, [("a", 2), ("m", 1), ("q", 1), ("z", 1)]);
        assert_eq!((table.get("q"), table.get("b")), (Some(&1), None));
        let first = |key: &str| table.first_from(&key.to_owned()).map(|(key, _)| &**key);
        let found = ["a", "b", "z", "zz"].map(first);
        assert_eq!(found, [Some("a"), Some("m"), Some("z"), None]);
        *table.get_mut("q").unwrap() = 7;
        table.insert("b".to_owned(), 5);
        table.insert("b".to_owned(), 6);
        assert_eq!((table.remove("b"), table.remove("b")), (Some(6), None));
        assert_eq!(
            serde_json::to_string(&table).unwrap(),
            r#"{"a":2,"m":1,"q":7,"z":1}"#
        );
    }

    #[test]
    fn of_several_entries_with_one_key_the_last_counts() {
        // So many that a sorting which is not stable would mix them.
        let entries: Vec<_> = (0..1000).map(|number| (number * 7 % 10, number)).collect();
        let table: Vec<_> = Table::from(entries).into_iter().collect();
        let expected: Vec<_> = (0..10).map(|key| (key, 990 + key * 3 % 10)).collect();
        assert_eq!(table, expected);
    }
}
