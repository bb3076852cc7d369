//! The promise that the program tells what it consists of, and under which licences.

use std::fs;
use std::process::Command;

use crate::examples::repository;
use crate::fixture::BINARY;
use crate::skip;

#[test]
fn the_program_prints_its_notices() {
    let output = Command::new(BINARY).arg("--licenses").output().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == fs::read(repository("NOTICES")).unwrap());
}

/// A crate, or another version of one, changes the list.
#[test]
fn the_notices_are_those_of_what_is_linked() {
    let Ok(version) = Command::new("cargo").arg("--version").output() else {
        skip!("there is no cargo");
    };
    assert!(version.status.success());
    let output = Command::new(repository("scripts/notices"))
        .arg("--check")
        .output();
    let Ok(output) = output else {
        skip!("there is no Python");
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}
