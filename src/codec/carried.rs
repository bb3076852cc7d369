//! What the program carries in compressed form (RFC 1951): `build.rs` makes it.

use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZFlush};

/// Decompresses a document, which its length precedes; as archives do, so that the program has the same code
/// once.
pub fn document(carried: &[u8]) -> Vec<u8> {
    let (length, compressed) = carried.split_first_chunk().unwrap_or((&[0; 4], &[]));
    let length = u32::from_le_bytes(*length) as usize;
    let mut document = vec![0; length];
    let mut state = InflateState::new_boxed(DataFormat::Raw);
    let result = inflate(&mut state, compressed, &mut document, MZFlush::Finish);
    assert_eq!(result.bytes_written, length, "the build compressed it");
    document
}

/// A document by the name of its file in the folder where the build put it.
macro_rules! carried {
    ($name:literal) => {
        $crate::codec::carried::document(include_bytes!(concat!(env!("OUT_DIR"), "/", $name)))
    };
}

pub(crate) use carried;
