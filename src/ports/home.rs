//! Sockets in a home, by name.
//!
//! The name belongs to the sandbox, which may put anything there and change it at any moment. So what
//! is connected to is the very file that was looked at: it is opened without following a link on the
//! way, must be a socket of the sandbox's, and is reached through its descriptor; and whoever
//! listens there must be the sandbox as well, for a socket's file can outlive who bound it, or be
//! passed about.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, UnixAddr, connect, getsockopt, recv,
    send, setsockopt, socket, sockopt,
};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};
use nix::sys::time::{TimeVal, TimeValLike};

use super::{Listener, Name, Port, is_lack, unreachable};
use crate::error::{Error, Result};
use crate::sys::User;

pub(super) const ACCEPTED: &str =
    "a name of 1 to 64 letters, digits, dots, dashes and underscores, other than . and ..";

/// Where the sockets are, from the home on.
const DIRECTORY: [&str; 2] = [".sbx", "proxy"];

/// What the file of a port ends in.
const SUFFIX: &str = ".sock";

/// Most characters of a name.
const MAX_NAME_BYTES: usize = 64;

/// Most sockets that are listed: a sandbox can make any number of them. Few in unit tests.
const MAX_LISTED: usize = if cfg!(test) { 8 } else { 1000 };

/// The sockets of one home.
pub struct Sockets {
    home: Arc<OwnedFd>,
    owner: User,
}

/// Reads a name.
pub(super) fn parse(text: &[u8]) -> Option<String> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    let accepted = (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.iter().all(plain)
        && text != b"."
        && text != b"..";
    accepted
        .then(|| String::from_utf8(text.to_vec()).ok())
        .flatten()
}

impl Sockets {
    pub(super) fn new(home: Arc<OwnedFd>, owner: User) -> Self {
        Self { home, owner }
    }

    /// Opens the directory of the sockets, without following a link.
    fn directory(&self, flags: OFlag) -> std::result::Result<OwnedFd, Errno> {
        let flags = flags | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let parent = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let above = openat(&self.home, DIRECTORY[0], parent, Mode::empty())?;
        openat(&above, DIRECTORY[1], flags, Mode::empty())
    }

    /// Why a file is no socket of the sandbox's.
    fn objection(&self, status: &FileStat) -> Option<String> {
        match status.st_mode & libc::S_IFMT {
            libc::S_IFSOCK if status.st_uid == self.owner.uid => None,
            libc::S_IFSOCK => Some(format!(
                "it belongs to uid {}, not to the sandbox",
                status.st_uid
            )),
            libc::S_IFLNK => Some("it is a link, and links are not followed".to_owned()),
            _ => Some("it is not a socket".to_owned()),
        }
    }

    /// Connects.
    pub(super) fn connect(&self, name: &str, limit: Duration) -> Result<OwnedFd> {
        let cause = match self.try_connect(name, limit) {
            Ok(Ok(socket)) => return Ok(socket),
            Ok(Err(objection)) => objection,
            Err(Errno::ENOENT) => "there is no such socket; bind a server to it".to_owned(),
            Err(Errno::ECONNREFUSED) => "nothing listens on it".to_owned(),
            Err(Errno::EAGAIN) => "it does not accept connections".to_owned(),
            Err(Errno::ENOTDIR | Errno::ELOOP) => "its directory is none, or a link".to_owned(),
            Err(errno) if is_lack(errno) => {
                let act = format!("cannot connect to port {name}");
                return Err(Error::system(act, errno));
            }
            Err(errno) => format!("{} ({errno:?})", errno.desc().to_lowercase()),
        };
        let tried = format!("$SBX_PROXY_DIR/{name}{SUFFIX}: {cause}");
        Err(unreachable(name, &tried))
    }

    fn try_connect(
        &self,
        name: &str,
        limit: Duration,
    ) -> std::result::Result<std::result::Result<OwnedFd, String>, Errno> {
        let directory = self.directory(OFlag::O_PATH)?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let name = format!("{name}{SUFFIX}");
        let file = openat(&directory, name.as_str(), flags, Mode::empty())?;
        if let Some(objection) = self.objection(&fstat(&file)?) {
            return Ok(Err(objection));
        }
        let socket = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        // Connecting waits while the queue is full, as long as sending would (unix(7)).
        let limit = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
        setsockopt(&socket, sockopt::SendTimeout, &TimeVal::milliseconds(limit))?;
        // Whatever the name means by now, the descriptor is what was looked at.
        let address = UnixAddr::new(format!("/proc/self/fd/{}", file.as_raw_fd()).as_str())?;
        connect(socket.as_raw_fd(), &address)?;
        let listener = getsockopt(&socket, sockopt::PeerCredentials)?;
        Ok(if listener.uid() == self.owner.uid {
            Ok(socket)
        } else {
            let uid = listener.uid();
            Err(format!("uid {uid} listens on it, not the sandbox"))
        })
    }

