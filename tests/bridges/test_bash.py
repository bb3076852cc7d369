"""Promises of interpreter contexts that the bash bridge keeps."""
import os
import signal
import time
import unittest

from harness import BashContext, have


@unittest.skipUnless(have("bash"), "no bash")
class Bash(unittest.TestCase):
    def setUp(self):
        self.context = BashContext()
        self.addCleanup(lambda: self.context.close())

    def out(self, code, **fields):
        execution = self.context.run(code, **fields)
        self.assertIsNone(execution.death, (code, execution.order))
        return execution.stdout

    def status(self, code):
        return self.context.run(code).done["exit_code"]

    def test_state(self):
        self.out("x=1; declare -A m=([a]=7); a=(1 2 3); f() { echo f$x; }; cd /tmp; export E=2; declare d=5")
        self.assertEqual(self.out('echo $x ${m[a]} ${a[@]} $PWD $d; f; bash -c "echo $E"'), "1 7 1 2 3 /tmp 5\nf1\n2\n")

    def test_status(self):
        self.assertEqual([self.status(c) for c in ("true", "false", "(exit 7)", "", "# c", "f() { return 3; }; f")], [0, 1, 7, 0, 0, 3])

    def test_syntax_errors_keep_the_state(self):
        self.out("x=1")
        for code in ("if", "echo 'open", "fi; x=2", "cat <<E\nno end", "for"):
            execution = self.context.run(code)
            self.assertIsNone(execution.death, code)
        self.assertEqual(self.out("echo $x"), "1\n")

    def test_heredoc_and_long_code(self):
        self.assertEqual(self.out("cat <<E\na $((1+1))\nE\ncat <<'F'\n$x\nF"), "a 2\n$x\n")
        self.assertEqual(len(self.out("echo " + "x" * 300000)), 300001)

    def test_exit_ends_the_context(self):
        execution = self.context.run("echo last; exit 4")
        self.assertEqual((execution.done, execution.death, execution.stdout), (None, 4, "last\n"))

    def test_errexit_ends_the_execution_only(self):
        self.assertEqual(self.out("set -euo pipefail\nx=1\nf() { false; echo not; }\necho a; f; echo not"), "a\n")
        self.assertEqual(self.out("echo $x; false && true; if false; then :; fi; echo b; (exit 3); echo not"), "1\nb\n")
        self.assertEqual(self.out("set +e; false; echo c"), "c\n")
        self.assertEqual(self.out("false; echo ${nothing-d}"), "d\n")

    def test_unset_variable_ends_as_in_a_script(self):
        self.out("set -u; x=1")
        self.assertEqual(self.out("echo $x"), "1\n")

    def test_errors_that_would_end_a_shell_end_the_execution_only(self):
        self.out(
            "x=1; declare -A m=([a b]='q\nr'); declare -r fixed=5; declare -ai list=(1 2); f() { echo f$x; }; export E=ee"
            "; alias ll='ls -d'; trap 'echo usr' USR1; cd /tmp; umask 027; shopt -s extglob; exec 7</etc/passwd"
        )
        for options in "-u", "-eu", "-euo pipefail":
            for code in (
                "echo $NOPE", 'echo "${NOPE}"', "v=$NOPE", "[[ $NOPE ]]", "((NOPE + 1))", "for i in $NOPE; do :; done",
                "g() { local x=2; h; }; h() { local x=3; { echo $NOPE; } >/dev/null; }; g", "echo ${NOPE?none}",
                ": ${NOPE:?none}", "echo ${list[7]}", "trap 'echo $NOPE' USR2; kill -USR2 $$; trap - USR2", "cat; echo $NOPE",
            ):
                execution = self.context.run("set %s\n%s\necho not" % (options, code), stdin="in\n" if "cat" in code else None)
                self.assertIsNone(execution.death, code)
                self.assertIn("NOPE", execution.stderr.replace("list", "NOPE"), code)
                self.assertNotIn("not\n", execution.stdout, code)
                self.assertEqual(execution.done["exit_code"], 1, code)
                self.assertEqual(self.out("echo $x ${g-} ${i-} $-; shopt -po pipefail; cat; trap - USR2").split()[0], "1", code)
                self.assertEqual(self.out("set +eu +o pipefail; echo $-"), "hBEc\n")
        self.assertEqual(
            self.out('declare -p m fixed list E; f; bash -c "echo $E"; alias; kill -USR1 $$; pwd; umask; read -ru 7 l; echo ${l%%:*}'),
            "declare -A m=([\"a b\"]=$'q\\nr' )\ndeclare -r fixed=\"5\"\ndeclare -ai list=([0]=\"1\" [1]=\"2\")\n"
            "declare -x E=\"ee\"\nf1\nee\nalias ll='ls -d'\nusr\n/tmp\n0027\nroot\n",
        )
        self.context.run("set -- p 'q r'; set -u; echo $NOPE")
        self.assertEqual(self.out('echo $# "$2"; set +u'), "2 q r\n")
        self.assertEqual(self.out("case aa in +(a)) echo ext; esac; ls /proc/self/fd | tr '\\n' ' '"), "ext\n0 1 2 3 7 ")

    def test_an_exit_trap_of_the_code(self):
        self.out("set -u; trap 'echo bye $?' EXIT")
        self.assertEqual(self.context.run("echo $NOPE").done["exit_code"], 1)
        self.assertEqual((self.out("echo a"), self.out("echo b")), ("a\n", "b\n"))
        execution = self.context.run("exit 5")
        self.assertEqual((execution.death, execution.stdout), (5, "bye 5\n"))

    def test_ends_of_the_shell(self):
        for code, status in (("set -eu; exit 1", 1), ("set -e; f() { exit 3; }; f", 3), ("kill $$; sleep 5", -15), ("set -e; e=exit; $e 4", 4), ("exec true", 0)):
            context = BashContext()
            self.addCleanup(context.close)
            self.assertEqual(context.run(code).death, status, code)

    def test_a_debug_trap_fires_for_the_code_only(self):
        self.assertEqual(self.out("trap 'echo dbg' DEBUG; echo d"), "dbg\nd\n")
        self.assertEqual(self.out("echo e; :"), "dbg\ne\ndbg\n")
        self.assertEqual(self.out("trap - DEBUG"), "dbg\n")
        self.assertEqual((self.out("echo next"), self.out("trap -p DEBUG")), ("next\n", ""))
        self.out("trap 'n=$((n + 1)) last=$BASH_COMMAND' DEBUG; n=0")
        self.out("n=0; :; false")
        self.assertEqual(self.out("echo $n $? $last"), "3 0 echo $n $? $last\n")
        self.out("trap - DEBUG")
        self.out("trap 'echo \"it'\"'\"'s $?\" # end' DEBUG")
        self.assertEqual(self.out("(exit 3); echo a"), "it's 3\na\n")
        self.out("set -u; trap 'echo D' DEBUG")
        self.assertNotIn("b", self.out("echo $NOPE; echo b"))
        self.assertEqual(self.out("echo b; set +u"), "D\nb\nD\n")
        self.context.run("trap - DEBUG; false; set -T; trap 'echo T' DEBUG")
        self.assertEqual(self.out("f() { echo f; }; f"), "T\nT\nT\nf\n") # the function is entered too
        self.out("set +T; trap - DEBUG")
        self.assertEqual(self.out("echo c"), "c\n")

    def test_stdin(self):
        self.assertEqual(self.out("read a; cat; echo $a", stdin="one\ntwo\n"), "two\none\n")
        self.assertEqual(self.out("cat; read x || echo eof"), "eof\n")
        self.assertEqual(self.out("echo unread", stdin="x" * 200000), "unread\n")

    def test_environment_of_one_execution(self):
        self.out("B=old")
        self.assertEqual(self.out('bash -c \'echo "$A|$B"\'', env={"A": "1\n2 'q'", "B": "new"}), "1\n2 'q'|new\n")
        self.assertEqual(self.out('echo "${A-none}|$B"'), "none|old\n")

    def test_children_have_no_socket(self):
        self.assertEqual(self.out("ls /proc/self/fd | tr '\\n' ' '"), "0 1 2 3 ")

    def test_background_jobs(self):
        self.assertEqual(self.out("sleep 0.3 & echo started"), "started\n")
        self.assertEqual(self.out("wait; echo done"), "done\n")
        execution = self.context.run("yes &", timeout=10)
        self.assertEqual(execution.done["exit_code"], 0)
        self.assertEqual(self.context.run("kill %1; wait 2>/dev/null; echo x").stdout[-2:], "x\n")

    def test_traps(self):
        self.out("trap 'echo usr' USR1; trap 'echo bye' EXIT")
        self.assertEqual(self.out("kill -USR1 $$; echo a"), "usr\na\n")
        self.assertEqual(self.context.run("exit 0").stdout, "bye\n")

    def test_output_is_all_there(self):
        self.assertEqual(len(self.out("for i in {1..20000}; do echo line; done").split()), 20000)

    def interrupted(self, code):
        self.out("kept=yes")
        execution = self.context.start("echo go; " + code + "\necho not")
        while "go" not in execution.stdout and not execution.finished.is_set():
            time.sleep(0.005)
        time.sleep(0.1)
        self.context.interrupt(execution)
        self.assertTrue(execution.finished.wait(10), code)
        self.assertIsNone(execution.death, code)
        self.assertEqual((execution.done["interrupted"], execution.done["exit_code"]), (True, 130), code)
        self.assertNotIn("not", execution.stdout)
        self.assertEqual(self.out("echo $kept $-"), "yes %s\n" % self.flags)

    def test_interrupts(self):
        self.flags = self.out("echo $-").strip()
        for code in (
            "while true; do :; done", "sleep 100", "f() { while true; do sleep 1; done; echo not; }; g() { f; echo not; }; g",
            "(while true; do :; done)", "x=$(sleep 100)", "sleep 100 | cat", "sleep 100 & wait", "read x < <(sleep 100)",
            "until false; do for i in 1 2; do sleep 9; done; done",
        ):
            self.interrupted(code)

    def test_an_interrupt_never_hits_the_next_execution(self):
        self.out("kept=yes")
        for i in range(200):
            execution = self.context.start("for i in {1..%d}; do echo $i; done; true" % (1 + i % 30))
            time.sleep((i % 40) * 0.0001)
            with self.context.lock:
                self.context.signal_group()
            self.assertTrue(execution.finished.wait(10), i)
            self.assertIsNone(execution.death, i)
            follow = self.context.run("echo $kept")
            self.assertEqual((follow.stdout, follow.done["interrupted"]), ("yes\n", False), i)

    def test_loops_that_are_not_there(self):
        """`break` and `continue` outside of a loop do nothing, as at a prompt."""
        self.out("n=5")
        for code in ("continue", "break", "[[ -f /none ]] || continue", "for i in 1 2; do continue 2; done", "break 9"):
            for _ in range(12):
                self.context.run(code)
                self.assertEqual(self.out("echo $n"), "5\n", code)
        self.assertEqual(self.out("for i in 1 2 3; do [[ $i == 2 ]] && continue; echo $i; done"), "1\n3\n")

    def test_nothing_of_the_bridge_shows(self):
        self.assertEqual(self.out("echo hi \\"), "hi\n")
        self.assertEqual(self.out("cat <<EOF\nabc"), "abc\n")
        execution = self.context.run("set -x; echo a")
        self.assertRegex(execution.stderr, r"\A\++ echo a\n\Z")
        execution = self.context.run("echo b\necho c")
        self.assertNotIn("sbx", execution.stderr)
        self.assertRegex(execution.stderr, r"\A\++ echo b\n\++ echo c\n\Z")
        execution = self.context.run("set +x; continue")
        self.assertNotIn("sbx", execution.stderr)
        self.assertEqual(self.context.run("echo d").stderr, "")

    def test_the_last_background_process_is_known(self):
        pid = self.out("sleep 100 & echo $!").strip()
        self.assertEqual(self.out("echo $!").strip(), pid)
        self.assertEqual(self.out("kill $! && wait $!; echo $?"), "143\n")

    def test_without_temporary_files(self):
        self.assertEqual(self.out("export TMPDIR=/none; echo a"), "a\n")
        self.assertEqual(self.out("echo b # %s" % ("x" * 100_000)), "b\n")

    def test_garbage_on_the_socket_kills(self):
        execution = self.context.run("for f in /proc/$$/fd/*; do n=${f##*/}; ((n > 2)) && [[ $(readlink $f) == socket* ]] && echo junk >&$n; done; sleep 5", timeout=10)
        self.assertEqual(execution.death, -9)


if __name__ == "__main__":
    unittest.main()
