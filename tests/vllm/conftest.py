"""Real vLLM on the CPU, its engines in this process: one of each model for all tests, since each takes seconds."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
FOLDER = Path(__file__).parent

if HAS_VLLM:
    # Before torch and vLLM are imported, and only here: elsewhere this folder is collected beside all other tests.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tevatron.scorer.engines.vllm  # noqa: F401
else:
    # Their imports would fail; one test says why they are not run.
    collect_ignore_glob = ["test_[!i]*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(600))
