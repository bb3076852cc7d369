//! What programs may expect and do not get in a sandbox, exactly, and what does the same instead.

use std::path::Path;

use serde_json::json;

use super::{complaint, find, place, python, run};
use crate::fixture::{PATIENCE, wait_until};
use crate::skip;

/// A Python program's `attempt(name, function)`: prints what came of it.
const ATTEMPT: &str = "import os
def attempt(name, function):
    try:
        result = function()
        print(name, 'works' if result is None else result)
    except OSError as error:
        import errno
        print(name, errno.errorcode[error.errno])
";

/// Those of the directories that this machine has.
fn there<'a>(directories: &[&'a str]) -> Vec<&'a str> {
    let mut there = directories.to_vec();
    there.retain(|path| Path::new(path).is_dir());
    there
}

#[test]
fn only_the_home_can_be_written() {
    place!(server, sandbox);
    for directory in there(&["/tmp", "/var/tmp", "/dev/shm", "/opt"]) {
        let error = complaint(&sandbox, &format!("echo > {directory}/file"));
        assert!(error.contains("Permission denied"), "{directory}: {error}");
    }
    sandbox.sh("echo > file; echo > $TMPDIR/file");
}

#[test]
fn only_directories_of_programs_can_be_read() {
    place!(server, sandbox);
    let closed = [
        "/", "/dev", "/tmp", "/var", "/run", "/root", "/home", "/srv",
    ];
    for path in there(&closed) {
        let error = complaint(&sandbox, &format!("ls {path}"));
        assert!(error.contains("ermission denied"), "{path}: {error}");
    }
    sandbox.sh("ls /usr /etc /bin/ /proc /sys > /dev/null");
    // Names outside can be asked for, where the machine's permissions let everybody.
    sandbox.sh("test -d /tmp && test -e /dev/shm");
}

/// Everything in multiprocessing that is a semaphore or shared memory: both are files in /dev/shm.
#[test]
fn posix_semaphores_and_shared_memory_are_refused() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import multiprocessing, multiprocessing.pool
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory

if __name__ == '__main__':
    attempt('Lock', multiprocessing.Lock)
    attempt('Queue', multiprocessing.Queue)
    attempt('Pool', lambda: multiprocessing.Pool(2))
    attempt('ThreadPool', lambda: multiprocessing.pool.ThreadPool(2))
    attempt('ProcessPoolExecutor', lambda: ProcessPoolExecutor(2).submit(os.getpid))
    attempt('Value', lambda: multiprocessing.Value('i', 0))
    attempt('SharedMemory', lambda: shared_memory.SharedMemory(create=True, size=10))
"
        ),
    );
    assert_eq!(
        seen,
        "Lock EACCES\nQueue EACCES\nPool EACCES\nThreadPool EACCES\nProcessPoolExecutor EACCES\n\
         Value EACCES\nSharedMemory EACCES\n"
    );
}

#[test]
fn tcp_ports_cannot_be_chosen_to_listen_on() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import socket
def tcp(address):
    socket.socket().bind(address)
attempt('any', lambda: tcp(('0.0.0.0', 8000)))
attempt('loopback', lambda: tcp(('127.0.0.1', 0)))
attempt('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).bind(('127.0.0.1', 0)))
attempt('unix', lambda: socket.socket(socket.AF_UNIX).bind('socket'))
attempt('without bind', lambda: socket.socket().listen())
"
        ),
    );
    assert_eq!(
        seen,
        "any EACCES\nloopback EACCES\nudp works\nunix works\nwithout bind works\n"
    );
}

#[test]
fn raw_sockets_and_ping_are_refused() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import socket
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close())
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close())
"
        ),
    );
    assert_eq!(seen, "raw EPERM\npacket EAFNOSUPPORT\n");
}

