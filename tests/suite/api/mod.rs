//! What all routes have in common: how a token is sent, which web pages may use the server, what a
//! missing route and an unknown query parameter are answered, and how answers end.

mod answers;
mod bearer;
mod origins;
mod pages;
mod parameters;
mod routes;
mod unknown_fields;
