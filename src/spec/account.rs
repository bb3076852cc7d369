//! The accounts of a root directory, as `/etc/passwd` and `/etc/group` list them (passwd(5), group(5)).
//!
//! Pure functions. Whoever asks reads the files, which the owner of the root may have written.

use std::collections::{HashMap, HashSet};

/// The first number of a person's account (login.defs(5), `UID_MIN`).
const FIRST_ID: u32 = 1000;

/// The highest id that a sandbox with a root of its own has.
const MAX_ID: u32 = 65_535;

/// Most groups of an account besides its own, as of a process (`NGROUPS_MAX`, limits.h).
const MAX_GROUPS: usize = 65_536;

/// Longest name, and longest path of a home: they are kept and shown as long as the sandbox exists.
const MAX_NAME: usize = 256;
const MAX_HOME: usize = 4095;

/// Most memory of the names of a list, and what each takes besides its text: some 250 names of the usual length.
const MAX_NAMES_BYTES: usize = 16 << 10;
const BYTES_PER_NAME: usize = 56;

/// Who a command is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    /// Its further groups.
    pub groups: Vec<u32>,
    pub name: String,
    /// An absolute path.
    pub home: String,
}

impl Account {
    /// The account with a name or, if there is none, with a number. A number needs no account. Root needs none either.
    pub fn find(wanted: &str, passwd: &str, group: &str) -> Option<Self> {
        let lines = || passwd.lines().filter_map(Line::parse);
        let by_name = lines().find(|line| line.name == wanted);
        let number = || {
            let is_plain = wanted.bytes().all(|byte| byte.is_ascii_digit());
            let number: Option<u32> = wanted.parse().ok();
            number.filter(|number| is_plain && *number <= MAX_ID)
        };
        let found = by_name.or_else(|| {
            let number = if wanted == "root" { 0 } else { number()? };
            let by_number = lines().find(|line| line.uid == number);
            let without = Line {
                name: wanted,
                uid: number,
                gid: number,
                home: if number == 0 { "/root" } else { "/" },
            };
            Some(by_number.unwrap_or(without))
        })?;
        let mut groups: Vec<u32> = group
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let (gid, members) = (fields.nth(2)?, fields.next()?);
                let is_member = members.split(',').any(|member| member.trim() == found.name);
                let gid = gid.parse().ok().filter(|gid| *gid <= MAX_ID)?;
                (is_member && gid != found.gid).then_some(gid)
            })
            .collect();
        groups.truncate(MAX_GROUPS);
        Some(Self {
            uid: found.uid,
            gid: found.gid,
            groups,
            name: found.name.to_owned(),
            home: found.home.to_owned(),
        })
    }
}

/// The first number for a new account, and for its group, that nobody has; `None` if an account has the name already.
pub fn free_id(name: &str, passwd: &str, group: &str) -> Option<u32> {
    let field = |line: &'_ str, at| line.split(':').nth(at)?.parse::<u32>().ok();
    if passwd
        .lines()
        .any(|line| line.split(':').next() == Some(name))
    {
        return None;
    }
    let users = passwd
        .lines()
        .flat_map(|line| [field(line, 2), field(line, 3)]);
    let groups = group.lines().map(|line| field(line, 2));
    let taken: HashSet<u32> = users.chain(groups).flatten().collect();
    (FIRST_ID..=MAX_ID).find(|id| !taken.contains(id))
}

/// Names by number.
pub type Names = HashMap<u32, String>;

/// The names of the numbers in `/etc/passwd`, or in `/etc/group`; of several, the first. Numbers whose names are too long or
/// come too late have none.
pub fn names(list: &str) -> Names {
    let mut names = Names::new();
    let mut left = MAX_NAMES_BYTES;
    for line in list.lines() {
        let mut fields = line.split(':');
        let name = fields.next();
        let name = name.filter(|name| (1..=MAX_NAME).contains(&name.len()));
        let id = fields.nth(1).and_then(|id| id.parse().ok());
        if let (Some(name), Some(id)) = (name, id)
            && !names.contains_key(&id)
        {
            let Some(rest) = left.checked_sub(BYTES_PER_NAME + name.len()) else {
                break;
            };
            left = rest;
            names.insert(id, name.to_owned());
        }
    }
    names
}

