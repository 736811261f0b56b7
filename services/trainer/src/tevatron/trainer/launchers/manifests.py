"""Manifests of an attempt on Kubernetes: a JobSet, or Kubeflow's TrainJob, which makes one.

Pure functions of the settings and a launch. Both start the same entry with torchrun's variables (PET_*). Nothing in the
cluster tries again: an attempt that failed is the platform's to repeat.
"""

from __future__ import annotations

import math

from pydantic import JsonValue

from tevatron.core.errors import ConfigError
from tevatron.core.process import ATTEMPT_VARIABLE
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import Launch
from tevatron.trainer.launchers.torchrun import SHUTDOWN_MARGIN_S

Manifest = dict[str, JsonValue]

JOB_LABEL = "tevatron-job"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
USER = 10001
PORT = 29500
_NODE = "node"
"""Name of the replicated job and of its container, which Kubeflow's runtimes use too."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MARGIN_S = 15
"""For the node's entry, on top of torchrun's time."""


def jobset(settings: Settings, name: str, launch: Launch, *, num_nodes: int) -> Manifest:
    """Return the JobSet: one job with a pod for each node."""
    variables: dict[str, JsonValue] = {
        "PET_NNODES": str(num_nodes),
        "PET_NPROC_PER_NODE": str(launch.num_processes // num_nodes),
        "PET_MASTER_ADDR": f"{name}-{_NODE}-0-0.{name}",
        "PET_MASTER_PORT": str(PORT),
    }
    rank: Manifest = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    container: Manifest = {
        "name": _NODE,
        "image": _image(settings, launch),
        "command": _command(settings, launch),
        "env": [*_env({**variables, **_variables(launch)}), rank],
        "resources": _resources(settings, launch, num_nodes=num_nodes),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "data", "mountPath": str(settings.data)},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": num_nodes,
        "parallelism": num_nodes,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": _labels(launch)},
            "spec": merged(_pod(settings, container), read_pod(settings)),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(settings, name, launch),
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def train_job(settings: Settings, name: str, launch: Launch, *, num_nodes: int) -> Manifest:
    """Return the TrainJob; its TrainingRuntime has the pod's template, with the volumes."""
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(settings, name, launch),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": settings.jobset_runtime,
            },
            "trainer": {
                "image": _image(settings, launch),
                "command": _command(settings, launch),
                "env": _env(_variables(launch)),
                "numNodes": num_nodes,
                "numProcPerNode": launch.num_processes // num_nodes,
                "resourcesPerNode": _resources(settings, launch, num_nodes=num_nodes),
            },
        },
    }


def read_pod(settings: Settings) -> Manifest:
    """Return the operator's part of the pod: node selectors, tolerations, variables of the network, ..."""
    if settings.jobset_pod is None:
        return {}
    import yaml  # comes with the extra

    try:
        content = yaml.safe_load(settings.jobset_pod.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"TEVATRON_JOBSET_POD={settings.jobset_pod}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"TEVATRON_JOBSET_POD={settings.jobset_pod}: expected a pod's spec, got {type(content).__name__}"
        )
    return content


def merged(base: Manifest, extra: Manifest) -> Manifest:
    """Return `base` with an operator's part of it: mappings are merged, lists joined, all else replaced.

    `containers` are no list to join: the one of `extra` is merged into ours.
    """
    result = dict(base)
    for key, value in extra.items():
        ours = result.get(key)
        if key == "containers" and isinstance(ours, list) and isinstance(value, list):
            [our_one], [their_one] = ours, value
            assert isinstance(our_one, dict)
            assert isinstance(their_one, dict)
            result[key] = [merged(our_one, their_one)]
        elif isinstance(ours, dict) and isinstance(value, dict):
            result[key] = merged(ours, value)
        elif isinstance(ours, list) and isinstance(value, list):
            result[key] = [*ours, *value]
        else:
            result[key] = value
    return result


def _pod(settings: Settings, container: Manifest) -> Manifest:
    grace_s = math.ceil(settings.stop_grace_s) + SHUTDOWN_MARGIN_S + _MARGIN_S
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": settings.jobset_claim}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _metadata(settings: Settings, name: str, launch: Launch) -> Manifest:
    queue: Manifest = {} if settings.jobset_queue is None else {QUEUE_LABEL: settings.jobset_queue}
    return {
        "name": name,
        "namespace": settings.jobset_namespace,
        "labels": {**_labels(launch), **queue},
    }


def _labels(launch: Launch) -> Manifest:
    return {
        "app.kubernetes.io/name": "tevatron",
        "app.kubernetes.io/component": "ranks",
        JOB_LABEL: launch.marker.rpartition(":")[0],
    }


def _image(settings: Settings, launch: Launch) -> str:
    if launch.environment == "hf":
        image, variable = settings.jobset_image, "TEVATRON_JOBSET_IMAGE"
    else:
        image, variable = settings.jobset_megatron_image, "TEVATRON_JOBSET_MEGATRON_IMAGE"
    if image is None:
        raise ConfigError(
            f"backend '{launch.environment}': expected {variable} to name the ranks' image, got nothing"
        )
    return image


def _command(settings: Settings, launch: Launch) -> list[JsonValue]:
    return [
        *("python", "-m", "tevatron.trainer.launchers.node"),
        *("--log", str(launch.log_path)),
        *("--unwatched-s", f"{settings.unwatched_s:g}"),
        *("--stop-grace-s", f"{settings.stop_grace_s:g}"),
        *(launch.module, str(launch.config_path)),
    ]


def _variables(launch: Launch) -> Manifest:
    # HOME: the root file system is read-only, and caches of compiled kernels lie below it.
    return {ATTEMPT_VARIABLE: launch.marker, "HF_HUB_OFFLINE": "1", "HOME": "/tmp"}


def _env(variables: Manifest) -> list[JsonValue]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(settings: Settings, launch: Launch, *, num_nodes: int) -> Manifest:
    if settings.jobset_gpus_per_node == 0:
        return {}
    return {"limits": {"nvidia.com/gpu": launch.num_processes // num_nodes}}
