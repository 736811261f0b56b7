"""The run's metrics as TensorBoard reads them: event files under tensorboard/ in the run folder.

Owns the files alone: it is handed each metrics event as it is written. A file an attempt, since a killed one may have
ended in the middle of a record; what an attempt repeats takes the place of what the last one had written.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tevatron.core.contracts.run import TENSORBOARD_NAME, RunEventType

logger = logging.getLogger(__name__)


class TensorBoard:
    """The event file of one attempt."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        """Begin a file; `step` is the one that the attempt goes on from, 0 for none."""
        folder = run_dir / TENSORBOARD_NAME
        # Read in the order of their names, as TensorBoard does.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        start = SessionLog(status=SessionLog.START)
        self._append(
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            # Readers forget what earlier files have of this step and later ones.
            Event(wall_time=time.time(), step=step + 1, session_log=start),
        )

    def take(self, data: Mapping[str, JsonValue]) -> None:
        """Write the numbers of a metrics event, which has a `step`."""
        step = data["step"]
        assert isinstance(step, int), "every metrics event is of a step"
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in data.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def end(self, how: RunEventType) -> None:
        """Leave the file, which is whole after each event."""

    def _append(self, *events: Event) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as stream:
                records = RecordWriter(stream)
                for event in events:
                    records.write(event.SerializeToString())
        except OSError as error:
            logger.warning("metrics cannot be written to %s: %s", self._path, error)
