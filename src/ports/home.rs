//! Sockets in a home, by name.
//!
//! The sandbox owns the directory and may replace any name in it at any moment. So the file is opened
//! without following links, checked to be a socket that the sandbox owns, and connected to through the
//! same descriptor. The listener must run as the sandbox too, because a socket's file can outlive the
//! process that bound it, and its descriptor can be passed to another process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket,
    socketpair, sockopt,
};
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::sys::time::{TimeVal, TimeValLike};

use super::port::{Listener, Port, is_exhaustion, unreachable};
use super::{Listing, MAX_LISTED};
use crate::client::Stopped;
use crate::codec::sort::sort;
use crate::error::{Error, Result, cause};
use crate::sys::paths::{fstatat, openat};
use crate::sys::{User, proc, refuse_descriptors};

pub(super) const ACCEPTED: &str =
    "a name of 1 to 64 letters, digits, dots, dashes and underscores, other than . and ..";

/// The directory of the sockets, relative to the home.
pub(super) const DIRECTORY: [&str; 2] = [".sbx", "proxy"];

/// The same in a root of a sandbox's own.
pub(super) const DIRECTORY_OF_ROOT: [&str; 3] = ["run", "sbx", "proxy"];

const SUFFIX: &str = ".sock";

const MAX_NAME_BYTES: usize = 64;

/// The sockets of one home.
pub struct Sockets {
    home: Arc<OwnedFd>,
    /// Where the sockets are in it.
    path: &'static [&'static str],
    owner: User,
}

enum ConnectError {
    /// The file, or the process that listens, is not the sandbox's.
    Rejected(String),
    System(Errno),
}

impl From<Errno> for ConnectError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// Parses the name of a socket.
pub(super) fn parse(text: &[u8]) -> Option<String> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
    let is_name = (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.iter().all(plain)
        && ![&b"."[..], b".."].contains(&text);
    String::from_utf8(text.to_vec()).ok().filter(|_| is_name)
}

