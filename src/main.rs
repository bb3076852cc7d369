//! The program. All of it is in the library, because unit tests need to unwind the stack after a panic, and
//! `build.rs` leaves out of programs what that takes.

use std::process::ExitCode;

fn main() -> ExitCode {
    sbx_server::main()
}
