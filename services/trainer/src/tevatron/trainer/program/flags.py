"""The command line of training: the reference's flags, every field of TrainArguments, and what becomes of the rest.

Owns spelling only: aliases, the flat JSON form, what is dead, what another backend's is, what the Trainer takes as it
is. Defaults and meanings stand on the fields of `TrainArguments`.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.run import TrainRun
from tevatron.core.contracts.train import TrainArguments, aliases
from tevatron.core.errors import ConfigError, unknown_name
from tevatron.trainer.program.reference_flags import (
    DEAD,
    FIXED,
    MEGATRON_DEAD,
    REFUSED,
    TRANSLATED,
)

RUN_FLAGS = (
    "model_name_or_path",
    "dataset_path",
    "validation_path",
    "output_dir",
    "base_model",
    "resume",
)
Backend = typing.Literal["hf", "megatron"]
_NOT_HONOURED: dict[Backend, frozenset[str]] = {
    "hf": frozenset({"megatron"}),
    "megatron": frozenset({"megatron", "fsdp", "attn_implementation", "torch_compile"}),
}
"""Fields of TrainArguments that are no flags of a backend's drivers."""
_RUN_ALIASES = {"save_dir": "output_dir", "distill_dataset_path": "dataset_path"}
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


class Parsed(NamedTuple):
    """A run, and what its user should know about the flags."""

    run: TrainRun
    warnings: list[str]
    from_config: bool
    """Whether the run was read from its own config.json."""


def parse(
    argv: Sequence[str],
    *,
    backend: Backend = "hf",
    defaults: Mapping[str, JsonValue] | None = None,
) -> Parsed:
    """Read a command line: flags, or one JSON file with a TrainRun or with flat flags in it.

    `defaults` are fields that this command line sets where the user does not.
    """
    if len(argv) == 1 and argv[0].endswith(".json"):
        return _parse_json(Path(argv[0]), backend=backend, defaults=defaults or {})
    return _from_values(_split(argv), backend=backend, defaults=defaults or {})


def help_text(
    driver: str, *, backend: Backend = "hf", defaults: Mapping[str, JsonValue] | None = None
) -> str:
    """Return what --help of that driver says: its own name, the flags of its backend and its own defaults."""
    start = "torchrun -m" if backend == "megatron" else "python -m"
    own = defaults or {}
    lines = [
        f"usage: {start} {driver} --model_name_or_path DIR --dataset_path FILE --output_dir DIR [flags]",
        f"       {start} {driver} CONFIG.json",
        "",
        f"Train a reranker with the {backend} backend; the checkpoint lies in OUTPUT_DIR/export. "
        "A folder with saved states is gone on with.",
        "",
    ]
    for name, field in TrainRun.model_fields.items():
        if name in RUN_FLAGS and field.description:
            lines += [f"  --{name}", f"      {field.description}"]
    fields = {
        name: field
        for name, field in TrainArguments.model_fields.items()
        if name not in _NOT_HONOURED[backend]
    }
    if backend == "megatron":
        fields |= MegatronArguments.model_fields
    for name, field in fields.items():
        default = own.get(name, field.default)
        lines += [f"  --{name}  (default: {default})", f"      {field.description or ''}"]
    lines += ["", "The reference's other spellings are taken too."]
    if backend == "hf":
        lines[-1] = (
            "The reference's other spellings and flags of the Hugging Face Trainer are taken too."
        )
    return "\n".join(lines) + "\n"


def _parse_json(path: Path, *, backend: Backend, defaults: Mapping[str, JsonValue]) -> Parsed:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object")
    if isinstance(content.get("arguments"), dict):
        run = _validated(content, source=str(path))
        if run.backend != backend:
            raise ConfigError(
                f"{path}: a run of the {run.backend} backend, this is the {backend} backend"
            )
        return Parsed(run, [], from_config=True)
    return _from_values(content, backend=backend, defaults=defaults)


def _split(argv: Sequence[str]) -> dict[str, JsonValue]:
    """Return flags with their values as text: none means true, several make a list."""
    values: dict[str, list[str]] = {}
    name = None
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in values:
                raise ConfigError(f"--{name} is given twice")
            values[name] = [value] if "=" in word else []
        elif name is None:
            raise ConfigError(f"expected a flag or one .json file, got '{word}'")
        else:
            values[name].append(word)
    return {
        name: True if not words else words[0] if len(words) == 1 else list(words)
        for name, words in values.items()
    }


def _from_values(
    values: Mapping[str, JsonValue], *, backend: Backend, defaults: Mapping[str, JsonValue]
) -> Parsed:
    named: dict[str, JsonValue] = {}
    warnings: list[str] = []
    for given, value in values.items():
        for name, one in _translate(given, value, warnings, backend=backend).items():
            if name in named and named[name] != one:
                raise ConfigError(
                    f"--{given} says '{name}' {one!r}, another flag says {named[name]!r}"
                )
            named[name] = one
    if named.get("head") == "seq_cls":
        named.setdefault("prompt_template", "pair")
    named = {**defaults, **named}
    arguments: dict[str, JsonValue] = {
        name: _typed(name, value)
        for name, value in named.items()
        if name in TrainArguments.model_fields
    }
    own = {
        name: _typed(name, value)
        for name, value in named.items()
        if name in MegatronArguments.model_fields
    }
    if own:
        arguments["megatron"] = own
    run = {name: value for name, value in named.items() if name in RUN_FLAGS}
    rest = {
        name: _loose(value)
        for name, value in named.items()
        if name not in arguments and name not in run and name not in own
    }
    for name in ("model_name_or_path", "dataset_path", "output_dir"):
        if name not in run:
            raise ConfigError(f"--{name} is required")
    run.setdefault("base_model", Path(str(run["model_name_or_path"])).name or "base")
    return Parsed(
        _validated(
            {**run, "backend": backend, "arguments": arguments, "hf_arguments": rest},
            source="command line",
        ),
        warnings,
        from_config=False,
    )


