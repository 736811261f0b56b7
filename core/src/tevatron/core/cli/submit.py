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
    from tevatron.core.cli.specs import RunFile
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
Replicas = Annotated[
    int | None, typer.Option(min=1, max=64, help="Servers that share the pairs; 1 if left out.")
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
    scorer: Annotated[
        list[str] | None, typer.Option(help="Rerank with a scorer that is there; several times.")
    ] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Template of the model.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest prompt of the model.")] = None,
    engine: Annotated[str | None, typer.Option(help="What scores: hf or vllm.")] = None,
    replicas: Replicas = None,
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
        "scorers": list(scorer) if scorer else None,
        "prompt_template": prompt_template,
        "max_length": max_length,
        "engine": engine,
        "replicas": replicas,
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
    replicas: Replicas = None,
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
        "replicas": replicas,
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
            help="{jobs: {name: spec}}, and models and datasets to register first; with a matrix a study.",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Show the progress to the end.")
    ] = True,
    metric: Annotated[
        str | None, typer.Option(help="Of a study's table; the evaluations' first if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a study's failed and cancelled jobs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--dry_run", help="Show a study's cells; submit nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Submit the jobs of a file. All or none; they may refer to one another ({from: name}).

    A file with a matrix is a study: it ends with one table, and run again it goes on where it was.
    """
    from tevatron.core.cli import specs  # yaml and pydantic are heavy
    from tevatron.core.errors import ConfigError

    content = specs.read_run_file(file)
    if content.study is not None:
        _run_study(
            content, file, follow=follow, metric=metric, resume=resume, dry_run=dry_run, json=json
        )
        return
    if metric is not None or resume or dry_run:
        raise ConfigError(
            f"{file}: --metric, --resume and --dry-run are for a study, and this file has no matrix"
        )
    with connect() as client:
        register(client, models=content.models, datasets=content.datasets)
    _submit(content.jobs, follow=follow, json=json)


def _run_study(
    content: RunFile,
    file: Path,
    *,
    follow: bool,
    metric: str | None,
    resume: bool,
    dry_run: bool,
    json: bool,
) -> None:
    from tevatron.core.cli import output, study_table  # rich is heavy
    from tevatron.core.cli.study_run import follow_study, submit_study
    from tevatron.core.contracts.jobs import JobState

    study = content.study
    assert study is not None
    shown = study_table.shown_metric(study, metric)
    # Whether there can be a table is known before anything runs.
    study_table.rows_of(study)
    if dry_run:
        if json:
            output.print_json(study_table.plan_json(study))
        else:
            study_table.print_plan(study)
        return
    with connect() as client:
        register(client, models=content.models, datasets=content.datasets)
        # One request each: some seconds a hundred.
        typer.echo(f"{study.name}: submitting what is missing of {len(study.jobs)} jobs", err=True)
        jobs = submit_study(client, study, resume=resume)
        if follow:
            typer.echo(f"{study.name}: {study_table.count_states(jobs)}", err=True)
            jobs = follow_study(client, jobs, file=file, quiet=json)
    if json:
        output.print_json(study_table.study_json(study, jobs, metric=shown))
    else:
        study_table.print_study(study, jobs, metric=shown)
    if any(job.state in (JobState.FAILED, JobState.CANCELLED) for job in jobs.values()):
        typer.echo(f"to try failed jobs again: tevatron run {file} --resume", err=True)
        raise typer.Exit(1)


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
