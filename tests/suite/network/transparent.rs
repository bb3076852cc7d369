//! Filtered networks of programs without proxy support: they reach what the rules name as if nothing were between, and
//! nothing else (the hostile tests of `filtered` are about both).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use serde_json::{Value, json};

use super::filtered::{gate_of, in_both_modes};
use super::{PROXY_VARIABLES, Place, allow, lan, sh, transparent, visitors, with};
use crate::fixture::{
    Held, Lan, Names, OTHERS, OUTSIDE, PATIENCE, Server, serve_pages, threads_of, wait_until,
};
use crate::walls::descriptors::STUCK;

/// The port of the web outside.
const PORT: u16 = 8080;

/// Runs a test in each kind of workspace.
pub fn in_all_modes(lan: &Lan, network: &Value, test: impl Fn(&Place<'_>, &Value)) {
    in_both_modes(lan, network, &test);
    let server = lan.start(Server::host());
    let offered = server.get("/health").json()["isolation"]["isolations"].clone();
    if offered == json!(["landlock", "namespaces"]) {
        let own = with(network.clone(), &json!({ "isolation": "namespaces" }));
        test(&Place::sandbox(&server, &own), &json!({}));
    }
}

/// A script of Python for a shell.
pub fn python(code: &str) -> String {
    format!("python3 - <<'END'\n{code}\nEND")
}

/// The same without the variables that tell of the proxy.
fn untold(script: &str) -> String {
    let proxies = PROXY_VARIABLES.join(" ");
    format!("unset {proxies} RES_OPTIONS\n{script}")
}

/// Verdicts, as host, port and rule.
pub fn verdicts(place: &Place<'_>, verdict: &str) -> Vec<(String, u64, String)> {
    let report = place.server.get(&place.target("network")).json();
    let recent = report["recent"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    recent
        .iter()
        .filter(|one| one["verdict"] == verdict)
        .map(|one| {
            let port = one["port"].as_u64().unwrap();
            (text(&one["host"]), port, text(&one["rule"]))
        })
        .collect()
}

#[test]
fn names_and_addresses_are_reached_without_a_proxy() {
    let lan = lan!();
    let names = Names::serve(&lan);
    names.set("good.example", &[OUTSIDE]);
    names.set("refused.example", &[OUTSIDE]);
    serve_pages(lan.listen(OUTSIDE, PORT), "the web");
    let network = transparent(&["good.example", "missing.example", OTHERS[0]]);
    in_all_modes(&lan, &network, |place, more| {
        // Whatever looks names up: glibc over UDP and over TCP, and whatever connects: with and without blocking.
        for options in ["", "RES_OPTIONS=use-vc"] {
            let curl = untold(&format!("{options} curl -sS http://good.example:{PORT}/a"));
            let page = sh(place, more, &curl);
            assert!(page.starts_with("the web\nGET /a HTTP/1.1\n"), "{page}");
        }
        let code = format!(
            "import asyncio, socket
async def main():
    reader, writer = await asyncio.open_connection('good.example', {PORT})
    writer.write(b'GET /b HTTP/1.1\\r\\n\\r\\n')
    print((await reader.readline() + await reader.readline()).decode(), end='')
    writer.close()
asyncio.run(main())
for address in {{found[4] for found in socket.getaddrinfo('good.example', {PORT}, type=socket.SOCK_STREAM)}}:
    socket.create_connection(address, timeout=10).close()
for name in ['missing.example', 'refused.example']:
    try: print(socket.getaddrinfo(name, 80))
    except socket.gaierror as error: print(name, error)"
        );
        let said = sh(place, more, &untold(&python(&code)));
        assert!(
            said.starts_with("HTTP/1.1 200 OK\r\nContent-Length:"),
            "{said}"
        );
        for name in ["missing.example", "refused.example"] {
            let expected = format!("{name} [Errno -2] Name or service not known");
            assert!(said.contains(&expected), "{said}");
        }
        // The variables are there for those who know them.
        let page = sh(
            place,
            more,
            &format!("curl -sS http://good.example:{PORT}/"),
        );
        assert!(page.starts_with("the web\n"), "{page}");

        let allowed = verdicts(place, "allowed");
        let expected = (
            "good.example".to_owned(),
            PORT.into(),
            "good.example".to_owned(),
        );
        assert!(
            allowed.len() >= 5 && allowed.iter().all(|one| *one == expected),
            "{allowed:?}"
        );
        let refused = verdicts(place, "refused");
        assert!(!refused.is_empty());
        let expected = ("refused.example".to_owned(), 53, "not in allow".to_owned());
        assert!(refused.iter().all(|one| *one == expected), "{refused:?}");
    });
    let asked = names.asked();
    assert!(
        !asked.iter().any(|name| name == "refused.example"),
        "{asked:?}"
    );
}

/// Programs that look names up with a resolver of their own, or over TCP.
#[test]
fn names_are_told_to_resolvers_of_all_kinds() {
    let lan = lan!();
    let names = Names::serve(&lan);
    names.set("good.example", &[OUTSIDE]);
    for number in 0..20 {
        names.set(&format!("n{number}.good.example"), &[OUTSIDE]);
    }
    let network = transparent(&["good.example", "*.good.example"]);
    in_all_modes(&lan, &network, |place, more| {
        let code = "import socket, struct
def question(name, kind=1):
    labels = b''.join(bytes([len(part)]) + part.encode() for part in name.split('.'))
    return struct.pack('>6H', 7, 0x100, 1, 0, 0, 0) + labels + b'\\0' + struct.pack('>2H', kind, 1)
def show(answer): return answer[3] & 15, struct.unpack('>H', answer[6:8])[0], answer[-4:].hex()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
udp.connect(('192.0.2.53', 53))
def ask(*words):
    udp.send(question(*words))
    return show(udp.recv(512))
for noise in [b'', b'x', b'\\xff' * 1000, question('a')[:-1]]: udp.send(noise) if noise else None
print(ask('good.example'), ask('GOOD.example'), ask('good.example', 28)[:2], ask('bad.example')[:2])
# More that have to be looked up than are at once; those that were not answered are asked again.
names = [f'n{number}.good.example' for number in range(20)]
found = {}
udp.settimeout(1)
while len(found) < 20:
    for name in names:
        if name not in found: udp.send(question(name))
    try:
        while True:
            answer = udp.recv(512)
            code, count, address = show(answer)
            name = next(name for name in names if question(name)[12:] == answer[12:-16])
            if code == 0 and count == 1: found[name] = address
    except TimeoutError: pass
print(len(set(found.values())))
print(ask('good.example', 33)[:2])
tcp = socket.create_connection(('192.0.2.53', 53))
def ask_stream(message):
    tcp.sendall(struct.pack('>H', len(message)) + message)
    length, = struct.unpack('>H', tcp.recv(2, socket.MSG_WAITALL))
    return tcp.recv(length, socket.MSG_WAITALL)
print(show(ask_stream(question('good.example'))), show(ask_stream(question('bad.example')))[:2])
tcp.sendall(b'\\0\\1x')
print(tcp.recv(1))";
        let said = sh(place, more, &untold(&python(code)));
        let good = "(0, 1, 'c6120001')";
        let expected = format!("{good} {good} (0, 0) (3, 0)\n20\n(4, 0)\n{good} (3, 0)\nb''\n");
        assert_eq!(said, expected);
    });
}

/// What a program says to the proxy about where it wants to go is judged, whoever says it.
#[test]
fn a_line_that_a_program_writes_itself_is_judged() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let other = lan.listen(OUTSIDE, 0);
    let forbidden = other.local_addr().unwrap();
    let ask = |place: &Place<'_>, more: &Value| {
        let gate = gate_of(place, more);
        let code = format!(
            "import socket
for line in [b'\\x00{web}\\n', b'\\x00{forbidden}\\n', b'\\x00{web}:1\\n', b'\\x00\\n', b'\\x00' * 400]:
    gate = socket.create_connection(('127.0.0.1', {gate}))
    try:
        gate.sendall(line + b'GET / HTTP/1.1\\r\\n\\r\\n')
        print(gate.recv(12))
    except OSError as error: print(error.strerror)"
        );
        sh(place, more, &untold(&python(&code)))
    };
    let reset = "Connection reset by peer\n".repeat(4);
    in_all_modes(&lan, &transparent(&[&web.to_string()]), |place, more| {
        assert_eq!(ask(place, more), format!("b'HTTP/1.1 200'\n{reset}"));
    });
    // A gate that leads nobody takes it for a request that is none.
    in_both_modes(&lan, &allow(&[&web.to_string()]), |place, more| {
        assert_eq!(ask(place, more), "b'HTTP/1.1 400'\n".repeat(5));
    });
    assert_eq!(visitors(&other), 0);
}

