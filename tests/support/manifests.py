"""Kubernetes files as the cluster gets them: rendered by Kustomize, and what they say in terms of our services."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tevatron.core.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s"
OVERLAYS = ("overlays/dev", "overlays/gpu")
EXAMPLE = "examples/scorer-over-nodes"
COMPONENT = "app.kubernetes.io/component"

# What kubectl prints is anything that YAML can hold.
Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    """Return what `kubectl kustomize` makes of the folder; skips where there is no kubectl."""
    own = Path(sysconfig.get_path("scripts")) / "kubectl"
    kubectl = str(own) if own.exists() else shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    answer = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return [manifest for manifest in yaml.safe_load_all(answer.stdout) if manifest]


def way_to_k8s(folder: Path) -> Path:
    """Return the path of k8s/ as a kustomization in `folder` must write it: from there."""
    return Path(os.path.relpath(FOLDER, folder.resolve()))


def render_with(overlay: str, components: Sequence[str], *, folder: Path) -> list[Manifest]:
    """Return an overlay with components that it does not have, as an operator's own overlay would."""
    where = way_to_k8s(folder)
    lines = {
        "resources": [str(where / overlay)],
        "components": [str(where / "components" / name) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    return render(folder)


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] in kinds}


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the pod templates of everything that starts pods, by its name."""
    found = of_kind(manifests, "Deployment", "StatefulSet", "Job")
    templates = {name: manifest["spec"]["template"] for name, manifest in found.items()}
    for name, manifest in of_kind(manifests, "LeaderWorkerSet").items():
        group = manifest["spec"]["leaderWorkerTemplate"]
        templates |= {f"{name}/{part}": group[f"{part}Template"] for part in ("leader", "worker")}
    return templates


def container_of(template: Manifest) -> Manifest:
    (container,) = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def environment_of(template: Manifest, manifests: Sequence[Manifest]) -> dict[str, str]:
    """Return the container's environment; a secret's value is a stand-in that a setting of its name may have."""
    container, values = container_of(template), dict[str, str]()
    maps = of_kind(manifests, "ConfigMap")
    for source in container.get("envFrom", []):
        values |= maps[source["configMapRef"]["name"]]["data"]
    for entry in container.get("env", []):
        if "value" in entry:
            values[entry["name"]] = entry["value"].replace("$(POD_IP)", "10.1.2.3")
        elif "secretKeyRef" in entry["valueFrom"]:
            values[entry["name"]] = f"secret://{entry['valueFrom']['secretKeyRef']['key']}"
        else:
            values[entry["name"]] = "10.1.2.3"
    return values


def settings_of(name: str, manifests: Sequence[Manifest]) -> Settings:
    """Return the settings that the process of this name reads."""
    return Settings.from_environment(environment_of(pod_templates(manifests)[name], manifests))


class Network:
    """What the network policies let through, from one component of ours to another."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._policies = [
            manifest["spec"] for manifest in of_kind(manifests, "NetworkPolicy").values()
        ]

    def lets(self, source: str, target: str, port: int) -> bool:
        """Say whether a pod of `source` may connect to a pod of `target`."""
        out = any(
            _names(rule["to"], target) and _opens(rule, port)
            for rule in self._rules(source, "egress")
        )
        into = any(
            _names(rule["from"], source) and _opens(rule, port)
            for rule in self._rules(target, "ingress")
        )
        return out and into

    def _rules(self, component: str, direction: str) -> Iterator[Manifest]:
        labels = {COMPONENT: component}
        for policy in self._policies:
            if _selects(policy["podSelector"], labels):
                yield from policy.get(direction, [])


def _names(peers: Sequence[Manifest], component: str) -> bool:
    return any(
        "podSelector" in peer
        and "namespaceSelector" not in peer
        and _selects(peer["podSelector"], {COMPONENT: component})
        for peer in peers
    )


def _opens(rule: Manifest, port: int) -> bool:
    return "ports" not in rule or any(
        entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"]
    )


def _selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions", []):
        has = labels.get(expression["key"])
        if expression["operator"] == "Exists":
            fits = has is not None
        else:
            assert expression["operator"] == "In"
            fits = has in expression["values"]
        if not fits:
            return False
    return True
