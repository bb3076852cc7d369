//! Messages of JSON-RPC 2.0 as MCP sends them over HTTP, and what is wrong with those that are refused.
//!
//! The protocol has two eras. A request of the present one (revision 2026-07-28) tells its version in its `_meta`, and
//! headers repeat what proxies look at. Requests of the eras before come after `initialize`, and may have a header
//! with the version. Which era a message is of shows in itself, so nothing is remembered.

use std::fmt::Display;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::codec::base64;
use crate::codec::fields::{Fields, JsonType, Members, decoded};
use crate::codec::object::object;
use crate::error::capped;
use crate::http::Response;
use crate::http::parse::Head;

/// The revisions of the present era.
pub(super) const MODERN: &[&str] = &["2026-07-28"];

/// Those before, the newest first.
pub(super) const LEGACY: &[&str] = &["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// Those of them that have batches.
const WITH_BATCHES: &[&str] = &["2025-03-26", "2024-11-05"];

/// Most messages of a batch.
const MAX_BATCH: usize = 100;

const VERSION_HEADER: &str = "MCP-Protocol-Version";
const METHOD_HEADER: &str = "Mcp-Method";
const NAME_HEADER: &str = "Mcp-Name";

const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES_KEY: &str = "io.modelcontextprotocol/clientCapabilities";

/// The eras of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Era {
    Modern,
    Legacy,
}

/// A request, or a notification.
#[derive(Debug)]
pub(super) struct Message<'a> {
    /// `None` for a notification.
    pub(super) id: Option<&'a RawValue>,
    pub(super) method: String,
    pub(super) params: Fields<'a>,
    pub(super) era: Era,
}

/// Why a message is refused.
#[derive(Debug)]
pub(super) struct RpcError {
    status: u16,
    code: i32,
    text: String,
    data: Option<Value>,
    id: Option<Box<RawValue>>,
}

impl RpcError {
    fn new(status: u16, code: i32, text: impl Display) -> Self {
        Self {
            status,
            code,
            text: capped(&text),
            data: None,
            id: None,
        }
    }

    /// The body is no JSON.
    fn parse(text: impl Display) -> Self {
        Self::new(400, -32700, text)
    }

    /// The body is no message.
    pub(super) fn invalid(text: impl Display) -> Self {
        Self::new(400, -32600, text)
    }

    /// There is no such method.
    pub(super) fn method(name: &str) -> Self {
        Self::new(404, -32601, format_args!("there is no method {name:?}"))
    }

    /// The parameters are wrong.
    pub(super) fn params(text: impl Display) -> Self {
        Self::new(400, -32602, text)
    }

    /// A header is missing, or says something else than the body.
    fn header(text: impl Display) -> Self {
        Self::new(400, -32020, text)
    }

    /// The version is not known.
    fn version(requested: &str) -> Self {
        let supported: Vec<_> = MODERN.iter().chain(LEGACY).copied().collect();
        let mut failure = Self::new(400, -32022, "this protocol version is not supported");
        failure.data = Some(object! { "supported": supported, "requested": capped(&requested) });
        failure
    }

    /// The failure of a request. Clients of the former era take errors for answers only if the status is 200.
    pub(super) fn about(mut self, id: &RawValue, era: Era) -> Self {
        self.id = Some(id.to_owned());
        if era == Era::Legacy {
            self.status = 200;
        }
        self
    }
}

#[derive(Serialize)]
struct ErrorDocument<'a> {
    jsonrpc: &'static str,
    id: Option<&'a RawValue>,
    error: ErrorMembers<'a>,
}

#[derive(Serialize)]
struct ErrorMembers<'a> {
    code: i32,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a Value>,
}

impl RpcError {
    fn document(&self) -> ErrorDocument<'_> {
        ErrorDocument {
            jsonrpc: "2.0",
            id: self.id.as_deref(),
            error: ErrorMembers {
                code: self.code,
                message: &self.text,
                data: self.data.as_ref(),
            },
        }
    }

    /// It among the answers to a batch.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // Fails only for maps whose keys are not strings; no document has any.
        serde_json::to_vec(&self.document()).unwrap_or_default()
    }
}

