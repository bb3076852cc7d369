//! What commands may reach over the network: the choices, and which of them is the narrower one.
//!
//! Pure values. `confine` and `egress` enforce them; the doors read and show them.

mod address;
mod rules;
mod upstream;

use std::sync::Arc;

pub use address::Address;
pub use rules::{Host, Rule, Rules, Verdict, host_and_port};
pub use upstream::{Protocol, Upstream};

/// What the commands of a workspace, or a single one, may reach over the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NetworkPolicy {
    /// Whatever the machine reaches.
    #[default]
    Open,
    /// What a filter lets through, over TCP.
    Filtered(Arc<Filter>),
    /// Nothing.
    Blocked,
}

/// Which connections are let through, and how they leave the machine.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub rules: Rules,
    /// The proxy that connections go through; `None` for those that lead to their servers.
    pub upstream: Option<Upstream>,
    /// Whether programs without proxy support get through too.
    pub is_transparent: bool,
    /// What the workspace lets through, if this is the filter of a single command: both decide.
    ceiling: Option<Arc<Self>>,
}

/// What a policy is or allows that another does not; the subject is the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooWide(pub String);

impl NetworkPolicy {
    /// The network policies that a word chooses, the widest first.
    pub const WORDS: [(&str, Self); 2] = [("open", Self::Open), ("blocked", Self::Blocked)];

    /// The policy that a word chooses.
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::WORDS.into_iter();
        all.find(|(known, _)| *known == name)
            .map(|(_, policy)| policy)
    }

    /// The name of its kind.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Filtered(_) => "allowlist",
            Self::Blocked => "blocked",
        }
    }

    /// Bytes in memory, approximately.
    pub fn size(&self) -> usize {
        match self {
            Self::Filtered(filter) => filter.rules.size(),
            Self::Open | Self::Blocked => 0,
        }
    }

    /// Text that no other policy has. It may hold credentials.
    pub fn identity(&self) -> String {
        let credentials = match self {
            Self::Filtered(filter) => filter.upstream.as_ref().map(|proxy| &proxy.credentials),
            Self::Open | Self::Blocked => None,
        };
        format!("{self:?} {credentials:?}")
    }

    /// This policy for a command where all commands have the policy `ceiling`.
    ///
    /// # Errors
    /// `TooWide`, with what it allows and the ceiling does not.
    pub fn beneath(self, ceiling: &Self) -> Result<Self, TooWide> {
        let too_wide = |what: String| Err(TooWide(what));
        match (&self, ceiling) {
            (Self::Blocked, _) | (_, Self::Open) => Ok(self),
            (Self::Filtered(own), Self::Filtered(all)) => {
                if own == all {
                    return Ok(ceiling.clone());
                }
                match own.rules.check_within(&all.rules) {
                    Ok(()) => {}
                    Err(None) => return too_wide("is open".to_owned()),
                    Err(Some(rule)) => return too_wide(format!("allows {}", rule.text())),
                }
                if own.upstream.is_some() && own.upstream != all.upstream {
                    return too_wide("has another proxy".to_owned());
                }
                Ok(Self::Filtered(Arc::new(Filter {
                    rules: own.rules.clone(),
                    upstream: all.upstream.clone(),
                    is_transparent: own.is_transparent,
                    ceiling: Some(Arc::clone(all)),
                })))
            }
            _ if self == *ceiling => Ok(self),
            _ => too_wide(format!("is {}", self.name())),
        }
    }
}

impl Filter {
    /// A filter of a whole workspace, or of a command where the workspace has none.
    pub fn new(rules: Rules, upstream: Option<Upstream>) -> Self {
        Self {
            rules,
            upstream,
            ..Self::default()
        }
    }

    /// Its rules, and those of the workspace: all of them must allow a connection.
    fn all_rules(&self) -> impl Iterator<Item = &Rules> {
        let ceiling = self.ceiling.as_ref().map(|filter| &filter.rules);
        [&self.rules].into_iter().chain(ceiling)
    }

    /// See [`Rules::judge_name`].
    pub fn judge_name(&self, name: &str, port: u16) -> Verdict {
        first_refusal(self.all_rules().map(|rules| rules.judge_name(name, port)))
    }