#[test]
fn what_is_refused_is_refused_at_once() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let closed = format!("{OUTSIDE}:9");
    let network = transparent(&[&web.to_string(), &closed]);
    in_all_modes(&lan, &network, |place, more| {
        let own = place.server.address.port();
        let code = format!(
            "import socket
def connect(host, port, kind=socket.SOCK_STREAM, block=True):
    client = socket.socket(socket.AF_INET, kind)
    client.setblocking(block)
    try: client.connect((host, port))
    except OSError as error: return error.strerror
    try: return client.recv(1)
    except OSError as error: return error.strerror
print(connect('{OUTSIDE}', 81), connect('{OUTSIDE}', 81, block=False))
# The server's own port, an address of names that was given to none, and a datagram.
print(connect('{INSIDE}', {own}), connect('198.18.0.77', 80))
print(connect('{OUTSIDE}', 123, socket.SOCK_DGRAM))
# Allowed, and nobody is there.
print(connect('{OUTSIDE}', 9))",
            INSIDE = crate::fixture::INSIDE,
        );
        let said = sh(place, more, &untold(&python(&code)));
        let denied = "Permission denied";
        let expected =
            format!("{denied} {denied}\n{denied} {denied}\n{denied}\nConnection reset by peer\n");
        assert_eq!(said, expected);
        let rules: Vec<_> = verdicts(place, "refused")
            .into_iter()
            .map(|(host, port, rule)| format!("{host}:{port} {rule}"))
            .collect();
        let expected = [
            format!("{OUTSIDE}:81 not in allow"),
            format!("{OUTSIDE}:81 not in allow"),
            format!("{}:{own} the server's own port", crate::fixture::INSIDE),
            "198.18.0.77:80 the name is not known any more".to_owned(),
        ];
        assert_eq!(rules, expected);
    });
}

