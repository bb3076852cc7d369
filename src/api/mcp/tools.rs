//! The table of tools. What clients read about them is in `tools.json`, which a test compares with this table.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::reply::ToolClient;
use super::{commands, files};
use crate::client::Stopped;
use crate::codec::carried::carried;
use crate::codec::fields::{Fields, Members, decoded};
use crate::error::{Error, Result};
use crate::workspace::Workspace;

/// What a tool gives, or why it stopped.
pub(super) type Outcome = std::result::Result<ToolResult, Stopped>;

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

/// What a tool works with.
pub(super) struct ToolCall<'a, 's> {
    pub(super) workspace: &'a Workspace,
    pub(super) client: &'a mut ToolClient<'s>,
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
            let text = format!("{name} has no argument {unknown:?}; it takes {accepted}");
            return Err(Error::invalid(text).into());
        }
        (self.run)(call, arguments)
    }
}

/// The arguments of a tool.
pub(super) fn fields(arguments: &RawValue) -> Result<Fields<'_>> {
    Ok(Fields::from(decoded::<Members<'_>>(
        "arguments",
        arguments,
    )?))
}

/// An argument that must be there.
pub(super) fn required(fields: &mut Fields<'_>, name: &str) -> Result<String> {
    let missing = || Error::invalid(format!("the argument {name} is missing"));
    fields.string(name)?.ok_or_else(missing)
}

/// What a tool gives.
pub(super) struct ToolResult {
    text: String,
    image: Option<Image>,
    structured: Value,
    is_error: bool,
}

/// An image, which models see.
pub(super) struct Image {
    /// As Base64.
    pub(super) data: String,
    pub(super) media_type: &'static str,
}

impl ToolResult {
    /// A text for models that read only text, and the same for programs.
    pub(super) fn new(text: impl Into<String>, structured: Value) -> Self {
        Self {
            text: text.into(),
            image: None,
            structured,
            is_error: false,
        }
    }

    /// Marks it as that of a tool that failed.
    pub(super) fn into_error(mut self) -> Self {
        self.is_error = true;
        self
    }

    /// With an image beside the text.
    pub(super) fn with_image(mut self, image: Image) -> Self {
        self.image = Some(image);
        self
    }

    /// The result of `tools/call`.
    pub(super) fn into_value(self) -> Value {
        let mut content = vec![json!({ "type": "text", "text": self.text })];
        content.extend(self.image.map(
            |image| json!({ "type": "image", "data": image.data, "mimeType": image.media_type }),
        ));
        json!({
            "content": content,
            "structuredContent": self.structured,
            "isError": self.is_error,
        })
    }
}

/// A document of the API as the result of a tool.
pub(super) fn to_value(document: &impl Serialize) -> Value {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_value(document).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
