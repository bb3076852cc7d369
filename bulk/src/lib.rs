//! Loops over the bytes of output: JSON text and Base64.
//!
//! They are a package of their own because the program is compiled for size and these for speed: cargo
//! optimizes a package as a whole. Only what handles every byte of a large stream belongs here, as pure
//! functions of bytes.

pub mod base64;
pub mod escape;
