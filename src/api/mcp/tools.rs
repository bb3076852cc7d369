//! The table of tools. What clients read about them is in `tools.json`, which a test compares with this table.

use serde_json::Value;
use serde_json::value::RawValue;

use super::calls::{Outcome, ToolCall};
use super::{commands, files};
use crate::codec::carried::carried;
use crate::codec::fields::{Members, decoded};
use crate::error::Error;

/// One tool.
pub(super) struct Tool {
    pub(super) name: &'static str,
    /// All that it takes.
    arguments: &'static [&'static str],
    run: fn(&mut ToolCall<'_, '_>, &RawValue) -> Outcome,
}

/// In the order in which clients see them.
pub(super) const TOOLS: &[Tool] = &[
    tool(
        "run",
        &["cmd", "cwd", "env", "stdin", "timeout", "wait"],
        commands::run,
    ),
    tool(
        "start",
        &["cmd", "cwd", "env", "stdin", "timeout", "tag", "id", "pty"],
        commands::start,
    ),
    tool(
        "output",
        &["id", "stdout_offset", "stderr_offset", "wait"],
        commands::output,
    ),
    tool("input", &["id", "text", "eof"], commands::input),
    tool("stop", &["id", "signal"], commands::stop),
    tool("processes", &[], commands::processes),
    tool("read_file", &["path", "lines"], files::read),
    tool(
        "write_file",
        &["path", "content", "mode", "if_sha256"],
        files::write,
    ),
    tool(
        "edit_file",
        &["path", "edits", "if_sha256", "dry_run"],
        files::edit,
    ),
    tool("list_files", &["path", "depth"], files::list),
    tool(
        "glob",
        &["path", "pattern", "type", "all", "limit", "after", "sort"],
        files::glob,
    ),
    tool(
        "grep",
        &[
            "pattern",
            "path",
            "literal",
            "case",
            "word",
            "multiline",
            "glob",
            "all",
            "before",
            "after",
            "limit",
            "per_file",
            "max_file_bytes",
        ],
        files::grep,
    ),
    tool("ports", &["wait_for", "timeout"], commands::ports),
];

const fn tool(
    name: &'static str,
    arguments: &'static [&'static str],
    run: fn(&mut ToolCall<'_, '_>, &RawValue) -> Outcome,
) -> Tool {
    Tool {
        name,
        arguments,
        run,
    }
}

/// The tool with a name.
pub(super) fn find(name: &str) -> Option<&'static Tool> {
    TOOLS.iter().find(|tool| tool.name == name)
}

/// The list of tools for clients.
pub(super) fn list() -> Value {
    // A test checks that it is JSON.
    serde_json::from_slice(&carried!("tools.json")).unwrap_or_default()
}

/// A call that was accepted.
pub(super) struct Invocation {
    pub(super) tool: &'static Tool,
    /// A JSON object.
    pub(super) arguments: Box<RawValue>,
    pub(super) progress_token: Option<Box<RawValue>>,
}

impl Tool {
    /// Calls it. An argument that it does not have is refused: a model must not believe that it was obeyed.
    pub(super) fn call(&self, call: &mut ToolCall<'_, '_>, arguments: &RawValue) -> Outcome {
        let Members(members) = decoded("arguments", arguments)?;
        if let Some(unknown) = members
            .keys()
            .find(|name| !self.arguments.contains(&&***name))
        {
            let (name, accepted) = (self.name, self.arguments.join(", "));
            let accepted = if accepted.is_empty() {
                "none"
            } else {
                &accepted
            };
            let text = format_args!("{name} has no argument {unknown:?}; it takes {accepted}");
            return Err(Error::invalid(text).into());
        }
        (self.run)(call, arguments)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    fn listed() -> Vec<Value> {
        list().as_array().unwrap().clone()
    }

    #[test]
    fn clients_read_of_the_tools_that_there_are() {
        let names: Vec<_> = TOOLS.iter().map(|tool| tool.name).collect();
        let listed = listed();
        let told: Vec<_> = listed
            .iter()
            .map(|tool| tool["name"].as_str().unwrap())
            .collect();
        assert_eq!(told, names);
        for (tool, listed) in TOOLS.iter().zip(&listed) {
            let schema = &listed["inputSchema"];
            assert_eq!(schema["additionalProperties"], false, "{}", tool.name);
            let properties = schema["properties"]
                .as_object()
                .cloned()
                .unwrap_or_default();
            let told: BTreeSet<_> = properties.keys().map(String::as_str).collect();
            assert_eq!(
                told,
                tool.arguments.iter().copied().collect(),
                "{}",
                tool.name
            );
            for (name, property) in &properties {
                assert!(
                    property["description"].is_string(),
                    "{} of {}",
                    name,
                    tool.name
                );
            }
            for required in schema["required"].as_array().into_iter().flatten() {
                assert!(tool.arguments.contains(&required.as_str().unwrap()));
            }
        }
    }

    #[test]
    fn every_tool_says_what_it_gives_and_does() {
        for tool in listed() {
            let name = &tool["name"];
            assert!(tool["description"].as_str().unwrap().len() > 40, "{name}");
            let output = &tool["outputSchema"];
            assert_eq!(output["type"], "object", "{name}");
            // A result is what was asked for, or an error.
            let kinds = output["anyOf"].as_array().unwrap();
            assert_eq!(kinds[1]["required"], json!(["error", "code"]), "{name}");
            let required = kinds[0]["required"].as_array().unwrap();
            assert!(!required.is_empty(), "{name}");
            for member in required {
                assert!(
                    output["properties"][member.as_str().unwrap()].is_object(),
                    "{name} {member}"
                );
            }
            let hints = tool["annotations"].as_object().unwrap();
            for hint in [
                "readOnlyHint",
                "destructiveHint",
                "idempotentHint",
                "openWorldHint",
            ] {
                assert!(hints[hint].is_boolean(), "{name} {hint}");
            }
            assert!(hints["title"].is_string(), "{name}");
        }
    }
}
