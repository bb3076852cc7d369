//! Compresses what the program carries to send: documents are several times smaller than their text. Leaves out of
//! it what it does not use.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    compress_file("openapi.json");
    compress_file("src/api/mcp/tools.json");
    compress_scripts();
    compress_console();
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
    let mut scripts = Vec::new();
    for path in paths_in(FOLDER) {
        let name = path.file_name().and_then(|name| name.to_str());
        let is_script = |name: &&str| [".py", ".js", ".sh"].iter().any(|end| name.ends_with(end));
        if let Some(name) = name.filter(is_script) {
            let text = fs::read(&path).expect("cannot read a script of interpreters");
            scripts.extend_from_slice(&[name.as_bytes(), b"\0", &text, b"\0"].concat());
        }
    }
    compress("scripts", &scripts);
}

fn compress_file(path: &str) {
    println!("cargo::rerun-if-changed={path}");
    let document = fs::read(path).expect("cannot read a document");
    compress(path.rsplit('/').next().unwrap_or(path), &document);
}

/// The files of the console: a table of names, types and contents compressed by gzip. It is empty without the feature
/// `console`. The files of others are in the repository as they are sent.
fn compress_console() {
    const OWN: &str = "src/api/console/page";
    const OTHERS: &str = "src/api/console/xterm";
    let mut table = "[\n".to_owned();
    if env::var_os("CARGO_FEATURE_CONSOLE").is_some() {
        for path in [OWN, OTHERS].into_iter().flat_map(paths_in) {
            let name = path.file_name().and_then(|name| name.to_str());
            let name = name.expect("the names of the console's files are text");
            let (name, sent) = match name.strip_suffix(".gz") {
                Some(name) => {
                    let manifest = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
                    (name, PathBuf::from(manifest).join(&path))
                }
                None if path.starts_with(OWN) => {
                    let content = fs::read(&path).expect("cannot read a file of the console");
                    let sent = out_directory().join(format!("{name}.gz"));
                    fs::write(&sent, gzip(&content)).expect("cannot write a compressed file");
                    (name, sent)
                }
                None => continue,
            };
            let kind = match name.rsplit('.').next() {
                Some("html") => "text/html; charset=utf-8",
                Some("css") => "text/css; charset=utf-8",
                Some("js" | "mjs") => "text/javascript; charset=utf-8",
                Some("svg") => "image/svg+xml",
                _ => panic!("{name} has no type that is known"),
            };
            let sent = sent.to_str().expect("the paths of a build are text");
            table.extend([
                format!("    File {{ name: {name:?}, kind: {kind:?}, "),
                format!("gzip: include_bytes!({sent:?}) }},\n"),
            ]);
        }
    }
    table += "]\n";
    fs::write(out_directory().join("console.rs"), table).expect("cannot write a table");
}

/// The files in a folder, in order.
fn paths_in(folder: &str) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={folder}");
    let entries = fs::read_dir(folder).expect("cannot list a folder");
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// A member of gzip (RFC 1952) with no name and no time, so that the same content is always the same bytes.
fn gzip(content: &[u8]) -> Vec<u8> {
    let crc = content.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    });
    let length = u32::try_from(content.len()).expect("files of the console are small");
    let mut member = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 255];
    member.extend(deflate(content));
    member.extend((!crc).to_le_bytes());
    member.extend(length.to_le_bytes());
    member
}

/// Compresses slowly and well (RFC 1951).
fn deflate(content: &[u8]) -> Vec<u8> {
    let mut compressed = Vec::new();
    let (options, format) = (zopfli::Options::default(), zopfli::Format::Deflate);
    zopfli::compress(options, format, content, &mut compressed).expect("memory takes all");
    compressed
}

/// Writes a document for `src/codec/carried.rs`: its length, and its compressed text.
fn compress(name: &str, document: &[u8]) {
    let length = u32::try_from(document.len()).expect("a document is small");
    let compressed = deflate(document);
    let carried = [&length.to_le_bytes()[..], &compressed].concat();
    fs::write(out_directory().join(name), carried).expect("cannot write a compressed document");
}

fn out_directory() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}
