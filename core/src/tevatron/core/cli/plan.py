"""`tevatron plan`: the memory that a training needs on each GPU, and the layouts that fit, from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pydantic import JsonValue

    from tevatron.core.contracts.plan import Plan, PlannedLayout

_GIB = 2**30


def plan(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Model folder, or its config.json.")],
    backend: Annotated[str | None, typer.Option(help="hf (the default) or megatron.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run.")] = 1,
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU in GiB.")] = 139.0,
    file: Annotated[Path | None, typer.Option(help="YAML of a train job; flags win.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a training needs on each GPU and which layouts fit; takes every training flag, starts nothing."""
    from pydantic import ValidationError

    from tevatron.core.cli import output, specs  # rich, yaml and pydantic are heavy
    from tevatron.core.contracts.plan import PlanRequest
    from tevatron.core.contracts.train import TrainArguments
    from tevatron.core.model_shape import ModelShape
    from tevatron.core.plan import make_plan

    job = specs.read_yaml(file) if file is not None else {}
    given: JsonValue = job.get("arguments") or {}
    default = PlanRequest.model_fields["backend"].default
    flags = specs.train_arguments(list(context.args))
    try:
        merged = specs.merge_arguments(given, flags)
        arguments = TrainArguments.model_validate(merged, strict=False)
    except ValidationError as error:
        raise specs.explain(error, what="the training arguments") from error
    made = make_plan(
        ModelShape.read(model),
        arguments,
        backend=backend or str(job.get("backend", default)),
        num_gpus=gpus,
        gpu_gib=gpu_gib,
    )
    if as_json:
        output.print_json(made.model_dump(mode="json"))
        return
    _print(made)


def _print(made: Plan) -> None:
    from tevatron.core.cli import output

    typer.echo(
        f"{made.backend}: {made.num_params / 1e9:.2f} billion parameters, {made.num_trained / 1e6:,.1f} million trained, "
        f"{made.tokens_per_pass} tokens a pass, {made.gpu_bytes / _GIB:.0f} GiB a GPU"
    )
    others = [one for one in made.fitting if one.layout != made.asked.layout]
    output.print_rows(
        [_row(made.asked, "asked"), *(_row(one, "") for one in others)],
        *_row(made.asked, ""),
    )
    if not made.fitting:
        typer.echo(
            "no layout fits these GPUs: try --gradient_checkpointing, --use_lora or a smaller --packing_max_tokens"
        )


def _row(one: PlannedLayout, note: str) -> dict[str, str]:
    memory = one.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "working": memory.working,
        "GiB a GPU": one.total_bytes,
    }
    sizes = {name: f"{size / _GIB:.1f}" for name, size in parts.items()}
    return {"layout": one.layout, **sizes, "fits": "yes" if one.fits else "no", "": note}