impl Sockets {
    pub(super) fn new(home: Arc<OwnedFd>, path: &'static [&'static str], owner: User) -> Self {
        Self { home, path, owner }
    }

    pub(super) fn owner(&self) -> User {
        self.owner
    }

    /// Opens the directory of the sockets without following links.
    fn directory(&self, flags: OFlag) -> nix::Result<OwnedFd> {
        let careful = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let (name, above) = self.path.split_last().ok_or(Errno::ENOENT)?;
        let mut directory = openat(&self.home, ".", careful | OFlag::O_PATH, Mode::empty())?;
        for name in above {
            directory = openat(&directory, *name, careful | OFlag::O_PATH, Mode::empty())?;
        }
        openat(&directory, *name, careful | flags, Mode::empty())
    }

    /// Why a file cannot be a socket of the sandbox; `None` if it is one.
    fn objection(&self, status: &FileStat) -> Option<String> {
        match status.st_mode & libc::S_IFMT {
            libc::S_IFSOCK if proc::user_of(status.st_uid) == self.owner.uid => None,
            libc::S_IFSOCK => {
                let uid = status.st_uid;
                Some(format!("it belongs to uid {uid}, not to the sandbox"))
            }
            libc::S_IFLNK => Some("it is a link, and links are not followed".to_owned()),
            _ => Some("it is not a socket".to_owned()),
        }
    }

    pub(super) fn connect(&self, name: &str, limit: Duration) -> Result<OwnedFd> {
        let cause = match self.try_connect(name, limit) {
            Ok(socket) => return Ok(socket),
            Err(ConnectError::Rejected(cause)) => cause,
            Err(ConnectError::System(errno)) => match errno {
                Errno::ENOENT if name.bytes().all(|byte| byte.is_ascii_digit()) => {
                    "there is no such socket; bind a server to it, or ask for tcp_ports when the sandbox is made: without \
                     them it listens on no TCP port"
                        .to_owned()
                }
                Errno::ENOENT => "there is no such socket; bind a server to it".to_owned(),
                Errno::ECONNREFUSED => "nothing listens on it".to_owned(),
                Errno::EAGAIN => "it does not accept connections".to_owned(),
                Errno::ENOTDIR | Errno::ELOOP => {
                    "a part of its path is no directory, or a link".to_owned()
                }
                errno if is_exhaustion(errno) => {
                    let act = format!("cannot connect to port {name}");
                    return Err(Error::system(act, errno));
                }
                errno => cause(errno),
            },
        };
        let tried = format!("$SBX_PROXY_DIR/{name}{SUFFIX}: {cause}");
        Err(unreachable(name, &tried))
    }

    /// Opens a socket's file, which is the sandbox's, for connecting to it. The name may mean another file
    /// at any time; the descriptor is the file that was checked.
    fn open(&self, name: &str) -> std::result::Result<OwnedFd, ConnectError> {
        let directory = self.directory(OFlag::O_PATH)?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let name = format!("{name}{SUFFIX}");
        let file = openat(&directory, name.as_str(), flags, Mode::empty())?;
        match self.objection(&fstat(&file)?) {
            Some(objection) => Err(ConnectError::Rejected(objection)),
            None => Ok(file),
        }
    }

    fn try_connect(
        &self,
        name: &str,
        limit: Duration,
    ) -> std::result::Result<OwnedFd, ConnectError> {
        let file = self.open(name)?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        refuse_descriptors(socket.as_fd());
        // While the queue is full, connect waits as long as the send timeout (unix(7)).
        let limit = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
        setsockopt(&socket, sockopt::SendTimeout, &TimeVal::milliseconds(limit))?;
        connect(socket.as_raw_fd(), &address_of(&file)?)?;
        let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
        if proc::user_of(uid) != self.owner.uid {
            let cause = format!("uid {uid} listens on it, not the sandbox");
            return Err(ConnectError::Rejected(cause));
        }
        Ok(socket)
    }

    /// Whether a server listens. The server does not notice.
    pub(super) fn is_listening(&self, name: &str) -> bool {
        let file = self.open(name);
        file.is_ok_and(|file| is_listened_on(&file).unwrap_or(false))
    }

    /// All sockets, with or without a server.
    pub(super) fn list(&self, listing: &mut Listing<'_>) -> std::result::Result<(), Stopped> {
        let failed = |errno| Stopped::Failed(Error::system("cannot list $SBX_PROXY_DIR", errno));
        let directory = match self.directory(OFlag::O_RDONLY) {
            // The sandbox has removed it.
            Err(Errno::ENOENT) => return Ok(()),
            other => other.map_err(failed)?,
        };
        // `Dir` takes the first descriptor.
        let parent = directory.try_clone().map_err(|_| failed(Errno::EMFILE))?;
        let is_ours = |name: &String| {
            let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
            let status = fstatat(&parent, format!("{name}{SUFFIX}").as_str(), flags);
            status.is_ok_and(|status| self.objection(&status).is_none())
        };
        let mut directory = Dir::from_fd(directory).map_err(failed)?;
        let path = self.path.join("/");
        let mut names = Vec::new();
        for entry in directory.iter() {
            listing.pass()?;
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes().strip_suffix(SUFFIX.as_bytes());
            let Some(name) = name.and_then(parse).filter(is_ours) else {
                continue;
            };
            listing.charge(Listener::bytes(path.len() + 2 * name.len()))?;
            names.push(name);
            if names.len() == MAX_LISTED {
                break;
            }
        }
        sort(&mut names);
        for name in names {
            listing.add(Listener {
                address: format!("{path}/{name}{SUFFIX}"),
                port: Port::Socket(name),
                process: None,
            });
        }
        Ok(())
    }
}

/// The address of a socket's file that is open.
fn address_of(file: &OwnedFd) -> nix::Result<UnixAddr> {
    UnixAddr::new(format!("/proc/self/fd/{}", file.as_raw_fd()).as_str())
}

