"""Uvicorn as it is, but for its pauses: a tenth of a second to see that it is to end, another one for its connections."""

from __future__ import annotations

import asyncio
import socket

import uvicorn


class Server(uvicorn.Server):
    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listener in (*self.servers, *(sockets or [])):
            listener.close()
        await self.lifespan.shutdown()
