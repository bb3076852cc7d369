//! What commands may reach over the network: the choices, and which of them is the narrower one.
//!
//! Pure values. `confine` enforces them; the doors read and show them.

/// What the commands of a workspace, or a single one, may reach over the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Posture {
    /// Whatever the machine reaches.
    #[default]
    Open,
    /// Nothing.
    Blocked,
}

impl Posture {
    /// The postures by their names, the widest first.
    pub const NAMES: [(&str, Self); 2] = [("open", Self::Open), ("blocked", Self::Blocked)];

    /// The posture with a name.
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::NAMES.into_iter();
        all.find(|(known, _)| *known == name)
            .map(|(_, posture)| posture)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Blocked => "blocked",
        }
    }

    /// Whether it allows nothing that the other does not allow.
    pub fn is_within(self, other: Self) -> bool {
        self == other || self == Self::Blocked || other == Self::Open
    }
}

#[cfg(test)]
mod tests {
    use super::Posture::{self, Blocked, Open};

    #[test]
    fn what_is_blocked_is_within_everything_and_open_within_nothing_else() {
        for (one, other, expected) in [
            (Open, Open, true),
            (Open, Blocked, false),
            (Blocked, Open, true),
            (Blocked, Blocked, true),
        ] {
            assert_eq!(one.is_within(other), expected, "{one:?} {other:?}");
        }
    }

    #[test]
    fn names_are_those_that_are_shown() {
        for (name, posture) in Posture::NAMES {
            assert_eq!(posture.name(), name);
            assert_eq!(Posture::named(name), Some(posture));
        }
    }
}
