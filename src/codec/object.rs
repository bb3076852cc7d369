//! JSON objects with members that the program names.
//!
//! `serde_json::json!` has code for each member that makes its name and its value, and checks that the value can be
//! JSON. Here a member is two words and a value in a list, which one function takes in: a fifth of the code.

use serde_json::{Map, Value};

/// A JSON object: `object! { "id": id, "size": size }`. Values are what [`Value`] can be made from.
macro_rules! object {
    ($($name:literal: $value:expr),* $(,)?) => {
        $crate::codec::object::of(&mut [$(($name, serde_json::Value::from($value))),*])
    };
}

pub(crate) use object;

/// An object of these members, whose values are taken.
#[inline(never)]
pub fn of(members: &mut [(&str, Value)]) -> Value {
    let members = members.iter_mut();
    object_of(members.map(|(name, value)| ((*name).to_owned(), value.take())))
}

/// A JSON object of these members.
pub fn object_of(members: impl Iterator<Item = (String, Value)>) -> Value {
    let mut object = Map::new();
    // Collecting them would sort them first, with code that nothing else here needs.
    object.extend(members);
    object.into()
}
