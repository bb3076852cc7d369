//! What bounds the server: what each tenant holds of its memory, what there is in all, and how long nothing has happened.

pub mod activity;
pub mod ledger;
pub mod memory;
pub mod together;
pub mod work_clock;
