//! Stands for the interpreter contexts in a build without them.

/// What bounds the contexts of a workspace, which has none.
#[derive(Debug, Clone, Copy, Default)]
pub struct ContextsSettings {}