#[test]
fn sockets_behave_as_ever() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    in_all_modes(&lan, &transparent(&[&web.to_string()]), |place, more| {
        let code = format!(
            "import os, select, socket, subprocess, sys, threading
web = ('{ip}', {port})
def get(client):
    client.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')
    return client.recv(12) == b'HTTP/1.1 200'
new = lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)
done = []
# A copy, options that were set before, a socket that does not block.
first = new()
second = first.dup()
first.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
second.connect(web)
done.append(get(first) and first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1)
quick = new()
quick.setblocking(False)
done.append(quick.connect_ex(web) == 0)
select.select([], [quick], [])
done.append(quick.gettimeout() == 0.0)
quick.setblocking(True)
done.append(get(quick))
try: quick.connect(web)
except OSError as error: done.append(error.errno in (13, 106))
# In a child, and by the program that it becomes.
third = new()
if os.fork() == 0:
    third.connect(web)
    os._exit(0)
os.wait()
done.append(get(third))
fourth = new()
os.set_inheritable(fourth.fileno(), True)
code = f'import socket; socket.socket(fileno={{fourth.fileno()}}).connect({{web}})'
done.append(subprocess.run([sys.executable, '-c', code], close_fds=False).returncode == 0 and get(fourth))
# Eight threads at once.
def run():
    for _ in range(5):
        client = new()
        client.connect(web)
        counts.append(get(client))
        client.close()
counts = []
threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
done.append(counts == [True] * 40)
# Unix sockets are the kernel's, and a socket that listens is closed when it is closed.
here = socket.socket(socket.AF_UNIX)
path = os.path.join(os.getcwd(), f'socket-{{os.getpid()}}')
here.bind(path)
here.listen()
client = socket.socket(socket.AF_UNIX)
client.connect(path)
here.accept()[0].sendall(b'x')
done.append(client.recv(1) == b'x')
os.unlink(path)
server = new()
server.listen()
port = server.getsockname()[1]
server.close()
listening = [line.split()[1] for line in open('/proc/net/tcp') if line.split()[3] == '0A']
done.append(all(not one.endswith(':%04X' % port) for one in listening))
# Only the last sockets that are not connected can be led.
many = [new() for _ in range(100)]
results = [client.connect_ex(web) for client in many]
done.append(all(results[:36]) and not any(results[36:]) and get(many[99]))
print(done)",
            ip = web.ip(),
            port = web.port(),
        );
        let said = sh(place, more, &untold(&python(&code)));
        let expected = "[True, True, True, True, True, True, True, True, True, True, True]\n";
        assert_eq!(said, expected);
    });
}

