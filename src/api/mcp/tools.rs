//! The table of tools. What clients read about them, and what each one takes, is in `tools.json`.

use std::sync::LazyLock;

use serde_json::Value;
use serde_json::value::RawValue;

use super::calls::{Outcome, ToolCall};
use super::{commands, files};
use crate::codec::carried::carried;
use crate::codec::fields::{Members, decoded};
use crate::error::Error;

/// One tool. What it takes is in its schema.
pub(super) struct Tool {
    pub(super) name: &'static str,
    run: fn(&mut ToolCall<'_, '_>, &RawValue) -> Outcome,
    /// Whether it needs processes that run.
    pub(super) is_running: bool,
}

/// In the order in which clients see them.
pub(super) const TOOLS: &[Tool] = &[
    running("run", commands::run),
    running("start", commands::start),
    tool("output", commands::output),
    running("input", commands::input),
    tool("stop", commands::stop),
    tool("processes", commands::processes),
    tool("read_file", files::read),
    tool("write_file", files::write),
    tool("edit_file", files::edit),
    tool("list_files", files::list),
    tool("glob", files::glob),
    tool("grep", files::grep),
    tool("ports", commands::ports),
];

const fn tool(name: &'static str, run: fn(&mut ToolCall<'_, '_>, &RawValue) -> Outcome) -> Tool {
    let is_running = false;
    Tool {
        name,
        run,
        is_running,
    }
}

const fn running(name: &'static str, run: fn(&mut ToolCall<'_, '_>, &RawValue) -> Outcome) -> Tool {
    let is_running = true;
    Tool {
        is_running,
        ..tool(name, run)
    }
}

/// The names of the arguments of each tool, in the order of [`TOOLS`].
static ARGUMENTS: LazyLock<Vec<Vec<String>>> = LazyLock::new(|| {
    let names = |tool: &Value| {
        let properties = tool["inputSchema"]["properties"].as_object();
        properties.map_or_else(Vec::new, |properties| properties.keys().cloned().collect())
    };
    let listed = list();
    listed.as_array().into_iter().flatten().map(names).collect()
});

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
        let tools = TOOLS.iter().zip(&*ARGUMENTS);
        let mut arguments_of = tools.filter(|(tool, _)| tool.name == self.name);
        let known = arguments_of.next().map_or(&[][..], |(_, known)| known);
        let is_unknown = |name: &&String| !known.contains(name);
        if let Some(unknown) = members.iter().map(|(name, _)| name).find(is_unknown) {
            let (name, accepted) = (self.name, known.join(", "));
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
            for (name, property) in &properties {
                assert!(
                    property["description"].is_string(),
                    "{} of {}",
                    name,
                    tool.name
                );
            }
            for required in schema["required"].as_array().into_iter().flatten() {
                assert!(properties.contains_key(required.as_str().unwrap()));
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
