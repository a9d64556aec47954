"""The requests that a server of vLLM works on: one streamed answer each, in the link's thread.

open ──► POST /inference/v1/generate ──► one line a token ──► finished ──► take
cancel ──► the connection is closed, and the server drops the request
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec

from producers.engines.engine import EngineError
from producers.engines.server_link import ServerLink
from producers.engines.streamed_answer import StreamedAnswer
from schemas.importing import said

GENERATE = "/inference/v1/generate"
_MOST_OF_A_REFUSAL = 4_096  # bytes
_LOOK_S = 0.02
_CATCH_UP_S = 30.0


class ServerStreams:
    """The open requests of one engine."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._open: dict[str, tuple[StreamedAnswer, asyncio.Task[None]]] = {}  # by sample
        self._finished: queue.SimpleQueue[StreamedAnswer] = queue.SimpleQueue()
        self._bell = threading.Event()
        self._failed: EngineError | None = None
        self.tokens = 0  # that have come, of all requests
        self.moved_at = time.monotonic()  # when one came last, or nothing was awaited

    def open(self, answer: StreamedAnswer, body: Mapping[str, object]) -> None:
        """Send a request."""
        if not self._open:
            self.moved_at = time.monotonic()
        self._open[answer.name] = answer, self._link.wait_for(self._begin(answer, body), "take a request")

    async def _begin(self, answer: StreamedAnswer, body: Mapping[str, object]) -> asyncio.Task[None]:
        return asyncio.create_task(self._follow(answer, msgspec.json.encode(body)))

    @property
    def answers(self) -> list[StreamedAnswer]:
        """The answers of requests that nobody has taken or cancelled."""
        opened = list(self._open.values())  # at once: streams ask too, while requests are opened
        return [answer for answer, _ in opened]

    def cancel(self, names: Sequence[str], *, unfinished: bool = False) -> list[StreamedAnswer]:
        """Drop requests. Return what has come of them; unknown ones are left out.

        `unfinished`: leave also those out that are finished, so that `take` returns them.
        """
        found = [self._open.pop(name) for name in dict.fromkeys(names) if name in self._open]
        if found:
            self._link.wait_for(_stop([task for _, task in found]), "drop requests")
        if not unfinished:
            return [answer for answer, _ in found]
        self._open |= {answer.name: (answer, task) for answer, task in found if answer.finish}
        return [answer for answer, _ in found if not answer.finish]

    async def caught_up(self, drawn: Mapping[str, int]) -> None:
        """Wait until all tokens have come that the paused server has drawn; `drawn`: by request.

        The server no longer knows of a request that is finished, and not yet of one that waits.
        """
        until = time.monotonic() + _CATCH_UP_S
        while behind := [one for one in self.answers if not _has_all(one, drawn)]:
            if self._failed is not None:
                raise self._failed
            if time.monotonic() > until:
                one = behind[0]
                raise self._link.wrong(
                    f"says that it has drawn {drawn.get(one.request, 0)} tokens of sample {one.name}; "
                    f"{len(one.tokens)} have come"
                )
            await asyncio.sleep(_LOOK_S / 10)

    async def goes_on_with(self, root: str) -> dict[str, int]:
        """Note that other weights draw the next tokens. Return the tokens of each unfinished request."""
        running = [one for one in self.answers if not one.finish]
        for one in running:
            one.goes_on_with(root, len(one.tokens))
        return {one.name: len(one.tokens) for one in running}

    def passed_longest(self) -> tuple[StreamedAnswer, float] | None:
        """Return the answer that later ones passed first, and the seconds since; None if there is none."""
        passed = [(at, one) for one in self.answers if (at := one.passed_at) is not None]
        if not passed:
            return None
        at, answer = min(passed, key=lambda one: one[0])
        return answer, time.perf_counter() - at

    def wait_anew(self) -> None:
        """Note that the server rested until now: none of the answers is late."""
        for one in self.answers:
            one.passed_at = None

    def take(self, wait_s: float = _LOOK_S) -> list[StreamedAnswer]:
        """Return the answers that are finished; wait for one for a moment. Raises what a request met."""
        self._bell.wait(wait_s)
        self._bell.clear()
        self.check()
        found = []
        while not self._finished.empty():
            answer = self._finished.get()
            if (mine := self._open.get(answer.name)) is not None and mine[0] is answer:
                del self._open[answer.name]
                found.append(answer)
        return found

    def check(self) -> None:
        """Raise the error that a request met, if there is one."""
        if self._failed is not None:
            raise self._failed

    def fail(self, error: EngineError) -> None:
        """End the engine with an error, at its next step. The first one counts."""
        self._failed = self._failed or error
        self._bell.set()

    async def _follow(self, answer: StreamedAnswer, body: bytes) -> None:
        try:
            await self._read(answer, body)
        except EngineError as error:
            self.fail(self._link.named(error))
        except (aiohttp.ClientError, OSError) as error:
            self.fail(self._link.wrong(f"broke off in the middle of sample {answer.name}: {said(error)}"))
        except Exception as error:  # by aiohttp, for instance for a line that does not fit its buffer
            self.fail(self._link.wrong(f"sends what can't be read for sample {answer.name}: {said(error)}"))

    async def _read(self, answer: StreamedAnswer, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._link.session.post(
            self._link.url + GENERATE, data=body, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                content = await response.content.read(_MOST_OF_A_REFUSAL)
                raise self._link.refusal(response.status, "POST", GENERATE, content)
            async for line in response.content:
                before = len(answer.tokens)
                done = answer.take(line)
                if fresh := len(answer.tokens) - before:
                    self.tokens += fresh
                    self.moved_at = time.monotonic()
                if fresh and not before:
                    for other in self.answers:
                        other.may_be_passed_by(answer)
                if done:
                    response.close()  # the server draws nothing behind a stop string
                    self._finished.put(answer)
                    self._bell.set()
                    return
        raise self._link.wrong(f"ended the stream of sample {answer.name} before its end")


def _has_all(answer: StreamedAnswer, drawn: Mapping[str, int]) -> bool:
    if answer.finish:
        return True
    known = drawn.get(answer.request)
    return not answer.tokens if known is None else len(answer.tokens) == known


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel requests, and wait until their connections are closed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
