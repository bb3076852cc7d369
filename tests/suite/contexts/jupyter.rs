//! Contexts whose code a Jupyter kernel runs: on a dedicated machine and in a sandbox.
//!
//! The bridge is tested in `tests/bridges/test_jupyter.py`; here is what needs the server: that a kernel runs within a
//! sandbox's walls, that its death is the context's, and that nothing of it stays.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{PATH, lend, modules_of, packages};
use crate::fixture::{
    PATIENCE, Reply, Sandbox, Server, TempDir, assert_error, is_alive, is_root, names_in,
    output_of, wait_until,
};
use crate::skip;

/// A workspace of either mode.
struct Place<'a> {
    server: &'a Server,
    sandbox: Option<&'a Sandbox<'a>>,
    /// Where Python finds `jupyter_client` and ipykernel.
    packages: PathBuf,
}

/// Runs a test on a dedicated machine and in a sandbox.
fn everywhere(test: impl Fn(&Place<'_>)) {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => skip!("no Jupyter: {reason}"),
    };
    let server = Server::builder().env("PATH", PATH).start();
    test(&Place {
        server: &server,
        sandbox: None,
        packages: modules_of(&packages),
    });
    if is_root() {
        let server = Server::host().env("PATH", PATH).start();
        let sandbox = server.sandbox();
        let copy = sandbox.home.join("packages");
        lend(&packages, &copy);
        test(&Place {
            server: &server,
            sandbox: Some(&sandbox),
            packages: modules_of(&copy),
        });
    }
}

impl Place<'_> {
    fn target(&self, route: &str) -> String {
        match self.sandbox {
            None => format!("/v1/{route}"),
            Some(sandbox) => sandbox.target(route),
        }
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Reply {
        self.server.post(&self.target(route), body)
    }

    /// Asks for a context of a kernel.
    #[track_caller]
    fn ask(&self, kernel: &str, more: &[(&str, &str)]) -> Reply {
        let mut environment = json!({ "PYTHONPATH": self.packages });
        for (name, value) in more {
            environment[*name] = json!(value);
        }
        let backend = format!("jupyter:{kernel}");
        self.post(
            "contexts",
            &json!({ "backend": backend, "env": environment }),
        )
    }

    /// Makes a context and returns it.
    #[track_caller]
    fn make(&self, more: &[(&str, &str)]) -> Value {
        let reply = self.ask("python3", more);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Runs code in a context to its end.
    #[track_caller]
    fn run(&self, context: &Value, body: &Value) -> Vec<Value> {
        let id = context["id"].as_str().unwrap();
        let target = self.target(&format!("contexts/{id}/execute"));
        let stream = self
            .server
            .stream("POST", &target, body.to_string().as_bytes());
        stream.collect()
    }

    /// The text of the result of code.
    #[track_caller]
    fn value(&self, context: &Value, code: &str) -> String {
        let events = self.run(context, &json!({ "code": code }));
        let text = &of(&events, "result")["data"]["text/plain"];
        text.as_str().unwrap_or_default().to_owned()
    }
}

/// The first event of a kind, or null.
fn of<'a>(events: &'a [Value], kind: &str) -> &'a Value {
    let mut events = events.iter();
    events
        .find(|event| event["event"] == kind)
        .unwrap_or(&Value::Null)
}

