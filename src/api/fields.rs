//! Taking a JSON document apart, field by field, so that an error can name the field, what it is and
//! what it should be.
//!
//! Each field stays raw text until its type is known: what is not understood costs nothing, however
//! deep it is nested. Which fields there are is not known here.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::error::{Error, Result};

/// A JSON object that is taken apart; null is the same as absent, and unknown fields are ignored.
pub(super) struct Fields<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Fields<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self> {
        let broken = |error| Error::invalid(format!("the body is not JSON: {error}"));
        let document: &RawValue = serde_json::from_slice(body).map_err(broken)?;
        if JsonType::of(document) != JsonType::Object {
            return Err(wrong_type("the body", "a JSON object", document));
        }
        let members: Members<'_> = decoded("the body", document)?;
        Ok(Self(members.0))
    }

    pub(super) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        self.0
            .remove(name)
            .filter(|value| JsonType::of(value) != JsonType::Null)
    }

    /// A field of one type, if it is there.
    fn typed(
        &mut self,
        name: &str,
        expected: JsonType,
        accepted: &str,
    ) -> Result<Option<&'a RawValue>> {
        match self.take(name) {
            Some(value) if JsonType::of(value) != expected => {
                Err(wrong_type(name, accepted, value))
            }
            other => Ok(other),
        }
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>> {
        self.typed(name, JsonType::String, "a string")?
            .map(|value| decoded(name, value))
            .transpose()
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>> {
        let value = self.typed(name, JsonType::Boolean, "true or false")?;
        Ok(value.map(|value| value.get() == "true"))
    }

    pub(super) fn seconds(&mut self, name: &str) -> Result<Option<Duration>> {
        let accepted = "a number of seconds above 0";
        let Some(number) = self.typed(name, JsonType::Number, accepted)? else {
            return Ok(None);
        };
        let seconds: Option<f64> = number.get().parse().ok();
        seconds
            .filter(|seconds| *seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .map(Some)
            .ok_or_else(|| Error::invalid(format!("{name} is {number}; it takes {accepted}")))
    }

    pub(super) fn whole(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let accepted = format!("a whole number from {} to {}", range.start(), range.end());
        let Some(number) = self.typed(name, JsonType::Number, &accepted)? else {
            return Ok(None);
        };
        let whole = number.get().parse().ok();
        whole
            .filter(|whole| range.contains(whole))
            .map(Some)
            .ok_or_else(|| Error::invalid(format!("{name} is {number}; it takes {accepted}")))
    }

    pub(super) fn choice<T: Copy>(
        &mut self,
        name: &str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>> {
        let Some(text) = self.string(name)? else {
            return Ok(None);
        };
        let accepted = choices
            .iter()
            .map(|(word, _)| *word)
            .collect::<Vec<_>>()
            .join(" or ");
        choices
            .iter()
            .find(|(word, _)| *word == text)
            .map(|(_, choice)| Some(*choice))
            .ok_or_else(|| Error::invalid(format!("{name} is {text:?}; it takes {accepted}")))
    }
}

/// Most elements of an array, or members of an object. The kernel takes a command of a few megabytes
/// at most; many more tiny values would cost the server many times their size.
pub(super) const MAX_VALUES: usize = 65_536;

/// The elements of an array, each as it was written.
pub(super) struct Elements<'a>(pub(super) Vec<&'a RawValue>);

/// The members of an object, each as it was written; of several with one name the last counts.
pub(super) struct Members<'a>(pub(super) BTreeMap<String, &'a RawValue>);

struct Collect<T>(PhantomData<T>);

impl<'a> Deserialize<'a> for Elements<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_seq(Collect(PhantomData::<Self>))
    }
}

impl<'a> Deserialize<'a> for Members<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(Collect(PhantomData::<Self>))
    }
}

impl<'a> Visitor<'a> for Collect<Elements<'a>> {
    type Value = Elements<'a>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(
        self,
        mut values: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = values.next_element()? {
            if elements.len() == MAX_VALUES {
                return Err(too_many());
            }
            elements.push(element);
        }
        Ok(Elements(elements))
    }
}

impl<'a> Visitor<'a> for Collect<Members<'a>> {
    type Value = Members<'a>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(
        self,
        mut values: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let mut members = BTreeMap::new();
        while let Some((name, value)) = values.next_entry()? {
            members.insert(name, value);
            if members.len() > MAX_VALUES {
                return Err(too_many());
            }
        }
        Ok(Members(members))
    }
}

fn too_many<E: serde::de::Error>() -> E {
    E::custom(format_args!("it has more than {MAX_VALUES} values"))
}

/// What kind of value a piece of JSON is: its first character tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonType {
    Null,
    Boolean,
    Number,
    String,
    Array,
    Object,
}

impl JsonType {
    pub(super) fn of(value: &RawValue) -> Self {
        match value.get().as_bytes().first() {
            Some(b'n') => Self::Null,
            Some(b't' | b'f') => Self::Boolean,
            Some(b'"') => Self::String,
            Some(b'[') => Self::Array,
            Some(b'{') => Self::Object,
            _ => Self::Number,
        }
    }
}

pub(super) fn decoded<'a, T: Deserialize<'a>>(field: &str, value: &'a RawValue) -> Result<T> {
    serde_json::from_str(value.get())
        .map_err(|error| Error::invalid(format!("{field} cannot be read: {error}")))
}

pub(super) fn wrong_type(field: &str, accepted: &str, found: &RawValue) -> Error {
    let found = match JsonType::of(found) {
        JsonType::Null => "null",
        JsonType::Boolean => "a boolean",
        JsonType::Number => "a number",
        JsonType::String => "a string",
        JsonType::Array => "an array",
        JsonType::Object => "an object",
    };
    Error::invalid(format!("{field} is {found}; it takes {accepted}"))
}
