"""Kubernetes as a cluster: each attempt is a JobSet, or a TrainJob where the operator names a Kubeflow runtime.

Owns the calls to the API server and what its answers mean. Needs the rights to create, get, list and delete that kind in
one namespace, and to list pods, whose words (OOMKilled, Evicted) go into the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import BaseModel

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import ClusterUnreachableError, Launch
from tevatron.trainer.launchers.cluster import ClusterLauncher, Sight, Stage, insist
from tevatron.trainer.launchers.manifests import JOB_LABEL, jobset, train_job

if TYPE_CHECKING:
    from lightkube import Client
    from lightkube.models.core_v1 import ContainerStatus, PodStatus

logger = logging.getLogger(__name__)

_STAGES = {"Completed": Stage.SUCCEEDED, "Complete": Stage.SUCCEEDED, "Failed": Stage.FAILED}
"""Final conditions of a JobSet and of a TrainJob."""
_CONFLICT, _NOT_FOUND, _TOO_MANY = 409, 404, 429
_POLL_S = 0.5
_GONE_MARGIN_S = 60.0
"""After a pod's own time to end: what the garbage collector takes. Pods of a lost node stay longer, maybe for ever."""


class _Condition(BaseModel):
    type: str
    status: str
    message: str = ""


class _Status(BaseModel):
    conditions: list[_Condition] = []


class _Object(BaseModel):
    status: _Status = _Status()


class JobsetCluster:
    """One namespace of a Kubernetes cluster."""

    def __init__(self, settings: Settings, client: Client) -> None:
        # An optional library.
        from lightkube.generic_resource import create_namespaced_resource

        self._settings = settings
        self._client = client
        self.gpus_per_node = settings.jobset_gpus_per_node
        self._manifest = jobset if settings.jobset_runtime is None else train_job
        self._resource = (
            create_namespaced_resource("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
            if settings.jobset_runtime is None
            else create_namespaced_resource(
                "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs"
            )
        )

    def submit(self, name: str, launch: Launch, *, num_nodes: int) -> None:
        """Create it; one of this name is this attempt, submitted before."""
        manifest = self._manifest(self._settings, name, launch, num_nodes=num_nodes)
        with _answers(passing=_CONFLICT):
            self._client.create(self._resource(manifest))

    def look(self, name: str) -> Sight | None:
        """Return what its conditions say, and why its pods ended."""
        found = self._get(name)
        if found is None:
            return None
        for condition in found.status.conditions:
            stage = _STAGES.get(condition.type)
            if stage is None or condition.status != "True":
                continue
            words = [] if stage is Stage.SUCCEEDED else self._words_of_pods(name)
            return Sight(stage, "; ".join([condition.message, *words]))
        return Sight(Stage.ALIVE)

    def names(self, job_id: str) -> list[str]:
        """Return the names of this job's attempts."""
        with _answers():
            found = self._client.list(self._resource, labels={JOB_LABEL: job_id})
            return [str(entry.metadata.name) for entry in found]

    def end(self, name: str, *, grace_s: float) -> None:
        """Delete it, and wait until all its pods are gone: a foreground deletion keeps it there so long.

        The pods' own grace period holds; ranks of a cancelled run end at once on SIGTERM. The kubelet of a lost node
        does not answer: its pods cannot be waited for, and their ranks read in the notes that they are over.
        """
        from lightkube.types import CascadeType  # an optional library

        with _answers(passing=_NOT_FOUND):
            self._client.delete(self._resource, name, cascade=CascadeType.FOREGROUND)
        deadline = time.monotonic() + self._settings.stop_grace_s + _GONE_MARGIN_S
        while insist(lambda: self._get(name)) is not None:
            if time.monotonic() > deadline:
                logger.warning("%s is deleted, but pods of it do not go: their node is lost", name)
                return
            time.sleep(_POLL_S)

    def _get(self, name: str) -> _Object | None:
        with _answers(passing=_NOT_FOUND):
            return _Object.model_validate(dict(self._client.get(self._resource, name)))
        return None

    def _words_of_pods(self, name: str) -> Iterator[str]:
        from lightkube import ApiError  # an optional library
        from lightkube.resources.core_v1 import Pod

        try:
            pods = list(self._client.list(Pod, labels={"jobset.sigs.k8s.io/jobset-name": name}))
        except ApiError as error:
            yield f"its pods cannot be listed: {error.status.message}"
            return
        for pod in pods:
            word = None if pod.status is None else _word_of(pod.status)
            if word is not None and pod.metadata is not None:
                yield f"pod {pod.metadata.name}: {word}"


class JobsetLauncher(ClusterLauncher):
    """Submits to the cluster of the pod that this worker runs in, or to that of the kubeconfig."""

    def __init__(self, settings: Settings) -> None:
        try:
            # An optional library.
            from lightkube import Client
            from lightkube.core.exceptions import ConfigError as NoConfigError
        except ImportError as error:
            raise ConfigError(
                f"launcher 'jobset' needs the extra of that name: pip install 'tevatron-trainer[jobset]' ({error})"
            ) from error
        try:
            client = Client(namespace=settings.jobset_namespace)
        except NoConfigError as error:
            raise ConfigError(
                f"launcher 'jobset': neither in a pod nor a kubeconfig: {error}"
            ) from error
        super().__init__(JobsetCluster(settings, client), settings)


def _word_of(status: PodStatus) -> str | None:
    """Return why a pod failed, if it says: Evicted, OOMKilled, the exit code of its container."""
    if status.reason is not None:
        return f"{status.reason} {status.message or ''}".strip()
    ended = [_ended(container) for container in status.containerStatuses or ()]
    return "; ".join(word for word in ended if word is not None) or None


def _ended(status: ContainerStatus) -> str | None:
    ended = None if status.state is None else status.state.terminated
    if ended is None or ended.exitCode == 0:
        return None
    return f"{ended.reason or 'ended'}, exit code {ended.exitCode}"


@contextmanager
def _answers(*, passing: int | None = None) -> Iterator[None]:
    """Turn errors of the API server into ours; the status `passing` ends the block without one."""
    import httpx2  # lightkube's, and as optional

    try:
        yield
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        if code == passing:
            return
        message = f"the API server answers {code}: {error.response.text[:500]}"
        if code == _TOO_MANY or code >= 500:
            raise ClusterUnreachableError(message) from error
        raise ConfigError(message) from error
    except httpx2.TransportError as error:
        raise ClusterUnreachableError(f"the API server does not answer: {error}") from error
