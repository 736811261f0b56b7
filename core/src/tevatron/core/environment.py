"""What a child that runs a model may know of our environment: training ranks and scorers' servers alike.

A library's own knobs (NCCL, CUDA, caches, proxies) reach it; what opens something does not. A secret is told by its
name, or by a URL with a password in it. Knows no service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HUB_TOKEN = "HF_TOKEN"
_SECRET_NAME = re.compile(
    # Our own settings, the client of a database, clouds.
    r"^(TEVATRON_|PG|AWS_|AZURE_|GOOGLE_|GCP_)"
    r"|(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIAL|AUTH|COOKIE|DSN)S?(_|$)"
    r"|(^|_)(DATABASE|DB|BROKER|REDIS|VALKEY|POSTGRES)_UR[IL]$",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:[^/\s@]+@")


def child_environment(
    environment: Mapping[str, str], *, devices: str | None, allow_hub: bool = False
) -> dict[str, str]:
    """Return what a child may know of `environment`.

    Args:
        environment: Ours.
        devices: `cpu`, GPU indices such as `0,1`, or None for what is there.
        allow_hub: Whether it may fetch from the hub, with the hub's own token.
    """
    passed = {name: text for name, text in environment.items() if not _is_secret(name, text)}
    if not allow_hub:
        passed["HF_HUB_OFFLINE"] = "1"
    elif HUB_TOKEN in environment:
        passed[HUB_TOKEN] = environment[HUB_TOKEN]
    if devices is not None:
        passed["CUDA_VISIBLE_DEVICES"] = "" if devices == "cpu" else devices
    return passed


def _is_secret(name: str, text: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(text))
