//! How many requests there were, by route and status.

use crate::codec::table::Table;
use crate::threads::lock::{Mutex, lock};

/// The statuses that are counted one by one. All others are counted together, because a server
/// behind a port may answer with any number, and each would be a time series in the metrics.
const STATUSES: [u16; 28] = [
    101, 200, 201, 202, 204, 206, 400, 401, 403, 404, 405, 406, 408, 409, 411, 413, 414, 416, 417,
    426, 429, 431, 500, 501, 502, 503, 504, 507,
];

/// Counters of requests.
#[derive(Default)]
pub(super) struct RequestCounts(Mutex<Table<Key, u64>>);

/// A route's name, and the status unless it is a rare one.
type Key = (&'static str, Option<u16>);

impl RequestCounts {
    pub(super) fn count(&self, route: &'static str, status: u16) {
        let status = STATUSES.contains(&status).then_some(status);
        *lock(&self.0).get_or_default((route, status)) += 1;
    }

    /// All counts so far.
    pub(super) fn all(&self) -> Table<Key, u64> {
        lock(&self.0).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_route_and_status() {
        let counts = RequestCounts::default();
        for (route, status) in [
            ("health", 200),
            ("health", 200),
            ("health", 418),
            ("none", 404),
        ] {
            counts.count(route, status);
        }
        let all: Vec<_> = counts.all().into_iter().collect();
        assert_eq!(
            all,
            [
                (("health", None), 1),
                (("health", Some(200)), 2),
                (("none", Some(404)), 1)
            ]
        );
    }
}
