"""An API server over HTTP that keeps JobSets and behaves as the real one, with a kubelet that may really run their pods.

What it has of the real one: 201 and 409, 404, label selectors, conditions, a failed pod that fails its JobSet and ends the
others, deletion in the foreground (the object stays until its pods are gone), pods of a lost node that never go.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(
    r"/apis?/(?P<group>[^/]+(?:/[^/]+)?)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)(?:/(?P<name>.+))?"
)


@dataclass
class Pod:
    """One pod: a process, or what a test says of it."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    lost: bool = False
    """Its node does not answer any more."""
    told_at: float | None = None
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Running"})

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    @property
    def is_gone(self) -> bool:
        return not self.lost and (self.process is None or self.code is not None)

    def ask_to_end(self) -> None:
        if self.told_at is None and not self.lost:
            self.told_at = time.monotonic()
            if self.process is not None:
                self.process.send_signal(signal.SIGTERM)


@dataclass
class JobSet:
    manifest: dict[str, Any]
    pods: list[Pod]
    condition: dict[str, str] | None = None
    deleting: bool = False

    def end_as(self, kind: str, message: str) -> None:
        self.condition = {"type": kind, "status": "True", "message": message}


class FakeKubernetes:
    """The cluster.

    Args:
        folder: For the kubeconfig and the pods' own output.
        run_pods: Whether pods are processes.
        prefix: Command before a pod's, by its index: where the node is.
        address: What the name of the first pod resolves to.
        grace_s: In place of the pods' own, between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_pods: bool = False,
        prefix: Callable[[int], list[str]] = lambda _: [],
        address: str = "127.0.0.1",
        grace_s: float = 20.0,
    ) -> None:
        self.jobsets: dict[str, JobSet] = {}
        self.requests: list[str] = []
        self.num_failures = 0
        """Requests that are answered with 503 from now on."""
        self._folder = folder
        self._run_pods = run_pods
        self._prefix = prefix
        self._address = address
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._over = threading.Event()

    @contextmanager
    def serving(self) -> Iterator[Path]:
        """Serve for the length of the block; yields a kubeconfig."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.05,)),
            threading.Thread(target=self._control),
        ]
        for thread in threads:
            thread.start()
        port = server.server_address[1]
        try:
            yield self._kubeconfig(f"http://127.0.0.1:{port}")
        finally:
            self._over.set()
            server.shutdown()
            for thread in threads:
                thread.join()
            server.server_close()
            for pod in self._all_pods():
                if pod.process is not None:
                    pod.process.kill()
                    pod.process.wait()

    def lose_node(self, name: str, index: int) -> None:
        """Take a node away: everything on it dies, and its pod stays for ever."""
        with self._lock:
            pod = self.jobsets[name].pods[index]
            pod.lost = True
            if pod.process is not None:
                pod.process.kill()
            self.jobsets[name].end_as("Failed", "jobset failed due to one or more job failures")

    def _all_pods(self) -> list[Pod]:
        return [pod for jobset in self.jobsets.values() for pod in jobset.pods]

    def _kubeconfig(self, url: str) -> Path:
        path = self._folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "users": [{"name": "fake", "user": {}}],
        }
        path.write_text(json.dumps(content))
        return path

    # What controllers and kubelets do

    def _control(self) -> None:
        while not self._over.wait(0.1):
            with self._lock:
                for name, jobset in list(self.jobsets.items()):
                    self._control_one(name, jobset)

    def _control_one(self, name: str, jobset: JobSet) -> None:
        codes = [pod.code for pod in jobset.pods]
        if self._run_pods and jobset.condition is None:
            if any(code not in (None, 0) for code in codes):
                jobset.end_as("Failed", "jobset failed due to one or more job failures")
            elif all(code == 0 for code in codes):
                jobset.end_as("Completed", "jobset completed successfully")
        for pod in jobset.pods:
            self._control_pod(pod)
            if jobset.deleting or (jobset.condition or {}).get("type") == "Failed":
                pod.ask_to_end()
        if jobset.deleting and all(pod.is_gone for pod in jobset.pods):
            del self.jobsets[name]

    def _control_pod(self, pod: Pod) -> None:
        if pod.process is None:
            return
        if pod.code is not None and pod.status["phase"] == "Running":
            ended = {"exitCode": pod.code % 256, "reason": "Error" if pod.code else "Completed"}
            pod.status = {
                "phase": "Failed" if pod.code else "Succeeded",
                "containerStatuses": [_container(ended)],
            }
        elif pod.told_at is not None and time.monotonic() - pod.told_at > self._grace_s:
            pod.process.kill()

    def _start(self, manifest: dict[str, Any]) -> list[Pod]:
        name = manifest["metadata"]["name"]
        [replicated] = manifest["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        [container] = job["template"]["spec"]["containers"]
        pods = [Pod(f"{name}-node-0-{index}-abcde") for index in range(job["completions"])]
        if self._run_pods:
            for index, pod in enumerate(pods):
                pod.process = self._run(pod.name, index, container)
        return pods

    def _run(self, name: str, index: int, container: dict[str, Any]) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        for variable in container["env"]:
            value = variable.get("value", str(index))
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            is_name = variable["name"] == "PET_MASTER_ADDR"
            environment[variable["name"]] = self._address if is_name else value
        [python, *rest] = container["command"]
        assert python == "python"
        with (self._folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                [*self._prefix(index), os.environ.get("POD_PYTHON", sys.executable), *rest],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # What the API server answers

    def _answer(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests.append(f"{method} {target}")
        if self.num_failures > 0:
            self.num_failures -= 1
            return _status(503, "ServiceUnavailable", "etcdserver: leader changed")
        url = urlsplit(target)
        match = _PATH.fullmatch(url.path)
        assert match is not None, target
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        if match["plural"] == "pods":
            return self._list_pods(selector)
        assert (match["group"], match["plural"]) == ("jobset.x-k8s.io/v1alpha2", "jobsets")
        if method == "POST":
            return self._create(json.loads(body))
        if match["name"] is None:
            return self._list(selector)
        jobset = self.jobsets.get(match["name"])
        if jobset is None:
            return _status(404, "NotFound", f'jobsets "{match["name"]}" not found')
        if method == "DELETE":
            assert parse_qs(url.query)["propagationPolicy"] == ["Foreground"]
            jobset.deleting = True
        return 200, _seen(jobset)

    def _create(self, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = manifest["metadata"]["name"]
        if name in self.jobsets:
            return _status(409, "AlreadyExists", f'jobsets "{name}" already exists')
        self.jobsets[name] = JobSet(manifest, self._start(manifest))
        return 201, _seen(self.jobsets[name])

    def _list(self, selector: str) -> tuple[int, dict[str, Any]]:
        key, _, value = selector.partition("=")
        items = [
            _seen(jobset)
            for jobset in self.jobsets.values()
            if jobset.manifest["metadata"]["labels"].get(key) == value
        ]
        return 200, {"kind": "JobSetList", "metadata": {}, "items": items}

    def _list_pods(self, selector: str) -> tuple[int, dict[str, Any]]:
        key, _, name = selector.partition("=")
        assert key == "jobset.sigs.k8s.io/jobset-name"
        pods = self.jobsets[name].pods if name in self.jobsets else []
        items = [{"metadata": {"name": pod.name}, "status": pod.status} for pod in pods]
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                with cluster._lock:
                    code, content = cluster._answer(self.command, self.path, body)
                text = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815  as the library wants them

            def log_message(self, format: str, *args: object) -> None:
                return

        return Handler


def _seen(jobset: JobSet) -> dict[str, Any]:
    conditions = [] if jobset.condition is None else [jobset.condition]
    metadata = dict(jobset.manifest["metadata"])
    if jobset.deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {**jobset.manifest, "metadata": metadata, "status": {"conditions": conditions}}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }


def _container(ended: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "node",
        "image": "image",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
