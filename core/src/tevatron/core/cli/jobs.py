"""Commands about jobs that are there already: list, show, logs, cancel, resume, save, stop, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from tevatron.core.cli.client import Client
    from tevatron.core.cli.output import Columns
    from tevatron.core.contracts.resources import JobResource

Item = TypeVar("Item", bound="BaseModel")
Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="Id or name of the job; of a name, the newest.")
]

JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids or names of the jobs.")]


def connect() -> Client:
    """Return a client of the API that the environment or a running stack names."""
    # httpx and the contracts are heavy; --help does not need them.
    from tevatron.core.cli.client import Client
    from tevatron.core.settings import Settings

    return Client.from_settings(Settings.from_environment())


def show_all(
    fetch: Callable[[Client], Sequence[Item]], columns: Columns[Item], *, json: bool
) -> None:
    """Fetch resources and write them as a table, or as JSON."""
    from tevatron.core.cli import output  # rich is heavy

    with connect() as client:
        found = fetch(client)
    output.show(found, columns, json=json)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the main one."""
    app.command("jobs")(list_jobs)
    app.command("show")(show)
    app.command("logs")(logs)
    app.command("cancel")(cancel)
    app.command("resume")(resume)
    app.command("save")(save)
    app.command("stop")(stop)
    app.command("results")(results)


def list_jobs(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    json: Json = False,
) -> None:
    """List jobs, the newest first."""
    from tevatron.core.cli import output  # rich is heavy

    with connect() as client:
        found = client.jobs(limit=limit)
    if json:
        output.print_json(output.dump(found))
    else:
        output.print_jobs(found)


def show(job: JobId, json: Json = False) -> None:
    """Show one job: state, spec, result."""
    from tevatron.core.cli import output  # rich is heavy

    with connect() as client:
        found = client.job(job)
    if json:
        output.print_json(found.model_dump(mode="json"))
        return
    output.print_jobs([found])
    output.print_json({"spec": found.spec, "result": found.result})


def logs(
    job: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job is over.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a job's events. With -f the exit status says whether it succeeded."""
    from tevatron.core.cli.follow import all_succeeded, describe

    with connect() as client:
        for event in client.follow(job) if follow else client.events(job):
            line = (
                f"{event.time:%Y-%m-%d %H:%M:%S} [{event.attempt}] {event.type}: {describe(event)}"
            )
            typer.echo(event.model_dump_json() if json else line)
        if follow and not all_succeeded([client.job(job)]):
            raise typer.Exit(1)


def cancel(jobs: JobIds, json: Json = False) -> None:
    """Cancel jobs. One that cannot be cancelled is an error, the others are cancelled all the same."""
    with connect() as client:
        _ask(client.cancel, jobs, json=json)


def save(jobs: JobIds, json: Json = False) -> None:
    """Save a resumable state of trainings after the step that they are at. `submit export` publishes it."""
    with connect() as client:
        _ask(client.save, jobs, json=json)


def stop(jobs: JobIds, json: Json = False) -> None:
    """End trainings after the step that they are at. What is learnt is published, and the jobs succeed."""
    with connect() as client:
        _ask(client.stop, jobs, json=json)


def _ask(request: Callable[[str], JobResource], jobs: list[str], *, json: bool) -> None:
    """Ask for the same of each job; one that refuses is an error, the others are asked all the same."""
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.errors import TevatronError

    found, failed = [], False
    for job in jobs:
        try:
            found.append(request(job))
        except TevatronError as error:
            failed = True
            typer.echo(f"tevatron: {error}", err=True)
    if json:
        output.print_json(output.dump(found))
    elif found:
        output.print_jobs(found)
    if failed:
        raise typer.Exit(1)


def resume(job: JobId, json: Json = False) -> None:
    """Go on with a job that was cancelled or has failed, a training from its last saved state."""
    from tevatron.core.cli import output  # rich is heavy

    with connect() as client:
        found = client.resume(job)
    if json:
        output.print_json(found.model_dump(mode="json"))
    else:
        output.print_jobs([found])


def results(
    evaluations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BASELINE EVALUATION]",
            help="Compare these two alone, by id or name, query by query.",
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only of this job.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Only on this dataset, by name or id.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Which metrics, such as ndcg@10; all if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare evaluations. Systems against metrics, with the change from what each reranked."""
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.errors import ConfigError, NotFoundError, unknown_name

    if evaluations:
        if len(evaluations) != 2 or job or dataset:
            raise ConfigError(
                f"expected two evaluations and no --job or --dataset, got {len(evaluations)}: {' '.join(evaluations)}"
            )
        _compare_two(*evaluations, metrics=metric, json=json)
        return
    with connect() as client:
        found = client.evaluations(job_id=job)
        names = registered_names(client)
        datasets = {entry.id: entry.name for entry in client.datasets()}
    if dataset is not None:
        if dataset not in {*datasets, *datasets.values()}:
            raise NotFoundError(unknown_name("dataset", dataset, datasets.values()))
        found = [
            entry for entry in found if dataset in (entry.dataset_id, names.get(entry.dataset_id))
        ]
    known = {name for entry in found for name in entry.metrics}
    for name in (metric or []) if found else []:
        if name not in known:
            raise NotFoundError(unknown_name("metric", name, known))
    if json:
        output.print_json(output.dump(found))
    elif not found:
        typer.echo("no evaluations", err=True)
    else:
        output.print_evaluations(found, names=names, metrics=metric)


def _compare_two(baseline: str, evaluation: str, *, metrics: list[str] | None, json: bool) -> None:
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.errors import NotFoundError, unknown_name

    with connect() as client:
        found = client.comparison(evaluation, baseline=baseline)
        names = {} if json else registered_names(client)
    known = [entry.metric for entry in found.metrics]
    for name in metrics or []:
        if name not in known:
            raise NotFoundError(unknown_name("metric", name, known))
    if json:
        output.print_json(found.model_dump(mode="json"))
    else:
        output.print_comparison(found, names=names, metrics=metrics)


def registered_names(client: Client) -> dict[str, str]:
    """Return the names of models, datasets and checkpoints by their ids."""
    names = {entry.id: entry.name for entry in client.models()}
    names |= {entry.id: entry.name for entry in client.datasets()}
    return names | {entry.id: entry.name for entry in client.checkpoints() if entry.name}
