"""Nodes on one machine: network namespaces, each with a host name and address of its own; root only.

Their bridge lies in a namespace too: on this machine's own, a firewall such as Docker's would drop what it forwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUBNET = "10.203.77"
CONTROLLER = f"{SUBNET}.254"
"""Address of this machine in their network, once it is a part of it."""


def missing() -> str | None:
    """Return why there can be no namespaces here, None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if any(shutil.which(program) is None for program in ("ip", "nsenter", "unshare")):
        return "network namespaces need the programs ip, nsenter and unshare"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], check=False, capture_output=True)
    return None if tried.returncode == 0 else "this machine makes no network namespaces"


class Nodes:
    """Namespaces by number."""

    def __init__(self, count: int, folder: Path) -> None:
        self.names = [f"tevatron{os.getpid()}n{number}" for number in range(count)]
        self.addresses = [f"{SUBNET}.{number + 1}" for number in range(count)]
        self._hosts = folder / "hosts"
        self._switch = f"tevatron{os.getpid()}switch"
        self._uplink = f"tv{os.getpid()}"

    def prefix(self, number: int) -> list[str]:
        """Return what goes before a command that runs on a node."""
        # Not `ip netns exec`: it mounts /sys anew, without the cgroups that slurmd asks for.
        enter = f'mount --bind {self._hosts} /etc/hosts; hostname node{number}; exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{self.names[number]}"),
            *("unshare", "--uts", "--mount", "sh", "-c", enter, "sh"),
        ]

    def make(self) -> None:
        """Make them."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        hosts = "".join(
            f"{address} node{number}\n" for number, address in enumerate(self.addresses)
        )
        self._hosts.write_text(f"127.0.0.1 localhost\n{hosts}")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _ip("netns", "add", name)
            self._plug(f"port{number}", "-n", name, "link", "add", "eth0")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def reach(self) -> None:
        """Make this machine a part of their network."""
        self._plug("uplink", "link", "add", self._uplink)
        _ip("addr", "add", f"{CONTROLLER}/24", "dev", self._uplink)
        _ip("link", "set", self._uplink, "up")

    def remove(self) -> None:
        """Remove what is there of them."""
        for name in [*self.names, self._switch]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _plug(self, port: str, *end: str) -> None:
        """Make a cable from a port of the bridge to the end that is described."""
        _ip(*end, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")


@contextmanager
def nodes(count: int, folder: Path) -> Iterator[Nodes]:
    """Have nodes for the length of the block; `folder` keeps their /etc/hosts."""
    found = Nodes(count, folder)
    try:
        found.make()
        yield found
    finally:
        found.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
