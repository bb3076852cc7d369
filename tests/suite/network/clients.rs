//! Real clients under an allow-list, by the variables that commands get: pip, uv, npm, git, curl, libraries of Python,
//! Node.js, Java, and a static program that knows no proxy. A host outside stands in for their servers.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::{PROXY_VARIABLES, Place, allow, lan, transparent};
use crate::client::environment;
use crate::contexts::{lend, modules_of};
use crate::fixture::{Lan, Names, OUTSIDE, Server, TempDir};
use crate::programs::python::WHEEL;
use crate::skip;
use crate::walls::probe::Plan;

/// The names of the servers.
const HOSTS: [&str; 5] = [
    "pypi.org",
    "files.pythonhosted.org",
    "registry.npmjs.org",
    "github.com",
    "plain.example",
];

/// `tests/client/internet.py`, on the host outside.
struct Internet {
    server: Child,
    directory: TempDir,
}

impl Internet {
    fn start(lan: &Lan) -> Self {
        let directory = TempDir::new();
        make_files(&directory);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client/internet.py");
        let [program, network] = lan.outside.words();
        let mut server = Command::new(program)
            .args([&network, "python3", script, &directory.join(""), OUTSIDE])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = server.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { server, directory }
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// What the servers have: a certificate, a wheel, a package of npm, a repository.
fn make_files(directory: &TempDir) {
    let names = HOSTS.map(|host| format!("DNS:{host}")).join(",");
    let script = format!(
        "set -e
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority \
            -addext basicConstraints=critical,CA:TRUE -keyout authority-key.pem -out authority.pem
        openssl req -newkey rsa:2048 -nodes -subj /CN=internet -keyout key.pem -out request.pem
        echo 'subjectAltName={names}' > extensions
        echo 'basicConstraints=CA:FALSE' >> extensions
        openssl x509 -req -in request.pem -CA authority.pem -CAkey authority-key.pem -CAcreateserial -days 2 \
            -extfile extensions -out certificate.pem
        mkdir package
        echo '{{\"name\":\"greeting\",\"version\":\"1.0.0\",\"main\":\"index.js\"}}' > package/package.json
        echo 'module.exports = \"hello\";' > package/index.js
        tar czf greeting-1.0.0.tgz package
        git init -q -b main work
        echo hello > work/file
        git -C work add file
        git -C work -c user.name=x -c user.email=x@example.com commit -q -m greeting
        git clone -q --bare work greeting.git
        git -C greeting.git update-server-info"
    );
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(directory.path());
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program}: {errors}");
    };
    run("sh", &["-c", &script]);
    run("python3", &["-c", WHEEL]);
}

/// The variables by which each client takes `certificate` as an authority.
fn trust_in(certificate: &str) -> Value {
    [
        "CURL_CA_BUNDLE",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "GIT_SSL_CAINFO",
        "NPM_CONFIG_CAFILE",
        "NODE_EXTRA_CA_CERTS",
    ]
    .into_iter()
    .map(|name| (name.to_owned(), json!(certificate)))
    .collect::<serde_json::Map<_, _>>()
    .into()
}

#[test]
fn clients_that_people_use_get_through_and_are_refused_with_a_reason() {
    check_clients(false);
}

/// The same clients without the variables.
#[test]
fn clients_that_are_told_of_no_proxy_get_through_where_it_is_transparent() {
    check_clients(true);
}

