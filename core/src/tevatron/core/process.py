"""Children that never outlive their parent, and the end of every process of an attempt.

Owns the exec wrapper (`python -m tevatron.core.process PARENT_PID -- ARGV...`), the kernel's parent-death signal, and
the search through /proc for the processes that carry an attempt's marker. Knows nothing of jobs or launchers. It is
imported by an interpreter that only execs, so it imports nothing but a few small modules of the standard library.

The parent-death signal fires when the *thread* that forked ends, not only its process. Start guarded children from a
thread that lives as long as the child should: the main thread, or one that waits for the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ATTEMPT_VARIABLE = "TEVATRON_ATTEMPT"
"""Environment variable `<job id>:<attempt>` that marks every process of an attempt."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
_ORPHAN_STATUS = 113
_NOT_FOUND_STATUS = 127
_PROC = Path("/proc")


class ProcessesLeftError(RuntimeError):
    """Processes of an attempt are still there after SIGKILL."""


def guarded(argv: Sequence[str], *, uid: int | None = None, gid: int | None = None) -> list[str]:
    """Return a command line that runs `argv` and is killed with SIGKILL when the calling thread's process ends.

    The wrapper execs, so the pid stays: the process that `Popen` returns is `argv` itself. `argv[0]` is looked for
    on PATH. With `uid` and `gid` the wrapper gives its privileges up before it execs (a change of user clears the
    parent-death signal, so `Popen(user=...)` around another wrapper would not do where ours is unreadable for them).
    Its exit status is 113 when the parent was gone already, 127 when there is no such program.
    """
    user = [] if uid is None else [f"--user={uid}:{uid if gid is None else gid}"]
    # -P: a folder `tevatron` in the working directory must not hide ours.
    return [
        sys.executable,
        "-P",
        "-m",
        "tevatron.core.process",
        str(os.getpid()),
        *user,
        "--",
        *argv,
    ]


def die_with_parent(expected_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; exit now where the parent is gone already.

    Without `expected_pid` (a torchrun rank cannot know the agent's pid beforehand) an attempt's process must have a
    parent with the same marker: one whose agent died before this call has been adopted by a process without it.
    Call it before anything slow is imported.
    """
    parent = os.getppid() if expected_pid is None else expected_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    orphan = os.getppid() != parent
    if expected_pid is None and not orphan:
        marker = _marker(os.getpid())
        orphan = marker is not None and _marker(parent) != marker
    if orphan:
        sys.stderr.write(f"process {os.getpid()}: its parent is gone, ending\n")
        sys.stderr.flush()
        os._exit(_ORPHAN_STATUS)


def processes_with_marker(value: str) -> list[int]:
    """Return the pids, in ascending order, of living processes whose environment has TEVATRON_ATTEMPT=`value`.

    A value that ends with a colon stands for every attempt of that job.
    """
    wanted = value.encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        marker = _marker(int(entry.name))
        if marker is not None and (
            marker == wanted or (value.endswith(":") and marker.startswith(wanted))
        ):
            found.append(int(entry.name))
    return sorted(found)


def end_processes(marker: str, grace_s: float) -> None:
    """End every process that carries `marker`, and return only when none is left.

    SIGTERM goes to those whose parent does not carry it (a launcher passes it on), SIGKILL after `grace_s` to all.
    Raises `ProcessesLeftError` with the pids that outlive SIGKILL (a process stuck in the kernel).
    """
    left = processes_with_marker(marker)
    seen = set(left)
    if grace_s > 0:
        for pid in left:
            if parent_pid(pid) not in seen:
                _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = _left(marker, seen)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    left = _left(marker, seen)
    while left:
        if time.monotonic() > deadline:
            raise ProcessesLeftError(
                f"processes {left} of {marker} are still there {_KILL_TIMEOUT_S:g} s after SIGKILL"
            )
        # Again and again: one that was forked while we looked is found by the next look.
        for pid in processes_with_marker(marker):
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = _left(marker, seen)


def _left(marker: str, seen: set[int]) -> list[int]:
    """Return what is alive of `marker`, with those in `seen` whose threads still end; adds new ones to `seen`."""
    now = processes_with_marker(marker)
    seen.update(now)
    # The environment of a process is gone once its first thread ended; the others may still hold memory and devices.
    return sorted({*now, *(pid for pid in seen if _has_ending_threads(pid))})


def _has_ending_threads(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] in "ZX" and int(fields[17]) > 1


def parent_pid(pid: int) -> int | None:
    """Return the parent of a process; None where there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third one (the state) on."""
    try:
        return (
            (_PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _marker(pid: int) -> bytes | None:
    """Return the value of TEVATRON_ATTEMPT in a process's environment; None for a zombie or another user's process."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    prefix = ATTEMPT_VARIABLE.encode() + b"="
    for line in environment.split(b"\0"):
        if line.startswith(prefix):
            return line.removeprefix(prefix)
    return None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # It ended by itself.


def main(argv: Sequence[str]) -> int:
    """Run the wrapper: `PARENT_PID [--user=UID:GID] -- ARGV...`; returns only where it cannot exec."""
    options, command = list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])
    if len(options) > 1:
        uid, gid = (int(part) for part in options[1].removeprefix("--user=").split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    die_with_parent(int(options[0]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: cannot start: {error.strerror}\n")
    return _NOT_FOUND_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
