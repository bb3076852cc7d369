//! How a panic unwinds the stack, in as few bytes as it takes.
//!
//! It goes by tables (the section `.eh_frame`). Programs usually have an index of them beside, sorted by address, of eight
//! bytes for each function: 57 KB here. This one has none: panics are bugs, so none is a matter of speed. LLVM's libunwind
//! looks through what programs register.
//!
//! The standard library's own hook for panics would print a backtrace, and the code that reads debug information for one is
//! 190 KB. This program's hook prints the place alone, and a release has no debug information. So there a backtrace has no
//! frames, and the compiler leaves out what nothing calls then.

use std::sync::Once;

unsafe extern "C" {
    /// Has libunwind look through a section of tables, from its start to its end (llvm-project,
    /// libunwind/src/libunwind.cpp).
    fn __unw_add_dynamic_eh_frame_section(start: usize);

    /// The start of the section; `unwinding.ld` defines it.
    static sbx_unwind_tables: u8;
}

/// Makes the tables known. Without it a panic aborts. The first call takes some 40 bytes of memory for each function.
pub fn prepare_unwinding() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        // SAFETY: The symbol is at the start of the tables, which the linker has made, ended, and put into read-only
        // memory of the program. They stay.
        unsafe { __unw_add_dynamic_eh_frame_section((&raw const sbx_unwind_tables).addr()) }
    });
}

#[cfg(not(debug_assertions))]
mod backtraces {
    use std::ffi::{c_int, c_void};

    /// `_URC_END_OF_STACK`.
    const END_OF_STACK: c_int = 5;

    /// The walk along the stack that a backtrace begins with (Itanium C++ ABI: Exception Handling, level I). It ends before
    /// the first frame. Unwinding has another one.
    // SAFETY: libunwind's own function has the same parameters, and build.rs has the linker prefer this one.
    #[unsafe(no_mangle)]
    extern "C" fn _Unwind_Backtrace(
        _visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        _argument: *mut c_void,
    ) -> c_int {
        END_OF_STACK
    }
}
