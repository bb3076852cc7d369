//! Compresses what the program carries to send: documents are several times smaller than their text. What belongs to
//! a feature of cargo that this build does not have is left out.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::{env, fs};

use lzma_rust2::{LzmaOptions, LzmaWriter};
use serde_json::Value;

fn main() {
    name_program();
    omit_index_of_unwinding();
    omit_backtraces();
    compress("openapi.json", &contract());
    compress("NOTICES", &read("NOTICES"));
    if has_feature("mcp") {
        compress("tools.json", &read("src/api/mcp/tools.json"));
    }
    compress_scripts();
    if has_feature("console") {
        compress_console();
    }
}

/// Tells tests where the program is. cargo's own variable for it, `CARGO_BIN_EXE_sbx-server`, does not reach them: shells drop
/// variables whose names have a dash, and the compiler is called by one (scripts/rustc).
fn name_program() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let profile = out.ancestors().nth(3).expect("it is below the profile's");
    let program = profile.join("sbx-server");
    println!("cargo:rustc-env=SBX_BUILT_PROGRAM={}", program.display());
}

/// See src/sys/unwinding.rs. Tests keep the index: they panic without the hook of the server.
fn omit_index_of_unwinding() {
    let script = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"))
        .join("src/sys/unwinding.ld");
    println!("cargo:rerun-if-changed={}", script.display());
    println!("cargo:rustc-link-arg=-T{}", script.display());
    println!("cargo:rustc-link-arg-bins=--no-eh-frame-hdr");
}

/// See src/sys/unwinding.rs. Of two functions of one name, the program's own comes before that of a library. Tests of a
/// release link it, too.
fn omit_backtraces() {
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        println!("cargo:rustc-link-arg=--allow-multiple-definition");
    }
}

fn has_feature(name: &str) -> bool {
    let name = name.to_uppercase().replace('-', "_");
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}

/// The contract. A build that has all of it serves the file as it was written.
fn contract() -> Vec<u8> {
    let text = read("openapi.json");
    let mut contract = serde_json::from_slice(&text).expect("the contract is JSON");
    if !cut_features(&mut contract) {
        return text;
    }
    while cut_components(&mut contract) {}
    contract.to_string().into_bytes()
}

/// Removes all members whose `x-feature` is not built. True if there were any.
fn cut_features(value: &mut Value) -> bool {
    let is_cut = |member: &Value| {
        let feature = member.get("x-feature").and_then(Value::as_str);
        feature.is_some_and(|feature| !has_feature(feature))
    };
    let mut has_cut = false;
    match value {
        Value::Object(members) => {
            // A schema must not require a property that is cut.
            if let Some(properties) = members.get("properties").cloned()
                && let Some(Value::Array(required)) = members.get_mut("required")
            {
                required.retain(|name| name.as_str().is_none_or(|name| !is_cut(&properties[name])));
            }
            let before = members.len();
            members.retain(|_, member| !is_cut(member));
            has_cut |= members.len() < before;
            for member in members.values_mut() {
                has_cut |= cut_features(member);
            }
        }
        Value::Array(elements) => {
            for element in elements {
                has_cut |= cut_features(element);
            }
        }
        _ => {}
    }
    has_cut
}

/// Removes the components that nothing refers to. True if there were any.
fn cut_components(contract: &mut Value) -> bool {
    let mut referred = BTreeSet::new();
    collect_references(contract, &mut referred);
    let mut has_cut = false;
    for (kind, components) in contract["components"].as_object_mut().into_iter().flatten() {
        // Security schemes are referred to by their names.
        if kind != "securitySchemes"
            && let Some(components) = components.as_object_mut()
        {
            let before = components.len();
            components.retain(|name, _| referred.contains(&format!("#/components/{kind}/{name}")));
            has_cut |= components.len() < before;
        }
    }
    has_cut
}

fn collect_references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            for member in members.values() {
                collect_references(member, found);
            }
        }
        Value::Array(elements) => {
            for element in elements {
                collect_references(element, found);
            }
        }
        Value::String(text) if text.starts_with("#/components/") => {
            found.insert(text.clone());
        }
        _ => {}
    }
}