#[test]
fn abstract_sockets_and_debuggers_end_at_the_command() {
    place!(server, sandbox, "python3");
    let within = python(
        &sandbox,
        "import os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind('\\0within' + os.environ['SBX_SANDBOX_ID'])
listener.listen()
socket.socket(socket.AF_UNIX).connect(listener.getsockname())
print('connected')
",
    );
    assert_eq!(within, "connected\n");
    let listen = "import os, socket, time
s = socket.socket(socket.AF_UNIX)
s.bind('\\0' + os.environ['SBX_SANDBOX_ID'])
s.listen()
u = socket.socket(socket.AF_UNIX)
u.bind('socket')
u.listen()
open('ready', 'w').close()
time.sleep(1000)
";
    let other = sandbox.spawn(&json!({ "cmd": ["python3", "-c", listen] }));
    wait_until("the other command listens", PATIENCE, || {
        sandbox.home.join("ready").exists()
    });
    let pid = &other["pid"];
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import ctypes, socket
def connect(name):
    socket.socket(socket.AF_UNIX).connect(name)
def trace():
    libc = ctypes.CDLL(None, use_errno=True)
    PTRACE_SEIZE = 0x4206
    if libc.ptrace(PTRACE_SEIZE, {pid}, None, None) != 0:
        raise OSError(ctypes.get_errno(), 'ptrace')
attempt('abstract', lambda: connect('\\0' + os.environ['SBX_SANDBOX_ID']))
attempt('path', lambda: connect('socket'))
attempt('trace', trace)
attempt('environ', lambda: open('/proc/{pid}/environ').close())
attempt('signal', lambda: os.kill({pid}, 0))
"
        ),
    );
    assert_eq!(
        seen,
        "abstract EPERM\npath works\ntrace EPERM\nenviron EACCES\nsignal works\n"
    );
}

#[test]
fn system_v_ipc_and_message_queues_are_missing() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
attempt('shmget', lambda: call(libc.shmget, 0, 4096, 0o1600))
attempt('semget', lambda: call(libc.semget, 0, 1, 0o1600))
attempt('msgget', lambda: call(libc.msgget, 0, 0o1600))
"
        ),
    );
    assert_eq!(seen, "shmget ENOSYS\nsemget ENOSYS\nmsgget ENOSYS\n");
}

#[test]
fn sandboxes_of_other_programs_cannot_be_made() {
    place!(server, sandbox, "unshare");
    for options in [
        "--user",
        "--user --map-root-user",
        "--mount",
        "--net",
        "--pid --fork",
    ] {
        let error = complaint(&sandbox, &format!("unshare {options} true"));
        assert!(
            error.contains("Operation not permitted"),
            "{options}: {error}"
        );
    }
    if find(&sandbox, "bwrap").is_ok() {
        complaint(&sandbox, "bwrap --ro-bind / / true");
    }
}

/// Programs that find none go on without, or say which switch does.
#[test]
fn filters_of_calls_and_of_sockets_cannot_be_attached() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import ctypes, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
allow = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
program = struct.pack('HxxxxxxP', 1, ctypes.addressof(allow))
def prctl(*arguments):
    if libc.prctl(*arguments) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
PR_SET_NAME, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SO_ATTACH_FILTER = 15, 22, 2, 26
attempt('calls', lambda: prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program))
attempt('packets', lambda: socket.socket().setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program))
attempt('name', lambda: prctl(PR_SET_NAME, b'name'))
"
        ),
    );
    assert_eq!(seen, "calls EINVAL\npackets ENOPROTOOPT\nname works\n");
}

#[test]
fn nobody_becomes_root() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
attempt('setuid', lambda: os.setuid(0))
attempt('chroot', lambda: os.chroot('.'))
attempt('device', lambda: os.mknod('device', 0o600 | 0o20000, os.makedev(1, 3)))
attempt('fifo', lambda: os.mkfifo('fifo'))
attempt('give away', lambda: os.chown('fifo', 0, 0))
attempt('hard link', lambda: os.link('/etc/passwd', 'passwd'))
attempt('symbolic link', lambda: os.symlink('/etc/passwd', 'link'))
print(open('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0])
"
        ),
    );
    // /etc may be another file system.
    assert_eq!(
        seen.replace("EXDEV", "EPERM"),
        "setuid EPERM\nchroot EPERM\ndevice EPERM\nfifo works\ngive away EPERM\nhard link EPERM\n\
         symbolic link works\n1\n"
    );
}

