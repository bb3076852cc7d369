//! Documents as bodies, whole or part by part.

use std::io::{Cursor, Read};

use serde::Serialize;
use serde_json::json;

use crate::client::{Interrupt, Uninterrupted};
use crate::http::{Body, Response};

/// A document as text.
pub(in crate::api) fn to_json(document: &impl Serialize) -> Vec<u8> {
    // Fails only for maps whose keys are not strings; no document has any.
    serde_json::to_vec(document).unwrap_or_default()
}

/// Bytes of a list that are written before they are sent.
const PIECE_BYTES: usize = 32 * 1024;

/// A document with a list, written piece by piece as the client takes it, so that it takes no more memory
/// than its items.
pub(in crate::api) struct ListDocument<F> {
    /// Appends the next item; false if there is none.
    append_next: F,
    tail: Vec<u8>,
    is_empty: bool,
    has_ended: bool,
    piece: Cursor<Vec<u8>>,
    /// Asked before each piece.
    pace: Box<dyn Interrupt>,
}

impl<F> ListDocument<F>
where
    F: FnMut(&mut Vec<u8>) -> serde_json::Result<bool> + Send + 'static,
{
    /// A JSON array.
    pub(in crate::api) fn array(append_next: F) -> Self {
        Self::new(b"[", append_next, b"]\n".to_vec())
    }

    /// A page of a list after `head`, and the id to go on after; `None` if there is no more.
    pub(in crate::api) fn page(head: &[u8], append_next: F, next: Option<&str>) -> Self {
        let tail = format!("],\"next\":{}}}\n", json!(next));
        Self::new(head, append_next, tail.into_bytes())
    }

    /// A list between the other parts of a document.
    pub(super) fn new(head: &[u8], append_next: F, tail: Vec<u8>) -> Self {
        Self {
            append_next,
            tail,
            is_empty: true,
            has_ended: false,
            piece: Cursor::new(head.to_vec()),
            pace: Box::new(Uninterrupted),
        }
    }

    /// Asks `pace` before each piece. Nothing more is sent if it says so.
    pub(in crate::api) fn paced(mut self, pace: Box<dyn Interrupt>) -> Self {
        self.pace = pace;
        self
    }

    /// The answer with this document: at once if it is small.
    pub(in crate::api) fn respond(mut self) -> Response {
        // Writing to memory does not fail, and neither does serializing a document. What is interrupted is interrupted
        // again when it is sent.
        let _ = self.append_piece();
        let body = if self.has_ended {
            Body::Bytes(self.piece.into_inner())
        } else {
            Body::Reader(Box::new(self))
        };
        Response::new(200, body).with_header("Content-Type", "application/json")
    }

    fn append_piece(&mut self) -> std::io::Result<()> {
        let stopped = |_| std::io::Error::from(std::io::ErrorKind::ConnectionAborted);
        self.pace.check().map_err(stopped)?;
        let piece = self.piece.get_mut();
        while piece.len() < PIECE_BYTES {
            let start = piece.len();
            if !self.is_empty {
                piece.push(b',');
            }
            if !(self.append_next)(piece)? {
                piece.truncate(start);
                piece.append(&mut self.tail);
                self.has_ended = true;
                break;
            }
            self.is_empty = false;
        }
        Ok(())
    }
}

impl<F> Read for ListDocument<F>
where
    F: FnMut(&mut Vec<u8>) -> serde_json::Result<bool> + Send + 'static,
{
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.piece.read(buffer)?;
        if read > 0 || self.has_ended {
            return Ok(read);
        }
        self.piece.get_mut().clear();
        self.piece.set_position(0);
        self.append_piece()?;
        self.piece.read(buffer)
    }
}
