"""What a child that runs a model may know of our environment: training ranks and scorers' servers alike.

A library's own knobs (NCCL, CUDA, caches, proxies) reach it; what opens something does not. A secret is told by its
name, or by a URL with a password in it. Knows no service.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

HUB_TOKEN = "HF_TOKEN"
TRACKER_SECRETS: Mapping[str, re.Pattern[str]] = {
    "wandb": re.compile(r"WANDB_API_KEY"),
    "mlflow": re.compile(r"MLFLOW_TRACKING_\w+"),
}
"""Names of the variables by which a tracker lets a run in."""
_SECRET_NAME = re.compile(
    # Our own settings, the client of a database, clouds.
    r"^(TEVATRON_|PG|AWS_|AZURE_|GOOGLE_|GCP_)"
    r"|(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIAL|AUTH|COOKIE|DSN)S?(_|$)"
    r"|(^|_)(DATABASE|DB|BROKER|REDIS|VALKEY|POSTGRES)_UR[IL]$",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_USER_IN_URL = re.compile(r"://[^/\s]+@")


def child_environment(
    environment: Mapping[str, str],
    *,
    devices: str | None,
    allow_hub: bool = False,
    trackers: Collection[str] = (),
) -> dict[str, str]:
    """Return what a child may know of `environment`.

    Args:
        environment: Ours.
        devices: `cpu`, GPU indices such as `0,1`, or None for what is there.
        allow_hub: Whether it may fetch from the hub, with the hub's own token.
        trackers: Names of TRACKER_SECRETS that it reports to, with their own secrets.
    """
    passed = {name: text for name, text in environment.items() if not _is_secret(name, text)}
    if not allow_hub:
        passed["HF_HUB_OFFLINE"] = "1"
    elif HUB_TOKEN in environment:
        passed[HUB_TOKEN] = environment[HUB_TOKEN]
    for tracker in trackers:
        is_its = TRACKER_SECRETS[tracker].fullmatch
        passed |= {name: text for name, text in environment.items() if is_its(name)}
    if devices is not None:
        passed["CUDA_VISIBLE_DEVICES"] = "" if devices == "cpu" else devices
    return passed


def without_passwords(text: str) -> str:
    """Return a text, such as a library's message, with what lets in left out of its URLs."""
    return _USER_IN_URL.sub("://***@", text)


def _is_secret(name: str, text: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(text))
