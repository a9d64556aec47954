"""The engine `served`: its samples are drawn by a server of vLLM, which may be on another machine.

submit ──► a streamed request each ──► tokens and logprobs, checked line by line
prepare ─► the patch as it is ───────► the server's workers prepare it while the server draws
           (on one machine they read it in the engine's memory)
install ─► pause ─ count ─ put in place ─ resume ──► hashed by the worker beside its steps

The server belongs to one generator, whose claim goes with each request: without it nothing changes there.
Whether the server is still there, and still the same start of it, is asked every few seconds: one that was
started anew has other weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from infra.end_tokens import end_tokens
from infra.files.sealed_memory import new_memory, seal
from infra.weights.adapter_tensors import Merging
from infra.weights.bits import model_of
from infra.weights.digest import model_digests, root_digest
from infra.weights.folder import ModelFolder
from infra.weights.patch import Patch, PatchFile, patch_pieces
from infra.weights.slices import SliceDigests, Slicing, slice_name
from producers.engines.engine import DrawnAnswer, EngineError, Pace, SampleRequest
from producers.engines.pace import StepTimes
from producers.engines.server_checks import check_facts, check_trials, trials_for
from producers.engines.server_facts import (
    CLAIM_AGAIN_S,
    CLAIM_PATH,
    DIGEST_BYTES,
    FILE_AWAY,
    PATCH_PATH,
    RELEASE_PATH,
    ServerFacts,
    WeightsState,
    answer_to,
    this_machine,
)
from producers.engines.server_link import ServerAway, ServerLink
from producers.engines.server_streams import ServerStreams
from producers.engines.streamed_answer import StreamedAnswer
from producers.stopping import stopping_of
from schemas.runspec import RunSpec

_SEED_BITS = 62  # of a request's seed: vLLM takes signed numbers of 64 bits
_AGAIN_S, _LONGEST_AGAIN_S = 0.02, 0.5  # between two looks at what a worker does
_PACED_S = 0.1  # of tokens that one look at the pace counts
_SENT = 1 << 20  # bytes of a patch that are handed to a connection at a time
_PROFILE_S = 1.5
_GONE = "was started anew, or had another owner meanwhile: its weights are gone"
_PROFILED = 12  # tokens of each sample of a profile


class _PaceWindow:
    """Counts the tokens of short times as steps of a batch of mean size: a server does not tell of steps."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.restart(0)

    def restart(self, tokens: int) -> None:
        """Begin anew: until now nothing was drawn, or not all the time."""
        self._since = self._seen = time.perf_counter()
        self._before, self._batch, self._sample_s = tokens, 0, 0.0

    def look(self, batch: int, tokens: int) -> None:
        """Note that so many samples are drawn now, and that so many tokens have come in all."""
        now = time.perf_counter()
        self._sample_s += self._batch * (now - self._seen)
        self._seen = now
        if not batch or not self._batch:
            self.restart(tokens)
        elif (seconds := now - self._since) > _PACED_S and tokens > self._before:
            self._times.add(max(1, round(self._sample_s / seconds)), self._sample_s / (tokens - self._before))
            self.restart(tokens)
        self._batch = batch


def server_seed(request: SampleRequest) -> int:
    """Return the seed of a request.

    Another one where an answer goes on: a server draws its first token with the seed's first number, and the
    same number for two tokens of an answer would make the second depend on the first.
    """
    mixed = blake3(f"{request.seed}/{len(request.made)}".encode()).digest(8)
    return int.from_bytes(mixed, "little") >> (64 - _SEED_BITS)


