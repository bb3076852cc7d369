//! From nothing to the first answer.

use std::time::{Duration, Instant};

use super::Plan;
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Samples, Table};

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let reply = scratch.reply_file();
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.samples / 10 {
        ours.push(first_answer(Program::server));
        floor.push(first_answer(|port| Program::responder(port, &reply)));
    }
    let note = "a static server that answers anything with one string";
    let limit = Limit::AtMost(1.4, 0.0);
    table.times("start to first /health", &ours, &floor, limit, note);
}

/// From before the program is started until it has answered.
fn first_answer(program: impl FnOnce(u16) -> Program) -> Duration {
    let port = free_port();
    let start = Instant::now();
    let program = program(port);
    let mut client = program.connect();
    client.health();
    start.elapsed()
}