    /// Whether a connection would find somebody. The kernel is asked, which disturbs nobody; only where
    /// it does not tell, it is tried.
    pub(super) fn is_listening(&self, name: &str) -> bool {
        let look = || {
            let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
            let name = format!("{name}{SUFFIX}");
            fstatat(self.directory(OFlag::O_PATH)?, name.as_str(), flags)
        };
        let Ok(status) = look() else { return false };
        if self.objection(&status).is_some() {
            return false;
        }
        if let Some(answer) = is_listened_on(&status) {
            return answer;
        }
        match self.try_connect(name, Duration::from_millis(1)) {
            Ok(connected) => connected.is_ok(),
            Err(errno) => errno == Errno::EAGAIN,
        }
    }

    /// The sockets there are, whether or not somebody listens.
    pub(super) fn list(&self) -> Result<Vec<Listener>> {
        let failed = |errno| Error::system("cannot list $SBX_PROXY_DIR", errno);
        let directory = match self.directory(OFlag::O_RDONLY) {
            // The sandbox may have removed it.
            Err(Errno::ENOENT) => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        // A second descriptor of it: the first belongs to whoever iterates.
        let place = directory.try_clone().map_err(|_| failed(Errno::EMFILE))?;
        let is_ours = |name: &String| {
            let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
            let status = fstatat(&place, format!("{name}{SUFFIX}").as_str(), flags);
            status.is_ok_and(|status| self.objection(&status).is_none())
        };
        let mut directory = Dir::from_fd(directory).map_err(failed)?;
        let mut names = Vec::new();
        for entry in directory.iter() {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes().strip_suffix(SUFFIX.as_bytes());
            names.extend(name.and_then(parse).filter(is_ours));
            if names.len() == MAX_LISTED {
                break;
            }
        }
        names.sort_unstable();
        let path = DIRECTORY.join("/");
        Ok(names
            .into_iter()
            .map(|name| Listener {
                address: format!("{path}/{name}{SUFFIX}"),
                port: Port(Name::Socket(name)),
                process: None,
            })
            .collect())
    }
}

/// Whether some socket that listens is bound to a file; none where the kernel does not tell
/// (`sock_diag(7)`): where it has no such interface, or names the file's number on another device,
/// which may be another file, or the same where file systems lie on one another.
fn is_listened_on(file: &FileStat) -> Option<bool> {
    const BY_FAMILY: u16 = 20;
    const REQUEST_DUMP: u16 = 0x301;
    const LISTEN: u32 = 1 << 10;
    const SHOW_FILE: u32 = 2;
    const FILE: u16 = 1;
    const DONE: u16 = 3;
    /// Of a message, and of what precedes the attributes in it.
    const HEADERS: usize = 16 + 16;
    let channel = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )
    .ok()?;
    let mut request = Vec::with_capacity(40);
    request.extend_from_slice(&40u32.to_ne_bytes());
    request.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    request.extend_from_slice(&REQUEST_DUMP.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[libc::AF_UNIX.to_ne_bytes()[0], 0, 0, 0]);
    for word in [LISTEN, 0, SHOW_FILE, u32::MAX, u32::MAX] {
        request.extend_from_slice(&word.to_ne_bytes());
    }
    send(channel.as_raw_fd(), &request, MsgFlags::empty()).ok()?;
    let word = |bytes: &[u8], at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    let half = |bytes: &[u8], at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    let device = libc::major(file.st_dev) << 20 | libc::minor(file.st_dev);
    let mut is_certain = true;
    let mut buffer = vec![0; 32 * 1024];
    loop {
        let count = recv(channel.as_raw_fd(), &mut buffer, MsgFlags::empty()).ok()?;
        let mut messages = &buffer[..count];
        while !messages.is_empty() {
            let length = usize::try_from(word(messages, 0)?).ok()?;
            match half(messages, 4)? {
                DONE => return is_certain.then_some(false),
                BY_FAMILY => {}
                _ => return None,
            }
            let mut attributes = messages.get(HEADERS..length)?;
            while let Some(length) = half(attributes, 0) {
                // The kernel tells the lower half of a large number, and the device in its own way.
                let inode = word(attributes, 4).map(u64::from);
                if half(attributes, 2)? == FILE && inode == Some(file.st_ino & 0xffff_ffff) {
                    if word(attributes, 8)? == device {
                        return Some(true);
                    }
                    is_certain = false;
                }
                let length = usize::from(length).next_multiple_of(4).max(4);
                attributes = attributes.get(length..).unwrap_or_default();
            }
            messages = messages
                .get(length.next_multiple_of(4)..)
                .unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;
    use crate::error::Kind;

    #[test]
    fn names_are_plain() {
        for name in ["a", "8000", "a.b_c-D", "...", ".a", "-"] {
            assert_eq!(parse(name.as_bytes()).as_deref(), Some(name));
        }
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", "a/b", "a b", "a\0", "%41", "\u{e4}", &long] {
            assert_eq!(parse(name.as_bytes()), None, "{name}");
        }
    }

    /// A home of the user that the tests run as.
    struct Home {
        path: PathBuf,
        sockets: Sockets,
    }

    impl Home {
        fn new(name: &str, owner: libc::uid_t) -> Self {
            let path = std::env::temp_dir().join(format!("sbx-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join(DIRECTORY.join("/"))).unwrap();
            let owner = User {
                uid: owner,
                gid: owner,
            };
            let home = Arc::new(OwnedFd::from(fs::File::open(&path).unwrap()));
            let sockets = Sockets::new(home, owner);
            Self { path, sockets }
        }

        fn of_mine(name: &str) -> Self {
            Self::new(name, nix::unistd::geteuid().as_raw())
        }

        fn socket(&self, name: &str) -> PathBuf {
            let directory = self.path.join(DIRECTORY.join("/"));
            directory.join(format!("{name}{SUFFIX}"))
        }

        #[track_caller]
        fn refuse(&self, name: &str, cause: &str) {
            let error = self
                .sockets
                .connect(name, Duration::from_secs(1))
                .unwrap_err();
            assert_eq!(error.kind(), Kind::Unreachable);
            assert!(error.to_string().contains(cause), "{error}");
            assert!(!self.sockets.is_listening(name));
        }
    }

    impl Drop for Home {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    #[test]
    fn a_socket_of_the_owners_is_reached_and_listed() {
        let home = Home::of_mine("reached");
        let listener = UnixListener::bind(home.socket("app")).unwrap();
        assert!(home.sockets.connect("app", Duration::from_secs(1)).is_ok());
        assert!(home.sockets.is_listening("app"));
        let status = nix::sys::stat::lstat(&home.socket("app")).unwrap();
        assert_ne!(is_listened_on(&status), Some(false));
        if is_listened_on(&status).is_some() {
            // Looking is not connecting.
            listener.set_nonblocking(true).unwrap();
            while listener.accept().is_ok() {}
            assert!(home.sockets.is_listening("app"));
            assert!(listener.accept().is_err());
        }
        let listed = home.sockets.list().unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].port, Port(Name::Socket("app".to_owned())));
        drop(listener);
        home.refuse("app", "nothing listens on it");
    }

    #[test]
    fn what_is_no_socket_of_the_owners_is_refused() {
        let home = Home::of_mine("refused");
        let _listener = UnixListener::bind(home.socket("app")).unwrap();
        symlink(home.socket("app"), home.socket("link")).unwrap();
        fs::write(home.socket("file"), "").unwrap();
        home.refuse("missing", "there is no such socket");
        home.refuse("link", "links are not followed");
        home.refuse("file", "it is not a socket");
        assert_eq!(home.sockets.list().unwrap().len(), 1);
        // The same files, in the eyes of another owner.
        let mine = nix::unistd::geteuid().as_raw();
        let other = Home::new("others", mine + 1);
        let _listener = UnixListener::bind(other.socket("app")).unwrap();
        other.refuse("app", "not to the sandbox");
        assert_eq!(other.sockets.list().unwrap().len(), 0);
    }

    #[test]
    fn what_is_no_socket_does_not_crowd_sockets_out_of_the_list() {
        let home = Home::of_mine("crowded");
        let mut listeners = Vec::new();
        for part in ["a", "b", "c"] {
            listeners.push(UnixListener::bind(home.socket(part)).unwrap());
            for number in 0..20 * MAX_LISTED {
                fs::write(home.socket(&format!("{part}{number}")), "").unwrap();
            }
        }
        let listed = home.sockets.list().unwrap();
        let names: Vec<_> = listed.iter().map(|found| found.port.to_string()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        for number in 0..2 * MAX_LISTED {
            listeners.push(UnixListener::bind(home.socket(&format!("d{number}"))).unwrap());
        }
        assert_eq!(home.sockets.list().unwrap().len(), MAX_LISTED);
    }

    #[test]
    fn a_file_of_the_same_number_on_another_device_is_another() {
        let home = Home::of_mine("numbered");
        let listener = UnixListener::bind(home.socket("app")).unwrap();
        let mut status = nix::sys::stat::lstat(&home.socket("app")).unwrap();
        if is_listened_on(&status) != Some(true) {
            // The kernel does not tell here, or file systems lie on one another.
            return;
        }
        status.st_dev += 1;
        assert_eq!(is_listened_on(&status), None);
        status.st_ino += 1 << 32;
        status.st_dev -= 1;
        assert_eq!(is_listened_on(&status), Some(true));
        drop(listener);
        assert_eq!(is_listened_on(&status), Some(false));
    }

    #[test]
    fn no_directory_on_the_way_may_be_a_link() {
        let home = Home::of_mine("linked");
        let _listener = UnixListener::bind(home.socket("app")).unwrap();
        let (directory, aside) = (home.path.join(".sbx"), home.path.join("aside"));
        fs::rename(&directory, &aside).unwrap();
        symlink(&aside, &directory).unwrap();
        home.refuse("app", "a link");
        assert!(home.sockets.list().is_err());
    }

    #[test]
    fn a_full_queue_is_given_up_and_counts_as_listening() {
        let home = Home::of_mine("full");
        let listener = UnixListener::bind(home.socket("app")).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let _queued = home.sockets.connect("app", Duration::from_secs(1)).unwrap();
        let error = home.sockets.connect("app", Duration::from_millis(50));
        assert!(error.unwrap_err().to_string().contains("does not accept"));
        assert!(home.sockets.is_listening("app"));
    }
}
