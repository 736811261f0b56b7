"""Watches one attempt: stores what the ranks write, hands requests on, and judges how it ended.

Owns the reading of `events.jsonl` and the way from an attempt's end to an outcome. Knows the launcher only as a
handle, and the database only through the job's context. No process of the attempt is left when `watch` returns or
raises, unless its ranks can do without this worker and only the worker stops.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tevatron.core.contracts.jobs import FailReason, Phase
from tevatron.core.contracts.run import RunEvent, RunEventType
from tevatron.core.errors import JobError
from tevatron.core.worker.runner import AttemptLostError, JobContext, Stopped, StopReason
from tevatron.trainer.launchers import AttachedHandle, Exit, Handle
from tevatron.trainer.run_folder import RunFolder

HANG_MARGIN_S = 60.0
"""After its last word an attempt has `stop_grace_s` and this to end. A launcher that saw a rank die gives the others
about `stop_grace_s` and only then says which one was first: to end it before would lose the cause."""
_POLL_S = 0.1
_READ_BYTES = 2**20
_SIBLINGS_FAIL_WITH = frozenset(
    {FailReason.PROGRAM_FAILED, FailReason.INTERNAL_ERROR, FailReason.WORKER_LOST}
)
"""What a rank may report that only lost its sibling; any other reason is the rank's own finding."""

_log = logging.getLogger(__name__)


class EventTail:
    """New whole lines of an events file, from where a watcher last said that it had stored them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = path.with_suffix(".begin")
        self._mark = path.with_suffix(".stored")
        self._offset = int(self._mark.read_text()) if self._mark.exists() else 0
        self._stored = self._offset

    def read(self) -> tuple[list[RunEvent], list[str]]:
        """Return the new events, and the lines that are none."""
        events: list[RunEvent] = []
        broken: list[str] = []
        if not self._path.exists():
            return events, broken
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(_READ_BYTES):
                # A line without its end is still being written.
                lines, separator, rest = chunk.rpartition(b"\n")
                if not separator:
                    break
                self._offset += len(lines) + 1
                for line in lines.split(b"\n"):
                    self.parse(line, events, broken)
                file.seek(-len(rest), 1)
        return events, broken

    def begin(self) -> None:
        """Begin a new attempt behind what is there: a killed one may have left half a line."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        if self._offset > 0:
            self._write(self._begin)

    def before(self) -> list[RunEvent]:
        """Return the events of this attempt that another watcher has stored."""
        begin = int(self._begin.read_text()) if self._begin.exists() else 0
        events: list[RunEvent] = []
        if begin < self._offset:
            with self._path.open("rb") as file:
                file.seek(begin)
                for line in file.read(self._offset - begin).split(b"\n"):
                    self.parse(line, events, [])
        return events

    def keep(self) -> None:
        """Remember that what was read is stored, for another watcher."""
        if self._offset != self._stored:
            self._write(self._mark)
            self._stored = self._offset

    def _write(self, path: Path) -> None:
        half = path.with_name(f"{path.name}.tmp")
        half.write_text(str(self._offset))
        half.replace(path)

    @staticmethod
    def parse(line: bytes, events: list[RunEvent], broken: list[str]) -> None:
        """Add what a line says to one of the lists."""
        if not line.strip():
            return
        try:
            events.append(RunEvent.model_validate_json(line))
        except ValidationError:
            broken.append(line[:200].decode("utf-8", errors="replace"))


class _Failed(BaseModel):
    """data of a `failed` event."""

    reason: FailReason
    phase: Phase | None = None
    message: str


class _Progress(BaseModel):
    """data of a `progress` event."""

    done: int
    total: int
    unit: str


@dataclass(slots=True)
class Seen:
    """What an attempt has said so far that decides its outcome."""

    exported: bool = False
    stopped: bool = False
    failed: _Failed | None = None

    @property
    def is_over(self) -> bool:
        """Whether only the end of the processes is left."""
        return self.exported or self.stopped or self.failed is not None

    def note(self, event: RunEvent) -> None:
        """Take in an event."""
        if event.type is RunEventType.EXPORTED:
            self.exported = True
        elif event.type is RunEventType.STOPPED:
            self.stopped = True
        elif event.type is RunEventType.FAILED:
            self.failed = self.failed or _Failed.model_validate(event.data)


@dataclass(slots=True)
class _HandedOn:
    """Which requests of users this attempt's ranks have got; each one once, since they remove its file."""

    save_at: datetime | None = None
    stop_at: datetime | None = None

    def add(self, ctx: JobContext, run: RunFolder) -> None:
        """Hand on what is new."""
        if ctx.save_requested_at not in (None, self.save_at):
            self.save_at = ctx.save_requested_at
            run.save.touch()
        if ctx.stop_requested_at not in (None, self.stop_at):
            self.stop_at = ctx.stop_requested_at
            run.finish.touch()


def watch(ctx: JobContext, handle: Handle, tail: EventTail, *, run: RunFolder, seen: Seen) -> None:
    """Follow the attempt to its end and return when its export is whole.

    Args:
        seen: What it has said before.

    Raises:
        JobError: It failed, with the reason that it gave.
        AttemptLostError: It was killed; another attempt may do better.
        Stopped: It was stopped, or left to run for another worker, for `ctx.stop_reason`.
    """
    try:
        ended = _follow(ctx, handle, tail, seen, run=run)
    except Stopped:
        # `_stop` has seen to the processes.
        raise
    except BaseException:
        handle.end(grace_s=0)
        raise
    handle.end(grace_s=0)
    _judge(ended, seen)