/// Runs a test in each kind of workspace, with a listener outside that its commands may connect to.
fn facing_a_listener(lan: &Lan, test: impl Fn(&Place<'_>, &Value, &TcpListener)) {
    let listener = lan.listen(OUTSIDE, 0);
    let network = transparent(&[&listener.local_addr().unwrap().to_string()]);
    in_all_modes(lan, &network, |place, more| test(place, more, &listener));
}

/// Expects a connection that ends after one byte, as those of [`one_byte`] do.
#[track_caller]
fn expect_one_byte(listener: &TcpListener) {
    let (mut client, _) = accepted(listener);
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"x");
}

/// Python that sends one byte over a connection of its own.
fn one_byte(listener: &TcpListener) -> String {
    let address = listener.local_addr().unwrap();
    let (ip, port) = (address.ip(), address.port());
    format!("with socket.create_connection(('{ip}', {port})) as client: client.sendall(b'x')")
}

#[test]
fn a_connection_is_closed_when_the_program_closes_it() {
    let lan = lan!();
    facing_a_listener(&lan, |place, more, listener| {
        let code = format!(
            "import socket, time
{}
time.sleep(1000)",
            one_byte(listener)
        );
        let body = with(json!({ "cmd": untold(&python(&code)) }), more);
        let reply = place.post("processes", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        expect_one_byte(listener);
    });
}

/// Nobody has their sockets any more when the server accepts them, so it cannot ask whose they are.
#[test]
fn what_is_sent_over_connections_that_are_closed_at_once_arrives() {
    const CONNECTIONS: usize = 500;
    let lan = lan!();
    facing_a_listener(&lan, |place, more, listener| {
        let code = format!(
            "import socket
for number in range({CONNECTIONS}):
    {}
print('sent')",
            one_byte(listener)
        );
        thread::scope(|scope| {
            scope.spawn(|| (0..CONNECTIONS).for_each(|_| expect_one_byte(listener)));
            assert_eq!(sh(place, more, &untold(&python(&code))), "sent\n");
        });
    });
}

/// The next connection, which comes soon.
fn accepted(listener: &TcpListener) -> (TcpStream, std::net::SocketAddr) {
    listener.set_nonblocking(true).unwrap();
    let mut found = None;
    wait_until("somebody connects", PATIENCE, || {
        found = listener.accept().ok();
        found.is_some()
    });
    let (client, address) = found.unwrap();
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    (client, address)
}

/// The server reads where it wants to go from its memory, which is its own; the kernel then says what it says without that.
#[test]
fn a_program_that_shows_its_memory_to_nobody_is_refused() {
    let lan = lan!();
    let web = lan.listen(OUTSIDE, 0);
    let address = web.local_addr().unwrap();
    let server = lan.start(Server::host());
    let place = Place::sandbox(&server, &transparent(&[&address.to_string()]));
    let code = format!(
        "import ctypes, socket
client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
ctypes.CDLL(None).prctl(4, 0)
try: client.connect(('{}', {}))
except OSError as error: print(error.strerror)",
        address.ip(),
        address.port(),
    );
    let said = sh(&place, &json!({}), &untold(&python(&code)));
    assert_eq!(said, "Permission denied\n");
    assert_eq!(visitors(&web), 0);
}

/// A proxy of the client's own looks the names up.
#[test]
fn a_proxy_of_ones_own_is_told_names() {
    let lan = lan!();
    let names = Names::serve(&lan);
    let proxy = lan.listen(OUTSIDE, 0);
    let url = format!("http://{}", proxy.local_addr().unwrap());
    let mut network = transparent(&["unknown.example"]);
    network["network"]["proxy"] = json!(url);
    in_all_modes(&lan, &network, |place, more| {
        let script = untold("curl -sS --max-time 60 http://unknown.example:8080/");
        let body = with(json!({ "cmd": script, "id": "client" }), more);
        assert_eq!(place.post("processes", &body).status, 200);
        let (mut client, _) = accepted(&proxy);
        let mut request = vec![0; 40];
        client.read_exact(&mut request).unwrap();
        let request = String::from_utf8(request).unwrap();
        assert!(
            request.starts_with("CONNECT unknown.example:8080 HTTP/1.1\r\n"),
            "{request}"
        );
        let _ = client.write_all(b"HTTP/1.1 502 no\r\n\r\n");
    });
    assert_eq!(names.asked(), Vec::<String>::new());
}

/// A descriptor that is sent with a question is closed by whoever receives it.
#[test]
fn a_descriptor_that_is_sent_with_a_question_holds_nobody_up() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    // It accepts nobody, so what is sent to it stays where it is.
    let deaf = lan.listen(OUTSIDE, 0);
    let deaf_address = deaf.local_addr().unwrap();
    let network = transparent(&[&web.to_string(), &deaf_address.to_string()]);
    in_all_modes(&lan, &network, |place, more| {
        let code = format!(
            "{STUCK}
import errno
web, deaf = ('{ip}', {web}), ('{ip}', {deaf})
def get():
    client = socket.create_connection(web, timeout=20)
    client.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')
    return client.recv(12) == b'HTTP/1.1 200'
new = lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sockets = []
try:
    while len(sockets) < 200: sockets.append(new())
except OSError as error: print(error.errno == errno.EMFILE, len(sockets))
for udp in sockets: udp.close()
while True:
    try: sockets = [new() for _ in range(40)]; break
    except OSError: time.sleep(0.05)
for udp in sockets: udp.connect(('192.0.2.53', 53))
# A process that exits does not wait: whoever closes the connection afterwards does.
if os.fork() == 0:
    full = socket.create_connection(deaf)
    full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 600))
    full.settimeout(2)
    try:
        while True: full.send(b'x' * 65536)
    except TimeoutError: pass
    for udp in sockets:
        udp.send(b'no question')
        give(udp, full)
    os._exit(0)
os.wait()
print(get())
for udp in sockets: udp.close()
while True:
    try: sockets = [new() for _ in range(64)]; break
    except OSError: time.sleep(0.05)
print(get())",
            ip = OUTSIDE,
            web = web.port(),
            deaf = deaf_address.port(),
        );
        let said = sh(place, more, &untold(&python(&code)));
        assert_eq!(said, "True 64\nTrue\nTrue\n");
    });
    drop(deaf);
}

