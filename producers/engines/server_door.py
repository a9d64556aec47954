"""Stands before all addresses of a server of vLLM: `--middleware streamrl.serving.ServerDoor`.

request ──► key? ──► claim? ──► vLLM
             │         └ all that changes the server needs the claim of the generator that it belongs to
             └ VLLM_API_KEY, where it is set: vLLM's own --api-key guards but a part of the addresses

/streamrl/claim, /streamrl/release   let a generator have this server, and let it go
/streamrl/facts                      the settings of the server: whoever has the key may read them
/streamrl/patch                      a patch of weights as it is; workers read it in this process's memory

Whoever has the key may draw beside the generator, and read. All other addresses change something, or may do
so in another release of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from producers.engines.received_patch import PatchRefused, ReceivedPatch
from producers.engines.server_claim import NotClaimed, ServerClaim
from producers.engines.server_facts import (
    CLAIM_HEADER,
    CLAIM_PATH,
    FACTS_PATH,
    PATCH_PATH,
    RELEASE_PATH,
    SENDER_SILENT_S,
)
from producers.engines.shared_names import remove_socket_names

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiMessage, AsgiReceive, AsgiSend], Awaitable[None]]

GUARD_VARIABLE = "VLLM_API_KEY"
_READS = {"GET", "HEAD", "OPTIONS"}
_DRAWS = (
    "/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/tokenize", "/detokenize",
)  # fmt: skip
_LONGEST = 64 << 10  # bytes of a request for a claim
_TOKEN = range(16, 129)  # characters of a claim


class Claiming(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a claim."""

    claim: str
    name: str


class DoorRefusal(Exception):
    """A request is refused, with a status and a reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class ServerDoor:
    """An ASGI middleware. vLLM makes one in each process that answers HTTP: there must be one alone."""

    def __init__(self, app: AsgiApp) -> None:
        self._app, self.claim, self._start = app, ServerClaim(), secrets.token_hex(8)
        key = os.environ.get(GUARD_VARIABLE, "").strip()
        self._wanted = f"Bearer {key}".encode() if key else b""
        self._receives, self._named = False, True

    async def __call__(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] not in ("http", "websocket") or _path(scope) == "/health":
            await self._app(scope, receive, send)
            return
        try:
            if not self._has_key(scope):
                raise DoorRefusal(401, "Unauthorized")
            await self._let_in(scope, receive, send)
        except NotClaimed as error:
            await _refuse(scope, send, DoorRefusal(409, str(error)))
        except PatchRefused as error:
            await _refuse(scope, send, DoorRefusal(400, str(error)))
        except DoorRefusal as error:
            await _refuse(scope, send, error)

    def _has_key(self, scope: AsgiMessage) -> bool:
        given = _headers(scope, b"authorization")
        return not self._wanted or (len(given) == 1 and secrets.compare_digest(given[0], self._wanted))

    async def _let_in(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        path, method = _path(scope), scope.get("method", "GET")
        if path == CLAIM_PATH:
            wanted = await _claiming(receive)
            self.claim.take(wanted.claim, wanted.name)
            # another one also after another owner: the weights of the one before may be gone
            await _answer(send, 200, {"start": f"{self._start}-{self.claim.owners}"})
            return
        if path == FACTS_PATH:
            await self._call(scope, send, "server_facts")
            if self._named:  # all processes of the server are connected now
                self._named = False
                remove_socket_names()
            return
        if method in _READS or path.startswith(_DRAWS) or scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        with self.claim.during(_token(scope), f"{method} {path}"):
            if path == RELEASE_PATH:
                self.claim.release(_token(scope))
                await _answer(send, 200, {})
            elif path == PATCH_PATH:
                await self._take_patch(scope, receive, send)
            else:
                await self._app(scope, receive, send)

    async def _take_patch(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        """AsgiReceive a patch, and have the workers read it here."""
        if self._receives:
            raise DoorRefusal(409, "another patch is on its way to this server")
        self._receives = True
        try:
            most = await self._most_bytes(scope)
            with ReceivedPatch(_length(scope), most) as patch:
                while True:
                    message = await _soon(receive)
                    patch.add(message.get("body", b""))
                    if not message.get("more_body"):
                        break
                update = {"update_info": {"file": patch.finished()}}
                await self._app(*_inside(scope, "/update_weights", update), send)
        finally:
            self._receives = False

    async def _most_bytes(self, scope: AsgiMessage) -> int:
        """Return how large a patch of this server's model can be."""
        parts: list[bytes] = []

        async def keep(message: AsgiMessage) -> None:
            parts.append(message.get("body", b""))

        await self._call(scope, keep, "patch_limit")
        try:
            return int(msgspec.json.decode(b"".join(parts))["results"][0]["result"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError):
            raise DoorRefusal(500, "the workers don't say how large a patch may be") from None

    async def _call(self, scope: AsgiMessage, send: AsgiSend, method: str) -> None:
        """Call a method of the workers, which answer whoever asked."""
        await self._app(*_inside(scope, "/collective_rpc", {"method": method}), send)


def _inside(scope: AsgiMessage, path: str, body: Mapping[str, object]) -> tuple[AsgiMessage, AsgiReceive]:
    """Return a request of this process's own, for another address than the one that was asked for."""
    content = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(b"authorization", one) for one in _headers(scope, b"authorization")]
    root = scope.get("root_path", "")
    inner = {
        **scope, "method": "POST", "path": root + path, "raw_path": (root + path).encode(),
        "query_string": b"", "headers": headers, "state": dict(scope.get("state", {})),
    }  # fmt: skip
    sent = False

    async def receive() -> AsgiMessage:
        nonlocal sent
        if sent:
            await asyncio.sleep(SENDER_SILENT_S)
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    return inner, receive


