//! Fuzz test of what reads archives: the same members however the bytes arrive, in bounded memory, and
//! what was read is read again after it was written.

use std::io::BufReader;

use super::input::CountedInput;
use super::members::{Member, MemberKind, Members};
use super::write::{MemberHeader, append_member};
use crate::error::Result;
use crate::fuzz::{bounded, check};
use crate::limits::ledger::{Budget, Charge, Item};

/// Content that is kept of all members.
const MAX_CONTENT_BYTES: usize = 256 * 1024;

/// A member, and the pieces of its content, joined.
type Whole = (Member, Vec<(u64, u8)>);

#[test]
fn an_archive_has_the_same_members_however_it_arrives() {
    let tokens: &[&[u8]] = &[
        b"ustar\x0000",
        b"ustar  \0",
        b"30 mtime=1350244992.023960108\n",
        b"22 GNU.sparse.major=1\n",
        b"22 GNU.sparse.minor=0\n",
        b"25 GNU.sparse.realsize=9\n",
        b"26 GNU.sparse.map=0,4,6,2\n",
        b"30 SCHILY.xattr.user.a=b\n9 x=\n",
        b"19 path=../../\xff\0/a\n",
        b"13 size=1234\n",
        b"\x80\0\0\0\0\0\0\0\0\0\x01\0",
        b"\xff\xff\xff\xff",
        b"00000000011\0",
        b"\x1f\x8b\x08\0\0\0\0\0\0\xff",
        b"\x28\xb5\x2f\xfd",
        &[0; 512],
        b"x",
        b"g",
        b"L",
        b"S",
    ];
    check("archive", tokens, |input| {
        // Few bytes of gzip are many of an archive.
        let is_compressed = input.first() == Some(&0x1f);
        if !is_compressed {
            bounded(input, 64, || drain(input).is_ok());
        }
        let (members, end) = read(input, 65_536);
        let (slowly, same_end) = read(input, 1);
        assert_eq!(end.is_some(), same_end.is_some());
        // How much comes out of broken gzip data depends on the pieces that the decompressor gets.
        if !is_compressed || end.is_none() {
            assert_eq!(members, slowly);
            assert_eq!(end, same_end);
        }
        for (member, content) in &members {
            let mut last = None;
            for (offset, _) in content {
                assert!(*offset < member.size && last.is_none_or(|last| last < *offset));
                last = Some(*offset);
            }
        }
        for (member, content) in members {
            check_written(member, &content);
        }
    });
}

/// Reads everything and keeps nothing.
fn drain(input: &[u8]) -> Result<()> {
    let mut input = CountedInput(input, 0);
    let mut members = Members::new(&mut input, true, charge())?;
    while members.next()?.is_some() {
        members.read_content(|_, _| Ok(()))?;
    }
    Ok(())
}

/// All members up to the first error, and its text.
fn read(input: &[u8], capacity: usize) -> (Vec<Whole>, Option<String>) {
    let mut found = Vec::new();
    let end = read_into(&mut found, input, capacity);
    (found, end.err().map(|error| error.to_string()))
}

fn read_into(found: &mut Vec<Whole>, input: &[u8], capacity: usize) -> Result<()> {
    let mut left = MAX_CONTENT_BYTES;
    let mut input = CountedInput(BufReader::with_capacity(capacity, input), 0);
    let mut members = Members::new(&mut input, true, charge())?;
    while let Some(member) = members.next()? {
        let mut content = Vec::new();
        members.read_content(|offset, bytes| {
            let bytes = &bytes[..bytes.len().min(left)];
            left -= bytes.len();
            content.extend((offset..).zip(bytes.iter().copied()));
            Ok(())
        })?;
        found.push((member, content));
    }
    Ok(())
}

/// A member is the same after it was written and read.
fn check_written(mut member: Member, content: &[(u64, u8)]) {
    let typeflag = match member.kind {
        // A file, even if its name ends with a slash.
        MemberKind::File => b'7',
        MemberKind::Directory => b'5',
        MemberKind::Symlink => b'2',
        MemberKind::HardLink => b'1',
        MemberKind::Other(_) => return,
    };
    // Such names cannot be written: pax ends a key there.
    member.attributes.retain(|own| !own.name.contains('='));
    let has_nul = member.name.contains(&0) || member.link.contains(&0);
    // Pax has no way to say "empty", nor the least of all times.
    if has_nul || member.name.is_empty() || member.modified.seconds == i64::MIN {
        return;
    }
    let is_whole = member.kind == MemberKind::File && member.size == content.len() as u64;
    member.size = if is_whole { member.size } else { 0 };
    let mut out = Vec::new();
    append_member(
        &mut out,
        &MemberHeader {
            path: &member.name,
            link: &member.link,
            typeflag,
            mode: member.mode,
            uid: member.uid,
            gid: member.gid,
            size: member.size,
            modified: member.modified,
            attributes: &member.attributes,
        },
    );
    if is_whole {
        out.extend(content.iter().map(|(_, byte)| byte));
    }
    out.resize(out.len().next_multiple_of(512) + 1024, 0);
    let (again, end) = read(&out, 512);
    assert_eq!(end, None);
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].0, member);
    if is_whole {
        assert_eq!(again[0].1, content);
    }
}

fn charge() -> Charge {
    let ledger = Budget::new(1 << 40).whole();
    ledger.charge(Item::Bodies, 0).unwrap()
}