/// The server connects sockets that their programs have too, and those decide how long a handshake takes.
#[test]
fn a_connection_that_is_never_made_holds_nobody_up() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let network = transparent(&[&web.to_string()]);
    in_all_modes(&lan, &network, |place, more| {
        let quiet = place.sandbox.as_ref().map(|_| Held::by(place.server));
        let code = format!(
            "import ctypes, errno, socket, struct, threading
IP_MINTTL, TCP_SYNCNT, TCP_USER_TIMEOUT, SO_ATTACH_FILTER = 21, 7, 18, 26
web = ('{ip}', {port})
def deaf(way):
    client = socket.socket()
    # A filter that drops every packet. A sandbox gets none, and elsewhere some kernels let only privileged programs
    # have one.
    nothing = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))
    program = struct.pack('HxxxxxxP', 1, ctypes.addressof(nothing))
    try:
        if way == 'filter': client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError: way = 'ttl'
    if way == 'ttl': client.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 255)
    client.setsockopt(socket.IPPROTO_TCP, TCP_SYNCNT, 127)
    client.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 2**31 - 1)
    return client
for way in ['ttl', 'filter']:
    for blocks in [True, False]:
        client = deaf(way)
        client.setblocking(blocks)
        print(way, errno.errorcode[client.connect_ex(web)], flush=True)
