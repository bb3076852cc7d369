//! Tools of those who write programs: version control, compilers, keys, debuggers.

use serde_json::json;

use super::{place, put, run};

#[test]
fn git_keeps_and_clones_a_repository() {
    place!(server, sandbox, "git");
    let script = "
set -e
git config --global user.name Tester
git config --global user.email tester@example.org
git init -q one && cd one
echo content > file && git add file && git commit -q -m first
git checkout -q -b other && echo more >> file && git commit -qa -m second
cd .. && git clone -q one two && git clone -q \"file://$HOME/one\" three
git -C two log --format=%s
cat three/file
git -C one gc -q && git -C one fsck
git -C two worktree add -q ../four && git -C two push -q origin HEAD:new
git -C one branch --list new
";
    assert_eq!(sandbox.sh(script), "second\nfirst\ncontent\nmore\n  new\n");
}

#[test]
fn a_c_program_is_compiled_and_run() {
    place!(server, sandbox, "cc");
    put(
        &sandbox,
        "hello.c",
        "#include <stdio.h>\nint main(void) { puts(\"compiled here\"); return 0; }\n",
    );
    assert_eq!(
        sandbox.sh("cc -O2 -o hello hello.c && ./hello && cc -shared -fPIC -o libhello.so hello.c && ls libhello.so"),
        "compiled here\nlibhello.so\n"
    );
}

/// The JVM takes neither the home nor the temporary directory from the environment.
#[test]
fn java_compiles_and_runs_under_a_limit_of_memory() {
    place!(server, sandbox, "javac");
    let sandbox_with_limit = server.sandbox_with(&json!({
        "max_mem_mb": 2048,
        "env": { "LANG": "C.UTF-8" },
    }));
    put(
        &sandbox_with_limit,
        "Main.java",
        "import java.io.File;
public class Main {
    public static void main(String[] arguments) throws Exception {
        System.out.println(File.createTempFile(\"file\", null).getParent().equals(System.getenv(\"TMPDIR\")));
        System.out.println(System.getProperty(\"user.home\").equals(System.getenv(\"HOME\")));
        System.out.println(\"\\u00e9\\u2603\");
        Process process = new ProcessBuilder(\"echo\", \"child\").inheritIO().start();
        process.waitFor();
    }
}
",
    );
    let script = r#"export JDK_JAVA_OPTIONS="-Djava.io.tmpdir=$TMPDIR -Duser.home=$HOME"; javac Main.java && java Main"#;
    assert_eq!(
        run(&sandbox_with_limit, &json!({ "cmd": script })),
        "true\ntrue\né☃\nchild\n"
    );
    drop(sandbox);
}

#[test]
fn keys_are_made_with_openssl() {
    place!(server, sandbox, "openssl");
    assert_eq!(
        sandbox.sh("openssl genpkey -algorithm ed25519 -out key && head -1 key && openssl pkey -in key -pubout | head -1"),
        "-----BEGIN PRIVATE KEY-----\n-----BEGIN PUBLIC KEY-----\n"
    );
}

/// Within one command, that is; across commands see [`super::refused`].
#[test]
fn debuggers_start_programs_and_look_at_them() {
    place!(server, sandbox, "gdb");
    let seen = sandbox.sh("gdb -nx -batch -ex run --args /bin/true 2>&1");
    assert!(seen.contains("exited normally"), "{seen}");
    let script = "sleep 1000 & gdb -nx -batch -p $! 2>&1; kill $!";
    let seen = sandbox.sh(script);
    assert!(seen.contains("detached"), "{seen}");
}

#[test]
fn strace_shows_what_a_program_does() {
    place!(server, sandbox, "strace");
    let seen = sandbox.sh("strace -f -e trace=execve sh -c true 2>&1");
    assert!(seen.contains("exited with 0"), "{seen}");
}
