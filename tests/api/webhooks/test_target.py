"""Where webhooks may go: public addresses by https, and the very address that was checked."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess

import httpx
import pytest
from tests.support.receivers import receiving

from tevatron.api.webhooks.sender import post
from tevatron.api.webhooks.target import addresses_of, check_target
from tevatron.core.errors import ForbiddenError, InputError
from tevatron.core.store.deliveries import Claimed


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example/a",
        "https://93.184.216.34:8443/",
        "https://[2606:4700::1111]/",
        "http://inside:8080/hooks/a",
    ],
)
def test_these_are_taken(url):
    check_target(url, ["http://inside:8080/hooks"])


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/",
        "http://inside:8080/other",
        "https://127.0.0.1/",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://0.0.0.0/",
        "https://[::1]/",
        "https://[fd00::1]/",
        "https://[fe80::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/",
    ],
)
def test_these_are_refused(url):
    with pytest.raises(ForbiddenError, match="TEVATRON_WEBHOOK_ALLOW"):
        check_target(url, ["http://inside:8080/hooks"])


@pytest.mark.parametrize("url", ["ftp://a.example/", "https://user@a.example/", "a.example"])
def test_these_are_no_urls(url):
    with pytest.raises(InputError):
        check_target(url, [])


@pytest.mark.parametrize("host", ["localhost", "127.1", "0177.0.0.1", "2130706433"])
def test_a_name_of_this_machine_is_refused_however_it_is_written(host):
    with pytest.raises(ForbiddenError, match="not a public address"):
        asyncio.run(addresses_of(f"https://{host}/", []))


def test_a_name_with_one_private_address_among_others_is_refused(monkeypatch):
    found = {"public.example": ["93.184.216.34", "2606:4700::1111"], "mixed.example": []}
    found["mixed.example"] = [*found["public.example"], "10.0.0.7"]

    def look_up(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *a, **k: look_up(host, port))
    assert asyncio.run(addresses_of("https://public.example/", [])) == found["public.example"]
    with pytest.raises(ForbiddenError, match=r"'mixed.example' is at 10\.0\.0\.7"):
        asyncio.run(addresses_of("https://mixed.example/", []))


def test_a_name_that_cannot_be_looked_up_is_said():
    for host in ("nothing.invalid", f"{'a' * 64}.example"):
        with pytest.raises(InputError, match="cannot be looked up"):
            asyncio.run(addresses_of(f"https://{host}/", []))


def test_the_checked_address_is_the_one_connected_to(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=hooks.example "
        f"-addext subjectAltName=DNS:hooks.example -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    names = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    tls.sni_callback = lambda _, name, __: names.append(name)
    trust = ssl.create_default_context(cafile=str(certificate))

    async def send(url, addresses):
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            return await post(client, claimed(url), addresses=addresses)

    with receiving([204], tls=tls) as receiver:
        port = receiver.url.rpartition(":")[2]
        # Nobody listens on the first address; no resolver knows the name.
        url = f"https://hooks.example:{port}/a"
        assert asyncio.run(send(url, ["127.0.0.2", "127.0.0.1"])) == 204
        assert names == ["hooks.example"]
        assert receiver.headers[0]["host"] == f"hooks.example:{port}"
        with pytest.raises(httpx.ConnectError, match="Hostname mismatch"):
            asyncio.run(send(f"https://other.example:{port}/a", ["127.0.0.1"]))
        assert len(receiver.bodies) == 1


def claimed(url):
    return Claimed(
        delivery_id="msg_1",
        webhook_id="hook_1",
        attempt=1,
        url=url,
        secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        payload={"type": "job.succeeded"},
    )
