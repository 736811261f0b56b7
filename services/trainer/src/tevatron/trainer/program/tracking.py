"""The run's metrics at W&B and MLflow, where its arguments ask for it; both packages are optional.

Owns what is sent, and when: a thread of each tracker sends the metrics events that it is handed, so that a network which
is slow or gone never holds up the training. What goes wrong is an error before the training begins if it is the user's
mistake, and otherwise one warning, after which this attempt sends nothing more. A resumed run goes on with its run of
the tracker, whose id is kept in the run folder, and what an earlier attempt has reported is not sent again.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue, ValidationError

from tevatron.core.contracts.run import EVENTS_NAME, TRACKING_NAME, RunEvent, RunEventType, TrainRun
from tevatron.core.contracts.train import TrackerName, TrainArguments
from tevatron.core.environment import without_passwords
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.settings import set_tracker_defaults

logger = logging.getLogger(__name__)

OPEN_S = 60.0
"""A tracker that is not there by then gets what was reported once it is."""
FINISH_S = 30.0
"""What a run waits at its end for the last numbers to be sent."""


class Client(Protocol):
    """A run of a tracker, used by one thread."""

    def send(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send numbers of a step."""

    def finish(self, how: RunEventType) -> None:
        """Close the run."""


class Tracker:
    """A reader of metrics that hands them to a client in a thread of its own."""

    def __init__(
        self,
        name: TrackerName,
        connect: Callable[[], Client],
        *,
        reported: set[tuple[int, str]],
        events: EventWriter,
    ) -> None:
        """Begin to connect.

        Args:
            name: For warnings.
            connect: Makes the client; a `ConfigError` of it is the user's mistake.
            reported: Steps and names of the numbers that are not sent again.
            events: Where a warning goes.
        """
        self._name = name
        self._connect = connect
        self._reported = reported
        self._events = events
        self._waiting: queue.SimpleQueue[Mapping[str, JsonValue] | RunEventType] = (
            queue.SimpleQueue()
        )
        self._connected: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, *, seconds: float) -> None:
        """Return when it is connected, or after that time; raise `ConfigError` where it can never be."""
        try:
            self._connected.result(timeout=seconds)
        except TimeoutError:
            self._warn(f"does not answer within {seconds:g} s, the training begins without it")

    def take(self, data: Mapping[str, JsonValue]) -> None:
        """Have the numbers of a metrics event sent."""
        self._waiting.put(data)

    def end(self, how: RunEventType) -> None:
        """Wait until all is sent, but not for long."""
        self._waiting.put(how)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._warn(f"has not taken the last numbers within {FINISH_S:g} s")

    def _run(self) -> None:
        try:
            client = self._connect()
            self._connected.set_result(None)
            while not isinstance(data := self._waiting.get(), RunEventType):
                self._send(client, data)
            client.finish(data)
        except ConfigError as error:
            self._connected.set_exception(error)
        except Exception as error:  # noqa: BLE001  the libraries' errors have no common root, and the training goes on
            self._warn(
                f"gets no more numbers from this attempt: {type(error).__name__}: {without_passwords(str(error))}"
            )
            if not self._connected.done():
                self._connected.set_result(None)

    def _send(self, client: Client, data: Mapping[str, JsonValue]) -> None:
        step = data["step"]
        assert isinstance(step, int), "every metrics event is of a step"
        numbers = {
            name: value
            for name, value in data.items()
            if isinstance(value, int | float)
            and name != "step"
            and (step, name) not in self._reported
        }
        if numbers:
            client.send(numbers, step=step)

    def _warn(self, what: str) -> None:
        message = f"{self._name} {what}"
        logger.warning("%s", message)
        self._events.log("warning", message)


