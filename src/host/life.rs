//! How long a sandbox lives, and what of it can change meanwhile.
//!
//! Its time runs, or stands still while the host or a rule has it rest: a tenant does not live longer by pausing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::now_ms;
use crate::codec::fields::Change;
use crate::codec::table::Table;
use crate::limits::activity::IdleBy;
use crate::spec::sandbox::{Fate, ResourceLimits, Settings, StopCause};

/// The end of a sandbox's life.
#[derive(Debug, Clone, Copy)]
pub struct Expiry {
    at: Instant,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

impl Expiry {
    /// After this time. `None` for one that no clock can show.
    fn after(lifetime: Duration) -> Option<Self> {
        let at_ms = now_ms() + u64::try_from(lifetime.as_millis()).ok()?;
        Some(Self {
            at: Instant::now().checked_add(lifetime)?,
            at_ms,
        })
    }

    /// At this time of the clock on the wall, in milliseconds since 1970.
    fn at_ms(at_ms: u64) -> Option<Self> {
        let left = Duration::from_millis(at_ms.saturating_sub(now_ms()));
        let at = Instant::now().checked_add(left)?;
        Some(Self { at, at_ms })
    }

    fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }
}

/// What a rule wants of a sandbox, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ruling {
    pub(super) fate: Fate,
    pub(super) why: Why,
}

/// Why a rule wants something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The sandbox is idle.
    Idle,
    /// Its time is over.
    Over,
    /// It has rested for as long as the operator allows.
    Rested,
}

/// Who has a sandbox rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Its own token.
    Tenant,
    /// The host's; with `holds` no other ends the rest.
    Host {
        holds: bool,
    },
    Rule(Ruling),
}

impl By {
    pub(super) fn cause(self) -> StopCause {
        match self {
            Self::Tenant | Self::Host { .. } => StopCause::Asked,
            Self::Rule(_) => StopCause::Timeout,
        }
    }

    /// Whether no other ends the rest.
    pub(super) fn holds(self) -> bool {
        self == Self::Host { holds: true }
    }

    /// Whether the time of the sandbox stands still meanwhile. A tenant does not live longer by resting, not even for as long
    /// as the operator allows.
    fn stops_time(self) -> bool {
        match self {
            Self::Tenant => false,
            Self::Host { .. } => true,
            Self::Rule(Ruling { why, .. }) => why != Why::Rested,
        }
    }
}

/// Who has a sandbox run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waker {
    Tenant,
    Host,
    /// A request that needs processes. `starts` says whether it starts a sandbox that nobody has stopped.
    Request {
        starts: bool,
    },
}

/// How much is left of a sandbox's life.
#[derive(Debug, Clone, Copy)]
pub(super) enum Left {
    /// It has no end.
    Unlimited,
    Until(Expiry),
    /// So much, which stands still.
    Standing(Duration),
}

/// What requests change of a sandbox.
#[derive(Clone)]
pub(super) struct Life {
    pub(super) settings: Settings,
    pub(super) left: Left,
    /// Whether somebody has it rest. One that does not run else has met an accident.
    pub(super) rests: bool,
    /// Whether its time stands still, if it has an end.
    pub(super) stands: bool,
    /// Whether only the host's token ends its rest.
    pub(super) is_held: bool,
}

impl Life {
    /// That of a new sandbox.
    pub(super) fn begin(settings: Settings) -> Self {
        let mut life = Self {
            settings,
            left: Left::Unlimited,
            rests: false,
            stands: false,
            is_held: false,
        };
        life.begin_anew();
        life
    }

    /// Its time begins anew.
    fn begin_anew(&mut self) {
        self.left = match self.settings.lifetime {
            None => Left::Unlimited,
            Some(lifetime) if self.stands => Left::Standing(lifetime),
            Some(lifetime) => Left::until(lifetime),
        };
    }

