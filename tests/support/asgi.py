"""One request to an application without a server around it, for applications that no server fixture makes."""

from __future__ import annotations

import anyio
import httpx
from fastapi import FastAPI


def get(app: FastAPI, path: str) -> httpx.Response:
    return _request(app, "GET", path, None)


def post(app: FastAPI, path: str, body: object) -> httpx.Response:
    return _request(app, "POST", path, body)


def _request(app: FastAPI, method: str, path: str, body: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, json=body)

    return anyio.run(send)
