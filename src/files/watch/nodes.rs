//! The directories that a watch knows, as a tree. Pure.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// What a directory takes in memory, besides twice its name.
const NODE_BYTES: usize = 208;

/// A tree of directories, each with a key that stays the same when the directory is renamed.
pub(super) struct Nodes<K> {
    root: K,
    by_key: HashMap<K, Node<K>>,
    bytes: usize,
    /// The path that was asked for last, and its key: events come in runs, and a path may have thousands of names.
    last_path: Option<(K, Vec<u8>)>,
}

struct Node<K> {
    /// `None` for the root.
    parent: Option<K>,
    name: Vec<u8>,
    children: BTreeMap<Vec<u8>, K>,
    notes: Notes,
}

/// What the watch remembers of a directory.
#[derive(Clone, Copy, Default)]
pub(super) struct Notes {
    /// When it was found where it is.
    pub(super) epoch: u64,
    /// A hash of the last change of its names if that was a move to elsewhere, else 0.
    pub(super) last_move: u64,
}

impl<K: Copy + Eq + Hash> Nodes<K> {
    /// A tree of one directory.
    pub(super) fn new(root: K) -> Self {
        let node = Node {
            parent: None,
            name: Vec::new(),
            children: BTreeMap::new(),
            notes: Notes::default(),
        };
        Self {
            root,
            by_key: HashMap::from([(root, node)]),
            bytes: NODE_BYTES,
            last_path: None,
        }
    }

    pub(super) fn root(&self) -> K {
        self.root
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// About how many bytes of memory it takes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn has(&self, key: K) -> bool {
        self.by_key.contains_key(&key)
    }

    pub(super) fn notes(&mut self, key: K) -> Option<&mut Notes> {
        self.by_key.get_mut(&key).map(|node| &mut node.notes)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = K> {
        self.by_key.keys().copied()
    }

    pub(super) fn child(&self, parent: K, name: &[u8]) -> Option<K> {
        self.by_key.get(&parent)?.children.get(name).copied()
    }

    /// The parent and the name; `None` for the root, and if it is not in the tree.
    pub(super) fn place(&self, key: K) -> Option<(K, Vec<u8>)> {
        let node = self.by_key.get(&key)?;
        Some((node.parent?, node.name.clone()))
    }

    /// The path relative to the root, without slashes at its ends; `None` if it is not in the tree.
    pub(super) fn path(&mut self, key: K) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let (mut at, mut node) = (key, self.by_key.get(&key)?);
        let above = loop {
            if let Some((_, path)) = self.last_path.as_ref().filter(|(last, _)| *last == at) {
                break path.clone();
            }
            let Some(parent) = node.parent else {
                break Vec::new();
            };
            names.push(&node.name[..]);
            (at, node) = (parent, self.by_key.get(&parent)?);
        };
        if names.is_empty() {
            return Some(above);
        }
        let path = names.into_iter().rev().fold(above, join);
        self.last_path = Some((key, path.clone()));
        Some(path)
    }

    /// Keeps no path.
    pub(super) fn forget_path(&mut self) {
        self.last_path = None;
    }

    /// Puts a directory, new or known, at a place in the tree. Returns what was at that place, with all that
    /// was below, and is not in the tree any more. `None` if the place is not in the tree, or inside of the
    /// directory itself.
    pub(super) fn put(&mut self, key: K, parent: K, name: &[u8]) -> Option<Vec<K>> {
        let is_new = !self.has(key);
        let mut above = Some(parent);
        while let Some(at) = above {
            if at == key {
                return None;
            }
            // Nothing is below one that is new, and a chain is built in as many steps as it has names.
            above = self.by_key.get(&at)?.parent.filter(|_| !is_new);
        }
        let there = self.child(parent, name);
        if there == Some(key) {
            return Some(Vec::new());
        }
        // First, because it may come from what it replaces.
        self.detach(key);
        let removed = there.map_or_else(Vec::new, |there| self.remove(there));
        self.bytes += 2 * name.len();
        let node = self.by_key.entry(key).or_insert_with(|| {
            self.bytes += NODE_BYTES;
            Node {
                parent: None,
                name: Vec::new(),
                children: BTreeMap::new(),
                notes: Notes::default(),
            }
        });
        node.parent = Some(parent);
        node.name = name.to_vec();
        if let Some(parent) = self.by_key.get_mut(&parent) {
            parent.children.insert(name.to_vec(), key);
        }
        Some(removed)
    }

