//! Answers look-ups of programs without proxy support.
//!
//! They get an address that stands for the name (see `names`). The addresses that the name really has are looked up for the
//! connection.

use super::Exits;
use super::connect::look_up;
use super::dns::{Answer, Kind, Question};
use super::listener::EgressListener;

/// The port of name servers. A look-up that is refused is listed with it.
pub(super) const DNS_PORT: u16 = 53;

/// Answers a question without asking anybody; `None` if the name has to be looked up for that.
pub(super) fn answer_at_once(
    exits: &Exits,
    listener: &EgressListener,
    question: &Question,
) -> Option<Answer> {
    if !question.is_understood {
        return Some(Answer::NotImplemented);
    }
    let Some(host) = &question.host else {
        return Some(Answer::NoHost);
    };
    let verdict = listener.filter().judge_look_up(host);
    if !verdict.is_allowed {
        // Programs ask for addresses of both families.
        if question.kind == Kind::Ipv4 {
            exits.note(host, DNS_PORT, &verdict);
        }
        return Some(Answer::NoHost);
    }
    match question.kind {
        Kind::Ipv4 => {}
        Kind::Ipv6 => return Some(Answer::Nothing),
        Kind::Other => return Some(Answer::NotImplemented),
    }
    let names = listener.names();
    let address = names.address_of(host);
    // The names are the look-up of the client's own proxy.
    let address = address.or_else(|| listener.filter().upstream.as_ref().map(|_| names.add(host)));
    address.map(Answer::Address)
}

/// Answers a question, and looks the name up if need be.
pub(super) fn answer(exits: &Exits, listener: &EgressListener, question: &Question) -> Answer {
    answer_at_once(exits, listener, question).unwrap_or_else(|| {
        let host = question.host.as_deref().unwrap_or_default();
        // Only whether there is such a host: programs go through the domains of their search list by that.
        match look_up(host) {
            Ok(_) => Answer::Address(listener.names().add(host)),
            Err(error) if is_unknown(&error) => Answer::NoHost,
            Err(_) => Answer::Failed,
        }
    })
}

/// Whether a look-up failed because there is no such host. The standard library has no kind for that: it has the texts of
/// the C library, which is part of the program.
fn is_unknown(error: &std::io::Error) -> bool {
    let text = error.to_string();
    let texts = ["Name does not resolve", "Name has no usable address"];
    texts.iter().any(|known| text.ends_with(known))
}
