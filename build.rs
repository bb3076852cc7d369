//! Compresses what the program carries to send: documents are several times smaller than their text. Leaves out of
//! it what it does not use.

use std::path::PathBuf;
use std::{env, fs};

/// The level of `miniz_oxide` that compresses most.
const LEVEL: u8 = 10;

fn main() {
    compress_contract();
    compress_scripts();
    leave_out_unwinding();
}

/// The program stops a thread that panics instead of unwinding its stack (`src/panics.rs`), so it needs no tables
/// for that. Its libraries have them nevertheless.
fn leave_out_unwinding() {
    println!("cargo::rerun-if-changed=no-unwinding.ld");
    let directory = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    println!("cargo::rustc-link-arg-bins=-T{directory}/no-unwinding.ld");
    println!("cargo::rustc-link-arg-bins=--no-eh-frame-hdr");
}

/// The scripts that interpreters get, as NUL-ended names and texts.
fn compress_scripts() {
    const FOLDER: &str = "src/interpreter";
    println!("cargo::rerun-if-changed={FOLDER}");
    let entries = fs::read_dir(FOLDER).expect("cannot list the scripts of interpreters");
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut scripts = Vec::new();
    for path in paths {
        let name = path.file_name().and_then(|name| name.to_str());
        let is_script = |name: &&str| [".py", ".js", ".sh"].iter().any(|end| name.ends_with(end));
        if let Some(name) = name.filter(is_script) {
            let text = fs::read(&path).expect("cannot read a script of interpreters");
            scripts.extend_from_slice(&[name.as_bytes(), b"\0", &text, b"\0"].concat());
        }
    }
    let compressed = miniz_oxide::deflate::compress_to_vec(&scripts, LEVEL);
    fs::write(out_directory().join("scripts.deflate"), compressed)
        .expect("cannot write the compressed scripts");
}

fn out_directory() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

fn compress_contract() {
    println!("cargo::rerun-if-changed=openapi.json");
    let document = fs::read("openapi.json").expect("cannot read openapi.json");
    println!("cargo::rustc-env=OPENAPI_BYTES={}", document.len());
    let compressed = miniz_oxide::deflate::compress_to_vec(&document, LEVEL);
    fs::write(out_directory().join("openapi.json.deflate"), compressed)
        .expect("cannot write the compressed contract");
}
