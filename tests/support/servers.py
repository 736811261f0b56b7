"""The scorer's server as a process: its command line, its environment, and a port for it."""

import os
import socket
import sys


def server_command(model, port, flags=""):
    """Return the command that serves the folder on a CPU."""
    argv = [sys.executable, "-P", "-m", "tevatron.eval.serve.server", "--backend", "hf"]
    argv += ["--model", str(model), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    return [*argv, *flags.split()]


def server_environment(**changes):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TEVATRON_")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
