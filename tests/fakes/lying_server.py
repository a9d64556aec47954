"""A server that speaks as vLLM's does, draws from fixed logits, and can be told to lie, hang or break off."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from blake3 import blake3

from infra.weights.bits import Bits
from infra.weights.digest import model_digests
from infra.weights.patch import read_patch
from producers.engines.server_facts import (
    CLAIM_HEADER,
    CONTRACT,
    DIGEST_BYTES,
    FILE_AWAY,
    ID_PREFIX,
    ServerFacts,
)

VOCABULARY = 24
LOGITS = np.linspace(0.0, 3.0, VOCABULARY)
Lie = Callable[[dict[str, Any]], Any]  # makes of an honest line what is sent: an object as JSON, or bytes


def honest_facts(config: dict[str, Any], **others: Any) -> ServerFacts:
    """Facts of a server that fits."""
    plain: dict[str, Any] = {
        "contract": CONTRACT, "machine": "another",
        "vllm": "0.32.0", "device": "cpu", "dtype": "float32",
        "front_ends": 1, "workers": 1, "ranks": 1, "vocabulary": VOCABULARY, "longest": 256, "slots": 16,
        "logprobs_mode": "processed_logprobs", "prefix_caching": False, "chunked_prefill": False,
        "priorities": True, "quantization": "", "adapters": False, "speculation": False, "transfers": True,
        "counts_tokens": True, "config": config,
    }  # fmt: skip
    return ServerFacts(**plain | others)


@dataclass
class Behaviour:
    """How the server behaves. A test changes it while the server runs."""

    lie: Lie | None = None
    hangs: asyncio.Event | None = None
    answers: dict[str, Any] = field(default_factory=dict)  # by method or path: what is answered in its place
    ignores_seeds: bool = False
    ignores_temperature: bool = False
    depends_on_others: bool = False
    token_s: float = 0.0
    start: str = "first"


class LyingServer:
    """The server, in a thread of its own."""

    def __init__(self, facts: ServerFacts, folder: Path) -> None:
        self.facts, self.how, self._folder = facts, Behaviour(), folder
        self.lends = True  # whether it can open a file in another process's memory
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self._owner = ""
        self._staged = bytearray()
        self._model: dict[str, Bits] = {}
        self._root: str | None = None
        self._prepared: Any = None
        self._version = "default"
        self._drawn: dict[str, list[str]] = {}  # versions of each request's tokens
        self._loop = asyncio.new_event_loop()
        self._runs = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def open(self) -> LyingServer:
        """Listen. Return itself."""
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    async def _listen(self) -> str:
        self._runs.set()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    def draws(self) -> bool:
        """Whether it has drawn a token of a request that goes on."""
        return any(self._drawn.values())

    def close(self) -> None:
        """Close all connections."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(50)
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path == "/streamrl/patch":
            return await self._take_patch(request)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return await self._generate(request, body)
        own = request.path.removeprefix("/streamrl/")
        key = {"facts": "server_facts", "claim": "claim_server"}.get(own, body.get("method", request.path))
        self.calls.append(key)
        if key in self.how.answers:
            found = self.how.answers[key]
            return await found(request) if callable(found) else web.json_response(found)
        if key == "claim_server":
            return self._claim(body)
        if key != "server_facts" and request.headers.get(CLAIM_HEADER) != self._owner:
            return web.json_response({"error": "it belongs to another"}, status=409)
        if request.path == "/streamrl/release":
            self._owner = ""
            return web.json_response({})
        if request.path in ("/collective_rpc", "/streamrl/facts"):
            work = getattr(self, f"_{key}", None)
            if work is None:
                error = {"error": {"message": f"'CPUWorker' object has no attribute '{key}'"}}
                return web.json_response(error, status=500)
            try:
                result = {"result": work(**body.get("kwargs", {}))}
            except ValueError as error:
                result = {"error": str(error)}
            return web.json_response({"results": [result]})
        if body.get("update_info", {}).get("file") and not self.lends:
            return web.json_response(
                {"error": {"message": f"Worker failed with '{FILE_AWAY}: no'"}}, status=500
            )
        self._control(request.path, body)
        return web.json_response({})

    def _control(self, path: str, body: dict[str, Any]) -> None:
        if path == "/pause":
            self._runs.clear()
        elif path == "/resume":
            self._runs.set()
        elif path == "/start_weight_update":
            self._staged.clear()
        elif path == "/update_weights":
            self._staged += Path(body["update_info"]["file"]).read_bytes()
        elif path == "/finish_weight_update":
            file = self._folder / "staged"
            file.write_bytes(self._staged)
            self._prepared = read_patch(file)
        elif path == "/update_weight_version":
            self._version = body["new_version"]

    def _server_facts(self) -> Any:
        return msgspec.to_builtins(self.facts)

    def _claim(self, body: dict[str, str]) -> web.Response:
        if self._owner not in ("", body["claim"]):
            return web.json_response({"error": "it belongs to another"}, status=409)
        self._owner = body["claim"]
        return web.json_response({"start": self.how.start})

    async def _take_patch(self, request: web.Request) -> web.Response:
        content = await request.read()
        body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if blake3(body).digest() != digest or request.headers.get(CLAIM_HEADER) != self._owner:
            return web.json_response({"error": "another hash, or no claim"}, status=400)
        self._staged += body
        return web.json_response({})

    def _end_update(self) -> None:
        self._staged.clear()

    def _drawn_tokens(self) -> Any:
        return {name: len(drawn) for name, drawn in self._drawn.items() if drawn}

    def _install_patch(self, root: str) -> None:
        self._prepared.apply(self._model)
        self._root, self._prepared = root, None

    def _weights_state(self) -> Any:
        prepared = self._prepared.root if self._prepared else None
        digests = model_digests(self._model) if self._root else None
        return {"root": self._root, "prepared": prepared, "digests": digests, "error": ""}

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "generate" in self.how.answers:
            return await self.how.answers["generate"](request)
        name, params = body["request_id"], body["sampling_params"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._drawn[name] = []
        try:
            await self._stream(response, name, params)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.append(name)
            raise
        finally:
            del self._drawn[name]
        return response

    async def _stream(self, response: web.StreamResponse, name: str, params: dict[str, Any]) -> None:
        noise = np.random.default_rng(0 if self.how.ignores_seeds else params["seed"])
        heat = 1.0 if self.how.ignores_temperature else params["temperature"]
        logprobs = LOGITS / heat - np.log(np.exp(LOGITS / heat).sum())
        if self.how.depends_on_others:
            await asyncio.sleep(0.2)  # the others have come by then
            noise.random(len(self._drawn))
        drawn = self._drawn[name]
        while True:
            await self._runs.wait()
            token = int(noise.choice(VOCABULARY, p=np.exp(logprobs) / np.exp(logprobs).sum()))
            drawn.append(self._version)
            finish = "length" if len(drawn) == params["max_tokens"] else None
            finish = "stop" if token in params["stop_token_ids"] else finish
            line = self._line(name, token, logprobs, finish, params["logprobs"])
            said = self.how.lie(line) if self.how.lie else line
            if said is None:
                return
            if self.how.hangs is not None:
                await self.how.hangs.wait()
            await response.write(said if isinstance(said, bytes) else data(said))
            if finish:
                await response.write(b"data: [DONE]\n\n")
                return
            await asyncio.sleep(self.how.token_s)

    def _line(
        self, name: str, token: int, logprobs: np.ndarray, finish: str | None, top: int
    ) -> dict[str, Any]:
        best = sorted({token, *np.argsort(-logprobs)[:top].tolist()})
        tops = [{"token_id": one, "logprob": float(logprobs[one])} for one in best]
        content = {"token_id": token, "logprob": float(logprobs[token]), "top_logprobs": tops}
        choice: dict[str, Any] = {
            "index": 0, "token_ids": [token], "finish_reason": finish, "logprobs": {"content": [content]},
        }  # fmt: skip
        if finish:
            choice["weight_versions"] = [asdict(span) for span in spans(self._drawn[name])]
        return {"request_id": ID_PREFIX + name, "choices": [choice]}


@dataclass
class Span:
    """Tokens of one version."""

    version: str
    start: int
    end: int


def spans(versions: list[str]) -> list[Span]:
    """Tokens by version, as vLLM says them."""
    found: list[Span] = []
    for at, version in enumerate(versions):
        if found and found[-1].version == version:
            found[-1].end = at + 1
        else:
            found.append(Span(version, at, at + 1))
    return found


def data(line: object) -> bytes:
    """A line of a stream."""
    return f"data: {json.dumps(line)}\n\n".encode()
