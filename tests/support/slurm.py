"""A real Slurm of one or more nodes on this machine, out of the distribution's packages; root only."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import wait_for

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "scontrol"]
_CONF = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
KillWait=5
MinJobAge=300
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why Slurm cannot run here, None where it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if lacking:
        return f"Slurm's programs are not installed: {', '.join(lacking)}"
    return None if os.geteuid() == 0 else "a Slurm of one's own needs root"


class Slurm:
    """Its daemons. A node's name is its address, so that every name resolves."""

    def __init__(
        self,
        folder: Path,
        *,
        addresses: Sequence[str],
        controller: str,
        port: int,
        prefix: Callable[[int], list[str]],
    ) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.addresses = addresses
        self._prefix = prefix
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.slurmds: list[subprocess.Popen[bytes]] = []
        nodes = [
            f"NodeName={address} NodeAddr={address} Port={port + 1 + number} CPUs=1 State=UNKNOWN"
            for number, address in enumerate(addresses)
        ]
        self.conf.write_text(
            _CONF.format(controller=controller, folder=folder, port=port, nodes="\n".join(nodes))
        )

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        files = [
            f"--{kind}={self.folder}/munge.{kind.removesuffix('-file')}"
            for kind in ("pid-file", "log-file", "seed-file")
        ]
        files += [f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        self._run(["munged", "--foreground", "--force", *files])
        wait_for((self.folder / "munge.socket").exists, what="munged")
        self._run(["slurmctld", "-D"])
        for number, address in enumerate(self.addresses):
            self.slurmds.append(self._run([*self._prefix(number), "slurmd", "-D", "-N", address]))
        wait_for(self._is_idle, timeout_s=60, what="idle nodes")

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def environment(self) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.conf),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def call(self, *argv: str) -> str:
        environment = {**os.environ, **self.environment()}
        return subprocess.run(
            argv, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def _is_idle(self) -> bool:
        try:
            states = self.call("sinfo", "--noheader", "--Node", "--format=%T").split()
        except subprocess.CalledProcessError:
            return False
        return states == ["idle"] * len(self.addresses)

    def _run(self, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                argv,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._daemons.append(daemon)
        return daemon


@contextmanager
def running_slurm(
    folder: Path,
    *,
    addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2"),
    controller: str = "localhost(127.0.0.1)",
    port: int = 16817,
    prefix: Callable[[int], list[str]] = lambda _: [],
) -> Iterator[Slurm]:
    """Run Slurm for the length of the block."""
    slurm = Slurm(folder, addresses=addresses, controller=controller, port=port, prefix=prefix)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