impl From<RpcError> for Response {
    fn from(failure: RpcError) -> Self {
        let mut response = Self::json(&failure.document());
        response.status = failure.status;
        response
    }
}

/// What a body has: one message, or a batch of them.
pub(super) enum Received<'a> {
    One(&'a RawValue),
    Batch(Vec<&'a RawValue>),
}

impl<'a> Received<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no JSON, or a batch that its revision does not have.
    pub(super) fn parse(body: &'a [u8], head: &Head) -> Result<Self, RpcError> {
        let broken = |error| RpcError::parse(format!("the body is not JSON: {error}"));
        let document: &RawValue = serde_json::from_slice(body).map_err(broken)?;
        if JsonType::of(document) != JsonType::Array {
            return Ok(Self::One(document));
        }
        let version = text_of(head, VERSION_HEADER)?;
        if version.is_some_and(|version| !WITH_BATCHES.contains(&&*version)) {
            let text = "this revision has no batches; send one message";
            return Err(RpcError::invalid(text));
        }
        let messages: Vec<&RawValue> =
            decoded("the batch", document).map_err(|error| RpcError::invalid(error.to_string()))?;
        if messages.is_empty() || messages.len() > MAX_BATCH {
            let text = format!("a batch has 1 to {MAX_BATCH} messages");
            return Err(RpcError::invalid(text));
        }
        Ok(Self::Batch(messages))
    }
}

impl<'a> Message<'a> {
    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with it, for its era.
    pub(super) fn parse(document: &'a RawValue, head: &Head) -> Result<Self, RpcError> {
        if JsonType::of(document) != JsonType::Object {
            return Err(RpcError::invalid("a message is a JSON object"));
        }
        let Members(members) = decoded("the message", document).map_err(RpcError::invalid)?;
        let id = members.get("id").copied();
        if id.is_some_and(|id| !is_id(id)) {
            return Err(RpcError::invalid(
                "id is neither a string nor a whole number of at most 1024 bytes",
            ));
        }
        let mut fields = Fields::from(Members(members));
        let read = Self::of_fields(&mut fields, id, head);
        read.map_err(|failure| RpcError {
            id: id.map(RawValue::to_owned),
            ..failure
        })
    }

    fn of_fields(
        fields: &mut Fields<'a>,
        id: Option<&'a RawValue>,
        head: &Head,
    ) -> Result<Self, RpcError> {
        if !matches!(fields.string("jsonrpc"), Ok(Some(version)) if version == "2.0") {
            return Err(RpcError::invalid("jsonrpc is not \"2.0\""));
        }
        let Ok(Some(method)) = fields.string("method") else {
            return Err(RpcError::invalid(
                "method is no string; only requests and notifications are accepted",
            ));
        };
        let params = match fields.take("params") {
            None => Members::default(),
            Some(params) if JsonType::of(params) == JsonType::Object => {
                decoded("params", params).map_err(RpcError::params)?
            }
            Some(_) => return Err(RpcError::params("params is no object")),
        };
        let era = era(&params, head, &method, id.is_none())?;
        Ok(Self {
            id,
            method,
            params: Fields::from(params),
            era,
        })
    }
}

/// Most bytes of an id: every answer repeats it.
const MAX_ID_BYTES: usize = 1024;

/// Whether a value is an id, or a token: a string or a whole number, and not too long.
pub(super) fn is_id(value: &RawValue) -> bool {
    match JsonType::of(value) {
        _ if value.get().len() > MAX_ID_BYTES => false,
        JsonType::String => true,
        JsonType::Number => !value.get().contains(['.', 'e', 'E']),
        _ => false,
    }
}

