# shellcheck shell=sh
# What the scripts beside this file share. Read by `.`, never run.
#
# Everything that a script installs it installs with apt-get and only as root; for anybody else it
# names the package and stops. Nothing here needs more than a POSIX shell.

top=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$top" || exit

# The machine's own architecture, whatever .cargo/config.toml has as its default.
target=$(uname -m)-unknown-linux-musl
export CARGO_BUILD_TARGET="$target"

case ${CARGO_TARGET_DIR:-target} in
/*) built=$CARGO_TARGET_DIR/$target/release ;;
*) built=$top/${CARGO_TARGET_DIR:-target}/$target/release ;;
esac

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$(basename -- "$0"): $*"
    exit 1
}

is_root() { [ "$(id -u)" = 0 ]; }

# try_install PACKAGE...: installs Debian packages where that is possible here.
try_install() {
    is_root && command -v apt-get >/dev/null 2>&1 || return 1
    say "installing $*"
    if [ -z "${apt_updated:-}" ]; then
        apt-get update -qq >&2 || return 1
        apt_updated=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

# need COMMAND PACKAGE...: the script cannot go on without COMMAND.
need() {
    command=$1
    shift
    command -v "$command" >/dev/null 2>&1 || try_install "$@" || true
    command -v "$command" >/dev/null 2>&1 || die "$command is missing (Debian: apt-get install $*)"
}

# want COMMAND PACKAGE...: without COMMAND something is left out, which is an error only in CI.
want() {
    command=$1
    shift
    command -v "$command" >/dev/null 2>&1 || try_install "$@" || true
    command -v "$command" >/dev/null 2>&1 && return
    [ -z "${CI:-}" ] || die "$command is missing (Debian: apt-get install $*)"
    say "note: $command is missing (Debian: apt-get install $*): what needs it is skipped"
}

# The Rust toolchain with the musl target, and a C compiler: the crates that write part of
# themselves while they are built (build scripts, macros) are linked for the machine by `cc`.
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

# A random token of 64 hex digits.
new_token() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