/// Whether a listening socket is bound to a file. Tries to connect a socket that is connected already: the
/// kernel looks for the listener first, and only then at the socket (`unix_stream_connect` in
/// `net/unix/af_unix.c`). So the listener gets nothing, and the cost does not grow with the number of sockets, as
/// that of asking for all (`sock_diag(7)`) does.
fn is_listened_on(file: &OwnedFd) -> nix::Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (socket, _connected) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
    let refusal = connect(socket.as_raw_fd(), &address_of(file)?);
    // EAGAIN: its queue is full. EINVAL: EISCONN in newer kernels.
    let refusals_of_listeners = [Errno::EISCONN, Errno::EINVAL, Errno::EAGAIN];
    Ok(refusal.is_err_and(|errno| refusals_of_listeners.contains(&errno)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;
    use crate::client::Interrupt;
    use crate::error::Kind;
    use crate::limits::ledger::Budget;
    use crate::ports::{Never, Ports, TcpPortsInside};

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
            let sockets = Sockets::new(home, &DIRECTORY, owner);
            Self { path, sockets }
        }

        fn of_mine(name: &str) -> Self {
            Self::new(name, nix::unistd::geteuid().as_raw())
        }

        fn socket(&self, name: &str) -> PathBuf {
            let directory = self.path.join(DIRECTORY.join("/"));
            directory.join(format!("{name}{SUFFIX}"))
        }

        fn list(&self) -> std::result::Result<Vec<Listener>, Stopped> {
            let (home, owner) = (Arc::clone(&self.sockets.home), self.sockets.owner);
            let ports = Ports::home(home, owner, TcpPortsInside::Given(Vec::new()));
            let budget = Budget::new(1 << 20).whole();
            Ok(ports.list(&budget, &mut Never)?.listeners)
        }

        fn listed(&self) -> Vec<Listener> {
            self.list().ok().unwrap()
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
        // Looking is not connecting.
        listener.set_nonblocking(true).unwrap();
        while listener.accept().is_ok() {}
        assert!(home.sockets.is_listening("app"));
        assert!(listener.accept().is_err());
        let listed = home.listed();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].port, Port::Socket("app".to_owned()));
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
        assert_eq!(home.listed().len(), 1);
        // The same files, in the eyes of another owner.
        let mine = nix::unistd::geteuid().as_raw();
        let other = Home::new("others", mine + 1);
        let _listener = UnixListener::bind(other.socket("app")).unwrap();
        other.refuse("app", "not to the sandbox");
        assert_eq!(other.listed().len(), 0);
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
        let listed = home.listed();
        let names: Vec<_> = listed.iter().map(|found| found.port.to_string()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        for number in 0..2 * MAX_LISTED {
            listeners.push(UnixListener::bind(home.socket(&format!("d{number}"))).unwrap());
        }
        assert_eq!(home.listed().len(), MAX_LISTED);
    }

    /// What is no socket takes as long to look at.
    #[test]
    fn a_long_list_is_interrupted() {
        struct Now;
        impl Interrupt for Now {
            fn check(&mut self) -> std::result::Result<(), Stopped> {
                Err(Stopped::Due)
            }
        }
        let home = Home::of_mine("long");
        for number in 0..200 {
            fs::write(home.socket(&number.to_string()), "").unwrap();
        }
        let (directory, owner) = (Arc::clone(&home.sockets.home), home.sockets.owner);
        let ports = Ports::home(directory, owner, TcpPortsInside::Given(Vec::new()));
        let budget = Budget::new(1 << 20).whole();
        assert!(matches!(ports.list(&budget, &mut Now), Err(Stopped::Due)));
    }

    #[test]
    fn a_socket_that_is_bound_and_does_not_listen_has_no_server() {
        let home = Home::of_mine("bound");
        let flags = SockFlag::SOCK_CLOEXEC;
        let server = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        let address = UnixAddr::new(&home.socket("app")).unwrap();
        nix::sys::socket::bind(server.as_raw_fd(), &address).unwrap();
        home.refuse("app", "nothing listens on it");
        nix::sys::socket::listen(&server, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        assert!(home.sockets.is_listening("app"));
        // What streams cannot be connected to.
        let datagrams = std::os::unix::net::UnixDatagram::bind(home.socket("datagrams"));
        assert!(datagrams.is_ok());
        assert!(!home.sockets.is_listening("datagrams"));
    }

    #[test]
    fn no_directory_on_the_way_may_be_a_link() {
        let home = Home::of_mine("linked");
        let _listener = UnixListener::bind(home.socket("app")).unwrap();
        let (directory, aside) = (home.path.join(".sbx"), home.path.join("aside"));
        fs::rename(&directory, &aside).unwrap();
        symlink(&aside, &directory).unwrap();
        home.refuse("app", "a link");
        assert!(home.list().is_err());
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