class ServedEngine:
    """An engine that is a server of vLLM."""

    def __init__(
        self, link: ServerLink, model: str, spec: RunSpec, *, name: str, batch_invariant: bool
    ) -> None:
        """`name`: of the generator, for others who want the server."""
        self._link, self._model, self._spec, self._name = link, model, spec, name
        self._invariant, self._slots = batch_invariant, spec.generator.slots
        self._layout = spec.generator.layout
        self._temperature, self._deadline = spec.sampling.temperature, link.deadline_s
        self._streams = ServerStreams(link)
        self._key, self._start, self._root = secrets.token_hex(16), "", ""
        self._stopping, self._ends = stopping_of(model, spec), end_tokens(model)
        self._count = 0  # requests so far
        self._times = StepTimes()
        self._pace = _PaceWindow(self._times)
        self._rests = False
        self._renewing: Future[None] | None = None

    def open(self) -> ServedEngine:
        """Take the server, check it, and measure it. Return itself."""
        self._link.open()
        try:
            self._take()
        except EngineError:
            self.close()
            raise
        return self

    def _take(self) -> None:
        self._start = self._claim()
        self._facts: ServerFacts = self._read(ServerFacts, self._link.facts())
        check_facts(self._facts, self._spec, self._model, self._link)
        self._clear()
        self._renewing = self._link.start(self._renew())
        self._try()
        self._profile()
        if self._spec.model.lora is not None:
            self._install_base()

    def _claim(self) -> str:
        """Wait until the server is there and free. Return which start of it this is."""
        until = time.monotonic() + self._deadline
        while True:
            try:
                claimed = self._read(dict[str, str], self._link.post(CLAIM_PATH, self._claiming))
                self._link.claim = self._key
                return claimed.get("start", "")
            except EngineError as error:
                waits = isinstance(error, ServerAway) or "belongs to" in str(error)
                if not waits or time.monotonic() > until:
                    raise
            time.sleep(_LONGEST_AGAIN_S)

    @property
    def _claiming(self) -> dict[str, str]:
        return {"claim": self._key, "name": self._name}

    def _clear(self) -> None:
        """End what another generator may have left behind, and begin with weights anew."""
        self._link.post("/abort_requests", {})
        self._link.post("/resume")
        self._link.call("end_update")
        shapes = {name: list(shape) for name, shape in ModelFolder(self._model).shapes.items()}
        slicing = Slicing.for_engine(Path(self._model), self._layout)
        heads, kv_heads = (slicing.heads, slicing.kv_heads) if slicing else (0, 0)
        init = {"shapes": shapes, "heads": heads, "kv_heads": kv_heads}
        self._link.post("/init_weight_transfer_engine", {"init_info": init})

    async def _renew(self) -> None:
        """Ask again and again whether the server is there and still ours."""
        while True:
            await asyncio.sleep(CLAIM_AGAIN_S)
            try:
                claimed = await self._link.ask("POST", CLAIM_PATH, self._claiming)
                if claimed != {"start": self._start}:
                    self._streams.fail(self._link.wrong(_GONE))
            except EngineError as error:
                self._streams.fail(error)

    def _try(self) -> None:
        """Draw a few short answers, and check seeds and logprobs."""
        trials = trials_for(self._slots, self._facts.vocabulary, self._temperature)
        answers = []
        for together in trials.rounds:
            opened = [self._ask(one.request, one.temperature, likeliest=one.likeliest) for one in together]
            self._wait_for(opened)
            answers.append(opened)
        check_trials(trials, answers, self._link, invariant=self._invariant)

    def _profile(self) -> None:
        """Measure how long a token of each sample takes, by batch size."""
        until, sizes = time.perf_counter() + _PROFILE_S, dict.fromkeys([1, self._slots, 8, 64, 256])
        for size in sizes:
            if size > self._slots or time.perf_counter() > until:
                continue
            requests = [
                SampleRequest(f"profile-{n}", [0], _PROFILED, n, 0.0, endless=True) for n in range(size)
            ]
            opened = [self._ask(one, self._temperature) for one in requests]
            self._wait_for(opened)
            seconds = [(one.last_at - one.first_at) / (_PROFILED - 1) for one in opened]
            self._times.expect(size, float(np.median(seconds)))

    def _install_base(self) -> None:
        """Install the model that an adapter is for: versions have only the layers that it changes."""
        base = model_of(Merging(self._spec.model, ModelFolder(self._model)).base_tensors())
        slices = SliceDigests(Slicing.for_engine(Path(self._model), self._layout))
        expected = slices.of(base, model_digests(base))
        self.prepare(PatchFile({}, base, since=None, root=root_digest(expected)).read())
        self.install(recompute=False)
        if wrong := [name for name, digest in self.digests().items() if expected.get(name) != digest]:
            raise self._link.wrong(f"does not hold the model that the adapter is for: {', '.join(wrong[:3])}")

    def _wait_for(self, answers: Sequence[StreamedAnswer]) -> None:
        """Wait until some answers are finished."""
        left = len(answers)
        while left:
            left -= len(self._streams.take())
            self._check_silence()

    def submit(self, request: SampleRequest) -> None:
        self._ask(request, self._temperature)

    def _ask(self, request: SampleRequest, temperature: float, *, likeliest: int = 0) -> StreamedAnswer:
        self._count += 1
        most = request.max_tokens - len(request.made)
        least = 0 if request.endless else max(0, self._stopping.min_tokens - len(request.made))
        ends = [] if request.endless else self._ends
        answer = StreamedAnswer(
            request.id, f"{self._key[:8]}-{self._count}", most, self._facts.vocabulary, frozenset(ends),
            None if request.endless else self._stopping, request.made,
            [(self._root, 0)] if self._root else [], [] if likeliest else None,
        )  # fmt: skip
        params = {
            "temperature": temperature, "max_tokens": most, "min_tokens": min(least, most),
            "seed": server_seed(request), "logprobs": likeliest, "detokenize": False,
            # the server's own idea of what ends an answer does not count
            "ignore_eos": True, "stop_token_ids": ends,
        }  # fmt: skip
        body: dict[str, Any] = {
            "request_id": answer.request, "token_ids": [*request.prompt, *request.made],
            "sampling_params": params, "stream": True,
        }  # fmt: skip
        if self._facts.priorities:
            body["priority"] = answer.priority = -round(request.priority)
        self._streams.open(answer, body)
        return answer

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        found = self._streams.take(wait_s) if wait_s else self._streams.take()
        self._pace.look(min(len(self._streams.answers), self._slots), self._streams.tokens)
        self._check_silence()
        return [answer.drawn() for answer in found]

    def _check_silence(self) -> None:
        """Raise EngineError if tokens are awaited, and for a long time none came, or none of one sample."""
        if self._rests or not self._streams.answers:
            return
        silent_s = time.monotonic() - self._streams.moved_at
        if silent_s > self._deadline:
            count = len(self._streams.answers)
            raise self._link.wrong(f"sent no token of {count} samples for {silent_s:.0f} s")
        passed = self._streams.passed_longest()
        if passed is not None and passed[1] > self._deadline:
            name, since_s = passed[0].name, passed[1]
            raise self._link.wrong(
                f"sent no token of sample {name} for {since_s:.0f} s, and drew others that came later"
            )

    def unfinished(self) -> dict[str, int]:
        return {one.name: len(one.tokens) for one in self._streams.answers if not one.finish}

    def abort(self, ids: Sequence[str]) -> None:
        self._streams.cancel(ids)

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        return [answer.drawn() for answer in self._streams.cancel(ids, unfinished=True)]

    def prepare(self, patch: Patch) -> None:
        self._streams.check()
        self._link.post("/start_weight_update")
        if self._facts.machine != this_machine() or not self._lent(patch):
            self._send(patch)
        self._link.post("/finish_weight_update", {})
        self._await_states("prepare weights", lambda state: state.prepared == patch.root)
        self._prepared = patch.root

    def _send(self, patch: Patch) -> None:
        """Send a patch as it is, and its hash."""
        size = sum(memoryview(piece).nbytes for piece in patch_pieces(patch)) + DIGEST_BYTES
        try:
            self._link.send(PATCH_PATH, _with_digest(patch), size)
        except EngineError:
            with contextlib.suppress(EngineError):  # it is gone, or somebody else's
                self._link.call("end_update")  # else vLLM would let no other one begin
            raise

    def _lent(self, patch: Patch) -> bool:
        """Let a server on this machine read the patch in our memory. Return whether it may do that."""
        with os.fdopen(new_memory("patch"), "wb") as file:
            for part in patch_pieces(patch):
                file.write(part)
            file.flush()
            seal(file.fileno())
            place = {"file": f"/proc/{os.getpid()}/fd/{file.fileno()}"}
            try:
                self._link.post("/update_weights", {"update_info": place})
            except EngineError as error:
                if FILE_AWAY not in str(error):
                    raise
                self._link.post("/start_weight_update")
                return False
        return True

    def install(self, *, recompute: bool) -> dict[str, int]:
        root = self._prepared
        self._link.post("/pause?mode=keep&clear_cache=false")
        drawn = self._read(dict[str, int], self._link.call("drawn_tokens"))
        self._link.wait_for(self._streams.caught_up(drawn), "send the tokens that it has drawn")
        self._link.call("install_patch", root=root)
        if recompute:
            # All running samples are preempted: the next step prefills their prompts and tokens.
            self._link.post("/reset_prefix_cache?reset_running_requests=true")
        self._link.post("/update_weight_version", {"new_version": root})
        tokens = self._link.wait_for(self._streams.goes_on_with(root), "count its tokens")
        self._root = root
        self._link.post("/resume")
        self._rested()
        return tokens

    def sleep(self) -> None:
        """Have the server draw nothing. Its memory stays as it is."""
        self._link.post("/pause?mode=keep&clear_cache=false")
        self._rests = True

    def wake(self) -> None:
        """Have the server go on."""
        self._link.post("/resume")
        self._rests = False
        self._rested()
        self._streams.wait_anew()

    def _rested(self) -> None:
        """Note that the time until now was not used to draw."""
        self._streams.moved_at = time.monotonic()
        self._pace.restart(self._streams.tokens)

    def digests(self) -> dict[str, str]:
        held = [
            state.digests or {}
            for state in self._await_states("hash weights", lambda state: state.digests is not None)
        ]
        if self._layout.ranks == 1:
            return held[0]
        return {slice_name(name, rank): one for rank, some in enumerate(held) for name, one in some.items()}

    def _await_states(self, what: str, reached: Callable[[WeightsState], bool]) -> list[WeightsState]:
        """Wait until the state of each worker's weights is the one that is wanted."""
        until, again_s, pause = time.monotonic() + self._deadline, _AGAIN_S, threading.Event()
        while True:
            self._streams.check()  # a server that was started anew would never be ready
            said = self._link.call_all("weights_state")
            states: list[WeightsState] = [self._read(WeightsState, one) for one in said]
            for state in states:
                if state.error:
                    raise self._link.wrong(f"says: {state.error}")
            if len(states) != (ranks := self._layout.ranks):
                raise self._link.wrong(f"has {len(states)} workers, and {ranks} ranks are expected")
            if all(map(reached, states)):
                return states
            if time.monotonic() > until:
                raise self._link.late(what)
            pause.wait(again_s)
            again_s = min(2 * again_s, _LONGEST_AGAIN_S)

    def _read(self, kind: Any, said: object) -> Any:
        try:
            return answer_to(kind, said)
        except msgspec.ValidationError as error:
            raise self._link.wrong(
                f"has another version of StreamRL, it seems: {error}", lasting=True
            ) from None

    def pace(self) -> Pace:
        return self._times.pace()  # a sample that goes on here is drawn with other numbers: see `server_seed`

    def close(self) -> None:
        """Drop all requests, and let go of the server."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._streams.cancel([one.name for one in self._streams.answers])
        with contextlib.suppress(EngineError):  # it is gone, or somebody else's
            if self._link.claim:
                # a server that hangs must not keep a start from saying so before the generator gives up
                self._link.post(RELEASE_PATH, within_s=self._deadline / 20)
        self._link.close()


async def _with_digest(patch: Patch) -> AsyncIterator[bytes]:
    """Yield the file of a patch and the hash of it, some bytes at a time."""
    hasher = blake3()
    for piece in patch_pieces(patch):
        view = memoryview(piece)
        for begin in range(0, view.nbytes, _SENT):
            part = bytes(view[begin : begin + _SENT])
            hasher.update(part)
            yield part
    yield hasher.digest()