    /// See [`Rules::judge_look_up`].
    pub fn judge_look_up(&self, name: &str) -> Verdict {
        first_refusal(self.all_rules().map(|rules| rules.judge_look_up(name)))
    }

    /// See [`Rules::judge_address`].
    pub fn judge_address(&self, address: Address, port: u16, is_own: bool, named: bool) -> Verdict {
        let judged = |rules: &Rules| rules.judge_address(address, port, is_own, named);
        first_refusal(self.all_rules().map(judged))
    }
}

/// The first verdict that refuses, else the first one.
fn first_refusal(verdicts: impl Iterator<Item = Verdict>) -> Verdict {
    let mut allowed = None;
    for verdict in verdicts {
        if !verdict.is_allowed {
            return verdict;
        }
        allowed.get_or_insert(verdict);
    }
    allowed.unwrap_or_else(|| Verdict::refused("no rules"))
}

#[cfg(test)]
mod tests {
    use super::NetworkPolicy::{self, Blocked, Open};
    use super::*;

    fn filtered(allow: &[&str]) -> NetworkPolicy {
        let rules = allow.iter().map(|text| Rule::parse(text).unwrap());
        let rules = Rules {
            allow: Some(rules.collect()),
            deny: Vec::new(),
        };
        NetworkPolicy::Filtered(Arc::new(Filter::new(rules, None)))
    }

    #[test]
    fn a_posture_only_tightens() {
        let (narrow, wide) = (
            filtered(&["a.example"]),
            filtered(&["a.example", "b.example"]),
        );
        for (own, ceiling, expected) in [
            (&Open, &Open, true),
            (&Open, &Blocked, false),
            (&Open, &wide, false),
            (&Blocked, &Open, true),
            (&Blocked, &Blocked, true),
            (&Blocked, &wide, true),
            (&wide, &Open, true),
            (&wide, &Blocked, false),
            (&wide, &wide, true),
            (&narrow, &wide, true),
            (&wide, &narrow, false),
        ] {
            let beneath = own.clone().beneath(ceiling);
            assert_eq!(beneath.is_ok(), expected, "{own:?} {ceiling:?}");
        }
        let TooWide(what) = wide.beneath(&narrow).unwrap_err();
        assert_eq!(what, "allows b.example");
    }

    #[test]
    fn what_the_workspace_denies_stays_denied() {
        let rules = |allow: Option<&str>, deny: &str| Rules {
            allow: allow.map(|text| vec![Rule::parse(text).unwrap()]),
            deny: vec![Rule::parse(deny).unwrap()],
        };
        let policy = |rules| NetworkPolicy::Filtered(Arc::new(Filter::new(rules, None)));
        let all = policy(rules(None, "bad.example.com"));
        let own = policy(rules(Some("*.example.com"), "worse.example.com"));
        let NetworkPolicy::Filtered(both) = own.beneath(&all).unwrap() else {
            panic!("no filter");
        };
        for (name, expected) in [
            ("good.example.com", true),
            ("bad.example.com", false),
            ("worse.example.com", false),
            ("example.org", false),
        ] {
            assert_eq!(both.judge_name(name, 80).is_allowed, expected, "{name}");
        }
    }

    #[test]
    fn a_proxy_of_ones_own_is_no_way_round_the_ceiling() {
        let with_proxy = |url: &str| {
            let upstream = Upstream::parse(Protocol::Http, url).unwrap();
            NetworkPolicy::Filtered(Arc::new(Filter::new(Rules::default(), Some(upstream))))
        };
        let (one, other) = (with_proxy("http://one:1"), with_proxy("http://other:1"));
        let direct = NetworkPolicy::Filtered(Arc::new(Filter::new(Rules::default(), None)));
        assert!(one.clone().beneath(&other).is_err());
        assert!(one.clone().beneath(&direct).is_err());
        let NetworkPolicy::Filtered(kept) = direct.beneath(&one).unwrap() else {
            panic!("no filter");
        };
        assert!(kept.upstream.is_some());
    }

    #[test]
    fn words_are_those_that_are_shown() {
        for (word, policy) in NetworkPolicy::WORDS {
            assert_eq!(policy.name(), word);
            assert_eq!(NetworkPolicy::named(word), Some(policy));
        }
    }
}
