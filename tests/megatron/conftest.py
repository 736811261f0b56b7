"""Real Megatron on the CPU: this process imports it once, behind the labelled shim, and forks the ranks."""

import gc
import importlib.util
import os
import warnings
from pathlib import Path

import pytest

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
FOLDER = Path(__file__).parent

if HAS_MEGATRON:
    # Before torch is imported, and only here: elsewhere this folder is collected beside all other tests.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    from tests.megatron import cpu_shim

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu_shim.install()
        import tevatron.trainer.program.backends.megatron.export
        import tevatron.trainer.program.train  # noqa: F401
    # Else each collection in a rank would look at all that was imported, and so copy it.
    gc.freeze()
else:
    # Their imports would fail; one test says why they are not run.
    collect_ignore_glob = ["test_[!i]*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.megatron)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(600))
