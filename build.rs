//! Compresses what the program carries to send: documents are several times smaller than their text.

use std::path::PathBuf;
use std::{env, fs};

/// The level of `miniz_oxide` that compresses most.
const LEVEL: u8 = 10;

fn main() {
    println!("cargo::rerun-if-changed=openapi.json");
    let document = fs::read("openapi.json").expect("cannot read openapi.json");
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    println!("cargo::rustc-env=OPENAPI_BYTES={}", document.len());
    let compressed = miniz_oxide::deflate::compress_to_vec(&document, LEVEL);
    fs::write(directory.join("openapi.json.deflate"), compressed)
        .expect("cannot write the compressed contract");
}
