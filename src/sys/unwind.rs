//! What the standard library would unwind a stack with. The program never does (`src/panics.rs`, `no-unwinding.ld`), so
//! these stand in for the library that does: they end a walk before its first frame. The linker then leaves that
//! library out, and with it what would read and print backtraces: a tenth of the program.
//!
//! Only the functions that the standard library refers to are here; one more that it needs some day is an error of the
//! linker.

use std::ffi::c_int;

/// `_URC_END_OF_STACK` (unwind.h).
const END_OF_STACK: c_int = 5;

#[unsafe(no_mangle)]
extern "C" fn _Unwind_Backtrace(_visit: usize, _argument: usize) -> c_int {
    END_OF_STACK
}

/// Continues an unwinding, which nothing begins.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume(_exception: usize) -> ! {
    std::process::abort()
}

/// Defines functions about a frame, of which there is none.
macro_rules! about_no_frame {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name(_frame: usize, _first: usize, _second: usize) -> usize {
                0
            }
        )*
    };
}

about_no_frame! {
    _Unwind_GetDataRelBase
    _Unwind_GetIP
    _Unwind_GetIPInfo
    _Unwind_GetLanguageSpecificData
    _Unwind_GetRegionStart
    _Unwind_GetTextRelBase
    _Unwind_SetGR
    _Unwind_SetIP
}
