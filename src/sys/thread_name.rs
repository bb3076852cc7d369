//! Names of threads, without musl's function for them: that one prints a number into a path, and with it the program had
//! all of printf(3), nine kilobytes.

use std::ffi::{c_char, c_int};

/// Names a thread for /proc. The standard library calls it for the thread that it has just started, of that thread, and
/// for no other.
#[unsafe(no_mangle)]
extern "C" fn pthread_setname_np(_calling: usize, name: *const c_char) -> c_int {
    // SAFETY: the kernel reads up to 16 bytes of a string that ends with NUL, and changes nothing but the name.
    unsafe { libc::prctl(libc::PR_SET_NAME, name) };
    0
}