/// The scripts that interpreters get, as NUL-ended names and texts without lines that are comments. Commands need some
/// of them too.
fn compress_scripts() {
    const FOLDER: &str = "src/interpreter";
    let is_for_commands = |name: &str| name.starts_with("run_") || name == "make_venv.py";
    let is_built = |name: &&str| has_feature("interpreter") || is_for_commands(name);
    let mut scripts = Vec::new();
    for path in paths_in(FOLDER) {
        let name = path.file_name().and_then(|name| name.to_str());
        let is_script = |name: &&str| [".py", ".js", ".sh"].iter().any(|end| name.ends_with(end));
        if let Some(name) = name.filter(is_script).filter(is_built) {
            let text = fs::read_to_string(&path).expect("cannot read a script of interpreters");
            let comment = match path.extension() {
                Some(end) if end == "js" => "//",
                _ => "#",
            };
            let code = without_comments(&text, comment);
            scripts.extend([name, "\0", &code, "\0"].concat().bytes());
        }
    }
    compress("scripts", &scripts);
}

/// The lines of a text that are more than a comment.
fn without_comments(text: &str, comment: &str) -> String {
    let is_code = |line: &&str| !line.trim_start().starts_with(comment);
    let code: Vec<&str> = text.lines().filter(is_code).collect();
    code.join("\n")
}

fn read(path: &str) -> Vec<u8> {
    println!("cargo::rerun-if-changed={path}");
    fs::read(path).expect("cannot read a document")
}

/// The files of the console: a NUL-ended line for each with its name, type and length, and behind them the contents,
/// scripts without lines that are comments.
/// Those of others are in the repository as members of gzip.
fn compress_console() {
    const OWN: &str = "src/api/console/page";
    const OTHERS: &str = "src/api/console/xterm";
    let (mut table, mut contents) = (String::new(), Vec::new());
    for path in [OWN, OTHERS].into_iter().flat_map(paths_in) {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.expect("the names of the console's files are text");
        let content = fs::read(&path).expect("cannot read a file of the console");
        let (name, content) = match name.strip_suffix(".gz") {
            Some(name) => (name, gunzip(&content)),
            None if path.extension().is_some_and(|end| end == "js") => {
                let text = String::from_utf8(content).expect("a script is text");
                (name, without_comments(&text, "//").into_bytes())
            }
            None if path.starts_with(OWN) => (name, content),
            None => continue,
        };
        let kind = match name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js" | "mjs") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            _ => panic!("{name} has no type that is known"),
        };
        table.extend([name, "\t", kind, "\t", &content.len().to_string(), "\n"]);
        contents.extend(content);
    }
    compress("console", &[table.as_bytes(), b"\0", &contents].concat());
}

/// The files in a folder, in order.
fn paths_in(folder: &str) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={folder}");
    let entries = fs::read_dir(folder).expect("cannot list a folder");
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The content of a member of gzip (RFC 1952) whose header has no optional field.
fn gunzip(member: &[u8]) -> Vec<u8> {
    assert_eq!(member[..4], [0x1f, 0x8b, 8, 0], "gzip --no-name makes it");
    let content = miniz_oxide::inflate::decompress_to_vec(&member[10..]);
    content.expect("a file of the console is broken")
}

/// Writes a document for `src/codec/carried.rs`: its length, and its text compressed by LZMA without a header. What is
/// aligned to words in binary files is not so in text: no bits of contexts are spent on it.
fn compress(name: &str, document: &[u8]) {
    let length = u32::try_from(document.len()).expect("a document is small");
    let mut options = LzmaOptions::with_preset(9);
    (options.lc, options.lp, options.pb) = (3, 0, 0);
    (options.nice_len, options.dict_size) = (273, length.max(4096));
    let out = length.to_le_bytes().to_vec();
    let mut writer = LzmaWriter::new_no_header(out, &options, false).expect("options fit");
    let carried = writer.write_all(document).and_then(|()| writer.finish());
    let carried = carried.expect("cannot compress a document");
    fs::write(out_directory().join(name), carried).expect("cannot write a compressed document");
}

fn out_directory() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}
