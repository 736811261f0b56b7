"""Where webhooks may go: https to the public network, and what the operator allows besides.

A user chooses the URL and we send the request from inside the network, so a name is looked up here, its addresses are
checked, and the request goes to the very address that was checked: a second look-up could give another one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from tevatron.api.allowed import DEFAULT_PORTS, is_allowed, parse_url
from tevatron.core.errors import ForbiddenError, InputError

TRANSLATED = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"), IPv6Network("2002::/16"))
"""IPv6 addresses with one of IPv4 inside, which a gateway may send on to a private one."""


def check_target(url: str, allow: Sequence[str]) -> None:
    """Refuse a URL to which nothing would be sent, as far as that can be seen without looking its name up."""
    parts = parse_url(url)
    if is_allowed(parts, allow):
        return
    if parts.scheme != "https":
        raise ForbiddenError(
            f"url: expected https, got {url!r}; the operator allows others by prefix (TEVATRON_WEBHOOK_ALLOW)"
        )
    assert parts.hostname is not None
    try:
        address = ip_address(parts.hostname)
    except ValueError:
        return
    _check_public(address, host=parts.hostname)


async def addresses_of(url: str, allow: Sequence[str]) -> list[str]:
    """Return the public addresses of the URL's host; none where the operator allows the URL, whatever its address is."""
    check_target(url, allow)
    parts = parse_url(url)
    if is_allowed(parts, allow):
        return []
    assert parts.hostname is not None
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise InputError(f"url: host '{parts.hostname}' cannot be looked up: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        _check_public(ip_address(address), host=parts.hostname)
    return addresses


def _check_public(address: IPv4Address | IPv6Address, *, host: str) -> None:
    is_translated = any(address in network for network in TRANSLATED)
    if not address.is_global or address.is_multicast or is_translated:
        raise ForbiddenError(
            f"url: '{host}' is at {address}, which is not a public address; "
            "the operator allows others by prefix (TEVATRON_WEBHOOK_ALLOW)"
        )
