//! `GET /openapi.json`: the contract with clients, in the format of `OpenAPI` 3.1.
//!
//! It is written by hand in `openapi.json`, which says more than code could derive: what values mean,
//! and which errors to expect. That it says what the server does is tested: here, that both have the
//! same paths, methods and error codes; in `tests/suite/contract.rs`, by requests made from it.

use crate::http::{Body, Response};

const SOURCE: &[u8] = include_bytes!("../../openapi.json");

/// Without the white space that is for the readers of the source: a third of it.
static DOCUMENT: [u8; compact::<{ SOURCE.len() }>(SOURCE).1] = compact(SOURCE).0;

/// Answers with the document. It needs no token: it is the same for everybody, tells nothing of this
/// machine, and says how a token is given.
pub(super) fn answer() -> Response {
    Response::new(200, Body::Bytes(DOCUMENT.to_vec()))
        .with_header("Content-Type", "application/json")
}

/// JSON without white space outside of strings, and its length; what does not fit is left out.
const fn compact<const SIZE: usize>(source: &[u8]) -> ([u8; SIZE], usize) {
    let mut document = [0; SIZE];
    let mut length = 0;
    let mut at = 0;
    let mut in_string = false;
    while at < source.len() {
        let byte = source[at];
        let is_escape = in_string && byte == b'\\';
        if byte == b'"' {
            in_string = !in_string;
        }
        if in_string || !byte.is_ascii_whitespace() {
            document[length] = byte;
            length += 1;
        }
        at += 1;
        if is_escape {
            document[length] = source[at];
            length += 1;
            at += 1;
        }
    }
    (document, length)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::super::route::Resource;
    use super::*;

    /// A segment that is no word of the server's: it stands for every parameter.
    const ANY: &str = "any";

    /// Those that a path of the contract can have.
    const ALL_METHODS: [&str; 8] = [
        "GET", "PUT", "POST", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE",
    ];

    fn contract() -> Value {
        serde_json::from_slice(&DOCUMENT).unwrap()
    }

    fn resolve<'a>(contract: &'a Value, value: &'a Value) -> &'a Value {
        match value["$ref"].as_str() {
            Some(reference) => contract.pointer(&reference[1..]).expect(reference),
            None => value,
        }
    }

    /// The methods of each path of the contract below each of its servers, with [`ANY`] for each
    /// parameter.
    fn promised() -> BTreeMap<String, BTreeSet<String>> {
        let contract = contract();
        let mut promised = BTreeMap::new();
        for (template, item) in contract["paths"].as_object().unwrap() {
            let item = resolve(&contract, item).as_object().unwrap();
            let methods: BTreeSet<String> = item
                .keys()
                .filter(|key| !["parameters", "servers"].contains(&key.as_str()))
                .map(|method| method.to_uppercase())
                .collect();
            let servers = item.get("servers").unwrap_or(&contract["servers"]);
            for server in servers.as_array().unwrap() {
                let base = server["url"].as_str().unwrap().trim_end_matches('/');
                let path = format!("{base}{template}");
                let plain = |segment| match str::strip_prefix(segment, "{") {
                    Some(_) => ANY,
                    None => segment,
                };
                let path: Vec<&str> = path.split('/').map(plain).collect();
                promised.insert(path.join("/"), methods.clone());
            }
        }
        promised
    }

    /// The methods of each path that the router knows: every path is tried that can be made of the
    /// words in its source.
    fn routed() -> BTreeMap<String, BTreeSet<String>> {
        let words: BTreeSet<&str> = include_str!("route.rs")
            .split("#[cfg(test)]\nmod tests")
            .next()
            .unwrap()
            .split('"')
            .skip(1)
            .step_by(2)
            .flat_map(|literal| literal.split('/'))
            .filter(|word| !word.is_empty() && !word.bytes().any(|byte| byte.is_ascii_uppercase()))
            .chain([ANY])
            .collect();
        let mut paths = vec![String::new()];
        let mut found = BTreeMap::new();
        // The deepest are /v1/sandboxes/{id}/processes/{id}/logs; only what is below these goes on.
        let roots = ["", "/v1", "/v1/sandboxes", "/v1/sandboxes/any"];
        for depth in 0..3 {
            let longer = paths.iter().flat_map(|path| {
                let words = words.iter();
                words.map(move |word| format!("{path}/{word}"))
            });
            paths = longer.collect();
            for root in roots {
                for path in &paths {
                    let path = format!("{root}{path}");
                    if let Some(resource) = Resource::find(path.as_bytes()) {
                        let methods = match resource.methods() {
                            // They are for the server behind the port to choose.
                            [] => &ALL_METHODS,
                            methods => methods,
                        };
                        let methods = methods.iter().map(|method| (*method).to_owned());
                        found.insert(path, methods.collect());
                    }
                }
            }
            assert!(depth < 2 || found.len() > 40, "too little was found");
        }
        // What matches a parameter matches every word in its place.
        let all = found.clone();
        found.retain(|path, _| {
            let segments: Vec<&str> = path.split('/').collect();
            !(0..segments.len()).any(|index| {
                let mut general = segments.clone();
                general[index] = ANY;
                let general = general.join("/");
                general != *path
                    && all.contains_key(&general)
                    && Resource::find(general.as_bytes()).map(Resource::name)
                        == Resource::find(path.as_bytes()).map(Resource::name)
            })
        });
        found
    }

    #[test]
    fn the_contract_and_the_router_have_the_same_paths_and_methods() {
        assert_eq!(promised(), routed());
    }

    /// The statuses and codes of all errors that are made anywhere: wherever a status is followed by a
    /// code.
    fn made() -> BTreeSet<(u16, String)> {
        let mut made = BTreeSet::new();
        for directory in ["api", "http"] {
            let directory = format!("{}/src/{directory}", env!("CARGO_MANIFEST_DIR"));
            for file in std::fs::read_dir(directory).unwrap() {
                let source = std::fs::read_to_string(file.unwrap().path()).unwrap();
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
                // What is said to connections that there is no room for.
                for call in source.split("refuse(").skip(1) {
                    let arguments = call.trim_start().strip_prefix("&socket,");
                    let code = arguments.and_then(|rest| rest.trim_start().strip_prefix('"'));
                    made.extend(code.map(|code| (503, quoted(code))));
                }
            }
        }
        made
    }

    #[test]
    fn the_contract_tells_of_every_error_and_of_no_other() {
        let contract = contract();
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
    fn the_contract_is_of_this_version() {
        assert_eq!(contract()["info"]["version"], env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn nothing_but_white_space_is_lost() {
        let source: Value = serde_json::from_slice(SOURCE).unwrap();
        assert_eq!(contract(), source);
        assert_eq!(DOCUMENT.len(), source.to_string().len());
    }
}
