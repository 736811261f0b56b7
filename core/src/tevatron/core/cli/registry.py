"""Commands about what jobs use: models, datasets, API keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tevatron.core.cli.jobs import Json, connect, show_all
from tevatron.core.errors import ConfigError

if TYPE_CHECKING:
    from tevatron.core.cli.output import Columns
    from tevatron.core.contracts.resources import (
        CheckpointResource,
        DatasetResource,
        ModelResource,
    )
    from tevatron.core.store.keys import KeyRepository

models = typer.Typer(help="Base models.", no_args_is_help=True)
datasets = typer.Typer(help="Datasets.", no_args_is_help=True)
checkpoints = typer.Typer(help="Published checkpoints.", no_args_is_help=True)
MaxQueued = Annotated[
    int | None,
    typer.Option(min=1, help="Jobs that may be waiting or queued; no limit if left out."),
]
MaxRunning = Annotated[
    int | None, typer.Option(min=1, help="Jobs that may run at a time; no limit if left out.")
]

keys = typer.Typer(help="API keys (made in the database, by an operator).", no_args_is_help=True)


class Kind(StrEnum):
    """Kinds of dataset, as contracts.resources.DatasetKind has them."""

    TRAINING = "training"
    BEIR = "beir"
    RANKLIST = "ranklist"


class Role(StrEnum):
    """What a key may do, as store.models.KeyRole has it."""

    USER = "user"
    ADMIN = "admin"


@models.command("add")
def add_model(
    name: Annotated[str, typer.Argument(help="Name by which jobs refer to it.")],
    path: Annotated[
        Path | None, typer.Argument(help="Folder in Hugging Face's layout under an allowed root.")
    ] = None,
    hub_id: Annotated[str | None, typer.Option(help="Hub id in place of a folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit or tag of the hub id.")] = None,
    json: Json = False,
) -> None:
    """Register a base model."""
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.cli.specs import model_request

    request = model_request(name, path=path, hub_id=hub_id, revision=revision)
    with connect() as client:
        found = client.register_model(request)
    output.print_json(found.model_dump(mode="json")) if json else typer.echo(found.id)


@models.command("list")
def list_models(json: Json = False) -> None:
    """List the registered models."""
    columns: Columns[ModelResource] = {
        "model": lambda entry: entry.id,
        "name": lambda entry: entry.name,
        "source": lambda entry: entry.path or f"{entry.hub_id}@{entry.revision}",
    }
    show_all(lambda client: client.models(), columns, json=json)


@datasets.command("add")
def add_dataset(  # noqa: PLR0913  a command's options
    name: Annotated[str, typer.Argument(help="Name by which jobs refer to it.")],
    kind: Annotated[Kind, typer.Option(help="What it holds.")],
    path: Annotated[
        Path | None, typer.Argument(help="File, or BEIR folder, under an allowed root.")
    ] = None,
    hub_id: Annotated[str | None, typer.Option(help="Hub id in place of a path.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit or tag of the hub id.")] = None,
    file: Annotated[
        str | None, typer.Option(help="Which file of the hub id, unless it is a BEIR folder.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL in place of a path: s3://bucket/train.jsonl.")
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Send the path's content to an API on another machine.")
    ] = False,
    json: Json = False,
) -> None:
    """Register a dataset."""
    from tevatron.core.cli import output, specs  # rich and yaml are heavy
    from tevatron.core.cli.uploading import content_of
    from tevatron.core.contracts.resources import DatasetKind

    if upload:
        if path is None or hub_id is not None or url is not None:
            raise ConfigError(
                "--upload: expected a path, whose content is sent, and no --hub-id or --url"
            )
        wanted = specs.upload_request(name, kind=kind.value)
        with connect() as client, content_of(path, DatasetKind(kind.value)) as content:
            found = client.upload_dataset(wanted, content)
    else:
        request = specs.dataset_request(
            name, kind=kind.value, path=path, hub_id=hub_id, revision=revision, file=file, url=url
        )
        with connect() as client:
            found = client.register_dataset(request)
    output.print_json(found.model_dump(mode="json")) if json else typer.echo(found.id)


@datasets.command("list")
def list_datasets(json: Json = False) -> None:
    """List the registered datasets."""
    columns: Columns[DatasetResource] = {
        "dataset": lambda entry: entry.id,
        "name": lambda entry: entry.name,
        "kind": lambda entry: entry.kind,
        "state": lambda entry: entry.state,
        "source": lambda entry: _hub_source(entry) or entry.url or entry.path,
    }
    show_all(lambda client: client.datasets(), columns, json=json)


def _hub_source(entry: DatasetResource) -> str | None:
    if entry.hub_id is None:
        return None
    return "/".join(part for part in (f"{entry.hub_id}@{entry.revision}", entry.file) if part)


@checkpoints.command("list")
def list_checkpoints(json: Json = False) -> None:
    """List the published checkpoints, the newest first."""
    columns: Columns[CheckpointResource] = {
        "checkpoint": lambda entry: entry.id,
        "name": lambda entry: entry.name or "-",
        "base model": lambda entry: str(entry.contract.get("base_model", "-")),
        "under TEVATRON_DATA": lambda entry: entry.path,
    }
    show_all(lambda client: client.checkpoints(), columns, json=json)


@contextmanager
def _key_repository() -> Iterator[KeyRepository]:
    # SQLAlchemy is heavy.
    from tevatron.core.cli.database import database_url
    from tevatron.core.store.keys import KeyRepository
    from tevatron.core.store.session import check_schema, make_engine, make_sessions

    engine = make_engine(database_url(), pool_size=1)
    try:
        check_schema(engine)
        with make_sessions(engine).begin() as session:
            yield KeyRepository(session)
    finally:
        engine.dispose()


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Whose, or what for.")],
    role: Annotated[Role, typer.Option(help="What it may do.")] = Role.USER,
    max_queued: MaxQueued = None,
    max_running: MaxRunning = None,
    json: Json = False,
) -> None:
    """Make a key and show its secret, this once."""
    from tevatron.core.cli import output  # rich is heavy
    from tevatron.core.store.models import KeyRole

    with _key_repository() as repository:
        key, secret = repository.create(
            name, role=KeyRole(role.value), max_queued=max_queued, max_running=max_running
        )
        found = {"id": key.id, "name": key.name, "role": role.value, "secret": secret}
    if json:
        output.print_json(dict(found))
    else:
        typer.echo(f"{found['id']} of {name}; it is not shown again:", err=True)
        typer.echo(secret)


@keys.command("list")
def list_keys(json: Json = False) -> None:
    """List the keys, without their secrets."""
    from tevatron.core.cli import output  # rich is heavy

    with _key_repository() as repository:
        rows = [
            {
                "id": key.id,
                "name": key.name,
                "role": str(key.role),
                "begins": key.prefix,
                "created": f"{key.created_at:%Y-%m-%d %H:%M}",
                "revoked": f"{key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else "-",
                "max_queued": str(key.max_queued or "-"),
                "max_running": str(key.max_running or "-"),
            }
            for key in repository.list_all()
        ]
    if json:
        output.print_json([dict(row) for row in rows])
    else:
        columns = (
            "id",
            "name",
            "role",
            "begins",
            "created",
            "revoked",
            "max_queued",
            "max_running",
        )
        output.print_rows(rows, *columns)


@keys.command("limit")
def limit_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key.")],
    max_queued: MaxQueued = None,
    max_running: MaxRunning = None,
    json: Json = False,
) -> None:
    """Set how many jobs of a key may be queued and run. What is queued or runs already stays."""
    from tevatron.core.cli import output  # rich is heavy

    with _key_repository() as repository:
        repository.limit(key, max_queued=max_queued, max_running=max_running)
    found = {"id": key, "max_queued": max_queued, "max_running": max_running}
    if json:
        output.print_json(dict(found))
    else:
        typer.echo(
            f"{key}: max_queued {max_queued or 'none'}, max_running {max_running or 'none'}",
            err=True,
        )


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key.")],
    json: Json = False,
) -> None:
    """Make a key useless for ever."""
    from tevatron.core.cli import output  # rich is heavy

    with _key_repository() as repository:
        found = {"id": repository.revoke(key).id, "state": "revoked"}
    output.print_json(dict(found)) if json else typer.echo(f"{key} is revoked", err=True)
