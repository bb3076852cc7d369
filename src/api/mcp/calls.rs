//! What a tool works with and what it gives: the types between the table of tools and the tools.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::client::ToolClient;
use crate::client::Stopped;
use crate::codec::fields::{Fields, Members, decoded};
use crate::error::Result;
use crate::limits::ledger::Charge;
use crate::workspace::Workspace;

/// What a tool gives, or why it stopped.
pub(super) type Outcome = std::result::Result<ToolResult, Stopped>;

/// What a tool works with.
pub(super) struct ToolCall<'a, 's> {
    pub(super) workspace: &'a Workspace,
    pub(super) client: &'a mut ToolClient<'s>,
    /// What the result takes, until it is sent.
    pub(super) charge: &'a mut Charge,
}

/// What a result may take without a charge.
pub(super) const FREE_BYTES: usize = 16 * 1024;

impl ToolCall<'_, '_> {
    /// Charges what a result takes, before it is made.
    ///
    /// # Errors
    /// `OverLimit`.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > FREE_BYTES.max(self.charge.bytes()) {
            self.charge.set(bytes)?;
        }
        Ok(())
    }
}

/// The arguments of a tool.
pub(super) fn fields(arguments: &RawValue) -> Result<Fields<'_>> {
    Ok(Fields::from(decoded::<Members<'_>>(
        "arguments",
        arguments,
    )?))
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
        // The macro would copy what is large.
        let mut text = json!({ "type": "text" });
        text["text"] = self.text.into();
        let mut content = vec![text];
        content.extend(self.image.map(|image| {
            let mut shown = json!({ "type": "image", "mimeType": image.media_type });
            shown["data"] = image.data.into();
            shown
        }));
        let mut result = json!({ "isError": self.is_error });
        result["content"] = content.into();
        result["structuredContent"] = self.structured;
        result
    }
}

/// A document of the API as the result of a tool.
pub(super) fn to_value(document: &impl Serialize) -> Value {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_value(document).unwrap_or_default()
}
