"""From flags and YAML files to job specs and registrations; every fault becomes one readable error."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tevatron.core.cli.matrix import expand, read_matrix
from tevatron.core.cli.study import Study, make_study
from tevatron.core.contracts.jobs import JobGroup, JobKind, JobSpec, Name
from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.resources import DatasetRequest, ModelRequest, ScorerRequest
from tevatron.core.contracts.train import TrainArguments, aliases
from tevatron.core.contracts.webhooks import WebhookRequest
from tevatron.core.errors import ConfigError, FormatError, unknown_name

Model = TypeVar("Model", bound=BaseModel)
_spec: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)
_name: TypeAdapter[str] = TypeAdapter(Name)


@dataclass(slots=True, kw_only=True)
class RunFile:
    """What `tevatron run FILE.yaml` does: register, then submit in one transaction, or run a study."""

    models: list[ModelRequest] = field(default_factory=list)
    datasets: list[DatasetRequest] = field(default_factory=list)
    jobs: JobGroup
    study: Study | None = None
    """Of a file with a matrix: what submits `jobs` one by one."""


def read_yaml(path: Path) -> dict[str, JsonValue]:
    """Return the mapping in a YAML (or JSON) file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        problem = getattr(error, "problem", None) or str(error)
        raise FormatError(f"not YAML: {problem}", path=path, line=line) from error
    if not isinstance(content, dict):
        raise FormatError(f"expected a mapping, got {type(content).__name__}", path=path)
    return content


def make_spec(content: Mapping[str, JsonValue], *, what: str) -> JobSpec:
    """Check one job spec."""
    try:
        return _spec.validate_python(dict(content), strict=False)
    except ValidationError as error:
        raise explain(error, what=what) from error


def read_run_file(path: Path) -> RunFile:
    """Read `{models?, datasets?, jobs}`, or a study's `{name, matrix, ...}`; paths are relative to its folder."""
    content = read_yaml(path)
    known = {"models", "datasets", "jobs", "matrix", *(["name"] if "matrix" in content else [])}
    for key in sorted(set(content) - known):
        raise FormatError(unknown_name("key", key, known), path=path)
    models = [
        _check(
            ModelRequest,
            {"name": name, **_with_path(entry, path.parent)},
            what=f"{path}: models.{name}",
        )
        for name, entry in _mapping(content, "models", path).items()
    ]
    datasets = [
        _check(
            DatasetRequest,
            {"name": name, **_with_path(entry, path.parent)},
            what=f"{path}: datasets.{name}",
        )
        for name, entry in _mapping(content, "datasets", path).items()
    ]
    if "matrix" not in content:
        jobs = _check(JobGroup, {"jobs": content.get("jobs")}, what=str(path))
        return RunFile(models=models, datasets=datasets, jobs=jobs)
    study = _study(content, path)
    return RunFile(
        models=models, datasets=datasets, jobs=JobGroup(jobs=dict(study.jobs)), study=study
    )


def _study(content: Mapping[str, JsonValue], path: Path) -> Study:
    try:
        name = _name.validate_python(content.get("name"), strict=True)
    except ValidationError as error:
        raise FormatError(
            f"a study needs a name of letters, digits, dots, underscores and hyphens, got {content.get('name')!r}",
            path=path,
            field="name",
        ) from error
    try:
        matrix = read_matrix(content["matrix"])
        expanded = expand(content.get("jobs"), matrix)
        group = _check(JobGroup, {"jobs": expanded.content}, what="the study")
        return make_study(name, matrix, jobs=group.jobs, cells_of=expanded.cells_of)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _mapping(content: Mapping[str, JsonValue], key: str, path: Path) -> dict[str, JsonValue]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise FormatError("expected a mapping of names", path=path, field=key)
    return found


def _with_path(entry: JsonValue, folder: Path) -> dict[str, JsonValue]:
    """Return the entry with an absolute path; a bare string is the path."""
    given: dict[str, JsonValue] = {"path": entry} if not isinstance(entry, dict) else dict(entry)
    if isinstance(given.get("path"), str):
        given["path"] = os.path.abspath(folder / str(given["path"]))  # noqa: PTH100  keeps links as they are
    return given


def _check(model: type[Model], content: object, *, what: str) -> Model:
    try:
        return model.model_validate(content, strict=False)
    except ValidationError as error:
        raise explain(error, what=what) from error


def model_request(
    name: str, *, path: Path | None, hub_id: str | None, revision: str | None
) -> ModelRequest:
    """Return the registration of a base model."""
    absolute = None if path is None else str(path.expanduser().absolute())
    content = {"name": name, "path": absolute, "hub_id": hub_id, "revision": revision}
    return _check(ModelRequest, content, what="model")


def dataset_request(
    name: str,
    *,
    kind: str,
    path: Path | None = None,
    hub_id: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    url: str | None = None,
) -> DatasetRequest:
    """Return the registration of a dataset."""
    if path is None and hub_id is None and url is None:
        raise ConfigError("a dataset is registered here by a path, --hub-id or --url, got none")
    absolute = None if path is None else str(path.expanduser().absolute())
    content = {
        "name": name,
        "kind": kind,
        "path": absolute,
        "hub_id": hub_id,
        "revision": revision,
        "file": file,
        "url": url,
    }
    return _check(DatasetRequest, content, what="dataset")


