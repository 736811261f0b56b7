"""Watching an attempt: which events are stored, how stop requests are answered, how its end is judged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from tevatron.core.errors import JobError
from tevatron.core.settings import Settings
from tevatron.core.worker.runner import AttemptLostError, JobContext, Stopped, StopReason
from tevatron.trainer import watch as watch_module
from tevatron.trainer.launchers import Exit
from tevatron.trainer.run_folder import RunFolder
from tevatron.trainer.watch import EventTail, Seen, catch_up, recall, watch

GOOD = Exit(status=0, killed=False, message="rank 0 ended with status 0")
BAD = Exit(status=1, killed=False, message="rank 0 ended with status 1; the log ends:\nTraceback")
KILLED = Exit(status=1, killed=True, message="rank 1 was killed by SIGKILL")


def event(kind: str, **data: object) -> str:
    return json.dumps({"time": 1.0, "type": kind, "data": data}) + "\n"


EXPORTED = event("exported", step=4)


@dataclass
class Claim:
    job_id: str = "job_1"
    attempt: int = 1


@dataclass
class Context:
    """Notes what is stored; `stops` gives a stop reason from the n-th look on."""

    settings: Settings
    stops: Callable[[], StopReason | None] = lambda: None
    claim: Claim = field(default_factory=Claim)
    stored: list[tuple[Any, ...]] = field(default_factory=list)
    lease_left_s: float = 0.0
    save_requested_at: datetime | None = None
    stop_requested_at: datetime | None = None

    def _store(self, *what: object) -> None:
        self.stored.append(what)

    def phase(self, phase: object) -> None:
        self._store("phase", str(phase))

    def progress(self, done: int, total: int, unit: str) -> None:
        self._store("progress", done, total, unit)

    def metrics(self, numbers: dict[str, object]) -> None:
        self._store("metrics", numbers["step"])

    def log(self, level: str, message: str) -> None:
        self._store("log", level, message)

    @property
    def stop_reason(self) -> StopReason | None:
        return self.stops()

    def check(self) -> None:
        if self.stop_reason is not None:
            raise Stopped(self.stop_reason)


@dataclass
class Attempt:
    """A handle whose program follows a script: on each look it does one thing, then ends with `ended`."""

    script: list[Callable[[], None]]
    ended: Exit = GOOD
    when_asked: list[Callable[[], None]] | None = None
    """What it does when it is asked to stop; None for one that does not listen."""
    calls: list[tuple[str, float | None]] = field(default_factory=list)
    done: bool = False

    def poll(self) -> Exit | None:
        if not self.script and not self.done:
            self.done = True
        if self.done:
            return self.ended
        self.script.pop(0)()
        return None

    def ask_to_stop(self) -> None:
        self.calls.append(("ask", None))
        if self.when_asked is not None:
            self.script = list(self.when_asked)

    def end(self, *, grace_s: float) -> None:
        self.calls.append(("end", grace_s))
        self.done = True


class Bench:
    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        self.settings = Settings(home=folder, kill_grace_s=0.4, stop_grace_s=0.8)
        self.ctx = Context(self.settings)

    def says(self, *lines: str) -> Callable[[], None]:
        def write() -> None:
            with self.run.events.open("a") as file:
                file.write("".join(lines))

        return write

    def watch(self, attempt: Attempt | Detached) -> None:
        tail = EventTail(self.run.events)
        catch_up(cast(JobContext, self.ctx), tail)
        watch(cast(JobContext, self.ctx), attempt, tail, run=self.run, seen=Seen())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_events_are_stored_in_their_order_and_a_whole_export_ends_it_well(bench: Bench) -> None:
    attempt = Attempt(
        [
            bench.says(
                event("phase", phase="loading"), event("log", level="info", message="hello")
            ),
            bench.says(event("phase", phase="training"), event("metrics", step=1, loss=0.5)),
            bench.says(event("progress", done=1, total=4, unit="steps")),
            bench.says(event("state_saved", step=2), EXPORTED),
        ]
    )
    bench.watch(attempt)
    assert bench.ctx.stored == [
        ("phase", "loading"),
        ("log", "info", "hello"),
        ("phase", "training"),
        ("metrics", 1),
        ("progress", 1, 4, "steps"),
        ("log", "info", "saved the training state of step 2"),
    ]
    assert attempt.calls == [("end", 0)]


def test_what_is_written_last_is_read_though_the_program_has_ended(bench: Bench) -> None:
    attempt = Attempt([])
    attempt.poll = lambda: (bench.says(EXPORTED)(), GOOD)[1]  # type: ignore[method-assign]
    bench.watch(attempt)


def test_events_of_an_earlier_attempt_count_for_nothing(bench: Bench) -> None:
    bench.says(event("failed", reason="data_error", phase="loading", message="old"), EXPORTED)()
    with pytest.raises(JobError, match="ended without a word: rank 0 ended with status 0"):
        bench.watch(Attempt([]))
    assert bench.ctx.stored == []


def test_numbers_that_a_killed_watcher_left_are_stored_once_by_the_next(bench: Bench) -> None:
    bench.says(event("metrics", step=1), event("metrics", step=2))()
    with pytest.raises(AttemptLostError):
        bench.watch(Attempt([], ended=KILLED))
    # The ranks go on for a moment after their watcher is dead.
    bench.says(event("metrics", step=3), event("phase", phase="saving"), EXPORTED, '{"time": ')()
    bench.watch(Attempt([bench.says(event("metrics", step=3), EXPORTED)]))
    assert bench.ctx.stored == [("metrics", 1), ("metrics", 2), ("metrics", 3), ("metrics", 3)]


def test_a_half_line_of_a_killed_attempt_hides_nothing_of_the_next(bench: Bench) -> None:
    bench.says('{"time": 1.0, "type": "metr')()
    bench.watch(Attempt([bench.says(event("metrics", step=1)), bench.says(EXPORTED)]))
    assert bench.ctx.stored == [("metrics", 1)]


def test_a_line_is_read_when_its_end_is_written(bench: Bench) -> None:
    line = event("metrics", step=1)
    bench.watch(Attempt([bench.says(line[:10]), bench.says(line[10:]), bench.says(EXPORTED)]))
    assert bench.ctx.stored == [("metrics", 1)]


def test_a_line_that_is_no_event_does_not_stop_the_training(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.watch(Attempt([bench.says("nonsense\n", event("metrics", step=1), EXPORTED)]))
    assert bench.ctx.stored == [("metrics", 1)]
    assert "is not an event: nonsense" in caplog.text


def test_many_events_at_once_are_all_read(bench: Bench) -> None:
    padding = "x" * 3000
    lines = [event("log", level="info", message=f"{number} {padding}") for number in range(1000)]
    bench.watch(Attempt([bench.says(*lines, EXPORTED)]))
    assert [stored[2].split()[0] for stored in bench.ctx.stored] == [str(n) for n in range(1000)]


def test_a_reported_failure_keeps_reason_phase_and_message(bench: Bench) -> None:
    failed = event("failed", reason="not_finite", phase="training", message="loss is NaN at step 7")
    with pytest.raises(JobError, match=r"^loss is NaN at step 7$") as error:
        bench.watch(Attempt([bench.says(failed)], ended=BAD))
    assert (error.value.reason, error.value.phase) == ("not_finite", "training")


def test_a_failure_waits_for_the_launcher_to_say_which_rank_was_first(bench: Bench) -> None:
    """A busy machine takes longer than `stop_grace_s` to end the sibling of a killed rank."""
    failed = event("failed", reason="program_failed", phase="training", message="connection reset")
    slow = [bench.says(failed), *[lambda: None] * 12]
    with pytest.raises(AttemptLostError):
        bench.watch(Attempt(slow, ended=KILLED))


@pytest.mark.parametrize("reason", ["program_failed", "internal_error"])
def test_the_failure_of_a_rank_whose_sibling_was_killed_is_a_lost_attempt(
    bench: Bench, reason: str
) -> None:
    failed = event("failed", reason=reason, phase="training", message="connection closed by peer")
    with pytest.raises(AttemptLostError, match="ended from outside: rank 1 was killed by SIGKILL"):
        bench.watch(Attempt([bench.says(failed)], ended=KILLED))


def test_a_rank_that_names_bad_data_is_believed_though_another_was_killed(bench: Bench) -> None:
    failed = event("failed", reason="data_error", phase="loading", message="line 17")
    with pytest.raises(JobError, match=r"^line 17$") as error:
        bench.watch(Attempt([bench.says(failed)], ended=KILLED))
    assert error.value.reason == "data_error"


def test_killed_without_a_word_is_a_lost_attempt(bench: Bench) -> None:
    with pytest.raises(AttemptLostError, match="ended from outside: rank 1 was killed by SIGKILL"):
        bench.watch(Attempt([], ended=KILLED))


def test_stopped_by_somebody_else_is_a_lost_attempt(bench: Bench) -> None:
    with pytest.raises(AttemptLostError):
        bench.watch(Attempt([bench.says(event("stopped", step=3))]))


def test_a_failure_without_a_word_shows_the_end_of_the_log(bench: Bench) -> None:
    with pytest.raises(JobError, match=r"without a word: rank 0 .*\nTraceback") as error:
        bench.watch(Attempt([], ended=BAD))
    assert error.value.reason == "program_failed"


def test_killed_after_the_export_was_whole_is_well(bench: Bench) -> None:
    bench.watch(Attempt([bench.says(EXPORTED)], ended=KILLED))


@pytest.mark.parametrize(
    "last", [EXPORTED, event("failed", reason="program_failed", message="broken")]
)
def test_a_program_that_hangs_after_its_last_word_is_ended(
    bench: Bench, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "HANG_MARGIN_S", 0.0)
    attempt = Attempt([bench.says(last), *[lambda: None] * 1000], ended=KILLED)
    began = time.monotonic()
    if last is EXPORTED:
        bench.watch(attempt)
    else:
        with pytest.raises(JobError, match="broken"):
            bench.watch(attempt)
    assert 0.8 <= time.monotonic() - began < 1.5
    assert attempt.calls == [("end", 0.4), ("end", 0)]


def test_cancel_leaves_a_note_kills_after_the_grace_and_removes_what_is_half_done(
    bench: Bench,
) -> None:
    bench.run.path.joinpath("export.tmp").mkdir()
    bench.run.path.joinpath("states", "step-4.tmp").mkdir(parents=True)
    bench.run.path.joinpath("states", "step-2").mkdir()
    bench.ctx.stops = lambda: StopReason.CANCELLED
    attempt = Attempt([lambda: None] * 100)
    with pytest.raises(Stopped):
        bench.watch(attempt)
    assert attempt.calls == [("end", 0.4)]
    assert bench.run.cancel.exists()
    assert sorted(path.name for path in bench.run.path.iterdir()) == ["cancel", "states"]
    assert [path.name for path in (bench.run.path / "states").iterdir()] == ["step-2"]


def test_shutdown_waits_for_the_state_and_stores_what_was_said(bench: Bench) -> None:
    bench.ctx.stops = lambda: StopReason.SHUTDOWN
    said = [lambda: None, bench.says(event("state_saved", step=7), event("stopped", step=7))]
    attempt = Attempt([lambda: None] * 100, when_asked=said)
    with pytest.raises(Stopped):
        bench.watch(attempt)
    assert attempt.calls == [("ask", None), ("end", 0)]
    assert bench.ctx.stored == [
        ("log", "info", "saved the training state of step 7"),
        ("log", "info", "the training program stopped; saved step: 7"),
    ]
    assert not bench.run.cancel.exists()


@pytest.mark.parametrize(
    ("reason", "lease_left_s", "waits_s"),
    [
        (StopReason.SHUTDOWN, 30.0, 0.8),
        (StopReason.LEASE_LOST, 0.0, 0.4),
        (StopReason.LEASE_LOST, -0.2, 0.2),  # what is left until the reaper hands the job on
        (StopReason.LEASE_LOST, -9.0, 0.0),
    ],
)
def test_who_does_not_stop_is_killed(
    bench: Bench, reason: StopReason, lease_left_s: float, waits_s: float
) -> None:
    bench.ctx.stops = lambda: reason
    bench.ctx.lease_left_s = lease_left_s
    attempt = Attempt([lambda: None] * 1000)
    began = time.monotonic()
    with pytest.raises(Stopped):
        bench.watch(attempt)
    assert waits_s <= time.monotonic() - began < waits_s + 0.3
    assert attempt.calls == [("ask", None), ("end", 0)]


def test_cancel_during_a_shutdown_does_not_wait_for_the_state(bench: Bench) -> None:
    looks = [StopReason.SHUTDOWN] * 4
    bench.ctx.stops = lambda: looks.pop() if looks else StopReason.CANCELLED
    attempt = Attempt([lambda: None] * 1000)
    began = time.monotonic()
    with pytest.raises(Stopped):
        bench.watch(attempt)
    assert time.monotonic() - began < 0.7
    assert attempt.calls == [("ask", None), ("end", 0.4)]


def test_no_process_is_left_when_storing_fails_for_good(bench: Bench) -> None:
    attempt = Attempt([bench.says(event("phase", phase="no such phase"))] * 100)
    with pytest.raises(ValueError, match="no such phase"):
        bench.watch(attempt)
    assert attempt.calls == [("end", 0)]


@dataclass
class Detached:
    """An attempt on a cluster: as the other, but it cannot be asked to stop, and needs no worker."""

    attempt: Attempt

    def poll(self) -> Exit | None:
        return self.attempt.poll()

    def end(self, *, grace_s: float) -> None:
        self.attempt.end(grace_s=grace_s)


@pytest.mark.parametrize("reason", [StopReason.SHUTDOWN, StopReason.LEASE_LOST])
def test_an_attempt_that_needs_no_worker_is_left_to_run(bench: Bench, reason: StopReason) -> None:
    bench.ctx.stops = lambda: reason
    attempt = Attempt([lambda: None] * 1000)
    with pytest.raises(Stopped):
        bench.watch(Detached(attempt))
    assert attempt.calls == []


def test_an_attempt_that_needs_no_worker_is_ended_by_a_cancel(bench: Bench) -> None:
    bench.ctx.stops = lambda: StopReason.CANCELLED
    attempt = Attempt([lambda: None] * 1000)
    with pytest.raises(Stopped):
        bench.watch(Detached(attempt))
    assert attempt.calls == [("end", 0.4)]
    assert bench.run.cancel.exists()


def test_another_watcher_goes_on_where_the_first_one_stopped(bench: Bench) -> None:
    bench.says(
        event("failed", reason="data_error", phase="loading", message="of an attempt before")
    )()
    looks = [None] * 6
    bench.ctx.stops = lambda: looks.pop() if looks else StopReason.SHUTDOWN
    said = [event("phase", phase="training"), event("metrics", step=1), EXPORTED]
    attempt = Attempt([bench.says(*said), *[lambda: None] * 1000])
    with pytest.raises(Stopped):
        bench.watch(Detached(attempt))
    assert ("metrics", 1) in bench.ctx.stored

    second = Context(bench.settings)
    tail = EventTail(bench.run.events)
    seen = recall(cast(JobContext, second), tail)
    assert (seen.exported, seen.failed) == (True, None)
    rest = Attempt([bench.says(event("metrics", step=2))])
    watch(cast(JobContext, second), Detached(rest), tail, run=bench.run, seen=seen)
    assert second.stored == [("phase", "training"), ("metrics", 2)]


def test_a_users_requests_reach_the_ranks_once_each(bench: Bench) -> None:
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        """Do as the ranks, which take a request's file away."""
        seen.append((bench.run.save.exists(), bench.run.finish.exists()))
        bench.run.save.unlink(missing_ok=True)
        bench.run.finish.unlink(missing_ok=True)

    def ask(name: str, second: int) -> Callable[[], None]:
        return lambda: setattr(bench.ctx, name, datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC))

    bench.run.path.mkdir(exist_ok=True)
    save, stop = "save_requested_at", "stop_requested_at"
    bench.watch(
        Attempt(
            [
                look,
                ask(save, 1),
                look,
                look,
                ask(save, 2),
                look,
                ask(stop, 3),
                look,
                look,
                bench.says(EXPORTED),
            ]
        )
    )
    assert seen == [
        (False, False), (True, False), (False, False), (True, False), (False, True), (False, False),
    ]  # fmt: skip


def test_requests_of_an_earlier_attempt_are_cleared_away(bench: Bench) -> None:
    bench.run.prepare(bench.settings)
    bench.run.save.touch()
    bench.run.finish.touch()
    bench.run.prepare(bench.settings)
    assert not bench.run.save.exists()
    assert not bench.run.finish.exists()
