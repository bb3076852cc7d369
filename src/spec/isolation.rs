//! The kinds of isolation a sandbox can have.
//!
//! Pure values. `confine` enforces them; the doors read and show them.

use crate::spec::network::NetworkPolicy;

/// Where commands in namespaces have a directory for temporary files of their own.
pub const TEMPORARY: &str = "/tmp";

/// The directories of a private root over which each run has something of the machine.
pub const MACHINE_DIRECTORIES: [&str; 3] = ["dev", "proc", "sys"];

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

    /// Whether the network of a sandbox with this policy is its own. An open one is the machine's.
    pub fn owns_network(self, policy: &NetworkPolicy) -> bool {
        self == Self::Namespaces && *policy != NetworkPolicy::Open
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Landlock => "landlock",
            Self::Namespaces => "namespaces",
        }
    }
}

/// What surrounds the commands of sandboxes that choose nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultIsolation {
    /// The strongest that the machine allows.
    Strongest,
    /// This.
    Fixed(Isolation),
}

impl DefaultIsolation {
    /// The name of the first choice.
    const STRONGEST: &str = "auto";

    /// The choice with a name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            Self::STRONGEST => Some(Self::Strongest),
            name => Isolation::named(name).map(Self::Fixed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DefaultIsolation, Isolation};

    #[test]
    fn names_are_those_that_are_shown() {
        for (name, isolation) in Isolation::NAMES {
            assert_eq!(isolation.name(), name);
            assert_eq!(Isolation::named(name), Some(isolation));
        }
        assert_eq!(Isolation::named("none"), None);
        assert_eq!(Isolation::named("auto"), None);
        let default = DefaultIsolation::named;
        assert_eq!(default("auto"), Some(DefaultIsolation::Strongest));
        let fixed = DefaultIsolation::Fixed(Isolation::Namespaces);
        assert_eq!(default("namespaces"), Some(fixed));
        assert_eq!(default("none"), None);
    }
}
