//! The tables by which a panic unwinds the stack (the section `.eh_frame`).
//!
//! Programs usually have an index of them beside, sorted by address, of eight bytes for each function: 57 KB here. This
//! one has none: panics are bugs, so none is a matter of speed. LLVM's libunwind looks through what programs register.

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
