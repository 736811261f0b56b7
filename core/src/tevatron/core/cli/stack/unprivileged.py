"""Children that do not run as root, wherever their files lie.

Postgres refuses to run as root. This module chooses the user for it, and is the exec wrapper that becomes that user. A
clone may lie under /root, whose mode 700 is not ours to change: there the child keeps one capability of root's, the one
that lets it pass folders it may not read (CAP_DAC_OVERRIDE); elsewhere it keeps none. Knows no server.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tevatron.core.process import die_with_parent, guarded

_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The user that a server runs as."""

    uid: int
    gid: int


def server_account() -> Account | None:
    """Return the unprivileged user for servers where we are root, None where we are an ordinary user already."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(uid=nobody.pw_uid, gid=nobody.pw_gid)


def reachable(path: Path) -> bool:
    """Say whether every user may read `path` and pass all folders above it."""
    wanted = stat.S_IROTH | (stat.S_IXOTH if os.access(path, os.X_OK) else 0)
    if path.stat().st_mode & wanted != wanted:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


def server_command(
    argv: Sequence[str], account: Account | None, *, paths: Sequence[Path]
) -> list[str]:
    """Return the command line that runs `argv`, ended with us, as `account`, able to reach `paths`."""
    if account is None:
        return guarded(argv)
    keep = "0" if all(reachable(path) for path in paths) else "1"
    module = "tevatron.core.cli.stack.unprivileged"
    return [
        sys.executable,
        "-P",
        "-m",
        module,
        str(os.getpid()),
        str(account.uid),
        str(account.gid),
        keep,
        *argv,
    ]


def import_path() -> dict[str, str]:
    """Return what the wrapper's interpreter needs in an empty environment to find us where we are not installed."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": path} if path else {}


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what} failed")


def become(account: Account, *, keep_file_access: bool) -> None:
    """Turn this process into the account's, with no capability or with CAP_DAC_OVERRIDE alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if keep_file_access:
        _check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")
    os.setgroups([])
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if keep_file_access:
        bit = 1 << _CAP_DAC_OVERRIDE
        data = (_Data * 2)(_Data(bit, bit, bit), _Data(0, 0, 0))
        _check(
            libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), data),
            "capset(CAP_DAC_OVERRIDE)",
        )
        raised = libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)
        _check(raised, "prctl(PR_CAP_AMBIENT_RAISE)")


def main() -> int:
    """Run `PARENT UID GID KEEP ARGV...` as that user, ended with PARENT; returns only where it cannot."""
    parent, uid, gid, keep, *argv = sys.argv[1:]
    try:
        become(Account(uid=int(uid), gid=int(gid)), keep_file_access=keep == "1")
        # After the change of user, which clears the parent-death signal.
        die_with_parent(int(parent))
        os.execv(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]} as user {uid}: {error}\n")
    return 127


if __name__ == "__main__":
    sys.exit(main())
