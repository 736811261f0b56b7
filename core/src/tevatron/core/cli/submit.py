"""Commands that submit jobs: `submit train|export|eval|annotate` and `run`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tevatron.core.cli.jobs import Json, connect, registered_names

if TYPE_CHECKING:
    from pydantic import JsonValue

    from tevatron.core.cli.client import Client
    from tevatron.core.contracts.jobs import JobGroup, JobSpec
    from tevatron.core.contracts.resources import DatasetRequest, DatasetResource, ModelRequest

app = typer.Typer(help="Submit one job.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Argument(metavar="[FILE.yaml]", help="A job spec; flags win over it.")
]
Name = Annotated[str | None, typer.Option(help="Name of the job.")]
Priority = Annotated[
    int | None,
    typer.Option(min=-10, max=10, help="Higher is claimed first; 0 if left out."),
]
Launcher = Annotated[
    str | None, typer.Option(help="local, jobset or slurm; the deployment's own if left out.")
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", "-f", help="Show its progress; the exit status says whether it succeeded."
    ),
]


class Dtype(StrEnum):
    """Arithmetic or weights, as the contracts have them."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit_train(  # noqa: PLR0913  a command's options
    context: typer.Context,
    file: File = None,
    model: Annotated[str | None, typer.Option(help="Base model, by name or id.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Training data, by name or id.")] = None,
    validation: Annotated[
        str | None, typer.Option(help="Held-out rows, by name or id; see --eval_steps.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="hf (the default) or megatron.")] = None,
    num_processes: Annotated[int | None, typer.Option(help="Ranks on all nodes together.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Machines, on a cluster.")] = None,
    launcher: Launcher = None,
    name: Name = None,
    priority: Priority = None,
    flags: Annotated[
        bool, typer.Option("--flags", help="List all training flags, then end.")
    ] = False,
    follow: Follow = False,
    json: Json = False,
) -> None:
    """Train a reranker and publish its checkpoint. Takes every training flag, such as --learning_rate 1e-4."""
    from tevatron.core.cli import output, specs  # rich, yaml and pydantic are heavy
    from tevatron.core.contracts.jobs import JobKind

    if flags:
        rows = [
            dict(zip(("flag", "default", "meaning"), row, strict=True))
            for row in specs.train_flags()
        ]
        output.print_rows(rows, "flag", "default", "meaning")
        return
    words = list(context.args)
    if file is not None and str(file).startswith("--"):
        words, file = [str(file), *words], None
    given: dict[str, JsonValue] = {
        "model": model,
        "dataset": dataset,
        "validation": validation,
        "backend": backend,
        "num_processes": num_processes,
        "num_nodes": num_nodes,
        "launcher": launcher,
        "name": name,
        "priority": priority,
    }
    spec = specs.merge_spec(JobKind.TRAIN, file, given, arguments=specs.train_arguments(words))
    _submit(spec, follow=follow, json=json)


@app.command("export")
def submit_export(  # noqa: PLR0913  a command's options
    file: File = None,
    train: Annotated[str | None, typer.Option(help="The train job, by id or name.")] = None,
    step: Annotated[int | None, typer.Option(help="Saved step; the newest if left out.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Weights of the checkpoint.")] = None,
    form: Annotated[str | None, typer.Option(help="merged or adapter.")] = None,
    to: Annotated[
        str | None, typer.Option(help="URL of a folder that gets a copy: s3://bucket/folder.")
    ] = None,
    launcher: Launcher = None,
    name: Name = None,
    priority: Priority = None,
    follow: Follow = False,
    json: Json = False,
) -> None:
    """Publish another checkpoint from a training job's saved state."""
    from tevatron.core.cli import specs  # yaml and pydantic are heavy
    from tevatron.core.contracts.jobs import JobKind

    given: dict[str, JsonValue] = {
        "train": train,
        "step": step,
        "dtype": dtype,
        "form": form,
        "to": to,
        "launcher": launcher,
        "name": name,
        "priority": priority,
    }
    _submit(specs.merge_spec(JobKind.EXPORT, file, given), follow=follow, json=json)


@app.command("eval")
def submit_eval(  # noqa: PLR0913  a command's options
    file: File = None,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset of kind beir, by name or id.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which qrels.")] = None,
    benchmark: Annotated[
        str | None, typer.Option(help="Data set of a benchmark whose rules hold: beir15/scifact.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Rerank with this checkpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="Rerank with this registered model.")] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Template of the model.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest prompt of the model.")] = None,
    engine: Annotated[str | None, typer.Option(help="What scores: hf or vllm.")] = None,
    ranklist: Annotated[
        str | None, typer.Option(help="First stage: a dataset of kind ranklist; BM25 if left out.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Candidates a query that are reranked.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Such as ndcg@10; several times.")
    ] = None,
    name: Name = None,
    priority: Priority = None,
    follow: Follow = False,
    json: Json = False,
) -> None:
    """Compute metrics of a first stage, or of its reranking."""
    from tevatron.core.cli import specs  # yaml and pydantic are heavy
    from tevatron.core.contracts.jobs import JobKind

    given: dict[str, JsonValue] = {
        "dataset": dataset,
        "split": split,
        "name": name,
        "priority": priority,
    }
    if benchmark is not None:
        of, _, one = benchmark.partition("/")
        given["benchmark"] = {"name": of, "dataset": one}
    if metric:
        given["metrics"] = list(metric)
    if ranklist is not None:
        given["first_stage"] = {"kind": "ranklist", "dataset": ranklist}
    rerank: dict[str, JsonValue] = {
        "checkpoint": checkpoint,
        "model": model,
        "prompt_template": prompt_template,
        "max_length": max_length,
        "engine": engine,
        "depth": depth,
    }
    rerank = {key: value for key, value in rerank.items() if value is not None}
    if rerank:
        given["rerank"] = rerank
    _submit(specs.merge_spec(JobKind.EVAL, file, given), follow=follow, json=json)


@app.command("annotate")
def submit_annotate(  # noqa: PLR0913  a command's options
    file: File = None,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset of kind training, by name or id.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The teacher: a checkpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="The teacher: a registered model.")] = None,
    scorer: Annotated[
        list[str] | None, typer.Option(help="The teacher: a scorer that is there; several times.")
    ] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Template of the model.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest prompt of the model.")] = None,
    engine: Annotated[str | None, typer.Option(help="What scores: hf or vllm.")] = None,
    max_negatives: Annotated[
        int | None, typer.Option(help="Negatives of a row that are scored.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows from the beginning.")] = None,
    name: Name = None,
    priority: Priority = None,
    follow: Follow = False,
    json: Json = False,
) -> None:
    """Score a training set with a teacher, and register the result as another training set."""
    from tevatron.core.cli import specs  # yaml and pydantic are heavy
    from tevatron.core.contracts.jobs import JobKind

    given: dict[str, JsonValue] = {
        "dataset": dataset,
        "max_negatives": max_negatives,
        "limit": limit,
        "name": name,
        "priority": priority,
    }
    teacher: dict[str, JsonValue] = {
        "checkpoint": checkpoint,
        "model": model,
        "scorers": list(scorer) if scorer else None,
        "prompt_template": prompt_template,
        "max_length": max_length,
        "engine": engine,
    }
    teacher = {key: value for key, value in teacher.items() if value is not None}
    if teacher:
        given["teacher"] = teacher
    _submit(specs.merge_spec(JobKind.ANNOTATE, file, given), follow=follow, json=json)


