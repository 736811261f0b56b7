"""Which URLs the operator allows, of outside scorers and of webhooks: those under one of his prefixes.

Compared part by part: as text, `http://scorer:80` would also allow `http://scorer:8000` and `http://scorer:80@other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import SplitResult, unquote, urlsplit

from tevatron.core.errors import ForbiddenError, InputError

DEFAULT_PORTS = {"http": 80, "https": 443}


def check_allowed(url: str, prefixes: Sequence[str]) -> None:
    """Refuse a scorer's URL that is malformed or under no allowed prefix."""
    if not is_allowed(parse_url(url), prefixes):
        raise ForbiddenError(
            f"url: {url!r} is under none of the prefixes that the operator allows (TEVATRON_SCORER_ALLOW)"
        )


def is_allowed(url: SplitResult, prefixes: Sequence[str]) -> bool:
    """Say whether a URL is under one of the prefixes."""
    return any(_is_under(url, parse_url(prefix)) for prefix in prefixes)


def parse_url(url: str) -> SplitResult:
    """Return the parts of a URL, or refuse it as malformed."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"url: {url!r} is not a URL: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0:
        raise InputError(f"url: expected http://host or https://host, got {url!r}")
    if not url.isascii() or not url.isprintable() or any(mark in url for mark in " \\@?#"):
        raise InputError(f"url: expected no user, query, fragment, blank or backslash, got {url!r}")
    if ".." in unquote(unquote(parts.path)).split("/"):
        raise InputError(f"url: expected a path without '..', got {url!r}")
    return parts


def _is_under(given: SplitResult, prefix: SplitResult) -> bool:
    if (given.scheme, given.hostname) != (prefix.scheme, prefix.hostname):
        return False
    if (given.port or DEFAULT_PORTS[given.scheme]) != (prefix.port or DEFAULT_PORTS[prefix.scheme]):
        return False
    folder = prefix.path.rstrip("/")
    return given.path == folder or given.path.startswith(f"{folder}/")
