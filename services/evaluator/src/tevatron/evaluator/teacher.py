"""A teacher that a command serves for itself: the scorer's server as a child, from its start to the command's end.

Takes the reference's `--teacher_*` flags and passes them on; the server decides what it can honour.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tevatron.core.errors import ConfigError, UnavailableError
from tevatron.core.process import guarded
from tevatron.core.settings import Settings
from tevatron.evaluator.backends import backends_of
from tevatron.evaluator.console import note
from tevatron.evaluator.pool import Backend

SERVER = "tevatron.eval.serve.server"
_PASSED_ON = {
    "teacher_model_name_or_path": "model",
    "teacher_lora_name_or_path": "lora_name_or_path",
    "teacher_tokenizer_name": "tokenizer",
    "prompt_template": "prompt_template",
    "rerank_max_len": "rerank_max_len",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_seqs": "max_num_seqs",
    "top_logprobs": "top_logprobs",
    "missing_fallback_logprob": "missing_fallback_logprob",
    "query_prefix": "query_prefix",
    "passage_prefix": "passage_prefix",
}
"""Flags of the command, and what the server calls them."""
_SWITCHES = ("enforce_eager", "trust_remote_code")
_STOP_S = 40.0


def add_teacher_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a teacher that the command serves; without effect next to `--backends`."""
    parser.add_argument(
        "--teacher_backend",
        choices=("hf", "vllm"),
        help="engine (default: vllm where it is installed)",
    )
    for name in _PASSED_ON:
        if name not in ("query_prefix", "passage_prefix"):
            parser.add_argument(f"--{name}", help=f"of the teacher's server: --{_PASSED_ON[name]}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help="of the teacher's server")


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[Backend]:
    """Serve the teacher for the length of the block."""
    if arguments.teacher_model_name_or_path is None:
        raise ConfigError(
            "expected --backends URL ... where the teacher is served, or --teacher_model_name_or_path to serve it here"
        )
    if importlib.util.find_spec("tevatron.scorer") is None:
        raise ConfigError(
            "the teacher cannot be served here, tevatron-scorer is not installed: give --backends URL ..."
        )
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(guarded(_command(arguments, port)), stdin=subprocess.DEVNULL)
    try:
        _wait_ready(process, url)
        yield backends_of([url])[0]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _command(arguments: argparse.Namespace, port: int) -> list[str]:
    engine = arguments.teacher_backend or ("vllm" if importlib.util.find_spec("vllm") else "hf")
    command = [sys.executable, "-m", SERVER, "--backend", engine]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, theirs in _PASSED_ON.items():
        if getattr(arguments, name) is not None:
            command += [f"--{theirs}", str(getattr(arguments, name))]
    return command + [f"--{name}" for name in _SWITCHES if getattr(arguments, name)]


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    seconds = Settings.from_environment().scorer_start_s
    note(f"starting the teacher at {url}")
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=url, trust_env=False, timeout=5.0) as client:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise UnavailableError(f"the teacher was not ready after {seconds:.0f} s")
            # It does not listen while it loads.
            with suppress(httpx.RequestError):
                if client.get("/ready").status_code == httpx.codes.OK:
                    return
            time.sleep(0.2)
    raise UnavailableError(
        f"the teacher's server ended with status {process.returncode}; what it said stands above"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
