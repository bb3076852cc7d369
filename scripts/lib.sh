# shellcheck shell=sh
# Functions and variables that the scripts beside this file share. Source it; do not run it.
#
# The scripts install missing Debian packages with apt-get when they run as root, and name them
# otherwise. They need nothing but a POSIX shell.

top=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$top" || exit

# Build for this machine, whatever the default target in .cargo/config.toml is.
target=$(uname -m)-unknown-linux-musl
export CARGO_BUILD_TARGET="$target"

case ${CARGO_TARGET_DIR:-target} in
/*) builds=$CARGO_TARGET_DIR/$target ;;
*) builds=$top/${CARGO_TARGET_DIR:-target}/$target ;;
esac
# Where cargo puts programs, by profile.
# shellcheck disable=SC2034 # used by the scripts that source this file
debug=$builds/debug built=$builds/release

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$(basename -- "$0"): $*"
    exit 1
}

is_root() { [ "$(id -u)" = 0 ]; }

# try_install PACKAGE...: installs Debian packages; fails unless root runs it on Debian or the like.
try_install() {
    is_root && command -v apt-get >/dev/null 2>&1 || return 1
    say "installing $*"
    if [ -z "${apt_updated:-}" ]; then
        apt-get update -qq >&2 || return 1
        apt_updated=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

# need COMMAND PACKAGE...: stops the script if COMMAND is missing and cannot be installed.
need() {
    command=$1
    shift
    command -v "$command" >/dev/null 2>&1 || try_install "$@" || true
    command -v "$command" >/dev/null 2>&1 || die "$command is missing (Debian: apt-get install $*)"
}

# want COMMAND PACKAGE...: the same for an optional command. A missing one is an error only in CI.
want() {
    command=$1
    shift
    command -v "$command" >/dev/null 2>&1 || try_install "$@" || true
    command -v "$command" >/dev/null 2>&1 && return
    [ -z "${CI:-}" ] || die "$command is missing (Debian: apt-get install $*)"
    say "note: $command is missing (Debian: apt-get install $*): tests that need it are skipped"
}

# Makes sure of the Rust toolchain, its musl target, and a C compiler. cargo uses `cc` to link build
# scripts and procedural macros, which run on this machine while the program is built.
need_rust() {
    case ":$PATH:" in
    *":$HOME/.cargo/bin:"*) ;;
    *) PATH=$PATH:$HOME/.cargo/bin ;;
    esac
    command -v cargo >/dev/null 2>&1 || die "cargo is missing: install Rust from https://rustup.rs"
    if [ ! -d "$(rustc --print target-libdir --target "$target" 2>/dev/null)" ]; then
        command -v rustup >/dev/null 2>&1 ||
            die "this Rust has no standard library for $target: install it, or Rust from https://rustup.rs"
        say "installing the Rust target $target"
        rustup target add "$target" >&2
    fi
    need cc gcc libc6-dev
}

# Prints a random token of 64 hexadecimal digits.
new_token() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
