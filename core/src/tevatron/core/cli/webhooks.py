"""Commands about webhooks: add, list, deliveries, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tevatron.core.cli.jobs import Json, connect, show_all

if TYPE_CHECKING:
    from tevatron.core.cli.output import Columns
    from tevatron.core.contracts.webhooks import DeliveryResource, WebhookResource

app = typer.Typer(help="URLs that are told how jobs end.", no_args_is_help=True)

WebhookRef = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id or name of the webhook.")]


@app.command("add")
def add_webhook(
    url: Annotated[str, typer.Argument(help="Where events are sent.")],
    name: Annotated[str | None, typer.Option(help="Name of the webhook.")] = None,
    json: Json = False,
) -> None:
    """Have a URL told how each of the key's jobs ends, and show the secret that signs, this once."""
    from tevatron.core.cli import output, specs  # rich and yaml are heavy

    request = specs.webhook_request(url, name=name)
    with connect() as client:
        found = client.add_webhook(request)
    if json:
        output.print_json(found.model_dump(mode="json"))
    else:
        typer.echo(f"{found.id}; its secret is not shown again:", err=True)
        typer.echo(found.secret)


@app.command("list")
def list_webhooks(json: Json = False) -> None:
    """List the webhooks, the newest first."""
    columns: Columns[WebhookResource] = {
        "webhook": lambda entry: entry.id,
        "name": lambda entry: entry.name or "-",
        "state": lambda entry: "disabled" if entry.disabled_at else "enabled",
        "URL": lambda entry: entry.url,
    }
    show_all(lambda client: client.webhooks(), columns, json=json)


@app.command("deliveries")
def list_deliveries(webhook: WebhookRef, json: Json = False) -> None:
    """List what was or is to be sent, the newest first."""
    columns: Columns[DeliveryResource] = {
        "delivery": lambda entry: entry.id,
        "job": lambda entry: entry.job_id,
        "event": lambda entry: str(entry.payload.get("type")),
        "state": lambda entry: entry.state,
        "attempts": lambda entry: str(entry.attempts),
        "last error": lambda entry: entry.last_error or "-",
    }
    show_all(lambda client: client.deliveries(webhook), columns, json=json)


@app.command("remove")
def remove_webhook(webhook: WebhookRef) -> None:
    """End a webhook; what is being sent may still arrive."""
    with connect() as client:
        client.remove_webhook(webhook)
    typer.echo(f"{webhook} is removed", err=True)
