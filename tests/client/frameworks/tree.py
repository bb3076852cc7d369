"""Makes a root for sandboxes of packages that this machine has: no download, and the same files.

    python3 tree.py <directory> <package ...>

Debian's packages and all that they depend on are copied, with their users, links to alternatives and certificates.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# What packages make when they are installed, and the list of packages itself.
MADE = ["/etc/alternatives", "/etc/ca-certificates.conf", "/etc/pam.d", "/etc/resolv.conf", "/etc/ssl/certs", "/var/lib/dpkg/status"]
LISTS = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "group": "root:x:0:\nusers:x:100:\n",
    "shadow": "root:*:19000:0:99999:7:::\n",
}
LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/")


def installed() -> dict[str, tuple[str, str]]:
    """Each installed package by its name and by what it provides: its own name and what it depends on."""
    form = "${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    query = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True)
    known = {}
    for line in query.stdout.splitlines():
        name, provides, depends = line.split("\t")
        for provided in names(provides):
            known.setdefault(provided, (name, depends))
    known |= {line.split("\t")[0]: (line.split("\t")[0], line.split("\t")[2]) for line in query.stdout.splitlines()}
    return known


def names(relation: str) -> list[str]:
    return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", relation)


def with_dependencies(wanted: list[str]) -> set[str]:
    known, found = installed(), set()
    while wanted:
        name, depends = known.get(wanted.pop(), (None, ""))
        if name and name not in found:
            found.add(name)
            wanted += names(depends)
    return found


def real(path: str) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def main() -> None:
    tree = Path(sys.argv[1])
    packages = with_dependencies(sys.argv[2:])
    listed = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True).stdout
    # Lines that are no paths tell of diversions. Packages have files in /bin, which is a link.
    paths = {real(line) for line in listed.splitlines() if line.startswith("/") and not line.startswith(LEFT_OUT)}
    paths = {path for path in paths if os.path.islink(path) or os.path.isfile(path)}
    # Alternatives, such as awk, are links that belong to no package.
    links = {entry.path for entry in os.scandir("/usr/bin") if entry.is_symlink()}
    paths |= {link for link in links if os.readlink(link).startswith("/etc/alternatives/") and os.path.realpath(link) in paths}
    paths |= {path for path in ("/bin", "/sbin", "/lib", "/lib64") if os.path.islink(path)}
    paths |= set(filter(os.path.exists, MADE))
    tree.mkdir(parents=True)
    for name in ("dev", "proc", "sys", "run", "tmp", "home", "root", "var/tmp", "var/log"):
        (tree / name).mkdir(parents=True)
    pack = subprocess.Popen(["tar", "-C", "/", "--null", "-T", "-", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    unpack = subprocess.Popen(["tar", "-C", tree, "-xp", "--numeric-owner"], stdin=pack.stdout)
    pack.stdout.close()
    pack.stdin.write("\0".join(path.lstrip("/") for path in sorted(paths)).encode())
    pack.stdin.close()
    assert pack.wait() == 0 and unpack.wait() == 0
    for name in ("tmp", "var/tmp"):
        (tree / name).chmod(0o1777)
    (tree / "root").chmod(0o700)
    for name, text in LISTS.items():
        (tree / "etc" / name).write_text(text)
    subprocess.run(["ldconfig", "-r", tree], check=True)


main()
