"""The `tevatron` command: wires the groups of commands; each command's work lies in a module of its own.

Everything heavier than typer is imported inside the commands, so that `tevatron --help` is quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tevatron.core.cli import jobs, registry, scorers, submit, webhooks
from tevatron.core.cli.plan import plan
from tevatron.core.errors import TevatronError

app = typer.Typer(
    name="tevatron",
    help="Train, serve and evaluate language-model rerankers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
jobs.add_to(app)
app.add_typer(submit.app, name="submit")
app.command("run")(submit.run)
app.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    plan
)
app.add_typer(registry.models, name="models")
app.add_typer(registry.datasets, name="datasets")
app.add_typer(registry.checkpoints, name="checkpoints")
app.add_typer(scorers.app, name="scorers")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(registry.keys, name="keys")


@app.command()
def up(
    home: Annotated[
        Path | None, typer.Option(help="Folder of the stack; TEVATRON_HOME, else .tevatron.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Loopback port of the API; a free one if left out."),
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder from which models and datasets may be registered; the current one if left out."
        ),
    ] = None,
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Allow models and datasets by hub id and revision.")
    ] = False,
) -> None:
    """Run the whole stack in the foreground. Database, broker, API, dispatcher, workers, scorer host."""
    # Only this command starts processes; the others must not pay for the imports.
    from tevatron.core.cli.stack.command import run_stack

    roots = root if root is not None else [Path()]
    raise typer.Exit(run_stack(home=home, port=port, roots=roots, allow_hub=allow_hub))


@app.command()
def migrate() -> None:
    """Bring the database's schema up to this version. TEVATRON_DATABASE_URL, or the running stack's."""
    # SQLAlchemy and Alembic are heavy.
    from tevatron.core.cli.database import database_url
    from tevatron.core.store.session import migrate as migrate_schema

    migrate_schema(database_url())
    typer.echo("the schema is up to date", err=True)


def main() -> None:
    """Run the command; a user's error is one message and exit status 1."""
    try:
        app()
    except TevatronError as error:
        typer.echo(f"tevatron: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our output went away, as `head` does.
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