def _follow(
    ctx: JobContext, handle: Handle, tail: EventTail, seen: Seen, *, run: RunFolder
) -> Exit:
    over_at: float | None = None
    handed_on = _HandedOn()
    while True:
        # Asked before the read: nothing is written after the end, so the read after it is the last one.
        ended = handle.poll()
        _read(ctx, tail, seen)
        handed_on.add(ctx, run)
        if ctx.stop_reason is not None:
            _stop(ctx, handle, run=run)
            _read(ctx, tail, seen)
            ctx.check()
        if ended is not None:
            return ended
        if seen.is_over and over_at is None:
            over_at = time.monotonic()
        limit_s = ctx.settings.stop_grace_s + HANG_MARGIN_S
        if over_at is not None and time.monotonic() - over_at > limit_s:
            # It has said its last word and hangs; that we end it says nothing about the cause.
            handle.end(grace_s=ctx.settings.kill_grace_s)
            return Exit(status=1, killed=False, message="it hung after its last event")
        time.sleep(_POLL_S)


def _stop(ctx: JobContext, handle: Handle, *, run: RunFolder) -> None:
    """End the attempt; one that can do without this worker only where it is cancelled."""
    if not _is_cancelled(ctx) and isinstance(handle, AttachedHandle):
        _let_save(ctx, handle)
    # A cancel may have come while the state was saved.
    if _is_cancelled(ctx):
        run.cancel.touch()
        handle.end(grace_s=ctx.settings.kill_grace_s)
        run.remove_half_done()
    elif isinstance(handle, AttachedHandle):
        handle.end(grace_s=0)


def _let_save(ctx: JobContext, handle: AttachedHandle) -> None:
    """Ask the ranks to save their state, and wait for it as long as it may take."""
    settings = ctx.settings
    grace_s = settings.stop_grace_s
    if ctx.stop_reason is StopReason.LEASE_LOST:
        # The reaper waits `kill_grace_s` after the lease; then another attempt may write into this folder.
        grace_s = max(0.0, min(settings.kill_grace_s, ctx.lease_left_s + settings.kill_grace_s))
    deadline = time.monotonic() + grace_s
    handle.ask_to_stop()
    while handle.poll() is None and time.monotonic() < deadline and not _is_cancelled(ctx):
        time.sleep(_POLL_S)


def _is_cancelled(ctx: JobContext) -> bool:
    return ctx.stop_reason is StopReason.CANCELLED


def _read(ctx: JobContext, tail: EventTail, seen: Seen) -> None:
    events, broken = tail.read()
    for line in broken:
        _log.warning("a line of the events file is not an event: %s", line)
    for event in events:
        seen.note(event)
        _report(ctx, event)
    tail.keep()


def catch_up(ctx: JobContext, tail: EventTail) -> None:
    """Store the numbers of an attempt before whose watcher was killed, and pass over whatever else it left."""
    events, _ = tail.read()
    for event in events:
        if event.type is RunEventType.METRICS:
            ctx.metrics(event.data)
    tail.begin()
    tail.keep()


def recall(ctx: JobContext, tail: EventTail) -> Seen:
    """Return what the attempt of another watcher has said, and enter the phase that it is in."""
    seen = Seen()
    phase: RunEvent | None = None
    for event in tail.before():
        seen.note(event)
        phase = event if event.type is RunEventType.PHASE else phase
    if phase is not None:
        _report(ctx, phase)
    return seen


def exported_step(path: Path) -> int | None:
    """Return the step that the run's last whole export is of, also where an earlier attempt made it."""
    if not path.exists():
        return None
    with path.open("rb") as lines:
        said = [line for line in lines if f'"{RunEventType.EXPORTED}"'.encode() in line]
    events: list[RunEvent] = []
    for line in said:
        EventTail.parse(line, events, [])
    steps = [event.data["step"] for event in events if event.type is RunEventType.EXPORTED]
    return int(str(steps[-1])) if steps else None


def _report(ctx: JobContext, event: RunEvent) -> None:
    if event.type is RunEventType.PHASE:
        ctx.phase(Phase(str(event.data["phase"])))
    elif event.type is RunEventType.PROGRESS:
        progress = _Progress.model_validate(event.data)
        ctx.progress(progress.done, progress.total, progress.unit)
    elif event.type is RunEventType.METRICS:
        ctx.metrics(event.data)
    elif event.type is RunEventType.LOG:
        ctx.log(str(event.data.get("level", "info")), str(event.data.get("message", "")))
    elif event.type is RunEventType.STATE_SAVED:
        ctx.log("info", f"saved the training state of step {event.data.get('step')}")
    elif event.type is RunEventType.STOPPED:
        ctx.log("info", f"the training program stopped; saved step: {event.data.get('step')}")


def _judge(ended: Exit, seen: Seen) -> None:
    """Raise unless the export is whole.

    The first cause counts: a rank whose sibling was killed fails too, and may well be the one that reports.
    """
    failed = seen.failed
    if failed is not None and not (ended.killed and failed.reason in _SIBLINGS_FAIL_WITH):
        raise JobError(failed.message, reason=failed.reason, phase=failed.phase)
    if failed is None and seen.exported:
        return
    if ended.killed or seen.stopped:
        raise AttemptLostError(f"the training program was ended from outside: {ended.message}")
    raise JobError(
        f"the training program ended without a word: {ended.message}",
        reason=FailReason.PROGRAM_FAILED,
    )
