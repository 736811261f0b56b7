"""Running the training program inside a test, on a tiny model."""

import json
import signal
from pathlib import Path

from tevatron.core.contracts.run import RunEvent, TrainRun
from tevatron.core.contracts.train import TrainArguments
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.export import main as export
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.train import train, write_config

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]


def write_dataset(path: Path, num_rows: int = 13) -> Path:
    """Rows of unlike lengths, with three to six negatives and a teacher's scores."""
    with path.open("w") as stream:
        for number in range(num_rows):
            word = WORDS[number % 5]
            negatives = [
                {
                    "title": "A-b",
                    "text": f"other thing {place} " * (1 + place % 4),
                    "score": -float(place),
                }
                for place in range(3 + number % 4)
            ]
            row = {
                "query_id": str(number),
                "query": f"what is {word} {number}",
                "positive_passages": [
                    {"text": f"{word} is {number} " * (1 + number % 3), "score": 3.0}
                ],
                "negative_passages": negatives,
            }
            stream.write(json.dumps(row) + "\n")
    return path


def make_run(
    model: Path,
    dataset: Path,
    output: Path,
    *,
    validation: Path | None = None,
    resume: bool = True,
    **arguments: object,
) -> TrainRun:
    """Two epochs of four steps of four queries, every step logged."""
    values = {
        "train_group_size": 4,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "save_steps": 3,
        "logging_steps": 1,
        "rerank_max_len": 96,
        **arguments,
    }
    return TrainRun(
        model_name_or_path=str(model),
        dataset_path=str(dataset),
        validation_path=None if validation is None else str(validation),
        output_dir=output,
        base_model="tiny",
        resume=resume,
        arguments=TrainArguments.model_validate(values),
    )


def run_training(run: TrainRun) -> list[RunEvent]:
    """Train in this process as rank 0 of 1; return all events."""
    write_config(run)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        train(run, RankEnvironment(0, 1, None), EventWriter(run.output_dir, rank=0))
    finally:
        signal.signal(signal.SIGTERM, handler)
    return read_events(run.output_dir)


def read_events(folder: Path) -> list[RunEvent]:
    """Return the events of a run folder."""
    text = (folder / "events.jsonl").read_text()
    return [RunEvent.model_validate_json(line) for line in text.splitlines()]


def of_type(events: list[RunEvent], kind: str) -> list[dict]:
    """Return the data of the events of a type."""
    return [event.data for event in events if event.type == kind]


def losses(events: list[RunEvent]) -> list[float]:
    """Return the logged losses in order."""
    return [data["loss"] for data in of_type(events, "metrics") if "loss" in data]


def evaluations(events: list[RunEvent]) -> list[dict]:
    """Return the numbers of the held-out rows in order."""
    return [data for data in of_type(events, "metrics") if "eval_loss" in data]


def run_export(tmp_path, run_dir, **options):
    config = {"run_dir": str(run_dir), "output_dir": str(tmp_path), **options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return export([str(tmp_path / "config.json")])
    finally:
        signal.signal(signal.SIGTERM, handler)
