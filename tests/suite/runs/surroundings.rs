//! What a script leaves of itself: no descriptor to its children, and no file anywhere.

use serde_json::json;

use super::everywhere;
use crate::fixture::names_in;

/// Shows the descriptors that a child of the shell has: the shell opens none for this.
const DESCRIPTORS: &str = "for n in $(seq 0 99); do [ -e /proc/$$/fd/$n ] && echo $n; done; true";

#[test]
fn children_of_the_code_have_the_standard_streams_only() {
    everywhere(|place| {
        for (language, _) in place.languages() {
            let code = match language {
                "python" => format!(
                    "import subprocess\nsubprocess.run(['sh', '-c', {DESCRIPTORS:?}], close_fds=False)"
                ),
                "javascript" => format!(
                    "require('child_process').spawnSync('sh', ['-c', {DESCRIPTORS:?}], {{stdio: 'inherit'}})"
                ),
                _ => format!("sh -c '{DESCRIPTORS}'"),
            };
            assert_eq!(place.run(language, &code), "0\n1\n2\n", "{language}");
            if language == "bash" {
                let long = format!("{}{code}", "# filler\n".repeat(20_000));
                assert_eq!(place.run(language, &long), "0\n1\n2\n", "long");
            }
        }
    });
}

#[test]
fn the_code_finds_no_trace_of_what_ran_it() {
    everywhere(|place| {
        for (language, _) in place.languages() {
            match language {
                "python" => assert_eq!(
                    place.run(
                        language,
                        "print(sorted(globals()), __builtins__.__name__)\nimport sys\nprint(repr(sys.path[0]))"
                    ),
                    "['__annotations__', '__builtins__', '__doc__', '__loader__', '__name__', '__package__', '__spec__'] builtins\n''\n"
                ),
                "javascript" => assert_eq!(
                    place.run(language, "console.log(require.main === module, __filename === process.cwd() + '/<code>')"),
                    "true true\n"
                ),
                _ => {
                    let code = "set -o posix; set; echo $#";
                    let long = format!("{}{code}", "# filler\n".repeat(20_000));
                    let variables = |code: &str| {
                        let shown = place.run(language, code);
                        let varies = ["BASHPID=", "PPID=", "RANDOM=", "SECONDS=", "BASH_EXECUTION_STRING=", "_="];
                        let keep = |line: &&str| !varies.iter().any(|name| line.starts_with(name));
                        let kept: Vec<String> = shown.lines().filter(keep).map(str::to_owned).collect();
                        kept
                    };
                    let short = variables(code);
                    assert!(short.len() > 5, "{short:?}");
                    assert_eq!(variables(&long), short);
                }
            }
        }
    });
}

#[test]
fn nothing_is_written() {
    everywhere(|place| {
        let before = names_in(&place.directory);
        for (language, code) in place.languages() {
            place.run(language, code);
        }
        assert_eq!(names_in(&place.directory), before);
        let temporary = "ls -A \"${TMPDIR:-/tmp}\" | grep -c code";
        let count = place.exec(&json!({ "cmd": temporary })).stdout;
        assert_eq!(count, "0\n");
    });
}
