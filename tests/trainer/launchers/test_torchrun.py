"""What torchrun's report and log say, and where its interpreter is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.torchrun import (
    interpreter,
    program_tail,
    rank_ends,
    torchrun_end,
    was_killed,
)

REPORT = """
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_19:50:{first:02d}
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {first_code} (pid: 100)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
[1]:
  time      : 2026-11-29_19:50:{second:02d}
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {second_code} (pid: 101) SIGKILL
"""


@pytest.mark.parametrize(
    ("first", "first_code", "second", "second_code", "killed"),
    [
        (10, -9, 10, 1, True),
        (10, 1, 10, -9, True),  # the survivor's failure was seen first
        (10, 1, 11, -15, False),  # torchrun ended the other one
        (10, 1, 50, -9, False),  # torchrun ended the other one, which did not listen
        (10, -6, 10, 1, True),
        (10, 1, 10, 2, False),
    ],
)
def test_first_cause_is_read_from_torchruns_report(
    first: int, first_code: int, second: int, second_code: int, killed: bool
) -> None:
    report = REPORT.format(
        first=first, first_code=first_code, second=second, second_code=second_code
    )
    ends = rank_ends(report)
    assert [end.code for end in ends] == [first_code, second_code]
    assert was_killed(ends) is killed


def test_a_log_without_a_report_shows_no_failed_rank() -> None:
    assert rank_ends("Traceback ...\nModuleNotFoundError: No module named 'x'\n") == []
    assert was_killed([]) is False


def test_the_tail_is_the_programs_own_and_short() -> None:
    lines = [f"line {number}" for number in range(100)]
    agent = "E1129 19:52:43.404 17 torch/distributed/elastic/multiprocessing/api.py:986] failed"
    assert program_tail("\n".join([*lines, agent, "Traceback"])).splitlines() == lines[80:]
    assert program_tail("x" * 9000) == "x" * 4000
    assert program_tail("") == "(it is empty)"


def test_a_torchrun_that_a_signal_ended_was_killed() -> None:
    ended = torchrun_end(-9, "line\n")
    assert ended == (True, "torchrun was killed by SIGKILL; the log ends:\nline")


def test_each_environment_has_an_interpreter_or_says_which_setting_lacks(tmp_path: Path) -> None:
    assert interpreter(Settings(), "hf") == Path(sys.executable)
    python = tmp_path / "python"
    with pytest.raises(ConfigError, match="python, which is not there"):
        interpreter(Settings(megatron_python=python), "megatron")
    python.touch()
    assert interpreter(Settings(megatron_python=python), "megatron") == python