def run(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.yaml",
            help="{jobs: {name: spec}}, and models and datasets to register first.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Show the progress to the end.")
    ] = True,
    json: Json = False,
) -> None:
    """Submit the jobs of a file. All or none; they may refer to one another ({from: name})."""
    from tevatron.core.cli import specs  # yaml and pydantic are heavy

    content = specs.read_run_file(file)
    with connect() as client:
        register(client, models=content.models, datasets=content.datasets)
    _submit(content.jobs, follow=follow, json=json)


def register(
    client: Client, *, models: Sequence[ModelRequest], datasets: Sequence[DatasetRequest]
) -> None:
    """Register what is not there yet under its name; another thing of that name is an error."""
    from tevatron.core.errors import ConflictError

    for model in models:
        old = client.find_model(model.name)
        if old is None:
            client.register_model(model)
        elif (old.path, old.hub_id, old.revision) != (model.path, model.hub_id, model.revision):
            source = old.path or old.hub_id
            raise ConflictError(f"a model named '{model.name}' exists and is another one: {source}")
    for dataset in datasets:
        known = client.find_dataset(dataset.name)
        if known is None:
            client.register_dataset(dataset)
        elif known.kind != dataset.kind or _source(known) != _source(dataset):
            raise ConflictError(
                f"a dataset named '{dataset.name}' exists and is another one: {known.hub_id or known.url or known.path}"
            )


def _source(dataset: DatasetResource | DatasetRequest) -> tuple[str | None, ...]:
    # One that was fetched lies at a path of its own.
    if dataset.hub_id is not None:
        return dataset.hub_id, dataset.revision, dataset.file
    return (dataset.url or dataset.path,)


def _submit(submission: JobSpec | JobGroup, *, follow: bool, json: bool) -> None:
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.cli.follow import all_succeeded, follow_jobs

    with connect() as client:
        found = client.submit(submission)
        if not follow:
            output.print_json(output.dump(found)) if json else output.print_jobs(found)
            return
        found = follow_jobs(client, found, quiet=json)
        wanted = {job.id for job in found}
        evaluations = [entry for entry in client.evaluations() if entry.job_id in wanted]
        names = registered_names(client)
    if json:
        output.print_json({"jobs": output.dump(found), "evaluations": output.dump(evaluations)})
    else:
        output.print_jobs(found)
        output.print_evaluations(evaluations, names=names)
    if not all_succeeded(found):
        raise typer.Exit(1)
