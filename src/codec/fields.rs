//! JSON objects, parsed field by field, so that an error names the field, its type and the accepted
//! values.
//!
//! A field stays raw text until it is asked for, so unknown fields cost nothing, however deeply they
//! are nested.

use std::cell::Cell;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::table::Table;
use super::{accepted_words, choose, near};
use crate::error::{Error, Result};

/// The fields of a JSON object. Null is the same as absent.
#[derive(Debug)]
pub struct Fields<'a> {
    values: Table<String, &'a RawValue>,
    /// The names that were asked for, whether or not they are there.
    known: Vec<&'static str>,
    /// What is unknown in the elements of its lists.
    unknown_inside: Vec<String>,
    /// For how many more unknown names it is found out whether they mean a known one.
    looks_left: Cell<usize>,
}

/// What a request changes of a value that may be absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Change<T> {
    #[default]
    Keep,
    Remove,
    Set(T),
}

impl<T> Change<T> {
    /// Changes a value.
    pub fn apply(self, value: &mut Option<T>) {
        match self {
            Self::Keep => {}
            Self::Remove => *value = None,
            Self::Set(new) => *value = Some(new),
        }
    }

    /// The new value where removing one means the default; `None` keeps it.
    pub fn or_default(self) -> Option<T>
    where
        T: Default,
    {
        match self {
            Self::Keep => None,
            Self::Remove => Some(T::default()),
            Self::Set(new) => Some(new),
        }
    }
}

/// The members of an object inside the body.
impl<'a> From<Members<'a>> for Fields<'a> {
    fn from(Members(values): Members<'a>) -> Self {
        Self {
            values,
            known: Vec::new(),
            unknown_inside: Vec::new(),
            looks_left: Cell::new(MAX_LOOKS),
        }
    }
}

