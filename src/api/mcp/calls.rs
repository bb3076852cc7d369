//! What a tool works with and what it gives: the types between the table of tools and the tools.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::client::ToolClient;
use crate::client::Stopped;
use crate::codec::fields::{Fields, Members, decoded};
use crate::codec::object::object;
use crate::error::Result;
use crate::limits::ledger::{Charge, Item, Ledger, OverLimit};
use crate::workspace::Workspace;

/// What a tool gives, or why it stopped.
pub(super) type Outcome = std::result::Result<ToolResult, Stopped>;

/// What a tool works with.
pub(super) struct ToolCall<'a, 's> {
    pub(super) workspace: &'a Workspace,
    pub(super) client: &'a mut ToolClient<'s>,
    /// What the answers to the request take.
    pub(super) room: &'a mut Room,
}

impl ToolCall<'_, '_> {
    /// Charges what a result takes, before it is made.
    ///
    /// # Errors
    /// `OverLimit`.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        Ok(self.room.reserve(bytes)?)
    }
}

/// What the answers to a request may take together without a charge.
const FREE_BYTES: usize = 16 * 1024;

/// What the answers to a request take, until they are sent.
pub(super) struct Room {
    charge: Charge,
    /// The bytes of the finished answers.
    kept: usize,
}

impl Room {
    pub(super) fn new(ledger: &Arc<Ledger>) -> Self {
        Self {
            charge: ledger.charge_up_to(Item::Responses, 0, 0),
            kept: 0,
        }
    }

    /// Charges what the next answer takes besides the finished ones, before it is made.
    ///
    /// # Errors
    /// The tenant's share is smaller. The charge stays as it was.
    pub(super) fn reserve(&mut self, bytes: usize) -> std::result::Result<(), OverLimit> {
        let all = self.kept + bytes;
        if all > FREE_BYTES.max(self.charge.bytes()) {
            self.charge.set(all)?;
        }
        Ok(())
    }

    /// Whether so many bytes of the next answer are charged.
    pub(super) fn covers(&self, bytes: usize) -> bool {
        self.kept + bytes <= self.charge.bytes()
    }

    /// Keeps a finished answer, and gives back what only making it took.
    ///
    /// # Errors
    /// Less was reserved, and the tenant's share is smaller.
    pub(super) fn keep(&mut self, bytes: usize) -> std::result::Result<(), OverLimit> {
        self.reserve(bytes)?;
        self.kept += bytes;
        self.charge.set(self.kept.min(self.charge.bytes()))
    }

    /// The charge for `bytes` in place of all answers, as far as they were charged.
    pub(super) fn into_charge(mut self, bytes: usize) -> Charge {
        // To lower a charge does not fail.
        let _ = self.charge.set(bytes.min(self.charge.bytes()));
        self.charge
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
        let mut text = object! { "type": "text" };
        text["text"] = self.text.into();
        let mut content = vec![text];
        content.extend(self.image.map(|image| {
            let mut shown = object! { "type": "image", "mimeType": image.media_type };
            shown["data"] = image.data.into();
            shown
        }));
        let mut result = object! { "isError": self.is_error };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ledger::Budget;

    #[test]
    fn small_answers_are_free_until_they_are_much_together() {
        // One item may hold half of it.
        let ledger = Budget::new(10 * FREE_BYTES as u64).whole();
        let mut room = Room::new(&ledger);
        let mut charged = Vec::new();
        for _ in 0..3 {
            room.reserve(FREE_BYTES / 2).unwrap();
            room.keep(FREE_BYTES / 2).unwrap();
            charged.push(room.charge.bytes());
        }
        assert_eq!(charged, [0, 0, FREE_BYTES / 2 * 3]);
        // What an answer takes only while it is made is given back.
        room.reserve(3 * FREE_BYTES).unwrap();
        assert!(room.covers(3 * FREE_BYTES));
        assert!(room.reserve(4 * FREE_BYTES).is_err());
        room.keep(10).unwrap();
        assert!(room.covers(0) && !room.covers(1));
        assert_eq!(room.into_charge(FREE_BYTES).bytes(), FREE_BYTES);
    }
}