    /// Removes a directory with all that is below, except the root. Returns what was removed.
    pub(super) fn remove(&mut self, key: K) -> Vec<K> {
        let mut removed = Vec::new();
        if key == self.root || !self.has(key) {
            return removed;
        }
        self.detach(key);
        removed.push(key);
        let mut at = 0;
        while let Some(key) = removed.get(at) {
            if let Some(node) = self.by_key.remove(key) {
                self.bytes -= NODE_BYTES;
                for (name, child) in node.children {
                    self.bytes -= 2 * name.len();
                    removed.push(child);
                }
            }
            at += 1;
        }
        removed
    }

    /// Takes a directory from its parent.
    fn detach(&mut self, key: K) {
        let Some(node) = self.by_key.get_mut(&key) else {
            return;
        };
        self.last_path = None;
        let (parent, name) = (node.parent.take(), std::mem::take(&mut node.name));
        if let Some(parent) = parent.and_then(|parent| self.by_key.get_mut(&parent)) {
            parent.children.remove(&name);
            self.bytes -= 2 * name.len();
        }
    }
}

pub(super) fn join(mut directory: Vec<u8>, name: &[u8]) -> Vec<u8> {
    if !directory.is_empty() {
        directory.push(b'/');
    }
    directory.extend_from_slice(name);
    directory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_move_with_what_is_in_them() {
        let mut nodes = Nodes::new(0);
        let empty = nodes.bytes();
        for (key, parent, name) in [(1, 0, "a"), (2, 1, "b"), (3, 2, "c"), (4, 0, "d")] {
            assert_eq!(nodes.put(key, parent, name.as_bytes()), Some(Vec::new()));
        }
        assert_eq!(nodes.path(3).unwrap(), b"a/b/c");
        assert_eq!(nodes.put(1, 4, b"e"), Some(Vec::new()));
        assert_eq!(nodes.path(3).unwrap(), b"d/e/b/c");
        assert_eq!(nodes.path(2).unwrap(), b"d/e/b");
        assert_eq!(nodes.path(3).unwrap(), b"d/e/b/c");
        assert_eq!(nodes.child(0, b"a"), None);
        assert_eq!(nodes.put(4, 3, b"x"), None, "not into itself");
        assert_eq!(nodes.put(9, 8, b"x"), None, "not to where nothing is");
        assert_eq!(nodes.put(3, 2, b"c"), Some(Vec::new()), "it is there");
        assert_eq!(nodes.put(5, 0, b"f"), Some(Vec::new()));
        // Over another: that one goes with what is in it.
        let mut removed = nodes.put(5, 4, b"e").unwrap();
        removed.sort_unstable();
        assert_eq!(removed, [1, 2, 3]);
        assert_eq!(nodes.path(5).unwrap(), b"d/e");
        assert_eq!(nodes.place(5), Some((4, b"e".to_vec())));
        // Over what it was in.
        assert_eq!(nodes.put(6, 5, b"g"), Some(Vec::new()));
        assert_eq!(nodes.put(6, 4, b"e"), Some(vec![5]));
        assert_eq!(nodes.path(6).unwrap(), b"d/e");
        assert_eq!((nodes.has(5), nodes.len()), (false, 3));
        assert!(nodes.remove(0).is_empty(), "the root stays");
        let mut removed = nodes.remove(4);
        removed.sort_unstable();
        assert_eq!(removed, [4, 6]);
        assert_eq!((nodes.len(), nodes.bytes()), (1, empty));
        assert_eq!((nodes.path(6), nodes.place(0)), (None, None));
    }
}