impl<'a> Fields<'a> {
    pub fn parse(body: &'a [u8]) -> Result<Self> {
        let broken = |error| Error::invalid(format_args!("the body is not JSON: {error}"));
        let document: &RawValue = serde_json::from_slice(body).map_err(broken)?;
        if JsonType::of(document) != JsonType::Object {
            return Err(wrong_type("the body", "a JSON object", document));
        }
        Ok(decoded::<Members<'_>>("the body", document)?.into())
    }

    /// The fields of a body that may be left out.
    ///
    /// # Errors
    /// As for [`Fields::parse`].
    pub fn parse_optional(body: &'a [u8]) -> Result<Self> {
        let is_empty = body.trim_ascii().is_empty();
        Self::parse(if is_empty { b"{}" } else { body })
    }

    /// The names of the fields that nobody has asked for, up to a bound. `are_all_known` says that all were asked for that
    /// there may be.
    ///
    /// # Errors
    /// `Invalid` if one of them means a field that is known.
    pub fn unknown(&self, are_all_known: bool) -> Result<Vec<String>> {
        let is_unknown = |(name, value): &(&String, &&RawValue)| {
            JsonType::of(value) != JsonType::Null && !self.known.contains(&name.as_str())
        };
        let mut names = self.unknown_inside.clone();
        for (name, _) in self.values.iter().filter(is_unknown) {
            let left = self.looks_left.get();
            self.looks_left.set(left.saturating_sub(1));
            let known = || self.known.iter().copied().filter(|_| left > 0);
            let spelt = || near::by_spelling(name, known()).filter(|_| are_all_known);
            if let Some(meant) = near::by_alias(name, known()).or_else(spelt) {
                let text = format!("{name} is not known; use {meant}");
                return Err(Error::invalid(text));
            }
            if names.len() < MAX_UNKNOWN && name.len() <= MAX_UNKNOWN_BYTES {
                names.push(name.clone());
            }
        }
        Ok(names)
    }

    /// Reads an object that is an element of a list. What nobody asks for in it is reported with that of the body.
    ///
    /// # Errors
    /// Those of `read`, and `Invalid` if a field of the object means one that is known; with the place of the element.
    pub fn element<T>(
        &mut self,
        list: &str,
        number: usize,
        element: &RawValue,
        read: impl FnOnce(&mut Fields<'_>) -> Result<T>,
    ) -> Result<T> {
        let looks_left = &self.looks_left;
        let read = || {
            let mut fields = Fields::parse(element.get().as_bytes())?;
            fields.looks_left.set(looks_left.get());
            let parsed = read(&mut fields);
            let unknown = fields.unknown(parsed.is_ok())?;
            looks_left.set(fields.looks_left.get());
            Ok((parsed?, unknown))
        };
        let (parsed, unknown) = read()
            .map_err(|error: Error| Error::invalid(format_args!("{list}[{number}]: {error}")))?;
        for name in unknown {
            if self.unknown_inside.len() < MAX_UNKNOWN {
                self.unknown_inside.push(format!("{list}[{number}].{name}"));
            }
        }
        Ok(parsed)
    }

    pub fn take(&mut self, name: &'static str) -> Option<&'a RawValue> {
        self.known.push(name);
        let value = std::mem::replace(self.values.get_mut(name)?, RawValue::NULL);
        (JsonType::of(value) != JsonType::Null).then_some(value)
    }

    /// Checks a string that is of no use here, and is reported with what nobody asks for.
    ///
    /// # Errors
    /// `Invalid` if it is no string.
    pub fn check_string(&self, name: &str) -> Result<()> {
        match self.values.get(name) {
            Some(value) if !matches!(JsonType::of(value), JsonType::String | JsonType::Null) => {
                Err(wrong_type(name, "a string", value))
            }
            _ => Ok(()),
        }
    }

    /// A field that null removes.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn removable<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&mut Self, &'static str) -> Result<Option<T>>,
    ) -> Result<Change<T>> {
        let given = self.values.get(name);
        let is_null = given.is_some_and(|value| JsonType::of(value) == JsonType::Null);
        Ok(match read(self, name)? {
            Some(value) => Change::Set(value),
            None if is_null => Change::Remove,
            None => Change::Keep,
        })
    }

    /// A field of one type; `None` if it is absent.
    fn typed(
        &mut self,
        name: &'static str,
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

    pub fn string(&mut self, name: &'static str) -> Result<Option<String>> {
        self.typed(name, JsonType::String, "a string")?
            .map(|value| decoded(name, value))
            .transpose()
    }

    /// A field that must be there, of any type; `accepted` says what it takes.
    ///
    /// # Errors
    /// `Invalid` if it is absent.
    pub fn required(&mut self, name: &'static str, accepted: &str) -> Result<&'a RawValue> {
        self.take(name).ok_or_else(|| missing(name, accepted))
    }

    /// A string that must be there.
    ///
    /// # Errors
    /// `Invalid` if it is absent, or no string.
    pub fn required_string(&mut self, name: &'static str) -> Result<String> {
        self.string(name)?.ok_or_else(|| missing(name, "a string"))
    }

    pub fn boolean(&mut self, name: &'static str) -> Result<Option<bool>> {
        let value = self.typed(name, JsonType::Boolean, "true or false")?;
        Ok(value.map(|value| value.get() == "true"))
    }

    fn number<T>(
        &mut self,
        name: &'static str,
        accepted: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(number) = self.typed(name, JsonType::Number, accepted)? else {
            return Ok(None);
        };
        parse(number.get())
            .map(Some)
            .ok_or_else(|| Error::invalid(format_args!("{name} is {number}; it takes {accepted}")))
    }

    pub fn seconds(&mut self, name: &'static str) -> Result<Option<Duration>> {
        self.number(name, "a number of seconds above 0", |text| {
            super::seconds(text).filter(|seconds| !seconds.is_zero())
        })
    }

    pub fn whole(&mut self, name: &'static str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let accepted = format!("a whole number from {} to {}", range.start(), range.end());
        self.number(name, &accepted, |text| {
            text.parse().ok().filter(|whole| range.contains(whole))
        })
    }

    /// Processors, as the processor time that they have in a second.
    pub fn processors(
        &mut self,
        name: &'static str,
        accepted: &str,
        range: RangeInclusive<Duration>,
    ) -> Result<Option<Duration>> {
        self.number(name, accepted, |text| {
            super::seconds(text).filter(|time| range.contains(time))
        })
    }

    pub fn integer(&mut self, name: &'static str) -> Result<Option<i64>> {
        self.number(name, "a whole number of 64 bits", |text| text.parse().ok())
    }

    pub fn choice<T: Copy>(
        &mut self,
        name: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>> {
        let Some(text) = self.string(name)? else {
            return Ok(None);
        };
        choose(choices, &text).map(Some).ok_or_else(|| {
            let accepted = accepted_words(choices);
            Error::invalid(format_args!("{name} is {text:?}; it takes {accepted}"))
        })
    }
}

/// Most unknown names in a body that are compared with the known ones, which takes microseconds for each.
const MAX_LOOKS: usize = 256;

/// Most names of unknown fields that are reported, and bytes of one.
const MAX_UNKNOWN: usize = 16;
const MAX_UNKNOWN_BYTES: usize = 64;

/// Most elements of an array, or members of an object. The kernel takes a command of a few megabytes
/// at most; many more tiny values would cost the server many times their size.
pub const MAX_VALUES: usize = 65_536;

/// The elements of an array, each as raw JSON.
pub struct Elements<'a>(pub Vec<&'a RawValue>);

/// The members of an object, each as raw JSON. Of several with one name the last counts.
#[derive(Debug, Default)]
pub struct Members<'a>(pub Table<String, &'a RawValue>);

impl<'a> Deserialize<'a> for Elements<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_seq(Self(Vec::new()))
    }
}

impl<'a> Deserialize<'a> for Members<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(Self(Table::new()))
    }
}