async def _soon(receive: AsgiReceive) -> AsgiMessage:
    """Return the next part of a request. A sender that is silent for long has gone."""
    try:
        message = await asyncio.wait_for(receive(), SENDER_SILENT_S)
    except TimeoutError:
        raise DoorRefusal(408, f"no more of the request came in {SENDER_SILENT_S:.0f} s") from None
    if message["type"] != "http.request":
        raise DoorRefusal(400, "the request broke off")
    return message


async def _claiming(receive: AsgiReceive) -> Claiming:
    content = bytearray()
    while True:
        message = await _soon(receive)
        content += message.get("body", b"")
        if len(content) > _LONGEST:
            raise DoorRefusal(413, f"a request for a claim has at most {_LONGEST} bytes")
        if not message.get("more_body"):
            break
    try:
        found = msgspec.json.decode(content, type=Claiming)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DoorRefusal(400, f"this is no request for a claim: {error}") from None
    if len(found.claim) not in _TOKEN or not found.claim.isascii():
        raise DoorRefusal(400, f"a claim has {_TOKEN.start} to {_TOKEN.stop - 1} characters of ASCII")
    return found


def _headers(scope: AsgiMessage, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope.get("headers", []) if name.lower() == wanted]


def _token(scope: AsgiMessage) -> str:
    given = _headers(scope, CLAIM_HEADER.lower().encode())
    return given[0].decode("latin-1") if len(given) == 1 else ""


def _length(scope: AsgiMessage) -> int:
    given = _headers(scope, b"content-length")
    if len(given) != 1 or not given[0].isdigit() or len(given[0]) > 18:
        raise DoorRefusal(411, "a patch comes with its length, in the header Content-Length")
    return int(given[0])


def _path(scope: AsgiMessage) -> str:
    """Return the address as vLLM's own routes have it."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


async def _refuse(scope: AsgiMessage, send: AsgiSend, error: DoorRefusal) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, error.status, {"error": str(error)})


async def _answer(send: AsgiSend, status: int, content: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})
