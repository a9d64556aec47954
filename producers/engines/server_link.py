"""Speaks HTTP with a server of vLLM: requests with a deadline, answers with a limit.

One thread runs the event loop in which all requests are; other threads call and wait for an answer.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any, TypeVar

import aiohttp
import msgspec

from producers.engines.engine import EngineError
from producers.engines.server_facts import CLAIM_HEADER, FACTS_PATH
from schemas.importing import said

KEY_VARIABLE = "STREAMRL_SERVER_KEY"
_LARGEST = 64 << 20  # bytes of an answer: the hashes of many tensors
_QUOTED = 400  # characters of an answer that a message repeats
_CONNECT_S = 10.0
_LONGEST_LINE = 256 << 10  # bytes of a line of a stream
_SLOWEST = 1 << 20  # bytes a second that a link carries at the least
_OF_A_PROXY = (502, 503, 504)  # a proxy's statuses for a server that does not answer it

_Result = TypeVar("_Result")


class ServerAway(EngineError):
    """Nobody answers at the server's address: it may be about to start."""


class ServerLink:
    """A connection to one server."""

    def __init__(self, url: str, *, key: str, deadline_s: float) -> None:
        """`key`: the server's `VLLM_API_KEY`; empty: it has none."""
        self.url, self._key, self.deadline_s = url.rstrip("/"), key.strip(), deadline_s
        self.claim = ""  # of the server: goes with all requests
        if not self._key.isprintable():
            raise EngineError(f"{KEY_VARIABLE} holds characters that no key may have")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="server")
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> ServerLink:
        """Start the thread. Nothing is sent yet. Return itself."""
        self._thread.start()
        self.wait_for(self._start(), "open")
        return self

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            # a new connection each time: a server closes idle ones just when they may be used again
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            read_bufsize=_LONGEST_LINE, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session. It is used in the link's thread only."""
        assert self._session is not None, "the link is not open"
        return self._session

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Begin some work in the link's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait_for(
        self, work: Coroutine[Any, Any, _Result], what: str, within_s: float | None = None
    ) -> _Result:
        """Do some work in the link's thread, and return its result."""
        under_way = self.start(work)
        try:
            return under_way.result((within_s or self.deadline_s) + _CONNECT_S)
        except TooLate:
            under_way.cancel()
            raise self.late(what, within_s) from None

    def late(self, what: str, within_s: float | None = None) -> EngineError:
        """Return the error for a server that does not answer in time."""
        return EngineError(
            f"the server {self.url} took more than {within_s or self.deadline_s:.0f} s to {what}"
        )

    def get(self, path: str) -> Any:
        """Return what a GET answers."""
        return self.wait_for(self.ask("GET", path, None), f"answer GET {path}")

    def post(self, path: str, body: object = None, within_s: float | None = None) -> Any:
        """Return what a POST answers."""
        return self.wait_for(self.ask("POST", path, body, within_s), f"answer POST {path}", within_s)

    def facts(self) -> Any:
        """Return what a server says of itself: no claim is needed."""
        found = self._results(self.get(FACTS_PATH), "server_facts")
        if len({one.get("machine") for one in found if isinstance(one, dict)}) > 1:
            raise self.wrong(
                "has ranks on several machines, and all of them read a patch in the memory of one: start it "
                "on one machine", lasting=True,
            )  # fmt: skip
        return found[0]

    def send(self, path: str, content: AsyncIterator[bytes], size: int) -> Any:
        """Return what a POST answers whose body is so many bytes as they are."""
        within_s = self.deadline_s + size / _SLOWEST
        sending = self._sent(path, content, size, within_s)
        return self.wait_for(sending, f"take {size} bytes at {path}", within_s)

    async def _sent(self, path: str, content: AsyncIterator[bytes], size: int, within_s: float) -> Any:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return await self._within(within_s, "POST", path, content, headers)

    def call(self, method: str, **arguments: object) -> Any:
        """Call a method of StreamRL's in the server's workers. Return what the first one answers.

        Raises EngineError with what one of them refuses.
        """
        return self.call_all(method, **arguments)[0]

    def call_all(self, method: str, **arguments: object) -> list[Any]:
        """Like `call`, and return what each worker answers, in their order."""
        return self.wait_for(self._called_all(method, **arguments), f"answer {method}")

    async def _called_all(self, method: str, **arguments: object) -> list[Any]:
        answer = await self.ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
        return self._results(answer, method)

    def _results(self, answer: Any, method: str) -> list[Any]:
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or any(not isinstance(one, dict) for one in results):
            raise self.wrong(f"answers {method} with {str(answer)[:_QUOTED]}")
        for number, one in enumerate(results):
            if error := one.get("error"):
                by = f" (worker {number})" if len(results) > 1 else ""
                raise self.wrong(f"says{by}: {str(error)[:_QUOTED]}")
        return [one.get("result") for one in results]

    async def ask(self, method: str, path: str, body: object, within_s: float | None = None) -> Any:
        """Send a request and return the answer's JSON, in the link's thread."""
        data = None if body is None else io.BytesIO(msgspec.json.encode(body))
        headers = {} if body is None else {"Content-Type": "application/json"}
        return await self._within(within_s or self.deadline_s, method, path, data, headers)

    async def _within(
        self, seconds: float, method: str, path: str, data: object, headers: dict[str, str]
    ) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._asked(method, path, data, headers)
        except aiohttp.ServerTimeoutError:  # it is a TimeoutError, too
            raise ServerAway(f"no server answers at {self.url} within {_CONNECT_S:.0f} s") from None
        except TimeoutError:
            raise self.late(f"answer {method} {path}") from None
        except aiohttp.ClientConnectorError as error:
            raise ServerAway(f"no server answers at {self.url}: {error.os_error.strerror}") from None
        except aiohttp.ClientError as error:
            # a proxy takes connections for a server that does not listen yet, and closes them
            kind = ServerAway if isinstance(error, aiohttp.ClientConnectionError) else EngineError
            raise kind(
                f"the server {self.url} broke off while it answered {method} {path}: {said(error)}"
            ) from None

    async def _asked(self, method: str, path: str, data: object, headers: dict[str, str]) -> Any:
        if self.claim:
            headers = headers | {CLAIM_HEADER: self.claim}
        async with self.session.request(
            method, self.url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            content = await self._content(response)
            if response.status != 200:
                raise self.refusal(response.status, method, path, content)
        if not content:
            return None
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self.wrong(f"answers {method} {path} with no JSON: {_quoted(content)}") from None

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        found = bytearray()
        async for piece in response.content.iter_any():
            found += piece
            if len(found) > _LARGEST:
                raise self.wrong(f"sends more than {_LARGEST >> 20} MiB")
        return bytes(found)

    def refusal(self, status: int, method: str, path: str, content: bytes) -> EngineError:
        """Return the error for an answer with another status than 200."""
        text = _quoted(content)
        if status in _OF_A_PROXY:
            return ServerAway(f"no server answers behind {self.url}: status {status}, {text}")
        if status == 401:
            return self.wrong(f"refuses the key: set {KEY_VARIABLE} to its VLLM_API_KEY", lasting=True)
        if status == 404 and path.startswith("/streamrl"):
            return self.wrong(
                f"has no {path}: start it with VLLM_SERVER_DEV_MODE=1 and "
                "--middleware streamrl.serving.ServerDoor", lasting=True,
            )  # fmt: skip
        if status == 409:
            return self.wrong(f"says: {_reason(content)}")
        if status == 404 and not path.startswith("/inference"):
            return self.wrong(f"has no {path}: start it with VLLM_SERVER_DEV_MODE=1", lasting=True)
        if status in (403, 404):
            return self.wrong(f"has no {path}: start it with --enable-scale-out", lasting=True)
        if path in ("/collective_rpc", FACTS_PATH) and "has no attribute" in text:
            return self.wrong(
                "has no part of StreamRL: start it with --worker-extension-cls streamrl.serving.ServedWorker",
                lasting=True,
            )
        return self.wrong(f"answers {method} {path} with status {status}: {text}")

    def wrong(self, what: str, *, lasting: bool = False) -> EngineError:
        """Return an error about this server. `lasting`: another start would meet it again."""
        error = EngineError(f"the server {self.url} {what}")
        error.lasting = lasting
        return error

    def named(self, error: EngineError) -> EngineError:
        """Return an error with the server's address, if it does not have it."""
        if self.url in str(error):
            return error
        return self.wrong(str(error).removeprefix("the server "), lasting=error.lasting)

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._session is not None:
            self.wait_for(self._session.close(), "close")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _reason(content: bytes) -> str:
    """Return the error that the part of StreamRL in a server answers with."""
    try:
        return str(msgspec.json.decode(content)["error"])[:_QUOTED]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return _quoted(content)


def _quoted(content: bytes) -> str:
    text = content[: 4 * _QUOTED].decode(errors="replace")
    return " ".join(text.split())[:_QUOTED] or "nothing"
