"""Asks for the key at every address of a server of vLLM, not only where samples are drawn.

vLLM's own `--api-key` guards the addresses below /v1 and /inference. The others are open to whoever reaches
the port, also to replace weights and to call methods of workers. `--middleware streamrl.serving.KeyForAll`
guards all but /health, with the key in VLLM_API_KEY.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, Any, _Send], Awaitable[None]]
GUARD_VARIABLE = "VLLM_API_KEY"


class KeyForAll:
    """An ASGI middleware."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ.get(GUARD_VARIABLE, '').strip()}".encode()
        if self._wanted == b"Bearer ":
            raise ValueError(f"{GUARD_VARIABLE} has to hold the key that this server asks for")

    async def __call__(self, scope: _Message, receive: Any, send: _Send) -> None:
        asks = scope["type"] in ("http", "websocket") and scope.get("path") != "/health"
        if not asks or self._fits(scope.get("headers", [])):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _fits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._wanted)