#[test]
fn a_kernel_keeps_state_and_shows_what_it_shows() {
    everywhere(|place| {
        let context = place.make(&[]);
        assert_eq!(context["backend"], "jupyter:python3");
        let code = "x = 20\nprint('shown', flush=True)\ndisplay({'a': 1})\nx + 1";
        let events = place.run(&context, &json!({ "code": code }));
        let order: Vec<_> = ["stdout", "display", "result", "end"]
            .map(|kind| of(&events, kind)["seq"].as_u64())
            .into();
        assert!(order.is_sorted() && !order.contains(&None), "{events:?}");
        let shown = String::from_utf8(output_of(&events, "stdout", 0).data).unwrap();
        assert_eq!(shown, "shown\n", "{events:?}");
        assert_eq!(place.value(&context, "x * 2"), "40");

        let events = place.run(&context, &json!({ "code": "1 / 0" }));
        assert_eq!(of(&events, "error")["name"], "ZeroDivisionError");
        assert_eq!(of(&events, "end")["reason"], "error");
        let events = place.run(
            &context,
            &json!({ "code": "input('? ')", "stdin": "typed\n" }),
        );
        assert_eq!(of(&events, "result")["data"]["text/plain"], "'typed'");
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn a_timeout_interrupts_the_kernel_and_keeps_its_state() {
    everywhere(|place| {
        let context = place.make(&[]);
        assert_eq!(place.value(&context, "kept = 5; kept"), "5");
        let body =
            json!({ "code": "import time; time.sleep(100)", "timeout": 1, "kill_after": 15 });
        let events = place.run(&context, &body);
        let end = of(&events, "end");
        assert_eq!(end["reason"], "timeout", "{events:?}");
        assert_eq!(end["state"], "kept", "{events:?}");
        assert_eq!(place.value(&context, "kept"), "5");
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn a_dead_kernel_is_a_dead_context() {
    everywhere(|place| {
        let context = place.make(&[]);
        let events = place.run(&context, &json!({ "code": "import os; os._exit(3)" }));
        let end = of(&events, "end");
        assert_eq!(end["reason"], "died", "{events:?}");
        assert_eq!(end["exit_code"], 3, "{events:?}");
        let id = context["id"].as_str().unwrap();
        let reply = place.post(&format!("contexts/{id}/execute"), &json!({ "code": "1" }));
        assert_error(&reply, 409, "context_dead");
        let reply = place.post(&format!("contexts/{id}/restart"), &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(place.value(&context, "6 * 7"), "42");
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn nothing_of_a_kernel_stays() {
    everywhere(|place| {
        let folder = TempDir::new();
        let temporary = match place.sandbox {
            None => folder.path().to_owned(),
            Some(sandbox) => sandbox.home.join("tmp-of-kernel"),
        };
        if place.sandbox.is_some() {
            let path = temporary.to_str().unwrap();
            let body = json!({ "cmd": format!("mkdir '{path}'") });
            place.post("exec", &body);
        }
        let context = place.make(&[("TMPDIR", temporary.to_str().unwrap())]);
        let kernel = place.value(
            &context,
            "import os; open('/proc/self/stat').read().split()[0]",
        );
        assert!(names_in(&temporary).is_empty());
        let kernel: i32 = kernel.trim_matches('\'').parse().unwrap();
        assert!(is_alive(kernel));
        let id = context["id"].as_str().unwrap();
        let deleted = place
            .server
            .delete(&place.target(&format!("contexts/{id}")));
        assert_eq!(deleted.status, 200);
        wait_until("the kernel has ended", PATIENCE, || !is_alive(kernel));
        assert!(names_in(&temporary).is_empty());
    });
}

#[test]
fn a_kernel_that_is_not_there_is_refused_with_a_sentence() {
    everywhere(|place| {
        let reply = place.ask("no-such", &[]);
        assert_error(&reply, 400, "no_backend");
        let text = reply.text();
        assert!(text.contains("cannot start the kernel no-such: "), "{text}");
        for backend in ["jupyter:", "jupyter:a/b", "jupyter:\u{e9}"] {
            let reply = place.post("contexts", &json!({ "backend": backend }));
            assert_error(&reply, 400, "bad_request");
        }
    });
}

#[test]
#[ignore = "keeps both processors busy: .ci/run runs it"]
fn each_kernel_has_a_default_context_of_its_own() {
    everywhere(|place| {
        let reply = place.post(
            "execute",
            &json!({ "code": "mine = 1", "backend": "plain" }),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        let body = json!({ "code": "'mine' in globals()", "backend": "jupyter:python3", "format": "simple" });
        // The system's Python may not have it: then the answer is no_backend, and never that of the other context.
        let reply = place.post("execute", &body);
        assert!(!reply.text().contains("True"), "{}", reply.text());
    });
}
