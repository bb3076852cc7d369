//! The order in which a thread takes locks, so that no two wait for each other.
//!
//! Nearly all locks are innermost: whoever holds one takes no other. [`OUTER`] names those that may be held meanwhile, by
//! what they guard. A debug build checks each lock that is taken, and panics before it could wait in another order.
//!
//! The allocator, the tables of `sys` and the log are below all of them: they call nothing else.

/// What the outer locks guard, the outermost first. Whoever holds one may take those of later lines, and innermost ones.
#[cfg(debug_assertions)]
const OUTER: [&[&str]; 3] = [
    &[
        "sbx_server::egress::ExitsState",
        "sbx_server::host::builds::BuildTable",
        "sbx_server::host::sandbox::IsEnding",
        "sbx_server::host::records::Generations",
        "sbx_server::host::table::SandboxTable",
        "sbx_server::http::slots::SlotTable",
        "sbx_server::interpreter::contexts::ContextTable",
        "sbx_server::process::logs::Reclaiming",
        "sbx_server::process::registry::ProcessTable",
        "sbx_server::workspace::watches::WatchTable",
    ],
    &[
        "sbx_server::egress::sockets::Watched",
        "sbx_server::interpreter::context::Lifecycle",
        "sbx_server::process::process::StdinSlot",
    ],
    &[
        "sbx_server::interpreter::execution::Journal",
        "sbx_server::process::process::Life",
    ],
];

#[cfg(debug_assertions)]
mod checked {
    use std::any::type_name;
    use std::cell::RefCell;

    use super::OUTER;

    thread_local! {
        /// What is guarded by the locks that this thread holds.
        static HELD: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    /// Notes that this thread holds the lock of a value, until it is dropped.
    pub struct Held(&'static str);

    impl Held {
        /// For a thread that waits for the lock.
        ///
        /// # Panics
        /// It holds one that must not be held meanwhile.
        pub fn in_order<T>() -> Self {
            let own = type_name::<T>();
            let held = HELD.with_borrow(|held| held.iter().map(|name| (rank(name), *name)).max());
            if let Some((rank_of_held, held)) = held {
                assert!(rank_of_held < rank(own), "{own} is locked while {held} is");
            }
            Self::in_any_order::<T>()
        }

        /// For a thread that has the lock without waiting.
        pub fn in_any_order<T>() -> Self {
            let own = type_name::<T>();
            HELD.with_borrow_mut(|held| held.push(own));
            Self(own)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            // Not at the end of the thread, when its values are gone.
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                let at = held.iter().rposition(|name| *name == self.0);
                at.map(|at| held.swap_remove(at))
            });
        }
    }

    fn rank(name: &str) -> usize {
        let line = OUTER.iter().position(|line| line.contains(&name));
        line.unwrap_or(OUTER.len())
    }

    #[cfg(test)]
    mod tests {
        use std::sync::Mutex;

        use crate::threads::lock::{lock, try_lock};

        #[test]
        fn an_innermost_lock_is_the_last() {
            let (one, other) = (Mutex::new(1_u8), Mutex::new(2_u16));
            drop(lock(&one));
            let held = lock(&other);
            assert!(try_lock(&one).is_some(), "nobody waits");
            let waited =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(lock(&one))));
            let text = waited.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(*text, "u8 is locked while u16 is");
            drop(held);
            drop(lock(&one));
        }
    }
}

#[cfg(debug_assertions)]
pub use checked::Held;

/// Nothing in a release.
#[cfg(not(debug_assertions))]
pub struct Held;

#[cfg(not(debug_assertions))]
impl Held {
    pub fn in_order<T>() -> Self {
        Self
    }

    pub fn in_any_order<T>() -> Self {
        Self
    }
}
