//! Real servers and clients.