def _translate(
    given: str, value: JsonValue, warnings: list[str], *, backend: Backend
) -> dict[str, JsonValue]:
    """Return the fields that a flag sets; none where it is dead, an error where it is not honoured."""
    name = {**aliases(), **_RUN_ALIASES}.get(given, given)
    if given == "report_to":
        names = _typed(given, value)
        if isinstance(names, list):
            # Hugging Face's names of what is so anyway.
            names = [name for name in names if name not in ("none", "tensorboard")]
        return {given: names}
    if name in RUN_FLAGS or (name in TrainArguments.model_fields and name != "megatron"):
        return {name: value}
    if given == "no_packing":
        return {"packing": not _boolean(given, value)}
    if backend == "megatron":
        return _translate_megatron(given, value, warnings)
    return _translate_hf(given, value, warnings)


def _translate_megatron(given: str, value: JsonValue, warnings: list[str]) -> dict[str, JsonValue]:
    if given in MegatronArguments.model_fields:
        return {given: value}
    if given in MEGATRON_DEAD:
        warnings.append(f"--{given} has no effect: {MEGATRON_DEAD[given]}")
        return {}
    if given in FIXED:
        if str(value).lower() in FIXED[given]:
            return {}
        raise ConfigError(
            f"--{given} {value} is not honoured by the megatron backend; it takes {' or '.join(FIXED[given])} only"
        )
    if given in TRANSLATED:
        return _translated(given, value)
    known = {*TrainArguments.model_fields, *MegatronArguments.model_fields, *aliases(), *RUN_FLAGS}
    raise ConfigError(unknown_name("flag of the megatron backend", given, known - {"megatron"}))


def _translate_hf(given: str, value: JsonValue, warnings: list[str]) -> dict[str, JsonValue]:
    if given in DEAD:
        warnings.append(f"--{given} has no effect: {DEAD[given]}")
        return {}
    if given in REFUSED:
        raise ConfigError(f"--{given} is not supported: {REFUSED[given]}")
    if given in FIXED:
        if str(value).lower() in FIXED[given]:
            return {}
        raise ConfigError(
            f"--{given} {value} is not honoured by the hf backend; it takes {' or '.join(FIXED[given])} only"
        )
    if given in MegatronArguments.model_fields:
        raise ConfigError(
            f"--{given} is a flag of the megatron backend; the hf backend does not honour it"
        )
    if given in TRANSLATED:
        return _translated(given, value)
    return _passed_on(given, value, warnings)


def _translated(given: str, value: JsonValue) -> dict[str, JsonValue]:
    meaning = TRANSLATED[given].get(str(value).lower())
    if meaning is None:
        there = ", ".join(TRANSLATED[given])
        raise ConfigError(f"--{given} must be one of {there}, got '{value}'")
    return dict(meaning)


def _passed_on(given: str, value: JsonValue, warnings: list[str]) -> dict[str, JsonValue]:
    # transformers takes a second to import, which a typo or --help need not wait for.
    from tevatron.trainer.program.backends.hf.arguments import HARMLESS, KNOWN, PASSED_ON

    if given in PASSED_ON:
        return {given: value}
    if given in HARMLESS:
        warnings.append(f"--{given} has no effect here")
        return {}
    if given in KNOWN:
        raise ConfigError(f"--{given} is not honoured by the hf backend")
    known = {*TrainArguments.model_fields, *aliases(), *RUN_FLAGS, *PASSED_ON}
    raise ConfigError(unknown_name("flag", given, known))


def _typed(name: str, value: JsonValue) -> JsonValue:
    """Give a flag's text the shape that its field wants; pydantic does the rest."""
    fields = {**TrainArguments.model_fields, **MegatronArguments.model_fields}
    wanted = fields[name].annotation
    kinds = set(typing.get_args(wanted)) if isinstance(wanted, types.UnionType) else {wanted}
    if bool in kinds:
        return _boolean(name, value)
    if list in {typing.get_origin(kind) for kind in kinds} and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _boolean(name: str, value: JsonValue) -> bool:
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"--{name} must be true or false, got '{value}'")


def _loose(value: JsonValue) -> JsonValue:
    """Read a flag of the Trainer's own as what its text says."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _validated(content: dict[str, typing.Any], *, source: str) -> TrainRun:
    try:
        return TrainRun.model_validate(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "arguments")
        if not place:
            # A rule over several flags, which says itself what it got.
            raise ConfigError(f"{source}: {first['msg']}") from error
        raise ConfigError(
            f"{source}: '{place}': {first['msg']}, got {first.get('input')!r}"
        ) from error
