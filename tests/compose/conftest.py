"""compose.yaml on a real Docker engine: images from a fresh clone, one stack for all tests, a project of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers import free_port
from tests.support.tiny_model import tiny_folder

from tevatron.core.cli.client import Client

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
CPU_IMAGES = ["api", "trainer", "scorer", "evaluator", "demo"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.compose)
            # The first one builds the images.
            item.add_marker(pytest.mark.timeout(3600))


class Stack:
    """A clone, and the compose project that is made of it."""

    def __init__(self, clone: Path, models: Path) -> None:
        self.clone = clone
        self.version = f"test-{secrets.token_hex(4)}"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"tevatron-{self.version}",
            "TEVATRON_VERSION": self.version,
            "TEVATRON_PORT": str(port),
            "TEVATRON_MODELS": str(models),
            "POSTGRES_PASSWORD": secrets.token_hex(24),
            "REDIS_PASSWORD": secrets.token_hex(24),
        }
        self.api_key: str | None = None

    def compose(self, *words: str, check: bool = True) -> str:
        """Run `docker compose`; returns what it prints."""
        files = ["--file", "compose.yaml", "--file", str(FOLDER / "short_times.yaml")]
        # Without it docker compose would take the folder of the second file for none of ours.
        command = ["docker", "compose", "--project-directory", ".", *files, *words]
        ended = subprocess.run(
            command,
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and ended.returncode != 0:
            logs = "" if words[0] == "logs" else self.compose("logs", "--tail=40", check=False)
            pytest.fail(f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}\n{logs}")
        return ended.stdout

    def up(self) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", "300")

    def containers(self) -> dict[str, dict]:
        """Return what runs, by service."""
        lines = self.compose("ps", "--format", "json").splitlines()
        found = [json.loads(line) for line in lines]
        return {entry["Service"]: entry for entry in found}

    def client(self) -> Client:
        if self.api_key is None:
            made = self.compose("exec", "-T", "api", "tevatron", "keys", "create", "test", "--json")
            self.api_key = str(json.loads(made)["secret"])
            # As in .env, for the service `demo`.
            self.environment["TEVATRON_API_KEY"] = self.api_key
        return Client(self.url, api_key=self.api_key)

    def demo(self) -> str:
        """Run the demo from outside, through the published port; returns the table."""
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--url", self.url]
        self.client().close()
        ended = subprocess.run(
            [*command, "--model", "/models/tiny"],
            cwd=self.clone,
            env={**os.environ, "TEVATRON_API_KEY": str(self.api_key)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            pytest.fail(f"{ended.stdout}\n{ended.stderr}\n{self.compose('logs', '--tail=40')}")
        return ended.stdout


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack, up and healthy; removed with its volumes and images."""
    clone = tmp_path_factory.mktemp("clone") / "tevatron"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    if (ROOT / "wheels").is_dir():
        (clone / "wheels").mkdir()
        for wheel in (ROOT / "wheels").glob("*.whl"):
            os.link(wheel, clone / "wheels" / wheel.name)
    models = tmp_path_factory.mktemp("models")
    models.chmod(0o755)
    for file in tiny_folder(models / "tiny").iterdir():
        # safetensors writes for the owner alone; the services run as another user.
        file.chmod(0o644)
    stack = Stack(clone, models)
    try:
        stack.compose("--profile", "demo", "build")
        stack.up()
        yield stack
    finally:
        stack.compose("--profile", "demo", "down", "--volumes", "--timeout", "5", check=False)
        images = [f"tevatron/{name}:{stack.version}" for name in CPU_IMAGES]
        subprocess.run(["docker", "image", "rm", *images], capture_output=True, check=False)


@pytest.fixture(scope="session")
def demo_table(stack: Stack) -> str:
    """What the demo prints, run once; its data and model are registered afterwards."""
    return stack.demo()


def wait_until(what: str, check, *, timeout_s: float) -> None:
    """Wait for something that may not answer meanwhile."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.5)
    pytest.fail(f"{what} did not come within {timeout_s:g} s")
