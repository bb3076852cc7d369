#!/bin/sh
# Fetches sbx-server, proves that it is the one that was asked for, and becomes it.
#
#   sh bootstrap.sh [ARGUMENT...]      arguments go to the server
#
# Made for any container image with a POSIX shell, also as PID 1: the server takes over this
# process, so it has the same pid. What it says goes to stderr, one line each, after
# `sbx-bootstrap:`; it ends with status 1 when it cannot go on.
#
# These variables say what to fetch. The server gets its environment without them.
#
#   SBX_SERVER_URL               where the program is. {arch} in it becomes x86_64 or aarch64, and
#                                {sha256} the digest below.
#   SBX_SERVER_URL_AARCH64       the same for aarch64, if it cannot be said with {arch} or {sha256}
#   SBX_SERVER_SHA256            digest of the x86_64 program, 64 lower-case hex digits
#   SBX_SERVER_SHA256_AARCH64    digest of the aarch64 program
#   SBX_SERVER_MOUNT             a directory that holds sbx-server-DIGEST, or sbx-server: used when
#                                nothing can be downloaded, or no URL is given
#   SBX_DL_TOKEN                 bearer token for a private URL. Sent to that URL's host only, and
#                                not shown in process lists: so by curl or python3, never by wget,
#                                which hands it on when it is redirected.
#   SBX_ALLOW_UNVERIFIED_SERVER  1 = run it also where no tool can compute a digest, or none is
#                                given. A digest that was computed and differs is always an error.
#
# The image needs chmod, mv and rm; one of wget, curl and python3 (or cp and a mount); and one of
# sha256sum, openssl and python3. The program goes to the first of $TMPDIR /tmp /dev/shm /run
# /var/tmp $HOME and the working directory in which a file can be made and executed.
#
# The work is done in a subshell, and whole functions are read before the first is called: no
# variable of the caller's is changed by a name that is used here, and half of this script does
# nothing.

say() { printf 'sbx-bootstrap: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

# replace TEXT MARK VALUE: TEXT with every MARK replaced.
replace() {
    text=$1
    while :; do
        case $text in
        *"$2"*) text=${text%%"$2"*}$3${text#*"$2"} ;;
        *) break ;;
        esac
    done
    printf '%s\n' "$text"
}

# The machine's architecture, by the name that the builds have.
architecture() {
    machine=$(uname -m 2>/dev/null) || read -r machine </proc/sys/kernel/arch || machine=unknown
    case $machine in
    x86_64 | amd64) echo x86_64 ;;
    aarch64 | arm64) echo aarch64 ;;
    *) echo "$machine" ;;
    esac 2>/dev/null
}

