"""A plugin of vLLM (entry point `vllm.general_plugins`), which vLLM runs in each process that it starts."""

from __future__ import annotations

import multiprocessing

from tevatron.core.process import die_with_parent


def die_with_server() -> None:
    """Have the kernel end a process of vLLM's with its parent; one that is left would keep the GPU's memory."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
