//! The smallest request, many at a time.

use std::io::Write;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::Plan;
use super::client::{find, request};
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table};

const CONNECTIONS: usize = 32;

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let responder = Program::responder(free_port(), &scratch.reply_file());
    let [mut rates, mut floor_rates] = [(); 2].map(|()| Vec::new());
    let [mut times, mut floor_times] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.rounds {
        rates.push(load(&server, plan.window, &mut times));
        floor_rates.push(load(&responder, plan.window, &mut floor_times));
    }
    let note = "a thread a connection that does not parse";
    let row = format!("/health a second, {CONNECTIONS} connections");
    let [ours, floor] = [rates, floor_rates].map(|rates| Figure::lowest(&rates));
    table.row(&row, ours, Some(floor), Limit::AtLeast(0.75), note);
    let row = format!("one of these, {CONNECTIONS} at a time");
    table.times(&row, &times, &floor_times, Limit::None, note);
}

/// Keeps one request under way on each of many connections, from one thread, which leaves the other
/// processors to the server. Returns the requests a second.
fn load(program: &Program, time: Duration, samples: &mut Samples) -> f64 {
    let request = request("GET", "/health", "", 0, b"");
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let mut clients: Vec<_> = (0..CONNECTIONS)
        .map(|number| {
            let client = program.connect();
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number as u64);
            epoll.add(client.stream.as_fd(), event).unwrap();
            (client, Instant::now())
        })
        .collect();
    for (client, sent) in &mut clients {
        client.stream.write_all(&request).unwrap();
        *sent = Instant::now();
    }
    let start = Instant::now();
    let mut count = 0_u32;
    let mut events = [EpollEvent::empty(); CONNECTIONS];
    while start.elapsed() < time {
        let ready = epoll.wait(&mut events, EpollTimeout::NONE).unwrap();
        for event in &events[..ready] {
            let (client, sent) = &mut clients[usize::try_from(event.data()).unwrap()];
            assert!(find(client.short_reply(), br#""status":"ok""#).is_some());
            let now = Instant::now();
            samples.push(now - *sent);
            *sent = now;
            client.stream.write_all(&request).unwrap();
            count += 1;
        }
    }
    f64::from(count) / start.elapsed().as_secs_f64()
}
