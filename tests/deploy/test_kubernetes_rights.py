"""Who may do what on Kubernetes: pods, tokens, roles, the network."""

import pytest
import yaml
from tests.support.manifests import (
    EXAMPLE,
    OVERLAYS,
    Network,
    container_of,
    of_kind,
    pod_templates,
    settings_of,
)

from tevatron.core.settings import PREFIX

# Rights


@pytest.mark.parametrize("name", [*OVERLAYS, EXAMPLE])
def test_pods_keep_to_the_restricted_standard_and_a_read_only_root(rendered, name):
    for template in pod_templates(rendered[name]).values():
        pod, container = template["spec"]["securityContext"], container_of(template)
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_the_namespace_enforces_the_restricted_standard(overlay):
    labels = of_kind(overlay, "Namespace")["tevatron"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize(
    ("name", "holders"),
    [("overlays/dev", set()), ("overlays/gpu", {"tevatron-trainer"}), (EXAMPLE, set())],
)
def test_only_a_submitter_of_jobsets_has_a_token(rendered, name, holders):
    templates = pod_templates(rendered[name])
    assert {
        who
        for who, template in templates.items()
        if template["spec"]["automountServiceAccountToken"]
    } == holders
    accounts = of_kind(rendered[name], "ServiceAccount")
    assert {
        who for who, account in accounts.items() if account["automountServiceAccountToken"]
    } == holders


def test_ranks_run_where_the_gpus_are(gpu):
    settings = settings_of("tevatron-trainer", gpu)
    (mount,) = (
        mount
        for mount in container_of(pod_templates(gpu)["tevatron-trainer"])["volumeMounts"]
        if mount["name"] == "ranks"
    )
    (files,) = (
        entry["data"]
        for name, entry in of_kind(gpu, "ConfigMap").items()
        if name.startswith("tevatron-ranks")
    )
    (name,) = files
    assert f"{mount['mountPath']}/{name}" == str(settings.jobset_pod)
    pod = yaml.safe_load(files[name])
    scorer = pod_templates(gpu)["tevatron-scorer"]["spec"]
    assert pod == {key: scorer[key] for key in ("nodeSelector", "tolerations")}
    assert settings.jobset_claim in of_kind(gpu, "PersistentVolumeClaim")
    assert {settings.jobset_namespace} == set(of_kind(gpu, "Namespace"))
    assert settings.launcher == "jobset"


def test_ranks_of_a_jobset_have_no_token(gpu):
    # The pods of a JobSet that names no account get this one.
    assert of_kind(gpu, "ServiceAccount")["default"]["automountServiceAccountToken"] is False


def test_the_trainer_may_make_jobsets_here_and_nothing_else(gpu, dev):
    assert of_kind(gpu, "ClusterRole", "ClusterRoleBinding") == {}
    assert set(of_kind(gpu, "Role")) == {"tevatron-trainer"}
    rules = of_kind(gpu, "Role")["tevatron-trainer"]["rules"]
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    work = {"create", "get", "list", "delete"}
    assert granted == {
        ("jobset.x-k8s.io", "jobsets"): work,
        ("trainer.kubeflow.org", "trainjobs"): work,
        ("", "pods"): {"list"},
    }
    assert of_kind(dev, "Role", "RoleBinding") == {}


@pytest.mark.parametrize("name", [*OVERLAYS, EXAMPLE, "options"])
def test_no_variable_of_a_service_link_is_a_setting(rendered, name):
    # Kubernetes sets FOO_PORT=tcp://... for a service `foo` in pods that have links.
    manifests = rendered[name]
    links = {
        f"{service.upper().replace('-', '_')}_PORT" for service in of_kind(manifests, "Service")
    }
    assert {link for link in links if link.startswith(PREFIX)} == set()
    for template in pod_templates(manifests).values():
        assert template["spec"]["enableServiceLinks"] is False


# The network


@pytest.mark.parametrize(
    ("source", "target", "port", "may"),
    [
        ("migrate", "postgres", 5432, True),
        ("api", "postgres", 5432, True),
        ("dispatcher", "postgres", 5432, True),
        ("trainer", "postgres", 5432, True),
        ("evaluator", "postgres", 5432, True),
        ("scorer", "postgres", 5432, True),
        ("api", "redis", 6379, True),
        ("dispatcher", "redis", 6379, True),
        ("trainer", "redis", 6379, True),
        ("evaluator", "redis", 6379, True),
        ("scorer", "redis", 6379, False),
        ("migrate", "redis", 6379, False),
        ("evaluator", "scorer", 8100, True),
        ("trainer", "scorer", 8100, False),
        ("api", "scorer", 8100, False),
        ("evaluator", "api", 8000, False),
        ("scorer", "api", 8000, False),
        ("redis", "postgres", 5432, False),
        ("api", "postgres", 22, False),
    ],
)
def test_the_network_lets_through_what_is_needed_alone(dev, source, target, port, may):
    assert Network(dev).lets(source, target, port) is may


def test_everything_else_is_denied(overlay):
    deny = of_kind(overlay, "NetworkPolicy")["default-deny"]["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_ranks_speak_with_ranks_alone(gpu):
    policies = of_kind(gpu, "NetworkPolicy")
    ranks = policies["ranks"]["spec"]
    is_rank = {
        "matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]
    }
    assert ranks["podSelector"] == is_rank
    assert ranks["ingress"] == [{"from": [{"podSelector": is_rank}]}]
    assert ranks["egress"] == [{"to": [{"podSelector": is_rank}]}]