# One that begins to block when the server has looked.
client = deaf('ttl')
def flip():
    for _ in range(20000): client.setblocking(False); client.setblocking(True)
flipping = threading.Thread(target=flip)
flipping.start()
print({{errno.errorcode[client.connect_ex(web)] for _ in range(5)}} <= {{'ETIMEDOUT', 'EALREADY', 'EACCES', 'EINVAL'}})
flipping.join()
# It is as it was, and can be connected once it listens to answers.
client = deaf('ttl')
client.connect_ex(web)
client.setsockopt(socket.IPPROTO_IP, IP_MINTTL, 0)
print(client.connect_ex(web))",
            ip = web.ip(),
            port = web.port(),
        );
        let said = sh(place, more, &untold(&python(&code)));
        let expected =
            "ttl ETIMEDOUT\nttl ETIMEDOUT\nfilter ETIMEDOUT\nfilter ETIMEDOUT\nTrue\n0\n";
        assert_eq!(said, expected);
        let request = format!("curl -sS http://{}:{}/", web.ip(), web.port());
        assert!(sh(place, more, &untold(&request)).starts_with("the web"));
        if let (Some(sandbox), Some(quiet)) = (&place.sandbox, quiet) {
            let deleted =
                place
                    .server
                    .request("DELETE", &format!("/v1/sandboxes/{}", sandbox.id), b"");
            assert_eq!(deleted.status, 200);
            quiet.await_of(place.server);
        }
    });
}

/// A look-up that nobody answers takes a thread for seconds, whatever becomes of the run that asked.
#[test]
fn look_ups_of_former_runs_count() {
    let lan = lan!();
    let silent = lan
        .outside
        .run(|| std::net::UdpSocket::bind((OUTSIDE, 53)).unwrap());
    let server = lan.start(Server::host());
    let sandbox = server.sandbox_with(&transparent(&["*.slow.example"]));
    let code = "import socket, struct, os
def question(name):
    labels = b''.join(bytes([len(part)]) + part.encode() for part in name.split('.'))
    return os.urandom(2) + struct.pack('>5H', 0x100, 1, 0, 0, 0) + labels + b'\\0' + struct.pack('>2H', 1, 1)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.connect(('192.0.2.53', 53))
for number in range(16): udp.send(question(f'n{os.urandom(4).hex()}.slow.example'))";
    let threads = || threads_of(server.inner_pid(), "network").len();
    for _ in 0..6 {
        sandbox.sh(&untold(&python(code)));
        for (change, body) in [("pause", json!({ "keep": "files" })), ("resume", json!({}))] {
            let reply = sandbox.post(change, &body);
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
    }
    // Besides those that lead.
    let most = threads();
    assert!((1..=16 + 8).contains(&most), "{most}");
    drop(silent);
}
