"""The run's events: one JSON line each, appended to events.jsonl in the run folder.

Owns the file and the shape of each line. Reporting never stops a training: a line that cannot be written is a warning.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from tevatron.core.contracts.jobs import FailReason, Phase
from tevatron.core.contracts.run import EVENTS_NAME, RunEvent, RunEventType

logger = logging.getLogger(__name__)


class MetricsReader(Protocol):
    """Takes each metrics event as it is written."""

    def take(self, data: Mapping[str, JsonValue]) -> None:
        """Take the event's data."""

    def end(self, how: RunEventType) -> None:
        """Know that no more come: `exported`, `stopped` or `failed`."""


class EventWriter:
    """Appends events of one rank; only rank 0 reports, except for failures, which every rank may."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._path = run_dir / EVENTS_NAME
        self.rank = rank
        self.current_phase = Phase.PREPARING
        self.readers: list[MetricsReader] = []
        """Who is handed the metrics that this rank writes."""

    def phase(self, phase: Phase) -> None:
        """Say what the run does now."""
        self.current_phase = phase
        self._write(RunEventType.PHASE, {"phase": phase.value})

    def progress(self, done: int, total: int, *, unit: str) -> None:
        """Say how far it is."""
        self._write(RunEventType.PROGRESS, {"done": done, "total": total, "unit": unit})

    def metrics(self, values: dict[str, float | int]) -> None:
        """Report numbers of a step; JSON has no NaN, so that one becomes null."""
        data: dict[str, JsonValue] = {
            key: value if math.isfinite(value) else None for key, value in values.items()
        }
        self._write(RunEventType.METRICS, data)
        for reader in self.readers:
            reader.take(data)

    def log(self, level: str, message: str) -> None:
        """Pass a line on to whoever watches the run."""
        self._write(RunEventType.LOG, {"level": level, "message": message})

    def state_saved(self, step: int) -> None:
        """Say that a resumable state is complete."""
        self._write(RunEventType.STATE_SAVED, {"step": step})

    def exported(self, step: int) -> None:
        """Say that export/ is whole."""
        self._write(RunEventType.EXPORTED, {"step": step})
        self._end(RunEventType.EXPORTED)

    def stopped(self, step: int | None) -> None:
        """Say that the run ended because it was asked to, with this state saved."""
        self._write(RunEventType.STOPPED, {"step": step})
        self._end(RunEventType.STOPPED)

    def failed(self, reason: FailReason, message: str, *, phase: str | None = None) -> None:
        """Say why the run ends; any rank may, and the first one counts."""
        where = phase or self.current_phase.value
        self._append(
            RunEventType.FAILED,
            {"reason": reason.value, "phase": where, "message": message, "rank": self.rank},
        )
        self._end(RunEventType.FAILED)

    def _end(self, how: RunEventType) -> None:
        readers, self.readers = self.readers, []
        for reader in readers:
            reader.end(how)

    def _write(self, kind: RunEventType, data: dict[str, JsonValue]) -> None:
        if self.rank == 0:
            self._append(kind, data)

    def _append(self, kind: RunEventType, data: dict[str, JsonValue]) -> None:
        line = RunEvent(time=time.time(), type=kind, data=data).model_dump_json() + "\n"
        try:
            # One write in append mode, so that lines of two ranks never mix.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("event '%s' cannot be written to %s: %s", kind.value, self._path, error)
