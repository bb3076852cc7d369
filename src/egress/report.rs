//! What a workspace's connections were allowed and refused, for those who ask why something does not work.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::spec::network::Verdict;
use crate::threads::lock::{Mutex, lock};

/// Verdicts that are remembered.
const REMEMBERED: usize = 256;

/// The verdicts of a workspace.
#[derive(Default)]
pub(super) struct VerdictLog {
    allowed: AtomicU64,
    refused: AtomicU64,
    /// Guards the last verdicts, the newest last.
    recent: Mutex<VecDeque<VerdictRecord>>,
}

/// One verdict.
#[derive(Debug, Clone)]
pub struct VerdictRecord {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// The host that was asked for.
    pub host: Box<str>,
    pub port: u16,
    /// Whether it was allowed.
    pub is_allowed: bool,
    /// The rule that decided.
    pub rule: Box<str>,
}

/// The verdicts so far.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of connections that were allowed.
    pub allowed: u64,
    /// Number of connections that were refused.
    pub refused: u64,
    /// The last verdicts, the oldest first.
    pub recent: Vec<VerdictRecord>,
}

impl VerdictLog {
    pub(super) fn add(&self, host: &str, port: u16, verdict: &Verdict) {
        let counter = if verdict.is_allowed {
            &self.allowed
        } else {
            &self.refused
        };
        counter.fetch_add(1, Ordering::Relaxed);
        #[expect(clippy::disallowed_methods, reason = "clients see the time of the day")]
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let record = VerdictRecord {
            at_ms: u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(u64::MAX),
            host: host.into(),
            port,
            is_allowed: verdict.is_allowed,
            rule: verdict.rule.as_str().into(),
        };
        let mut recent = lock(&self.recent);
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(record);
    }

    pub(super) fn report(&self) -> Report {
        Report {
            allowed: self.allowed.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            recent: lock(&self.recent).iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_verdicts_are_remembered_and_all_are_counted() {
        let log = VerdictLog::default();
        for number in 0..300 {
            log.add("a.example", number, &Verdict::refused("x"));
        }
        log.add("b.example", 1, &Verdict::allowed("y"));
        let report = log.report();
        assert_eq!((report.allowed, report.refused), (1, 300));
        assert_eq!(report.recent.len(), REMEMBERED);
        assert_eq!(report.recent[0].port, 45);
        assert!(report.recent[255].is_allowed);
    }
}