class Wandb:
    """A run of W&B."""

    def __init__(self, config: TrainRun, kept: RunId) -> None:
        import wandb  # comes with the extra

        arguments = config.arguments
        if kept.value is None:
            kept.keep(uuid.uuid4().hex)
        try:
            self._run = wandb.init(
                dir=config.output_dir / TRACKING_NAME,
                project=arguments.wandb_project,
                entity=arguments.wandb_entity,
                name=arguments.run_name,
                id=kept.value,
                resume="allow",
                reinit="create_new",
                config=_described(config),
                # What the program prints is in the attempt's log.
                settings=wandb.Settings(
                    console="off", init_timeout=OPEN_S / 2, finish_timeout=FINISH_S / 2
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(f"report_to 'wandb': {without_passwords(str(error))}") from error
        # W&B's own step may not stand still, as it does where a step is logged and evaluated.
        self._run.define_metric("*", step_metric="step")

    def send(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send a row."""
        self._run.log({"step": step, **numbers})

    def finish(self, how: RunEventType) -> None:
        """Say how it ended; one that was stopped is gone on with."""
        if how is RunEventType.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if how is RunEventType.EXPORTED else 1)


class Mlflow:
    """A run of MLflow."""

    _STATUS: Mapping[RunEventType, str] = {
        RunEventType.EXPORTED: "FINISHED",
        RunEventType.STOPPED: "KILLED",
        RunEventType.FAILED: "FAILED",
    }

    def __init__(self, config: TrainRun, kept: RunId) -> None:
        import mlflow  # comes with the extra

        if not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
            raise ConfigError(
                "report_to 'mlflow': expected MLFLOW_TRACKING_URI to name the server, got nothing"
            )
        self._client = mlflow.MlflowClient()
        try:
            run = mlflow.start_run(
                run_id=kept.value,
                run_name=config.arguments.run_name if kept.value is None else None,
            )
            self._id: str = run.info.run_id
            if kept.value is None:
                kept.keep(self._id)
                mlflow.log_params(_described(config))
        except mlflow.exceptions.MlflowException as error:
            if error.get_http_status_code() >= 500:  # type: ignore[no-untyped-call]
                raise  # The server's trouble, or the network's.
            raise ConfigError(f"report_to 'mlflow': {without_passwords(str(error))}") from error

    def send(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Send a batch."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 10**6
        # Its names have no @; its own metrics are called ndcg_at_k.
        self._client.log_batch(
            self._id,
            metrics=[
                Metric(name.replace("@", "_at_"), value, now_ms, step)
                for name, value in numbers.items()
            ],
        )

    def finish(self, how: RunEventType) -> None:
        """Say how it ended."""
        import mlflow

        mlflow.end_run(self._STATUS[how])


class RunId:
    """The id of this run at a tracker, in a file of the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = path.read_text(encoding="utf-8") if path.is_file() else None

    def keep(self, value: str) -> None:
        """Keep it for later attempts."""
        self._path.parent.mkdir(exist_ok=True)
        half = self._path.with_name(f"{self._path.name}.tmp")
        half.write_text(value, encoding="utf-8")
        half.replace(self._path)
        self.value = value


TRACKERS: dict[TrackerName, Callable[[TrainRun, RunId], Client]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def check_trackers(arguments: TrainArguments) -> None:
    """Raise `ConfigError` where the package of a tracker is not installed."""
    for name in arguments.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"report_to '{name}': expected its package, got none; pip install 'tevatron-trainer[{name}]'"
            )


def open_trackers(config: TrainRun, events: EventWriter) -> list[Tracker]:
    """Return a reader for each tracker that the run reports to; rank 0 alone calls it."""
    names = config.arguments.trackers
    if not names:
        return []
    set_tracker_defaults()
    if not config.resume:
        for name in names:
            _id_file(config, name).unlink(missing_ok=True)
    reported = _reported(config.output_dir / EVENTS_NAME) if config.resume else set()

    def start(name: TrackerName) -> Tracker:
        def connect() -> Client:
            return TRACKERS[name](config, RunId(_id_file(config, name)))

        return Tracker(name, connect, reported=reported, events=events)

    trackers = [start(name) for name in names]
    for tracker in trackers:
        tracker.wait(seconds=OPEN_S)
    return trackers


def _id_file(config: TrainRun, name: TrackerName) -> Path:
    return config.output_dir / TRACKING_NAME / f"{name}.id"


def _described(config: TrainRun) -> dict[str, JsonValue]:
    """Return what a tracker shows beside the numbers."""
    described: dict[str, JsonValue] = config.arguments.model_dump(mode="json")
    return {"backend": config.backend, "base_model": config.base_model, **described}


def _reported(path: Path) -> set[tuple[int, str]]:
    """Return steps and names of the numbers in an event file."""
    found: set[tuple[int, str]] = set()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            event = RunEvent.model_validate_json(line)
        except ValidationError:
            continue  # Half a line, of an attempt that was killed.
        step = event.data.get("step")
        if event.type is RunEventType.METRICS and isinstance(step, int):
            found.update((step, name) for name in event.data)
    return found
