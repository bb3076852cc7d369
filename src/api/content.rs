//! The content of files as the body of an answer: the same at every door.

use crate::http::Body;
use crate::workspace::Content;

/// The body that sends a content.
pub(super) fn body(content: Content) -> Body {
    match content {
        Content::Bytes(bytes) => Body::Bytes(bytes),
        Content::Reader(reader) => Body::Reader(reader),
        Content::File {
            file,
            length,
            start,
        } => Body::File {
            file,
            length,
            start,
        },
    }
}
