"""k8s/ against the services: valid, and of one mind with settings and code on what runs, where, and how it ends."""

import re
from importlib.metadata import entry_points, version
from importlib.util import find_spec

import kubernetes_validate
import pytest
from tests.deploy.dockerfiles import read_stages
from tests.support.manifests import (
    COMPONENT,
    EXAMPLE,
    OVERLAYS,
    ROOT,
    Network,
    container_of,
    environment_of,
    of_kind,
    pod_templates,
    render,
    settings_of,
    way_to_k8s,
)

from tevatron.api import health, security
from tevatron.core.cli.stack.supervisor import EXIT_GRACE_S, FRONT, WORKERS
from tevatron.core.settings import PREFIX, Settings
from tevatron.scorer.host.main import places
from tevatron.scorer.server import guard
from tevatron.scorer.server.arguments import parse

SERVICES = {
    "tevatron-api",
    "tevatron-dispatcher",
    "tevatron-trainer",
    "tevatron-evaluator",
    "tevatron-scorer",
}
CUSTOM_GROUPS = {
    "keda.sh",
    "jobset.x-k8s.io",
    "kueue.x-k8s.io",
    "leaderworkerset.x-k8s.io",
    "monitoring.coreos.com",
}
"""Their schemas are not in kubernetes-validate."""
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest with everything that is used, and the newest that kubernetes-validate knows."""


# What is valid


@pytest.mark.parametrize("kubernetes", VERSIONS)
@pytest.mark.parametrize("name", [*OVERLAYS, EXAMPLE, "options"])
def test_every_manifest_is_valid(rendered, name, kubernetes):
    skipped = set()
    for manifest in rendered[name]:
        group = manifest["apiVersion"].rpartition("/")[0]
        if group in CUSTOM_GROUPS:
            skipped.add(group)
            continue
        kubernetes_validate.validate(manifest, kubernetes, strict=True)
    assert len(skipped) < len(rendered[name])


@pytest.mark.parametrize("name", [*OVERLAYS, EXAMPLE, "options"])
def test_everything_lies_in_one_namespace_and_no_secret_in_the_files(rendered, name):
    outside = {"Namespace"}
    manifests = rendered[name]
    namespaces = {m["metadata"].get("namespace") for m in manifests if m["kind"] not in outside}
    assert namespaces == {"tevatron"}
    assert of_kind(manifests, "Secret") == {}


def test_the_overlay_of_the_docs_renders_and_changes_what_it_says(tmp_path):
    page = (ROOT / "docs/deploy-kubernetes.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    where = way_to_k8s(tmp_path)
    text = text.replace("../../components", f"{where}/components")
    text = text.replace("[../gpu]", f"[{where}/overlays/gpu]")
    (tmp_path / "kustomization.yaml").write_text(text)
    manifests = render(tmp_path)
    claim = of_kind(manifests, "PersistentVolumeClaim")["tevatron-data"]
    assert claim["spec"]["storageClassName"] == "shared"
    stores = of_kind(manifests, "NetworkPolicy")["services-to-stores"]["spec"]["egress"][0]
    assert stores["to"] == [{"ipBlock": {"cidr": "10.20.0.0/24"}}]
    image = container_of(pod_templates(manifests)["tevatron-api"])["image"]
    assert image == f"registry.example/tevatron/api:{version('tevatron-core')}"
    assert of_kind(manifests, "LocalQueue")


# What runs


def test_the_processes_are_those_of_tevatron_up(overlay):
    scripts = {
        script.name: script.value.partition(":")[0]
        for script in entry_points(group="console_scripts")
    }
    commands = {
        (scripts[command[0]], *command[1:])
        for command in (
            container_of(template)["command"]
            for name, template in pod_templates(overlay).items()
            if name in SERVICES
        )
    }
    assert commands == {*map(tuple, FRONT.values()), *map(tuple, WORKERS.values())}
    migrate = container_of(pod_templates(overlay)["tevatron-migrate"])
    assert migrate["command"] == ["tevatron", "migrate"]
    assert scripts["tevatron"] == "tevatron.core.cli.main"


@pytest.mark.parametrize("name", [*OVERLAYS, EXAMPLE])
def test_images_are_a_service_of_ours_in_this_version(rendered, name):
    settings = [manifest["data"] for manifest in of_kind(rendered[name], "ConfigMap").values()]
    images = {
        container_of(template)["image"] for template in pod_templates(rendered[name]).values()
    }
    images |= {value for data in settings for key, value in data.items() if key.endswith("_IMAGE")}
    ours = images - {"postgres:17", "redis:8"}
    assert ours
    for image in ours:
        path, _, tag = image.partition(":")
        owner, _, service = path.partition("/")
        assert owner == "tevatron"
        assert tag == version("tevatron-core")
        name, _, target = service.partition("-")
        stages = read_stages(ROOT / "services" / name / "Dockerfile")
        # The plain image of a service with backends is that of `hf`.
        assert (target or ("hf" if "hf" in stages else name)) in stages


def test_variables_are_settings_and_can_be_read(overlay):
    for name, template in pod_templates(overlay).items():
        environment = environment_of(template, overlay)
        ours = {key.removeprefix(PREFIX).lower() for key in environment if key.startswith(PREFIX)}
        assert ours - set(Settings.model_fields) == set(), name
        Settings.from_environment(environment)


def test_each_process_is_given_what_it_requires_and_no_more(overlay):
    stores = {
        name: {
            key
            for key in ("TEVATRON_DATABASE_URL", "TEVATRON_BROKER_URL")
            if key in environment_of(template, overlay)
        }
        for name, template in pod_templates(overlay).items()
    }
    both = {"TEVATRON_DATABASE_URL", "TEVATRON_BROKER_URL"}
    for name in SERVICES - {"tevatron-scorer"}:
        assert stores[name] == both
    for name in ("tevatron-scorer", "tevatron-migrate"):
        assert stores[name] == {"TEVATRON_DATABASE_URL"}


def test_the_volume_is_where_the_settings_say(overlay):
    for name in ("tevatron-api", "tevatron-trainer", "tevatron-evaluator", "tevatron-scorer"):
        settings, template = settings_of(name, overlay), pod_templates(overlay)[name]
        mounts = {mount["name"]: mount for mount in container_of(template)["volumeMounts"]}
        assert mounts["data"]["mountPath"] == str(settings.data) == "/data"
        assert mounts["tmp"]["mountPath"] == "/tmp" == str(settings.home.parent)
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in template["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == ["tevatron-data"]
        assert all(root.is_relative_to(settings.data) for root in settings.model_roots)


# Ports and probes


def test_the_api_listens_where_its_service_looks(overlay):
    settings = settings_of("tevatron-api", overlay)
    container = container_of(pod_templates(overlay)["tevatron-api"])
    assert settings.api_host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": settings.api_port}]
    (port,) = of_kind(overlay, "Service")["api"]["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (settings.api_port, "http")


def test_probes_ask_routes_that_need_no_key(overlay):
    routes = {route.path for route in health.router.routes}
    container = container_of(pod_templates(overlay)["tevatron-api"])
    asked = {
        container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert asked == {"/healthz", "/readyz"}
    assert asked <= routes & security.OPEN_PATHS


def test_processes_without_a_port_ask_for_their_stores_before_they_count(overlay):
    for name in SERVICES - {"tevatron-api"}:
        container = container_of(pod_templates(overlay)[name])
        *python, module = container["startupProbe"]["exec"]["command"]
        assert python == ["python", "-P", "-m"]
        assert find_spec(module) is not None
        assert "livenessProbe" not in container


def test_a_broker_that_is_away_does_not_take_the_api_away(overlay):
    # /readyz answers 503 without the broker, and the API accepts jobs without it.
    container = container_of(pod_templates(overlay)["tevatron-api"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_scorers_are_reachable_on_the_ports_of_their_slots(overlay):
    settings = settings_of("tevatron-scorer", overlay)
    container = container_of(pod_templates(overlay)["tevatron-scorer"])
    bounds = [place.bound for place in places(settings)]
    assert [port["containerPort"] for port in container["ports"]] == [b.port for b in bounds]
    assert {bound.advertised_host for bound in bounds} == {"10.1.2.3"}
    network = Network(overlay)
    assert all(network.lets("evaluator", "scorer", bound.port) for bound in bounds)


def test_the_example_serves_where_its_probes_and_its_service_look(rendered):
    manifests = rendered[EXAMPLE]
    container = container_of(pod_templates(manifests)["tevatron-scorer-large/leader"])
    command = re.search(r"exec tevatron-scorer serve (.*)", container["args"][0])
    assert command is not None
    options, bind = parse(command[1].replace('"$MODEL"', "/data/imports/large").split())
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    size = of_kind(manifests, "LeaderWorkerSet")["tevatron-scorer-large"]["spec"]
    assert options.flags.tensor_parallel_size == gpus * size["leaderWorkerTemplate"]["size"] == 16
    assert [port["containerPort"] for port in container["ports"]] == [bind.port]
    asked = {
        container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert asked == guard.OPEN_PATHS


def test_labels_select_the_pods_that_they_mean(overlay):
    templates = pod_templates(overlay)
    for name, service in of_kind(overlay, "Service").items():
        selected = [
            who
            for who, template in templates.items()
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        assert len(selected) == 1, name
        assert templates[selected[0]]["metadata"]["labels"][COMPONENT] == name


# The end of a pod


@pytest.mark.parametrize("name", ["tevatron-trainer", "tevatron-evaluator"])
def test_a_worker_has_time_to_save_and_give_its_job_back(overlay, name):
    settings = settings_of(name, overlay)
    grace_s = pod_templates(overlay)[name]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= settings.stop_grace_s + settings.kill_grace_s + EXIT_GRACE_S


def test_a_submitter_has_time_to_end_a_cancelled_jobset(gpu):
    settings = settings_of("tevatron-trainer", gpu)
    grace_s = pod_templates(gpu)["tevatron-trainer"]["spec"]["terminationGracePeriodSeconds"]
    # launchers/jobset.py waits for its pods to go for the stop grace and a minute.
    assert grace_s >= settings.stop_grace_s + 60 + settings.kill_grace_s + EXIT_GRACE_S


def test_a_host_has_time_to_give_its_scorers_back(overlay):
    settings = settings_of("tevatron-scorer", overlay)
    grace_s = pod_templates(overlay)["tevatron-scorer"]["spec"]["terminationGracePeriodSeconds"]
    # host/main.py gives its children kill_grace_s and 5 s.
    assert grace_s >= settings.kill_grace_s + 5 + EXIT_GRACE_S


def test_the_api_stops_after_it_gets_no_more_requests(overlay):
    spec = pod_templates(overlay)["tevatron-api"]["spec"]
    sleep_s = container_of({"spec": spec})["lifecycle"]["preStop"]["sleep"]["seconds"]
    # api/main.py finishes requests for 5 s.
    assert spec["terminationGracePeriodSeconds"] >= sleep_s + 5 + EXIT_GRACE_S
