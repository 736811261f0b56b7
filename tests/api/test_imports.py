from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "vllm", "megatron")


def modules_of(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    return set(done.stdout.split())


def test_the_api_imports_nothing_heavy():
    loaded = modules_of("import tevatron.api.main, tevatron.api.app")
    assert "tevatron.api.datasets.checks" in loaded
    assert loaded.isdisjoint({*HEAVY, "celery"})


def test_the_dispatcher_needs_no_web_framework():
    loaded = modules_of(
        "import tevatron.api.main, tevatron.api.dispatcher, tevatron.api.reaper, tevatron.api.loop"
    )
    assert "celery" in loaded
    assert loaded.isdisjoint({*HEAVY, "fastapi", "uvicorn"})
