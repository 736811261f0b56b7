"""A plugin of vLLM (entry point `vllm.general_plugins`), which vLLM runs in each process that it starts."""

from __future__ import annotations

import multiprocessing
import os

from tevatron.core.process import die_with_parent


def end_with_server() -> None:
    """Have a process of vLLM's end with its server and not before.

    The kernel ends it with its parent: one that is left would keep the GPU's memory. And it leaves the server's group,
    which Ctrl-C at a terminal reaches as a whole: the server still has answers to give.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
        os.setpgid(0, 0)