/// A line of `/etc/passwd`, as far as it is of use.
struct Line<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next();
        let name = name.filter(|name| (1..=MAX_NAME).contains(&name.len()))?;
        let mut id = fields.skip(1);
        let number = |text: Option<&str>| text?.parse::<u32>().ok().filter(|id| *id <= MAX_ID);
        let (uid, gid) = (number(id.next())?, number(id.next())?);
        let home = id.nth(1);
        let home = home.filter(|home| home.starts_with('/') && home.len() <= MAX_HOME);
        let home = home.unwrap_or("/");
        Some(Self {
            name,
            uid,
            gid,
            home,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbad\n:x:9:9::/:\nbig:x:65536:1::/:\n\
                          user:x:1000:1000:A User,,,:/home/user:/bin/bash\n1000:x:5:5::relative:\nnone:x:7:8\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:user\nbig:x:70000:user\nshort:x\nwheel:x:10: user \n";

    fn find(wanted: &str) -> Option<Account> {
        Account::find(wanted, PASSWD, GROUP)
    }

    #[test]
    fn accounts_are_found_by_name_and_by_number() {
        let user = find("user").unwrap();
        assert_eq!(
            (user.uid, user.gid, user.groups.as_slice()),
            (1000, 1000, &[27, 10][..])
        );
        assert_eq!(
            (user.name.as_str(), user.home.as_str()),
            ("user", "/home/user")
        );
        assert_eq!(find("0"), find("root"));
        let named_like_a_number = find("1000").unwrap();
        assert_eq!(
            (named_like_a_number.uid, named_like_a_number.home.as_str()),
            (5, "/")
        );
        let none = find("none").unwrap();
        assert_eq!((none.uid, none.gid, none.home.as_str()), (7, 8, "/"));
    }

    #[test]
    fn names_and_homes_have_a_limit() {
        let list = |name: usize, home: usize| {
            let (name, home) = ("n".repeat(name), "h".repeat(home));
            format!("{name}:x:7:8::/{home}:\n")
        };
        let home = |name, home| {
            Account::find("7", &list(name, home), "")
                .unwrap()
                .home
                .len()
        };
        assert_eq!(
            (home(256, 4094), home(256, 4095), home(257, 9)),
            (4095, 1, 1)
        );
    }

    #[test]
    fn a_number_and_root_need_no_account() {
        let number = find("1234").unwrap();
        assert_eq!(
            (number.uid, number.gid, number.home.as_str()),
            (1234, 1234, "/")
        );
        let root = Account::find("root", "", "").unwrap();
        assert_eq!((root.uid, root.home.as_str()), (0, "/root"));
    }

    #[test]
    fn a_new_account_has_a_number_of_its_own() {
        assert_eq!(free_id("user", PASSWD, GROUP), None);
        assert_eq!(free_id("other", PASSWD, GROUP), Some(1001));
        assert_eq!(free_id("user", "", ""), Some(1000));
        assert_eq!(
            free_id(
                "user",
                "a:x:1000:7::/:\nb:x:8:1001::/:\n",
                "c:x:1002:\nuser:x\n"
            ),
            Some(1003)
        );
        let all = (1000..=MAX_ID).map(|id| format!("u{id}:x:{id}:"));
        let all = all.collect::<Vec<_>>().join("\n");
        assert_eq!(free_id("user", &all, ""), None);
    }

    #[test]
    fn numbers_have_the_first_name_that_is_there() {
        let names = names("root:x:0:0::/:\ntoor:x:0:0::/:\n:x:4\nbad\nuser:x:1000:1000\n");
        let expected = [(0, "root".to_owned()), (1000, "user".to_owned())];
        assert_eq!(names, HashMap::from(expected));
    }

    #[test]
    fn as_many_names_are_kept_as_there_is_room_for() {
        let list = |length: usize| {
            let lines = (0..=MAX_ID).map(|id| format!("{id:0length$}:x:{id}:\n"));
            lines.collect::<String>()
        };
        for (length, expected) in [(8, 256), (256, 52), (257, 0)] {
            let names = names(&list(length));
            assert_eq!(names.len(), expected, "{length}");
            assert!(names.keys().all(|id| (*id as usize) < expected));
        }
    }

    #[test]
    fn what_is_no_account_is_none() {
        for wanted in ["nobody", "", "big", "65536", "-1", "+1", "1 ", "0x1", "bad"] {
            assert_eq!(find(wanted), None, "{wanted:?}");
        }
    }
}
