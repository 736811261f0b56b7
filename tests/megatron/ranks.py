"""Runs a function on several ranks: forks of this process, so that Megatron's imports are paid for once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

_TIMEOUT_S = 240


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return what the function returned on each rank; the first rank's error is raised as it was printed there."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes = []
    processes = []
    for rank in range(num_ranks):
        here, there = context.Pipe(duplex=False)
        target = (there, rank, num_ranks, port, function, args, kwargs)
        process = context.Process(target=_rank, args=target)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        answers = [_answer(pipe, process) for pipe, process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [f"rank {rank}: {text}" for rank, (worked, text) in enumerate(answers) if not worked]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in answers]


def _answer(pipe: Any, process: Any) -> tuple[bool, Any]:
    if not pipe.poll(_TIMEOUT_S):
        return False, f"no answer within {_TIMEOUT_S} s"
    try:
        worked, value = pipe.recv()
    except EOFError:
        process.join()
        return False, f"ended with {process.exitcode}"
    return worked, value


def _rank(
    pipe: Any, rank: int, num_ranks: int, port: int, function: Any, args: Any, kwargs: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        answer = True, function(*args, **kwargs)
    except BaseException:  # noqa: BLE001  told to the parent
        answer = False, traceback.format_exc()
    pipe.send(answer)
    pipe.close()
    # Not through the parent's exit handlers: they belong to pytest.
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
