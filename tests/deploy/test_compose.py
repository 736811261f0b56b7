"""What compose.yaml and compose.gpu.yaml promise, as far as it can be known without an engine."""

from __future__ import annotations

import re

import pytest
import yaml
from tests.deploy.dockerfiles import ROOT, inherited, read_stages

from tevatron.core.cli.stack.supervisor import FRONT, WORKERS
from tevatron.core.settings import PREFIX, Settings

FILES = ["compose.yaml", "compose.gpu.yaml"]
ONCE = {"migrate", "demo"}
THEIRS = {"postgres", "redis"}


class Loader(yaml.SafeLoader):
    """Knows compose's tag for a list that replaces another one."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def read(name: str) -> dict:
    return yaml.load((ROOT / name).read_text(), Loader)


SERVICES: dict[str, dict] = read("compose.yaml")["services"]
GPU: dict[str, dict] = read("compose.gpu.yaml")["services"]
RUNNING = sorted(set(SERVICES) - ONCE)
OURS = sorted(set(SERVICES) - THEIRS)


def image_stages(service: dict) -> tuple[dict, str]:
    """The stages of the Dockerfile that makes a service's image, and the target."""
    builds = {entry["image"]: entry["build"] for entry in SERVICES.values() if "build" in entry}
    build = builds[service["image"]]
    return read_stages(ROOT / build["dockerfile"]), build["target"]


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


def test_compose_runs_what_the_embedded_stack_runs():
    assert set(RUNNING) == {*FRONT, *WORKERS, *THEIRS}


@pytest.mark.parametrize("services", [SERVICES, GPU], ids=FILES)
def test_each_variable_of_ours_is_a_setting(services):
    names = {name for entry in services.values() for name in entry.get("environment", {})}
    ours = {name.removeprefix(PREFIX).lower() for name in names if name.startswith(PREFIX)}
    assert ours - set(Settings.model_fields) == set()
    assert ours


def test_the_example_of_env_names_what_the_files_ask_for_and_nothing_else():
    asked = {
        name for file in FILES for name in re.findall(r"\$\{([A-Z_]+)", (ROOT / file).read_text())
    }
    example = (ROOT / ".env.example").read_text()
    assert set(re.findall(r"^#?([A-Z_]+)=", example, flags=re.MULTILINE)) == asked


def test_the_example_of_env_shows_the_defaults():
    text = "".join((ROOT / file).read_text() for file in FILES)
    shown = re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    for name, value in shown:
        defaults = set(re.findall(rf"\$\{{{name}:-([^}}]*)\}}", text))
        assert value in defaults or name == "TEVATRON_MODELS", (name, value, defaults)


@pytest.mark.parametrize("name", RUNNING)
def test_a_service_is_watched_limited_and_comes_back(name: str):
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    if "healthcheck" not in service:
        stages, target = image_stages(service)
        assert inherited(stages, target, "HEALTHCHECK")[-1] != "NONE"


@pytest.mark.parametrize("name", OURS)
def test_our_services_have_no_rights(name: str):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert "privileged" not in service
    assert "user" not in service


def test_no_port_but_the_apis_is_published_and_that_on_loopback():
    assert [name for name, entry in {**SERVICES, **GPU}.items() if "ports" in entry] == ["api"]
    (port,) = SERVICES["api"]["ports"]
    assert port == f"${{TEVATRON_BIND:-127.0.0.1}}:${{TEVATRON_PORT:-8000}}:{Settings().api_port}"
    assert [entry.get("network_mode") for entry in SERVICES.values()] == [None] * len(SERVICES)


@pytest.mark.parametrize("file", FILES)
def test_no_secret_stands_in_a_file_and_none_has_a_default(file: str):
    text = (ROOT / file).read_text()
    assert not re.search(r"://[^/\s@]*:[^/\s@$]+@", text)
    for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD"):
        uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
        assert [use for use in uses if not use.startswith(":?")] == []
    for line in re.findall(
        r"^ +\w*(?:PASSWORD|AUTH|KEY|TOKEN|SECRET)\w*: *(.+)$", text, re.MULTILINE
    ):
        assert line.startswith("${")


@pytest.mark.parametrize("name", ["trainer", "evaluator"])
def test_a_worker_is_given_the_time_to_save_its_state(name: str):
    assert seconds(SERVICES[name]["stop_grace_period"]) > Settings().stop_grace_s + 10


def test_a_scorer_host_gets_no_broker_and_the_demo_no_database():
    assert "TEVATRON_BROKER_URL" not in SERVICES["scorer"]["environment"]
    assert set(SERVICES["demo"]["environment"]) == {"TEVATRON_API_KEY", "XDG_CACHE_HOME"}


def test_each_image_of_ours_is_built_from_a_target_that_there_is():
    for name in OURS:
        stages, target = image_stages(SERVICES[name])
        assert target in stages, name
    for name in ("trainer", "scorer-vllm"):
        service = "trainer" if name == "trainer" else "scorer"
        stages = read_stages(ROOT / "services" / service / "Dockerfile")
        assert GPU[name]["build"]["target"] in stages
        (argument,) = GPU[name]["build"]["args"]
        default = re.search(
            rf"^ARG {argument}=(.+)$",
            (ROOT / "services" / service / "Dockerfile").read_text(),
            re.MULTILINE,
        )[1]
        assert GPU[name]["build"]["args"][argument] == f"${{{argument}:-{default}}}"


def test_data_survives_in_volumes_and_models_cannot_be_changed():
    mounts = {name: SERVICES[name].get("volumes", []) for name in RUNNING}
    assert mounts["postgres"] == ["postgres:/var/lib/postgresql/data"]
    assert mounts["redis"] == ["redis:/data"]
    for name in ("api", "trainer", "scorer", "evaluator"):
        assert mounts[name] == ["data:/data", "${TEVATRON_MODELS:-models}:/models:ro"]
    assert set(read("compose.yaml")["volumes"]) == {"postgres", "redis", "data", "models"}


def test_the_broker_keeps_what_it_holds():
    command = " ".join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