    /// When it is over, if that is known.
    pub(super) fn expiry(&self) -> Option<Expiry> {
        match self.left {
            Left::Until(expiry) => Some(expiry),
            Left::Unlimited | Left::Standing(_) => None,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.expiry().is_some_and(|expiry| expiry.left().is_zero())
    }

    /// Its time stands still from here on; not if it is over already, and the sandbox is to be deleted for that.
    fn stand(&mut self) {
        if self.is_to_be_deleted() {
            return;
        }
        self.stands = true;
        if let Left::Until(expiry) = self.left {
            self.left = Left::Standing(expiry.left());
        }
    }

    /// Whether its time is over, and nothing is to be left of it.
    pub(super) fn is_to_be_deleted(&self) -> bool {
        self.is_over() && self.settings.rules.on_expiry == Fate::Delete
    }

    /// Its time goes on. What had none left, and was not to be deleted for that, has as much as at first: if it rests for that, or
    /// the host wants it to run. A tenant does not live longer by having it rest in the moment of its end.
    pub(super) fn go_on(&mut self, is_by_host: bool) {
        let may_begin_anew = self.stands || is_by_host;
        self.rests = false;
        self.stands = false;
        self.is_held = false;
        let is_kept = self.settings.rules.on_expiry != Fate::Delete;
        let begins_anew = may_begin_anew && is_kept && self.has_ended();
        match self.left {
            _ if begins_anew => self.begin_anew(),
            Left::Standing(left) => self.left = Left::until(left),
            Left::Unlimited | Left::Until(_) => {}
        }
    }

    /// Whether nothing is left of its time, even where that stands still.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.left, Left::Standing(Duration::ZERO)) || self.is_over()
    }

    /// Whether it ends earlier than after this time from now.
    pub(super) fn ends_before(&self, least: Duration) -> bool {
        match self.left {
            Left::Unlimited => false,
            Left::Until(expiry) => expiry.left() < least,
            Left::Standing(left) => left < least,
        }
    }

    /// It has this time from now on.
    pub(super) fn set_left(&mut self, time: Duration) {
        self.left = match self.left {
            Left::Standing(_) => Left::Standing(time),
            Left::Unlimited | Left::Until(_) => Left::until(time),
        };
    }

    /// Whether this would be a change.
    pub(super) fn is_changed_by(&self, change: &SettingsChange) -> bool {
        let mut after = self.settings.clone();
        change.clone().apply(&mut after);
        change.lifetime != Change::Keep || after != self.settings
    }

    pub(super) fn change(&mut self, change: SettingsChange) {
        let has_new_lifetime = change.lifetime != Change::Keep;
        change.apply(&mut self.settings);
        if has_new_lifetime {
            self.begin_anew();
        }
    }

    /// Whether a rest by this one would change something.
    pub(super) fn may_rest_more(&self, by: By) -> bool {
        (by.stops_time() && !self.stands) || (by.holds() && !self.is_held)
    }

    /// It rests from here on. Returns whether that is a change.
    pub(super) fn begin_rest(&mut self, by: By) -> bool {
        let before = [self.rests, self.is_held, self.stands];
        self.rests = true;
        self.is_held |= by.holds();
        if by.stops_time() && !self.stands {
            self.stand();
        }
        before != [self.rests, self.is_held, self.stands]
    }
}

impl Left {
    /// As much from now on; no end if no clock can show it.
    fn until(lifetime: Duration) -> Self {
        Expiry::after(lifetime).map_or(Self::Unlimited, Self::Until)
    }

    /// As it was written down, in milliseconds since 1970 and of what stands still.
    pub(super) fn found(expires_at_ms: Option<u64>, left_ms: Option<u64>) -> Self {
        let expiry = expires_at_ms.and_then(Expiry::at_ms);
        match left_ms {
            Some(left) => Self::Standing(Duration::from_millis(left)),
            None => expiry.map_or(Self::Unlimited, Self::Until),
        }
    }
}

/// What is changed of a sandbox; `None` leaves it as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SettingsChange {
    pub name: Change<String>,
    pub labels: Option<Arc<Table<String, String>>>,
    /// Without one it lives for ever.
    pub lifetime: Change<Duration>,
    pub rules: RulesChange,
    pub limits: LimitsChange,
}

/// What is changed of the limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitsChange {
    /// Without one it is the host's default.
    pub processes: Change<u64>,
    pub data: Change<u64>,
    pub memory: Change<u64>,
    pub cpu: Change<Duration>,
}

impl LimitsChange {
    /// Changes limits.
    pub(super) fn apply(self, limits: &mut ResourceLimits) {
        self.processes.apply(&mut limits.processes);
        self.data.apply(&mut limits.data);
        self.memory.apply(&mut limits.whole.memory);
        self.cpu.apply(&mut limits.whole.cpu);
    }
}

