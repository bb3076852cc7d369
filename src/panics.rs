//! What a panic does: its thread stops for good, and the rest of the server goes on.
//!
//! A panic is a bug. The tables and the code to unwind the stack after one were a fifth of the program, so there are
//! none: before the program would abort, the hook here logs where the panic was, answers the client that the thread
//! works for, closes its connection, releases the locks that the thread holds, and never returns. What the thread has
//! besides is lost until the server ends: its stack, its files, its seat, what was charged to its tenant. A tenant
//! that can cause panics so uses up its own share.
//!
//! A panic of a thread that everybody depends on ends the server: the main one, and those that called
//! [`depend_on_this_thread`]. Half a server would hang its clients.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::logging;
use crate::sys;

/// What the client gets if nothing was sent to it yet.
const FAILED: &str = "HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n\
    Content-Length: 91\r\nConnection: close\r\n\r\n\
    {\"error\":\"the server failed to handle this request; its log says where\",\"code\":\"internal\"}\n";

/// The exit status after a panic that ends the server, as Rust programs have it.
const STATUS: i32 = 101;

thread_local! {
    static SERVED: RefCell<Option<Arc<Served>>> = const { RefCell::new(None) };
    static IS_ESSENTIAL: Cell<bool> = const { Cell::new(false) };
}

/// A client that threads work for.
pub struct Served {
    socket: Arc<TcpStream>,
    /// Something may have been sent since the last request.
    is_answered: AtomicBool,
}

impl Served {
    /// A client that has asked for nothing yet.
    pub fn new(socket: &Arc<TcpStream>) -> Arc<Self> {
        Arc::new(Self {
            socket: Arc::clone(socket),
            is_answered: AtomicBool::new(true),
        })
    }

    /// Says whether nothing is sent for now: a request is being handled, and its answer has not begun.
    pub fn set_answered(&self, is_answered: bool) {
        self.is_answered.store(is_answered, Ordering::Relaxed);
    }

    fn give_up(&self) {
        // Whoever reads does not wait for this thread any longer, and this thread does not wait for the client.
        if !self.is_answered.swap(true, Ordering::Relaxed)
            && self.socket.set_nonblocking(true).is_ok()
        {
            let _ = (&*self.socket).write_all(FAILED.as_bytes());
        }
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// The client that this thread works for. A thread that it starts and waits for works for the same one.
pub fn served() -> Option<Arc<Served>> {
    SERVED.with_borrow(Clone::clone)
}

/// Says for which client this thread works from now on.
pub fn work_for(served: Option<Arc<Served>>) {
    SERVED.set(served);
}

/// Says that the server cannot go on without this thread.
pub fn depend_on_this_thread() {
    IS_ESSENTIAL.set(true);
}

/// Makes panics stop their threads. To be called on the main thread.
pub fn install() {
    depend_on_this_thread();
    std::panic::set_hook(Box::new(|panic| {
        log(panic);
        if IS_ESSENTIAL.try_with(Cell::get) == Ok(true) {
            std::process::exit(STATUS);
        }
        stop()
    }));
}

/// Logs a panic as one line with its place. Its message is left out because it may quote data of a client, as
/// that of a failed string slice does.
fn log(panic: &std::panic::PanicHookInfo<'_>) {
    match panic.location() {
        Some(place) => logging::info(format_args!("panicked at {place}")),
        None => logging::info(format_args!("panicked")),
    }
}

fn stop() -> ! {
    give_up();
    sys::stop_thread()
}

/// Answers the client that this thread works for, and closes its connection.
fn give_up() {
    if let Ok(Some(served)) = SERVED.try_with(RefCell::take) {
        served.give_up();
    }
}

/// Gives up the clients of threads that panic in this test program, whose panics unwind: a thread that stopped in the
/// hook would hold the lock that the end of the tests waits for. Other panics fail their tests as usual.
#[cfg(test)]
pub fn install_for_tests() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| match served() {
            Some(_) => give_up(),
            None => usual(panic),
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_whole() {
        let (head, body) = FAILED.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("Content-Length: {}\r\n", body.len())),
            "{}",
            body.len()
        );
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["code"], "internal");
    }
}
