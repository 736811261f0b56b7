"""The exec wrapper, the parent-death signal and the end of an attempt's processes, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tevatron.core.ids import new_id
from tevatron.core.process import (
    ATTEMPT_VARIABLE,
    end_processes,
    guarded,
    processes_with_marker,
)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
IGNORES_TERM = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def marker() -> Iterator[str]:
    value = f"{new_id('job')}:1"
    yield value
    end_processes(value, 0)


def environment(marker: str) -> dict[str, str]:
    return {**os.environ, ATTEMPT_VARIABLE: marker}


def test_wrapper_becomes_the_program_and_passes_its_status() -> None:
    child = subprocess.run(
        guarded(["sh", "-c", 'echo "$0 $1"; exit 7', "a b", "--", "c"]),
        capture_output=True,
        text=True,
    )
    assert (child.returncode, child.stdout) == (7, "a b --\n")


def test_wrapper_keeps_the_pid() -> None:
    child = subprocess.Popen(guarded(["sh", "-c", "echo $$"]), stdout=subprocess.PIPE, text=True)
    output, _ = child.communicate()
    assert int(output) == child.pid


def test_wrapper_names_a_missing_program() -> None:
    child = subprocess.run(guarded(["no-such-program"]), capture_output=True, text=True)
    assert child.returncode == 127
    assert child.stderr == "no-such-program: cannot start: No such file or directory\n"


def test_wrapper_does_not_start_when_its_parent_is_gone() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    argv = guarded(["echo", "started"])
    argv[argv.index(str(os.getpid()))] = str(dead.pid)
    child = subprocess.run(argv, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (113, "")
    assert "its parent is gone" in child.stderr


def test_wrapper_ignores_a_folder_of_our_name_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "tevatron").mkdir()
    (tmp_path / "tevatron" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    child = subprocess.run(guarded(["echo", "ours"]), capture_output=True, text=True, cwd=tmp_path)
    assert child.stdout == "ours\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give up privileges")
def test_wrapper_gives_its_privileges_up_and_still_dies_with_its_parent(marker: str) -> None:
    script = (
        "import subprocess, sys; from tevatron.core.process import guarded;"
        "subprocess.Popen(guarded(['sh', '-c', 'id -u; id -g; id -G; echo $$; sleep 60'], uid=65534, gid=65533)).wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment(marker)
    )
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(3)] == ["65534\n", "65533\n", "65533\n"]
    child_pid = int(parent.stdout.readline())
    assert child_pid in processes_with_marker(marker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: child_pid not in processes_with_marker(marker))
    end_processes(marker, 0)  # `sleep` is the shell's own child.
    parent.stdout.close()


def test_child_dies_with_a_killed_parent(marker: str) -> None:
    script = (
        "import subprocess, sys; from tevatron.core.process import guarded;"
        "child = subprocess.Popen(guarded(['sleep', '60'])); print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment(marker)
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    assert processes_with_marker(marker) == sorted([parent.pid, child_pid])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: processes_with_marker(marker) == [])


def test_an_orphan_of_an_attempt_ends_itself(marker: str) -> None:
    """A rank whose agent died before the rank could ask for the signal."""
    script = (
        "import os, sys, time; from tevatron.core.process import die_with_parent\n"
        "if os.fork() != 0: os._exit(0)\n"
        "while os.getppid() == int(sys.argv[1]): time.sleep(.01)\n"
        "die_with_parent(); print('lives on', flush=True)"
    )
    orphan = [
        sys.executable,
        "-c",
        f"import sys, os; sys.argv[1] = str(os.getpid())\n{script}",
        "0",
    ]
    child = subprocess.run(
        orphan, capture_output=True, text=True, env=environment(marker), timeout=20
    )
    assert child.stdout == ""
    assert "its parent is gone" in child.stderr


def test_die_with_parent_keeps_a_process_whose_parent_has_the_marker(marker: str) -> None:
    inner = (
        "from tevatron.core.process import die_with_parent; die_with_parent(); print('lives on')"
    )
    outer = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    child = subprocess.run(
        [sys.executable, "-c", outer, inner],
        capture_output=True,
        text=True,
        env=environment(marker),
    )
    assert child.stdout == "lives on\n"


def test_die_with_parent_without_an_attempt_needs_no_marker() -> None:
    script = (
        "from tevatron.core.process import die_with_parent; die_with_parent(); print('lives on')"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.stdout == "lives on\n"


def test_marker_is_matched_whole_and_a_colon_stands_for_every_attempt(marker: str) -> None:
    child = subprocess.Popen(SLEEP, env=environment(marker))
    job = marker.removesuffix("1")
    wait_until(lambda: processes_with_marker(marker) == [child.pid])
    assert processes_with_marker(job) == [child.pid]
    assert processes_with_marker(marker + "0") == []
    assert processes_with_marker(job.removesuffix(":")) == []
    child.kill()
    child.wait()


def test_a_zombie_is_not_counted(marker: str) -> None:
    child = subprocess.Popen(["true"], env=environment(marker))
    wait_until(lambda: processes_with_marker(marker) == [])
    end_processes(marker, 5)
    assert child.wait() == 0


def test_end_processes_asks_the_root_first_and_returns_when_it_is_gone(marker: str) -> None:
    script = "trap 'echo asked; exit 3' TERM; echo up; while :; do sleep .05; done"
    child = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, env=environment(marker)
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    began = time.monotonic()
    end_processes(marker, 20)
    assert time.monotonic() - began < 5
    assert child.wait() == 3
    assert child.stdout.read() == "asked\n"
    child.stdout.close()


def test_end_processes_kills_what_ignores_sigterm_after_the_grace(marker: str) -> None:
    child = subprocess.Popen(IGNORES_TERM, stdout=subprocess.PIPE, env=environment(marker))
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    began = time.monotonic()
    end_processes(marker, 0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()


def test_end_processes_reaches_other_sessions_and_those_that_lost_their_parent(marker: str) -> None:
    script = "setsid sleep 60 & setsid sh -c 'sleep 60 & sleep 60' & sleep .2"
    subprocess.run(["sh", "-c", script], env=environment(marker), check=True)
    assert len(processes_with_marker(marker)) == 4
    end_processes(marker, 0)
    assert processes_with_marker(marker) == []


def test_end_processes_without_any_returns_at_once(marker: str) -> None:
    began = time.monotonic()
    end_processes(marker, 30)
    assert time.monotonic() - began < 1


def test_die_with_parent_refuses_a_wrong_parent() -> None:
    script = (
        "from tevatron.core.process import die_with_parent; die_with_parent(1); print('lives on')"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (113, "")


def test_wrapper_is_light() -> None:
    """It is an interpreter that only execs: each process of the stack pays for it."""
    child = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-c", "import tevatron.core.process"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in child.stderr.splitlines()}
    assert "tevatron.core.process" in imported
    assert not imported & {"pydantic", "subprocess", "socket", "sqlalchemy", "asyncio"}
