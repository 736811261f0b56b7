"""Commands about scorers that stand: start, list, stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tevatron.core.cli.jobs import Json, connect, show_all
from tevatron.core.errors import UnavailableError

if TYPE_CHECKING:
    from tevatron.core.cli.client import Client
    from tevatron.core.cli.output import Columns
    from tevatron.core.contracts.resources import ScorerResource

app = typer.Typer(help="Scorers that stand, for several jobs.", no_args_is_help=True)

ScorerRef = Annotated[
    str, typer.Argument(metavar="SCORER", help="Id or name of the scorer; of a name, the newest.")
]
_LOOK_S = 1.0


@app.command("start")
def start_scorer(  # noqa: PLR0913  a command's options
    checkpoint: Annotated[
        str | None, typer.Argument(help="Checkpoint that it serves, by name or id.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Registered model in place of a checkpoint.")
    ] = None,
    prompt_template: Annotated[str | None, typer.Option(help="Template of the model.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest prompt of the model.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the scorer.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What scores: hf (the default) or vllm.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Arithmetic; the checkpoint's own if left out.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="Servers that it has; 1 if left out.")
    ] = None,
    ttl_s: Annotated[
        float | None,
        typer.Option(help="Seconds it stays without a job; the host's setting if left out."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until it is ready, or has failed.")
    ] = True,
    json: Json = False,
) -> None:
    """Start a scorer that stands for jobs (`submit eval --scorer`), and write its id."""
    from tevatron.core.cli import output, specs  # rich and yaml are heavy

    request = specs.scorer_request(
        {
            "name": name,
            "checkpoint": checkpoint,
            "model": model,
            "prompt_template": prompt_template,
            "max_length": max_length,
            "engine": engine,
            "dtype": dtype,
            "replicas": replicas,
            "ttl_s": ttl_s,
        }
    )
    with connect() as client:
        found = client.request_scorer(request)
        if wait:
            found = _wait_ready(client, found)
    if json:
        output.print_json(found.model_dump(mode="json"))
    else:
        typer.echo(found.id)


@app.command("list")
def list_scorers(json: Json = False) -> None:
    """List the scorers, the newest first."""
    columns: Columns[ScorerResource] = {
        "scorer": lambda entry: entry.id,
        "name": lambda entry: entry.name or "-",
        "state": lambda entry: entry.state,
        "ready": lambda entry: f"{entry.ready_replicas}/{entry.replicas}",
        "serves": lambda entry: entry.checkpoint_id or entry.model_id or "-",
        "engine": lambda entry: entry.engine or "-",
        "address": lambda entry: entry.url or "-",
    }
    show_all(lambda client: client.scorers(), columns, json=json)


@app.command("stop")
def stop_scorer(scorer: ScorerRef, json: Json = False) -> None:
    """Let a scorer go; a job that needs it fails."""
    from tevatron.core.cli import output  # rich is heavy

    with connect() as client:
        found = client.release_scorer(scorer)
    if json:
        output.print_json(found.model_dump(mode="json"))
    else:
        typer.echo(f"{found.id} is {found.state}", err=True)


def _wait_ready(client: Client, scorer: ScorerResource) -> ScorerResource:
    """Return the scorer once it is ready; what it waits for goes to standard error as it changes."""
    from tevatron.core.contracts.resources import ScorerState  # pydantic is heavy

    said = None
    while scorer.state is not ScorerState.READY:
        if scorer.state in (ScorerState.STOPPING, ScorerState.STOPPED, ScorerState.FAILED):
            why = scorer.error or "somebody let it go"
            raise UnavailableError(f"scorer {scorer.id} is {scorer.state}: {why}")
        if scorer.state != said:
            said = scorer.state
            typer.echo(f"{scorer.id} is {said}", err=True)
        time.sleep(_LOOK_S)
        scorer = client.scorer(scorer.id)
    return scorer
