"""What W&B and MLflow hold of a run is what its events say; nothing that goes wrong with them ends a training."""

import logging
import struct
import threading
import time

import pytest
import wandb
from mlflow import MlflowClient
from tests.trainer.program.training import make_run, of_type, read_events, run_training
from wandb.proto.wandb_internal_pb2 import Record

from tevatron.core.contracts.jobs import FailReason
from tevatron.core.contracts.run import RunEventType
from tevatron.core.errors import ConfigError
from tevatron.trainer.program import tracking
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.tracking import Tracker, open_trackers

# MLflow's own tables, with the SQLAlchemy that is installed here.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
BLOCK = 32768


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """MLflow takes seconds to make its tables."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path, store):
    """Nothing of this machine's own, and no network."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "rerankers")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")
    yield
    # It reads its variables once a process.
    wandb.teardown()


@pytest.fixture
def config(llama, dataset, tmp_path):
    """A run that nobody trains, with its folder."""
    folder = tmp_path / "run"
    folder.mkdir()

    def make(**arguments: object):
        return make_run(llama, dataset, folder, **arguments)

    return make


def wandb_records(run_dir):
    """The records of each offline run in the order of their beginning: a LevelDB log of W&B's protobufs."""
    for path in sorted((run_dir / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")):
        data = path.read_bytes()
        assert data[:4] == b":W&B"
        place, whole = 7, b""
        while place < len(data):
            left = BLOCK - place % BLOCK
            if left < 7:
                place += left
                continue
            length, kind = struct.unpack_from("<HB", data, place + 4)
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(whole)
                whole = b""


def wandb_rows(run_dir):
    return [
        {
            (item.key or ".".join(item.nested_key)): float(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_metrics(run_dir):
    """As metrics events."""
    return [
        {name: value for name, value in row.items() if not name.startswith("_")}
        for row in wandb_rows(run_dir)
    ]


def mlflow_history(run_dir):
    """Steps and values by name."""
    client = MlflowClient()
    run_id = (run_dir / "tracking" / "mlflow.id").read_text()
    return {
        name: [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }


def test_both_have_the_numbers_of_the_events(llama, dataset, tmp_path):
    run = make_run(
        llama, dataset, tmp_path, validation=dataset, eval_steps=2, max_steps=3,
        report_to=["mlflow"], wandb_project="papers", wandb_entity="team", run_name="first",
    )  # fmt: skip
    metrics = of_type(run_training(run), "metrics")
    assert [data["step"] for data in metrics] == [1, 2, 2, 3, 3]
    assert wandb_metrics(tmp_path) == metrics
    (begun,) = [record.run for record in wandb_records(tmp_path) if record.HasField("run")]
    assert (begun.project, begun.entity, begun.display_name) == ("papers", "team", "first")
    assert {item.key: item.value_json for item in begun.config.update}["train_group_size"] == "4"
    wanted = {}
    for data in metrics:
        for name in data.keys() - {"step"}:
            wanted.setdefault(name.replace("@", "_at_"), []).append((data["step"], data[name]))
    assert mlflow_history(tmp_path) == wanted
    assert {"loss", "eval_ndcg_at_10"} <= {*wanted}
    found = MlflowClient().get_run((tmp_path / "tracking" / "mlflow.id").read_text())
    assert MlflowClient().get_experiment(found.info.experiment_id).name == "rerankers"
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert found.data.params["train_group_size"] == "4"


def attempt(config, first, last, *, how):
    """Report the loss of some steps, then end."""
    events = EventWriter(config.output_dir, rank=0)
    events.phase(events.current_phase)
    events.readers += open_trackers(config, events)
    for step in range(first, last + 1):
        events.metrics({"step": step, "loss": 1 / step})
    how(events)


def test_a_resumed_run_goes_on_with_its_own_and_doubles_no_step(config):
    run = config(report_to=["wandb", "mlflow"])
    attempt(run, 1, 5, how=lambda events: events.stopped(3))
    client, run_id = MlflowClient(), (run.output_dir / "tracking" / "mlflow.id").read_text()
    assert client.get_run(run_id).info.status == "KILLED"
    with (run.output_dir / "events.jsonl").open("a") as stream:
        stream.write('{"time": 1\n')  # a kill in the middle of a line
    attempt(run, 4, 7, how=lambda events: events.exported(7))
    losses = [(step, 1 / step) for step in range(1, 8)]
    assert [(row["step"], row["loss"]) for row in wandb_metrics(run.output_dir)] == losses
    ids = {record.run.run_id for record in wandb_records(run.output_dir) if record.HasField("run")}
    assert ids == {(run.output_dir / "tracking" / "wandb.id").read_text()}
    assert mlflow_history(run.output_dir) == {"loss": losses}
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_run_that_begins_again_is_another_one(config):
    run = config(report_to=["wandb", "mlflow"])
    attempt(run, 1, 2, how=lambda events: events.failed(FailReason.PROGRAM_FAILED, "x"))
    names = ("wandb.id", "mlflow.id")
    first = [(run.output_dir / "tracking" / name).read_text() for name in names]
    attempt(run.model_copy(update={"resume": False}), 1, 3, how=lambda events: events.exported(3))
    second = [(run.output_dir / "tracking" / name).read_text() for name in names]
    assert not {*first} & {*second}
    assert len(mlflow_history(run.output_dir)["loss"]) == 3
    assert MlflowClient().get_run(first[1]).info.status == "FAILED"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_else(config, monkeypatch, name):
    find = tracking.importlib.util.find_spec
    monkeypatch.setattr(
        tracking.importlib.util, "find_spec", lambda one: None if one == name else find(one)
    )
    run = config(report_to=[name])
    with pytest.raises(ConfigError, match=rf"pip install 'tevatron-trainer\[{name}\]'"):
        run_training(run)
    assert [event.type for event in read_events(run.output_dir)] == ["phase"]


@pytest.mark.parametrize(
    ("name", "unset", "message"),
    [("mlflow", "MLFLOW_TRACKING_URI", "expected MLFLOW_TRACKING_URI"), ("wandb", "WANDB_MODE", "API key")],
)  # fmt: skip
def test_what_a_tracker_cannot_do_without(config, monkeypatch, name, unset, message):
    monkeypatch.delenv(unset)
    run = config(report_to=[name])
    with pytest.raises(ConfigError, match=f"report_to '{name}'.*{message}"):
        open_trackers(run, EventWriter(run.output_dir, rank=0))


def warnings_of(run_dir):
    return [data["message"] for data in of_type(read_events(run_dir), "log")]


def test_without_a_network_there_is_one_warning_and_the_training_goes_on(
    llama, dataset, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:canary@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = make_run(llama, dataset, tmp_path, max_steps=2, report_to=["mlflow"])
    events = run_training(run)
    assert events[-1].type == "exported"
    (warning,) = warnings_of(tmp_path)
    assert "mlflow gets no more numbers from this attempt" in warning
    assert "127.0.0.1" in warning
    assert "canary" not in caplog.text
    assert "canary" not in (tmp_path / "events.jsonl").read_text()


class Kept:
    """A client that keeps what it is sent, and can fail."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.sent: list[tuple[int, dict]] = []
        self.ended: RunEventType | None = None
        self._fails_at = fails_at

    def send(self, numbers, *, step):
        if step == self._fails_at:
            raise OSError("no route to https://user:canary@host")
        self.sent.append((step, dict(numbers)))

    def finish(self, how):
        self.ended = how


def make_tracker(tmp_path, connect):
    events = EventWriter(tmp_path, rank=0)
    return Tracker("wandb", connect, reported=set(), events=events)


def test_a_tracker_that_fails_on_the_way_warns_once(tmp_path, caplog):
    client = Kept(fails_at=2)
    tracker = make_tracker(tmp_path, lambda: client)
    for step in range(1, 5):
        tracker.take({"step": step, "loss": 0.5, "grad_norm": None})
    tracker.end(RunEventType.EXPORTED)
    assert client.sent == [(1, {"loss": 0.5})]
    (warning,) = warnings_of(tmp_path)
    assert warning == (
        "wandb gets no more numbers from this attempt: OSError: no route to https://***@host"
    )


def test_a_tracker_that_is_slow_holds_nothing_up_and_gets_it_all(tmp_path):
    client, is_there = Kept(), threading.Event()

    def connect():
        is_there.wait()
        return client

    tracker = make_tracker(tmp_path, connect)
    begun = time.monotonic()
    tracker.wait(seconds=0.1)
    tracker.take({"step": 1, "loss": 0.5})
    assert time.monotonic() - begun < 5
    assert "does not answer within 0.1 s" in warnings_of(tmp_path)[0]
    is_there.set()
    tracker.end(RunEventType.STOPPED)
    assert (client.sent, client.ended) == ([(1, {"loss": 0.5})], RunEventType.STOPPED)


def test_an_end_does_not_wait_for_a_tracker_that_hangs(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    hangs = threading.Event()
    tracker = make_tracker(tmp_path, hangs.wait)
    with caplog.at_level(logging.WARNING):
        tracker.end(RunEventType.EXPORTED)
    assert "wandb has not taken the last numbers within 0.1 s" in caplog.text
    hangs.set()