#[test]
fn limits_and_priorities_cannot_be_raised() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        &format!(
            "{ATTEMPT}
import resource
def raised(which):
    hard = resource.getrlimit(which)[1]
    try:
        resource.setrlimit(which, (hard, hard + 1))
    except ValueError:
        raise PermissionError(1, 'refused')
attempt('processes', lambda: raised(resource.RLIMIT_NPROC))
attempt('files', lambda: raised(resource.RLIMIT_NOFILE))
attempt('core', lambda: raised(resource.RLIMIT_CORE))
print(resource.getrlimit(resource.RLIMIT_CORE))
attempt('nice', lambda: os.nice(-1))
attempt('real time', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt('idle', lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))
attempt('batch', lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)))
attempt('lower', lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, 60)))
"
        ),
    );
    assert_eq!(
        seen,
        "processes EPERM\nfiles EPERM\ncore works\n(1, 1)\nnice EPERM\nreal time EPERM\nidle EPERM\nbatch works\nlower works\n"
    );
}

#[test]
fn files_of_the_kernel_cannot_be_written() {
    place!(server, sandbox);
    for path in ["/proc/self/comm", "/proc/self/oom_score_adj"] {
        let error = complaint(&sandbox, &format!("echo 0 > {path}"));
        assert!(error.contains("Permission denied"), "{path}: {error}");
    }
}

/// The user has a number and no line in /etc/passwd.
#[test]
fn the_user_has_no_name_that_the_machine_knows() {
    place!(server, sandbox);
    assert_eq!(sandbox.sh("echo $USER $LOGNAME; cd; pwd; echo ~"), {
        let home = sandbox.home.display();
        format!("sandbox sandbox\n{home}\n{home}\n")
    });
    complaint(&sandbox, "whoami");
    if find(&sandbox, "ssh-keygen").is_ok() {
        let error = complaint(&sandbox, "ssh-keygen -q -t ed25519 -N '' -f key");
        assert!(error.contains("No user exists for uid"), "{error}");
    }
    if find(&sandbox, "node").is_ok() {
        let error = complaint(&sandbox, "node -e 'os.userInfo()'");
        assert!(error.contains("uv_os_get_passwd"), "{error}");
    }
}

/// Nothing of the machine's environment is passed on but where programs are.
#[test]
fn the_variables_of_the_image_are_not_there() {
    place!(server, sandbox);
    let with_env = server.sandbox_with(&json!({ "env": { "LANG": "de_DE", "N": 7 } }));
    assert_eq!(
        run(
            &with_env,
            &json!({ "cmd": "echo $LANG $N $CARGO_MANIFEST_DIR" })
        ),
        "de_DE 7\n"
    );
    assert_eq!(sandbox.sh("echo $LANG"), "C.UTF-8\n");
    let names = sandbox.sh("env | cut -d= -f1 | grep -v -x -e PWD -e _ -e SHLVL | sort");
    assert_eq!(
        names.split_whitespace().collect::<Vec<_>>(),
        [
            "HOME",
            "LANG",
            "LOGNAME",
            "PATH",
            "SBX_PROXY_DIR",
            "SBX_SANDBOX_ID",
            "TMPDIR",
            "USER"
        ]
    );
}

/// `/var` is closed, where package managers keep what they know.
#[test]
fn packages_of_the_system_cannot_be_managed() {
    place!(server, sandbox, "dpkg");
    if !Path::new("/var/lib/dpkg/status").exists() {
        skip!("this machine's packages are not known to it");
    }
    let error = complaint(&sandbox, "dpkg -l");
    assert!(error.contains("Permission denied"), "{error}");
}