/// The era of a message whose version is known, and whose headers agree with its body.
fn era(
    params: &Members<'_>,
    head: &Head,
    method: &str,
    is_notification: bool,
) -> Result<Era, RpcError> {
    let header = text_of(head, VERSION_HEADER)?;
    let meta: Option<Members<'_>> = params
        .0
        .get("_meta")
        .filter(|meta| JsonType::of(meta) == JsonType::Object)
        .and_then(|meta| decoded("_meta", meta).ok());
    let named = meta.as_ref().and_then(|meta| meta.0.get(VERSION_KEY));
    let is_modern = |version: &str| MODERN.contains(&version);
    match &header {
        Some(version) if is_modern(version) => {}
        _ if named.is_some() => {}
        Some(version) if LEGACY.contains(&&**version) => return Ok(Era::Legacy),
        Some(version) => return Err(RpcError::version(version)),
        None => return Ok(Era::Legacy),
    }
    if is_notification {
        // The revision demands no headers of these.
        return header
            .filter(|version| is_modern(version))
            .map(|_| Era::Modern)
            .ok_or_else(|| {
                RpcError::header(format_args!("{VERSION_HEADER} is missing or not known"))
            });
    }
    let lacks = |key| meta.as_ref().is_none_or(|meta| meta.0.get(key).is_none());
    for key in [VERSION_KEY, CAPABILITIES_KEY] {
        if lacks(key) {
            return Err(RpcError::params(format_args!("params._meta lacks {key}")));
        }
    }
    let named = named.map(|named| decoded::<String>(VERSION_KEY, named));
    let Some(Ok(version)) = named else {
        return Err(RpcError::params(format_args!("{VERSION_KEY} is no string")));
    };
    let pairs = [
        (VERSION_HEADER, header, &*version),
        (METHOD_HEADER, text_of(head, METHOD_HEADER)?, method),
    ];
    for (name, header, body) in pairs {
        agree(name, header.as_deref(), body)?;
    }
    if !is_modern(&version) {
        return Err(RpcError::version(&version));
    }
    Ok(Era::Modern)
}

/// Checks that a header repeats the name of a tool.
///
/// # Errors
/// It is missing, or differs.
pub(super) fn check_name(head: &Head, name: &str) -> Result<(), RpcError> {
    let header = text_of(head, NAME_HEADER)?;
    agree(
        NAME_HEADER,
        header.as_deref().and_then(plain_value).as_deref(),
        name,
    )
}

fn agree(name: &str, header: Option<&str>, body: &str) -> Result<(), RpcError> {
    match header {
        Some(header) if header == body => Ok(()),
        Some(_) => Err(RpcError::header(format_args!(
            "the header {name} differs from the body"
        ))),
        None => Err(RpcError::header(format_args!(
            "the header {name} is missing or cannot be read"
        ))),
    }
}

/// A header that may be there once.
fn text_of(head: &Head, name: &str) -> Result<Option<String>, RpcError> {
    let mut values = head.values(name);
    let first = values.next();
    if values.next().is_some() {
        return Err(RpcError::header(format_args!(
            "the header {name} is there more than once"
        )));
    }
    let text = first.map(|value| std::str::from_utf8(value).map(str::to_owned));
    text.transpose()
        .map_err(|_| RpcError::header(format_args!("the header {name} is not text")))
}

/// What a header means whose value may be encoded; `None` if the encoding is broken.
fn plain_value(value: &str) -> Option<String> {
    let encoded = value
        .strip_prefix("=?base64?")
        .and_then(|rest| rest.strip_suffix("?="));
    match encoded {
        Some(encoded) => String::from_utf8(base64::decode(encoded.as_bytes())?).ok(),
        None => Some(value.to_owned()),
    }
}

/// How the server names itself, in both eras.
pub(super) fn server_info() -> Value {
    object! {
        "name": "sbx-server",
        "title": "Sandbox",
        "version": env!("CARGO_PKG_VERSION"),
    }
}