/// What is changed of the rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RulesChange {
    /// Without one it is idle for ever.
    pub idle_timeout: Change<Duration>,
    pub idle_by: Change<IdleBy>,
    pub on_idle: Option<Fate>,
    pub on_expiry: Option<Fate>,
    pub auto_resume: Option<bool>,
}

impl SettingsChange {
    /// Changes settings.
    pub fn apply(self, settings: &mut Settings) {
        fn set<T>(value: &mut T, change: Option<T>) {
            if let Some(new) = change {
                *value = new;
            }
        }
        let Self {
            name,
            labels,
            lifetime,
            rules,
            limits,
        } = self;
        name.apply(&mut settings.name);
        set(&mut settings.labels, labels);
        lifetime.apply(&mut settings.lifetime);
        rules.idle_timeout.apply(&mut settings.rules.idle_timeout);
        rules.idle_by.apply(&mut settings.rules.idle_by);
        set(&mut settings.rules.on_idle, rules.on_idle);
        set(&mut settings.rules.on_expiry, rules.on_expiry);
        set(&mut settings.rules.auto_resume, rules.auto_resume);
        limits.apply(&mut settings.limits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(seconds: Option<u64>) -> Life {
        Life::begin(Settings {
            lifetime: seconds.map(Duration::from_secs),
            ..Settings::default()
        })
    }

    /// What is left, in seconds, if it stands still.
    fn standing(life: &Life) -> Option<u64> {
        match life.left {
            Left::Standing(left) => Some((left + Duration::from_millis(500)).as_secs()),
            Left::Unlimited | Left::Until(_) => None,
        }
    }

    #[test]
    fn a_life_ends_when_its_time_is_over() {
        assert!(life(None).expiry().is_none());
        assert!(!life(None).is_over());
        assert!(!life(Some(60)).is_over());
        assert!(life(Some(0)).is_over());
        // No clock shows it.
        assert!(life(Some(u64::MAX)).expiry().is_none());
    }

    #[test]
    fn what_was_written_down_goes_by_the_clock_on_the_wall() {
        let found = |at, left| Life {
            left: Left::found(at, left),
            ..life(None)
        };
        assert!(found(Some(now_ms()), None).is_over());
        assert!(!found(Some(now_ms() + 60_000), None).is_over());
        assert!(!found(None, None).is_over());
        assert_eq!(standing(&found(None, Some(5000))), Some(5));
        assert!(!found(None, Some(0)).is_over());
    }

    #[test]
    fn time_stands_still_and_goes_on_with_what_was_left() {
        let mut resting = life(Some(60));
        resting.stand();
        resting.stand();
        assert_eq!(standing(&resting), Some(60));
        assert!(resting.expiry().is_none());
        resting.go_on(false);
        let left = resting.expiry().unwrap().left();
        assert!((55..=60).contains(&left.as_secs()), "{left:?}");
        // A lifetime that is set meanwhile stands still too.
        let mut resting = life(None);
        resting.stand();
        resting.settings.lifetime = Some(Duration::from_secs(7));
        resting.begin_anew();
        assert_eq!(standing(&resting), Some(7));
    }

    #[test]
    fn one_that_had_no_time_left_lives_as_long_again_unless_it_was_to_be_deleted() {
        for (on_expiry, lives) in [
            (Fate::Pause, true),
            (Fate::Stop, true),
            (Fate::Delete, false),
        ] {
            let mut over = life(Some(0));
            over.settings.rules.on_expiry = on_expiry;
            over.settings.lifetime = Some(Duration::from_secs(60));
            let mut by_tenant = over.clone();
            by_tenant.go_on(false);
            assert!(by_tenant.is_over(), "{on_expiry:?}");
            over.go_on(true);
            assert_eq!(!over.is_over(), lives, "{on_expiry:?}");
        }
        for (on_expiry, lives) in [(Fate::Stop, true), (Fate::Delete, false)] {
            let mut rested = life(Some(0));
            rested.settings.rules.on_expiry = on_expiry;
            rested.settings.lifetime = Some(Duration::from_secs(60));
            rested.stand();
            assert_eq!(rested.is_over(), !lives, "{on_expiry:?}");
            rested.go_on(false);
            assert_eq!(!rested.is_over(), lives, "{on_expiry:?}");
        }
    }
}