def upload_request(name: str, *, kind: str) -> DatasetRequest:
    """Return the registration of a dataset whose content is sent next."""
    return _check(DatasetRequest, {"name": name, "kind": kind}, what="dataset")


def scorer_request(content: Mapping[str, JsonValue]) -> ScorerRequest:
    """Return the request of a scorer with what is given."""
    given = {name: value for name, value in content.items() if value is not None}
    return _check(ScorerRequest, given, what="scorer")


def webhook_request(url: str, *, name: str | None) -> WebhookRequest:
    """Return the request of a webhook."""
    return _check(WebhookRequest, {"url": url, "name": name}, what="webhook")


def train_arguments(words: Sequence[str]) -> dict[str, JsonValue]:
    """Return training flags (`--learning-rate 1e-4`, `--packing=false`, `--use_lora`) by their fields' names."""
    found: dict[str, JsonValue] = {}
    own = MegatronArguments.model_fields
    fields, other = {**TrainArguments.model_fields, **own}, aliases()
    del fields["megatron"]
    at = 0
    while at < len(words):
        flag, has_value, value = words[at].partition("=")
        at += 1
        if not flag.startswith("--"):
            raise ConfigError(f"expected a flag that starts with --, got '{flag}'")
        spelled = flag[2:].replace("-", "_")
        name = other.get(spelled, spelled)
        if name not in fields:
            raise ConfigError(unknown_name("training flag", spelled, [*fields, *other]))
        if not has_value:
            # A flag alone means true.
            given = at < len(words) and not words[at].startswith("--")
            value = words[at] if given else "true"
            at += given
        is_list = "list[" in str(fields[name].annotation)
        found[name] = [part.strip() for part in value.split(",")] if is_list else value
    megatron = {name: found.pop(name) for name in list(found) if name in own}
    return {**found, "megatron": megatron} if megatron else found


def train_flags() -> list[tuple[str, str, str]]:
    """Return each training flag with its default and meaning."""
    return [
        (f"--{name}", str(field.default), field.description or "")
        for fields in (TrainArguments.model_fields, MegatronArguments.model_fields)
        for name, field in fields.items()
        if name != "megatron"
    ]


def merge_spec(
    kind: JobKind,
    file: Path | None,
    flags: Mapping[str, JsonValue],
    *,
    arguments: Mapping[str, JsonValue] | None = None,
) -> JobSpec:
    """Return the spec of FILE with the flags that were given on top of it."""
    content: dict[str, JsonValue] = read_yaml(file) if file is not None else {}
    if content.setdefault("kind", kind.value) != kind.value:
        raise ConfigError(f"{file}: is a spec of kind '{content['kind']}', expected '{kind.value}'")
    content.update({name: value for name, value in flags.items() if value is not None})
    if arguments:
        given = content.get("arguments") or {}
        content["arguments"] = merge_arguments(given, arguments)
    return make_spec(content, what=str(file) if file is not None else f"the {kind.value} job")


def merge_arguments(given: JsonValue, flags: Mapping[str, JsonValue]) -> JsonValue:
    """Return a file's training arguments with the flags on top of them, those of the megatron backend one by one."""
    if not isinstance(given, dict):
        return given
    merged = {**given, **flags}
    below, above = given.get("megatron"), flags.get("megatron")
    if isinstance(below, dict) and isinstance(above, dict):
        merged["megatron"] = {**below, **above}
    return merged


def explain(error: ValidationError, *, what: str) -> ConfigError:
    """Turn pydantic's faults into one error with a line for each."""
    kinds = {kind.value for kind in JobKind}
    lines = []
    for fault in error.errors():
        # The union's tag is no part of what the user wrote.
        place = ".".join(str(part) for part in fault["loc"] if str(part) not in kinds)
        lines.append(f"  {place or what}: {_fault(fault, is_whole=not place)}")
    return ConfigError("\n".join([f"{what} is not right:", *lines]))


def _fault(fault: ErrorDetails, *, is_whole: bool) -> str:
    """Say what is wrong in the words of whoever wrote the file, not in pydantic's."""
    loc = fault["loc"]
    match fault["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden" if len(loc) > 1 and loc[-2] == "arguments":
            known = [*TrainArguments.model_fields, *aliases()]
            return unknown_name("training flag", str(loc[-1]), known)
        case "extra_forbidden":
            return "there is no such field"
        case "union_tag_invalid":
            found = fault["ctx"]
            kinds = re.sub(r"<[^:]*: ('[^']*')>", r"\1", str(found["expected_tags"]))
            return f"{found['discriminator']} is one of {kinds}, got '{found['tag']}'"
        case _:
            message = fault["msg"].removeprefix("Value error, ")
            return message if is_whole else f"{message}, got {fault['input']!r:.100}"