fn check_clients(is_transparent: bool) {
    let lan = lan!();
    let packages = match environment("internet", &["requests", "httpx", "uv"]) {
        Ok(python) => python.ancestors().nth(2).unwrap().to_owned(),
        Err(reason) => skip!("no clients: {reason}"),
    };
    let names = Names::serve(&lan);
    for host in HOSTS.into_iter().chain(["evil.example"]) {
        names.set(host, &[OUTSIDE]);
    }
    let internet = Internet::start(&lan);
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let server = lan.start(Server::host().env("PATH", path));
    let rules = ["@pypi", "@npm", "@github", "plain.example"];
    let network = if is_transparent {
        transparent(&rules)
    } else {
        allow(&rules)
    };
    let place = Place::sandbox(&server, &network);
    let home = &place.sandbox.as_ref().unwrap().home;
    let ours = home.join("packages");
    lend(&packages, &ours);
    let modules = modules_of(&ours);
    let certificate = home.join("authority.pem");
    std::fs::copy(internet.directory.join("authority.pem"), &certificate).unwrap();
    readable(&certificate);
    let trust = trust_in(certificate.to_str().unwrap());
    let run = |script: &str| {
        let mut env = trust.clone();
        env["PYTHONPATH"] = json!(modules);
        if is_transparent {
            for name in PROXY_VARIABLES {
                env[name] = Value::Null;
            }
        }
        let body = json!({ "cmd": ["sh", "-c", script], "env": env, "timeout": 100 });
        let outcome = place.run(&body);
        (
            outcome.code(),
            format!("{}{}", outcome.stdout, outcome.stderr),
        )
    };
    let uv = ours.join("bin/uv");
    let uv = uv.to_str().unwrap();
    let works = [
        ("curl", "curl -sS https://plain.example/; curl -sS http://plain.example/".to_owned(), "a page\na page\n"),
        ("pip", "python3 -m venv v && PYTHONPATH= v/bin/pip install -q --disable-pip-version-check greeting \
                 && PYTHONPATH= v/bin/python -c 'import greeting; print(greeting.__file__)'".to_owned(), "greeting"),
        ("uv", format!("{uv} pip install -q --no-cache --target u greeting && ls u"), "greeting"),
        ("npm", "npm install --silent --no-audit --no-fund greeting && node -p 'require(\"greeting\")'".to_owned(), "hello"),
        ("git", "git clone -q https://github.com/greeting.git cloned && cat cloned/file".to_owned(), "hello"),
        ("urllib", python("import urllib.request as r; print(r.urlopen('https://plain.example/').read())"), "a page"),
        ("requests", python("import requests; print(requests.get('https://plain.example/').text)"), "a page"),
        ("httpx", python("import httpx; print(httpx.get('https://plain.example/').text)"), "a page"),
    ];
    for (client, script, expected) in works {
        let (code, text) = run(&script);
        assert_eq!(code, Some(0), "{client}: {text}");
        assert!(text.contains(expected), "{client}: {text}");
    }
    // Node.js that knows the variables.
    let fetch = "fetch('https://plain.example/').then((answer) => answer.text()).then(console.log)";
    let (_, version) = run("node -p 'process.versions.node.split(\".\")[0]'");
    let (code, text) = run(&format!("node -e \"{fetch}\""));
    if is_transparent || version.trim().parse::<u32>().unwrap() >= 24 {
        assert!(text.contains("a page"), "{text}");
    } else {
        assert_eq!(code, Some(1), "{text}");
    }
    // Clients that look the name up themselves get no such name.
    let texts: &[&str] = if is_transparent {
        &["not known", "Could not resolve"]
    } else {
        &["403"]
    };
    check_refusals(&run, texts);
    // pip says only that it found nothing.
    let index = "--retries 0 --index-url https://evil.example/simple/";
    let (code, text) = run(&format!("PYTHONPATH= v/bin/pip download {index} greeting"));
    assert_ne!(code, Some(0), "{text}");
    assert!(!names.asked().contains(&"evil.example".to_owned()));
    // A static program that looks for no variable.
    let mut plan = Plan::default();
    plan.add(&["tcp-connect", &format!("{OUTSIDE}:443")], "EACCES");
    place.check(&plan, &json!({}));
}

/// Clients that ask for what is not allowed say why they fail, by one of the texts.
fn check_refusals(run: &impl Fn(&str) -> (Option<i64>, String), texts: &[&str]) {
    let refused = [
        ("curl", "curl -sS https://evil.example/".to_owned()),
        (
            "git",
            "git clone -q https://evil.example/greeting.git".to_owned(),
        ),
        (
            "urllib",
            python("import urllib.request as r; r.urlopen('https://evil.example/')"),
        ),
        (
            "requests",
            python("import requests; requests.get('https://evil.example/')"),
        ),
        (
            "httpx",
            python("import httpx; httpx.get('https://evil.example/')"),
        ),
    ];
    for (client, script) in refused {
        let (code, text) = run(&script);
        assert_ne!(code, Some(0), "{client}: {text}");
        assert!(
            texts.iter().any(|known| text.contains(known)),
            "{client}: {text}"
        );
    }
}

/// The same for Java, whose programs take the proxy as properties.
#[test]
fn a_program_of_java_gets_through_by_properties() {
    let Some(lan) = Lan::new() else {
        skip!("needs root, and ip of iproute2, to make hosts");
    };
    if !Path::new("/usr/bin/java").exists() {
        skip!("there is no Java");
    }
    let names = Names::serve(&lan);
    names.set("plain.example", &[OUTSIDE]);
    let _internet = Internet::start(&lan);
    let server = lan.start(Server::host());
    let network = json!({ "mode": "allowlist", "allow": ["plain.example"] });
    let place = Place::sandbox(&server, &json!({ "network": network }));
    let source = "import java.net.URI;
        public class Fetch {
            public static void main(String[] words) throws Exception {
                System.out.write(URI.create(words[0]).toURL().openStream().readAllBytes());
                System.out.flush();
            }
        }";
    let file = place.path("Fetch.java");
    std::fs::write(&file, source).unwrap();
    readable(Path::new(&file));
    let run = |host: &str| {
        let java = "java -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=${HTTP_PROXY##*:} Fetch.java";
        place.exec(&json!(format!("{java} http://{host}/")), &json!({}))
    };
    let page = run("plain.example");
    assert_eq!(page.stdout, "a page\n", "{page:?}");
    let refused = run("evil.example");
    assert!(refused.stderr.contains("403"), "{refused:?}");
}

fn python(code: &str) -> String {
    format!("/usr/bin/python3 -c \"{code}\"")
}

fn readable(path: &Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(path, mode).unwrap();
}
