"""How large the images for the CPU are, and how long the stack of compose.yaml takes to be healthy.

    TEVATRON_VERSION=TAG python benchmarks/images.py       needs a Docker engine, and the images of that tag

Starts a project of its own twice, with empty volumes and again on what they then hold, and removes it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from pathlib import Path

from record import row, write_rows

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("api", "evaluator", "scorer", "trainer", "demo")
BASE = "python:3.11-slim"
MB = 1e6


def main() -> None:
    """Measure and write benchmarks/results/images.json."""
    tag = os.environ.get("TEVATRON_VERSION", "latest")
    base = size(BASE)
    digests = run("docker", "image", "inspect", "--format", "{{len .RepoDigests}}", BASE)
    origin = "published" if int(digests) else "a stand-in that was built here"
    rows = [
        row(
            name=BASE,
            layout="base",
            method="reference",
            value=base / MB,
            unit="MB",
            note=origin,
        )
    ]
    for name in IMAGES:
        total = size(f"tevatron/{name}:{tag}")
        ours = total - base
        rows.append(row(name=name, layout="with base", method="ours", value=total / MB, unit="MB"))
        rows.append(row(name=name, layout="above base", method="ours", value=ours / MB, unit="MB"))
    rows += start_times()
    for entry in rows:
        print(f"{entry['name']:<32} {entry['layout']:<14} {entry['value']:.1f} {entry['unit']}")
    print(write_rows("images", rows))


def size(image: str) -> int:
    """Return the bytes of an image's layers, unpacked."""
    return int(run("docker", "image", "inspect", "--format", "{{.Size}}", image))


def start_times() -> list[dict[str, object]]:
    """Return how long `up --wait` takes with empty volumes, and after `down`."""
    environment = {
        **os.environ,
        "COMPOSE_PROJECT_NAME": f"tevatron-bench-{secrets.token_hex(4)}",
        "TEVATRON_PORT": "0",
        "POSTGRES_PASSWORD": secrets.token_hex(24),
        "REDIS_PASSWORD": secrets.token_hex(24),
    }
    rows = []
    try:
        for layout in ("empty volumes", "volumes there"):
            started = time.monotonic()
            run("docker", "compose", "up", "--detach", "--wait", environment=environment)
            seconds = time.monotonic() - started
            name = "docker compose up --wait"
            rows.append(row(name=name, layout=layout, method="ours", value=seconds, unit="s"))
            rows += services(layout, environment)
            run("docker", "compose", "down", environment=environment)
    finally:
        run("docker", "compose", "down", "--volumes", environment=environment)
    return rows


def services(layout: str, environment: dict[str, str]) -> list[dict[str, object]]:
    """Return for each service of ours the time from its start to the end of its first good probe."""
    rows = []
    for line in run(
        "docker", "compose", "ps", "--format", "json", environment=environment
    ).splitlines():
        entry = json.loads(line)
        if not entry["Image"].startswith("tevatron/"):
            continue
        state = json.loads(run("docker", "inspect", "--format", "{{json .State}}", entry["ID"]))
        good = next(probe for probe in state["Health"]["Log"] if probe["ExitCode"] == 0)
        seconds = instant(good["End"]) - instant(state["StartedAt"])
        rows.append(
            row(
                name=f"{entry['Service']}: to the first good probe",
                layout=layout,
                method="ours",
                value=seconds,
                unit="s",
            )
        )
    return rows


def instant(text: str) -> float:
    """Return the seconds of a time with nanoseconds, as the engine writes it."""
    return float(run("date", "--date", text, "+%s.%N"))


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command in the repository and return what it prints."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
