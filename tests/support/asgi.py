"""One request to an application without a server around it, for applications that no server fixture makes."""

from __future__ import annotations

import anyio
import httpx
from fastapi import FastAPI


def get(app: FastAPI, path: str) -> httpx.Response:
    async def fetch() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    return anyio.run(fetch)