# A URL without what may be secret in it: user, password, query.
public() {
    shown=${1%%[?#]*}
    rest=${shown#*://}
    host=${rest%%/*}
    printf '%s\n' "${shown%%://*}://${host##*@}${rest#"$host"}"
}

is_digest() {
    case $1 in
    *[!0-9a-f]*) return 1 ;;
    *) [ "${#1}" = 64 ] ;;
    esac
}

# ------------------------------------------------------------------------------- downloading

# Each takes a URL and a file. What they say on stderr is read by `reason` and never shown, as it
# may hold the whole URL.

with_wget() {
    case $(wget --version 2>&1) in
    *"GNU Wget"*) wget -nv -T 30 -t 1 -O "$2" "$1" ;;
    # Small builds know few options, and say what went wrong even when told to be quiet.
    *) wget -q -O "$2" "$1" ;;
    esac
}

with_curl() {
    set -- -gfsSL --connect-timeout 30 --speed-time 30 --speed-limit 1 -o "$2" "$1"
    if [ -n "${SBX_DL_TOKEN:-}" ]; then
        # Through a pipe: arguments are for everybody to see. At a redirect to another host curl
        # leaves this header out.
        printf 'header = "Authorization: Bearer %s"\n' "$SBX_DL_TOKEN" | curl -K - "$@"
    else
        curl "$@"
    fi
}

with_python3() {
    python3 -I -c '
import os, shutil, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1])
token = os.environ.get("SBX_DL_TOKEN")
if token:
    request.add_unredirected_header("Authorization", "Bearer " + token)
try:
    with urllib.request.urlopen(request, timeout=30) as answer, open(sys.argv[2], "wb") as file:
        shutil.copyfileobj(answer, file)
        if answer.length:
            sys.exit("broken off")
except urllib.error.HTTPError as error:
    sys.exit("HTTP/1.1 %d" % error.code)
except Exception as error:
    sys.exit(str(error))
' "$1" "$2"
}

# reason STATUS WORDS: what a downloader's exit status and words mean, in one phrase.
reason() {
    for mark in 'error: ' 'ERROR ' 'HTTP/1.1 ' 'HTTP/1.0 '; do
        case $2 in
        *"$mark"[1-5][0-9][0-9]*)
            code=${2##*"$mark"}
            code=${code%"${code#???}"}
            case $code in
            404 | 410) echo "HTTP $code, there is no such file" ;;
            401 | 403) echo "HTTP $code, not permitted (a private file needs SBX_DL_TOKEN, and curl or python3)" ;;
            *) echo "HTTP $code" ;;
            esac
            return
            ;;
        esac
    done
    case $2 in
    *"o space left"* | *"riting output"* | *"riting body"* | *"uota exceeded"*) echo "no space" ;;
    *esolve* | *"bad address"* | *"ame or service"* | *"ame resolution"* | *"ssociated with hostname"*)
        echo "the host name cannot be resolved; is there a network?" ;;
    *efused* | *nreachable* | *"onnect to"* | *"imed out"* | *imeout*)
        echo "no connection; is there a network?" ;;
    *ertificate* | *CERT* | *SSL* | *TLS* | *ssl_client*) echo "TLS failed" ;;
    *) echo "failed with status $1" ;;
    esac
}

# download URL FILE: 0 when FILE is there. Otherwise $why says why not, and it is 2 when FILE's
# place is full.
download() {
    tools=
    if [ -n "${SBX_DL_TOKEN:-}" ]; then order="curl python3 wget"; else order="wget curl python3"; fi
    for tool in $order; do
        has "$tool" && tools="$tools $tool"
    done
    if [ -z "$tools" ]; then
        why="this image has none of wget, curl and python3"
        return 1
    fi
    for attempt in 1 2 3; do
        # A network that is only just coming up, a server that is busy.
        [ "$attempt" = 1 ] || sleep "$((attempt - 1))" 2>/dev/null || return 1
        all=
        retry=
        for tool in $tools; do
            if words=$("with_$tool" "$1" "$2" 2>&1 >/dev/null </dev/null); then
                return 0
            else
                because=$(reason "$?" "$words")
            fi
            all="$all${all:+; }$tool: $because"
            case $because in
            "no space") return 2 ;;
            "HTTP 408" | "HTTP 429" | "HTTP 5"* | "no connection"* | "the host name"* | failed*) retry=1 ;;
            esac
        done
        why="cannot download $(public "$1"): $all"
        [ -n "$retry" ] || return 1
    done
    return 1
}

# --------------------------------------------------------------------------------- verifying

# The digest of a file. Fails where no tool can compute it.
digest_of() {
    for tool in sha256sum openssl python3; do
        has "$tool" || continue
        case $tool in
        sha256sum) sum=$(sha256sum <"$1") ;;
        openssl) sum=$(openssl dgst -sha256 -r <"$1") ;;
        python3)
            sum=$(python3 -I -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())' <"$1")
            ;;
        esac 2>/dev/null
        sum=${sum%% *}
        if is_digest "$sum"; then
            echo "$sum"
            return 0
        fi
    done
    return 1
}

# verify FILE: returns only when it may be run.
verify() {
    if [ -z "$sha256" ]; then
        unverified="no digest is given in $sha256_name"
    elif actual=$(digest_of "$1"); then
        [ "$actual" = "$sha256" ] || die "wrong digest: $origin has $actual, expected $sha256; refusing to run it"
        return 0
    else
        unverified="this image has none of sha256sum, openssl and python3 to compute a digest"
    fi
    [ "${SBX_ALLOW_UNVERIFIED_SERVER:-}" = 1 ] ||
        die "cannot verify $origin: $unverified; SBX_ALLOW_UNVERIFIED_SERVER=1 runs it all the same"
    say "running $origin unverified: $unverified"
}

# What a file is: an architecture, `script`, or `unknown`. A shell that is told to run something
# that the kernel refuses takes it for a script: so a page of HTML, or the other architecture's
# program, must not come so far.
#
# `read` leaves out NUL bytes. What is left of an ELF header: class, byte order and version; the
# ABI unless it is 0; the type (2 or 3); the machine (62 is `>`).
kind_of() {
    IFS= read -r start <"$1" || [ -n "$start" ] || start=
    elf=$(printf '\177ELF')
    arm=$(printf '\267')
    case $start in
    "$elf"????">"* | "$elf"?????">"*) echo x86_64 ;;
    "$elf"????"$arm"* | "$elf"?????"$arm"*) echo aarch64 ;;
    "#!"*) echo script ;;
    *) echo unknown ;;
    esac
}

# ----------------------------------------------------------------------------------- placing

# obtain FILE: fills it with the program. 2 when FILE's place is full.
obtain() {
    why="SBX_SERVER_URL is not set"
    if [ -n "$url" ]; then
        origin=$(public "$url")
        download "$url" "$1" && return
        [ "$?" != 2 ] || return 2
    fi
    if [ -n "${SBX_SERVER_MOUNT:-}" ]; then
        for origin in "$SBX_SERVER_MOUNT/sbx-server-$sha256" "$SBX_SERVER_MOUNT/sbx-server"; do
            [ -f "$origin" ] || continue
            if cp "$origin" "$1" 2>/dev/null; then
                [ -z "$url" ] || say "taking $origin: $why"
                return 0
            fi
            [ -r "$origin" ] && has cp && return 2
            die "cannot copy $origin"
        done
        die "$why; and there is no sbx-server${sha256:+-$sha256} in $SBX_SERVER_MOUNT"
    fi
    die "$why"
}

# Puts the program where it can be executed and prints its path.
prepare() {
    set -u
    # What tools say is read here, in English.
    export LC_ALL=C
    for tool in chmod mv rm; do
        has "$tool" || die "this image has no $tool"
    done

    arch=$(architecture)
    case $arch in
    x86_64)
        url=${SBX_SERVER_URL:-}
        sha256_name=SBX_SERVER_SHA256
        sha256=${SBX_SERVER_SHA256:-}
        ;;
    aarch64)
        url=${SBX_SERVER_URL_AARCH64:-${SBX_SERVER_URL:-}}
        sha256_name=SBX_SERVER_SHA256_AARCH64
        sha256=${SBX_SERVER_SHA256_AARCH64:-}
        if [ -n "$url" ] && [ -z "${SBX_SERVER_URL_AARCH64:-}" ]; then
            case $url in
            *"{arch}"* | *"{sha256}"*) ;;
            *) die "wrong architecture: this machine is aarch64 and SBX_SERVER_URL is for x86_64; set SBX_SERVER_URL_AARCH64, or use {arch} or {sha256} in it" ;;
            esac
        fi
        ;;
    *) die "wrong architecture: there is no sbx-server for $arch, only for x86_64 and aarch64" ;;
    esac
    [ -z "$sha256" ] || is_digest "$sha256" || die "$sha256_name must be 64 lower-case hex digits"
    case $url in
    *"{sha256}"*) [ -n "$sha256" ] || die "the URL has {sha256} in it and $sha256_name is not set" ;;
    esac
    url=$(replace "$url" "{arch}" "$arch")
    url=$(replace "$url" "{sha256}" "$sha256")
    case $url in
    '' | http://* | https://*) ;;
    *) die "the URL must begin with https:// or http://" ;;
    esac
    case ${SBX_DL_TOKEN:-} in
    *[!A-Za-z0-9._~+/=-]*) die "SBX_DL_TOKEN holds a character that no bearer token has" ;;
    esac

    have=
    part=
    refused=
    trap 'rm -f "$part" "$have"' EXIT
    trap 'exit 143' HUP INT TERM
    for place in "${TMPDIR:-}" /tmp /dev/shm /run /var/tmp "${HOME:-}" .; do
        if [ -z "$place" ] || [ ! -d "$place" ]; then continue; fi
        case " $refused" in *" $place ("*) continue ;; esac
        [ -z "$part" ] || [ "$part" = "$have" ] || rm -f "$part"
        file=$place/.sbx-server
        part=$file.part.$$
        rm -f "$part" 2>/dev/null
        # Made here and not by a downloader, which would follow a link that somebody left.
        if [ -d "$file" ]; then
            refused="$refused$place ($file is a directory) "
        elif ! words=$( (set -C && : >"$part") 2>&1); then
            case $words in
            *ead-only*) refused="$refused$place (read-only) " ;;
            *) refused="$refused$place (not writable) " ;;
            esac
        elif ! if [ -n "$have" ]; then cp "$have" "$part" 2>/dev/null; else obtain "$part"; fi; then
            refused="$refused$place (no space) "
        else
            verify "$part"
            kind=$(kind_of "$part")
            case $kind in
            "$arch" | script) ;;
            unknown) die "$origin is not a program" ;;
            *) die "wrong architecture: $origin is for $kind, this machine is $arch" ;;
            esac
            chmod 755 "$part" || die "cannot make $part executable"
            "$part" --version </dev/null >/dev/null 2>&1
            status=$?
            case $status in
            0)
                mv -f "$part" "$file" || die "cannot rename $part"
                [ -z "$refused" ] || say "using $place; unusable: ${refused% }"
                printf '%s\n' "$file"
                exit 0
                ;;
            # Not permitted, of a file that is executable: by the file system it is on.
            126)
                refused="$refused$place (noexec) "
                [ -n "$have" ] || have=$part
                ;;
            *) die "$origin does not run here: --version ended with status $status" ;;
            esac
        fi
    done
    die "no place to run the server from: ${refused% }; mount one that is writable and executable, and name it in TMPDIR"
}

main() {
    SBX_SERVER_FILE=$(prepare) || exit 1
    unset SBX_SERVER_URL SBX_SERVER_URL_AARCH64 SBX_SERVER_SHA256 SBX_SERVER_SHA256_AARCH64 \
        SBX_SERVER_MOUNT SBX_DL_TOKEN SBX_ALLOW_UNVERIFIED_SERVER
    set -- "$SBX_SERVER_FILE" "$@"
    unset SBX_SERVER_FILE
    exec "$@"
}

main "$@"
