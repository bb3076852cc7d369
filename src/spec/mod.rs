//! What clients ask for, as checked values: commands, languages, kinds of isolation, network policies, sandboxes.
//!
//! Pure values, which the doors read and show and the mechanisms carry out.

pub mod account;
pub mod command;
pub mod isolation;
pub mod language;
pub mod network;
pub mod sandbox;