impl<'a> Visitor<'a> for Elements<'a> {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(mut self, mut values: A) -> std::result::Result<Self, A::Error> {
        while let Some(element) = values.next_element()? {
            if self.0.len() == MAX_VALUES {
                return Err(too_many());
            }
            self.0.push(element);
        }
        Ok(self)
    }
}

impl<'a> Visitor<'a> for Members<'a> {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut values: A) -> std::result::Result<Self, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = values.next_entry()? {
            if members.len() == MAX_VALUES {
                return Err(too_many());
            }
            members.push(member);
        }
        Ok(Self(members.into()))
    }
}

fn too_many<E: serde::de::Error>() -> E {
    E::custom(format_args!("it has more than {MAX_VALUES} values"))
}

/// The type of a JSON value, known by its first character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonType {
    Null,
    Boolean,
    Number,
    String,
    Array,
    Object,
}

impl JsonType {
    pub fn of(value: &RawValue) -> Self {
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

pub fn decoded<'a, T: Deserialize<'a>>(field: &str, value: &'a RawValue) -> Result<T> {
    serde_json::from_str(value.get())
        .map_err(|error| Error::invalid(format_args!("{field} cannot be read: {error}")))
}

/// The error about a field that must be there.
pub fn missing(field: &str, accepted: &str) -> Error {
    Error::invalid(format_args!("{field} is missing; it takes {accepted}"))
}

pub fn wrong_type(field: &str, accepted: &str, found: &RawValue) -> Error {
    let found = match JsonType::of(found) {
        JsonType::Null => "null",
        JsonType::Boolean => "a boolean",
        JsonType::Number => "a number",
        JsonType::String => "a string",
        JsonType::Array => "an array",
        JsonType::Object => "an object",
    };
    Error::invalid(format_args!("{field} is {found}; it takes {accepted}"))
}

/// An array of strings; `accepted` says what the field takes.
pub fn strings(name: &str, accepted: &str, array: &RawValue) -> Result<Vec<String>> {
    if JsonType::of(array) != JsonType::Array {
        return Err(wrong_type(name, accepted, array));
    }
    let elements = decoded::<Elements<'_>>(name, array)?.0.into_iter();
    let decode = |element| match JsonType::of(element) {
        JsonType::String => decoded(name, element),
        _ => Err(wrong_type(name, accepted, element)),
    };
    elements.map(decode).collect()
}
