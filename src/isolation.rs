//! What surrounds the commands of a sandbox: the choices.
//!
//! Pure values. `confine` enforces them; the doors read and show them.

use crate::posture::Posture;

/// What surrounds the commands of a sandbox besides its user, its limits and the filter of system calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Rules of Landlock, on the machine's own files, processes and network.
    #[default]
    Landlock,
    /// The same rules, inside namespaces of the sandbox.
    Namespaces,
}

impl Isolation {
    /// The choices by their names, the weakest first.
    pub const NAMES: [(&str, Self); 2] = [
        ("landlock", Self::Landlock),
        ("namespaces", Self::Namespaces),
    ];

    /// The choice with a name.
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::NAMES.into_iter();
        all.find(|(known, _)| *known == name)
            .map(|(_, isolation)| isolation)
    }

    /// Whether the network of a sandbox with this posture is its own. An open one is the machine's.
    pub fn owns_network(self, posture: &Posture) -> bool {
        self == Self::Namespaces && *posture != Posture::Open
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Landlock => "landlock",
            Self::Namespaces => "namespaces",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Isolation;

    #[test]
    fn names_are_those_that_are_shown() {
        for (name, isolation) in Isolation::NAMES {
            assert_eq!(isolation.name(), name);
            assert_eq!(Isolation::named(name), Some(isolation));
        }
        assert_eq!(Isolation::named("none"), None);
    }
}
