//! `GET /openapi.json`: the contract with clients, in the format of `OpenAPI` 3.1.
//!
//! It is written by hand, because it says more than code could derive: what values mean, and which
//! errors to expect. Tests compare it with the server: here paths, methods, query parameters and
//! error codes; in `tests/suite/contract.rs` requests that are made from it.

use std::sync::LazyLock;

use super::call::{Answer, Call};
use crate::codec::carried::carried;
use crate::http::{Body, Response};

/// Answers with the document. It needs no token: every server has the same one, and it says nothing
/// about this machine.
pub(super) fn answer(_: &Call<'_, '_>) -> Answer {
    Ok(Response::new(200, Body::Bytes(document())).with_header("Content-Type", "application/json"))
}

/// Unpacked once: it takes milliseconds, and anybody can ask for it.
static DOCUMENT: LazyLock<Vec<u8>> = LazyLock::new(|| carried!("openapi.json"));

fn document() -> Vec<u8> {
    DOCUMENT.clone()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::super::routes::{ALIASES, ROUTES};
    use super::*;

    /// The methods that a path of the contract can have.
    const ALL_METHODS: [&str; 8] = [
        "GET", "PUT", "POST", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE",
    ];

    /// The contract of the build that has all features.
    const WHOLE: &[u8] = include_bytes!("../../../openapi.json");

    /// The contract of this build.
    fn contract() -> Value {
        serde_json::from_slice(&document()).unwrap()
    }

    fn resolve<'a>(contract: &'a Value, value: &'a Value) -> &'a Value {
        match value["$ref"].as_str() {
            Some(reference) => contract.pointer(&reference[1..]).expect(reference),
            None => value,
        }
    }

    /// Each operation as `GET /v1/files/list`, with the names of its query parameters.
    type Operations = BTreeMap<String, BTreeSet<String>>;

    fn names(parameters: &[&str]) -> BTreeSet<String> {
        parameters.iter().map(|name| (*name).to_owned()).collect()
    }

    /// The operations of the contract, below each of its servers.
    fn promised() -> Operations {
        let contract = contract();
        let query = |holder: &Value| -> BTreeSet<String> {
            let parameters = holder["parameters"].as_array().into_iter().flatten();
            parameters
                .map(|parameter| resolve(&contract, parameter))
                .filter(|parameter| parameter["in"] == "query")
                .map(|parameter| parameter["name"].as_str().unwrap().to_owned())
                .collect()
        };
        let mut promised = BTreeMap::new();
        for (template, item) in contract["paths"].as_object().unwrap() {
            let item = resolve(&contract, item);
            let servers = item.get("servers").unwrap_or(&contract["servers"]);
            for server in servers.as_array().unwrap() {
                let base = server["url"].as_str().unwrap().trim_end_matches('/');
                for (method, operation) in item.as_object().unwrap() {
                    if ["parameters", "servers", "x-feature"].contains(&method.as_str()) {
                        continue;
                    }
                    let name = format!("{} {base}{template}", method.to_uppercase());
                    let parameters = &query(item) | &query(operation);
                    promised.insert(name, parameters);
                }
            }
        }
        promised
    }

    /// The operations of the route table, with the names that the contract has for parameters.
    fn routed() -> Operations {
        let mut routed = BTreeMap::new();
        for route in ROUTES.iter().copied().flatten() {
            let pattern = route
                .pattern
                .replace("{sandbox}", "{sandbox_id}")
                .replace("{snapshot}", "{snapshot_id}")
                .replace("{process}", "{process_id}")
                .replace("{context}", "{context_id}")
                .replace("{execution}", "{execution_id}")
                .replace("{watch}", "{watch_id}");
            let mut paths = vec![pattern.clone()];
            if !pattern.starts_with('/') {
                let mut inside = vec![pattern.clone()];
                for (alias, word) in ALIASES {
                    inside.extend(
                        pattern
                            .strip_prefix(word)
                            .map(|rest| format!("{alias}{rest}")),
                    );
                }
                // The path below a port may be absent.
                inside.extend(pattern.strip_suffix("/{path}").map(str::to_owned));
                let prefixes = ["/v1", "/v1/sandboxes/{sandbox_id}"];
                paths = prefixes
                    .iter()
                    .flat_map(|prefix| inside.iter().map(move |path| format!("{prefix}/{path}")))
                    .collect();
            }
            let methods = match route.methods {
                [] => &ALL_METHODS,
                methods => methods,
            };
            for path in &paths {
                for method in methods {
                    routed.insert(format!("{method} {path}"), names(route.parameters));
                }
            }
        }
        routed
    }

    #[test]
    fn the_contract_and_the_route_table_have_the_same_operations() {
        assert_eq!(promised(), routed());
    }

    /// The statuses and codes of all errors that the sources make: wherever a status is followed by a
    /// code.
    fn made() -> BTreeSet<(u16, String)> {
        let mut made = BTreeSet::new();
        for directory in ["api", "api/json", "api/rest", "http", "relay"] {
            let directory = format!("{}/src/{directory}", env!("CARGO_MANIFEST_DIR"));
            for file in std::fs::read_dir(directory).unwrap() {
                let path = file.unwrap().path();
                if path.is_dir() {
                    continue;
                }
                let source = std::fs::read_to_string(path).unwrap();
                let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
                let quoted = |text: &str| text.split('"').next().unwrap_or_default().to_owned();
                for (at, _) in source.match_indices(',') {
                    let status = source[..at].get(at.saturating_sub(3)..);
                    let code = source[at + 1..].trim_start().strip_prefix('"');
                    if let (Some(Ok(status @ 400..=599)), Some(code)) =
                        (status.map(str::parse), code)
                    {
                        made.insert((status, quoted(code)));
                    }
                }
                // What is said to connections that do not fit.
                for call in source.split("refuse(").skip(1) {
                    let arguments = call.trim_start().trim_start_matches('&');
                    let rest = arguments.strip_prefix("socket,");
                    let code = rest.and_then(|rest| rest.trim_start().strip_prefix('"'));
                    made.extend(code.map(|code| (503, quoted(code))));
                }
            }
        }
        made
    }

    #[test]
    fn the_contract_tells_of_every_error_and_of_no_other() {
        // The sources are there in every build.
        let contract: Value = serde_json::from_slice(WHOLE).unwrap();
        let mut promised = BTreeSet::new();
        for item in contract["components"]["pathItems"]
            .as_object()
            .unwrap()
            .values()
            .chain(contract["paths"].as_object().unwrap().values())
        {
            let operations = resolve(&contract, item).as_object().unwrap().values();
            for (status, response) in operations
                .filter_map(|operation| operation["responses"].as_object())
                .flatten()
            {
                let response = resolve(&contract, response);
                let schema = &response["content"]["application/json"]["schema"];
                let codes = schema["properties"]["code"]["enum"].as_array();
                // The text of what any request can meet has the status before its codes.
                let text = response["description"].as_str().unwrap();
                for code in codes.into_iter().flatten() {
                    let code = code.as_str().unwrap();
                    let status = status.parse().unwrap_or_else(|_| {
                        let before = text.split(code).next().unwrap();
                        assert_ne!(before, text, "{code} is not explained");
                        let mut words = before.rsplit([' ', ';', ':', '(']);
                        words.find_map(|word| word.parse().ok()).unwrap()
                    });
                    promised.insert((status, code.to_owned()));
                }
            }
        }
        assert_eq!(promised, made());
    }

    #[test]
    fn the_contract_is_served_as_it_was_written_and_without_what_is_left_out() {
        let is_whole = cfg!(all(
            feature = "attach",
            feature = "console",
            feature = "e2b",
            feature = "file-tools",
            feature = "interpreter",
            feature = "mcp"
        ));
        let has_cut = cfg!(not(all(
            feature = "attach",
            feature = "console",
            feature = "file-tools",
            feature = "interpreter"
        )));
        assert!(!is_whole || document() == WHOLE);
        assert_eq!(document() != WHOLE, has_cut);

        let text = String::from_utf8(document()).unwrap();
        let contract = contract();
        for (kind, components) in contract["components"].as_object().unwrap() {
            for name in components.as_object().unwrap().keys() {
                let reference = format!("\"#/components/{kind}/{name}\"");
                let is_used = kind == "securitySchemes" || text.contains(&reference);
                assert!(is_used, "{reference}");
            }
        }
        for rest in text.split("\"#/").skip(1) {
            let reference = rest.split('"').next().unwrap();
            assert!(
                contract.pointer(&format!("/{reference}")).is_some(),
                "{reference}"
            );
        }
    }

    #[test]
    fn the_contract_is_of_this_version() {
        assert_eq!(contract()["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
