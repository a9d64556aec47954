"""An engine of several ranks, of which this process is rank 0 and leads.

orders ──► rank 0: its own engine ── steps, sums, logits ──┐
             └── the same acts, in the same order ──► rank 1, 2, …: an engine each

Rank 0 alone hears the generator and looks at clocks. All that it does to its own engine, the other ranks do
to theirs between the same two steps, so that all draw the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from infra.weights.patch import Patch
from infra.weights.slices import slice_name
from producers.engines.engine import DrawnAnswer, EngineError, Pace, SampleRequest
from producers.engines.engine_messages import Abort, GoOn, HandOver, Install, Prepare, Rest, Submit
from producers.engines.pace import StepTimes
from producers.engines.rank_messages import Act, Hash, Step
from producers.engines.rank_team import RankTeam
from producers.engines.same_work import DrawnSoFar, tokens_digest
from producers.engines.vllm_in_process import VllmEngine


class LeadingRank:
    """Leads the ranks of one engine. It is used like an engine of one rank."""

    def __init__(self, own: VllmEngine, team: RankTeam) -> None:
        self._own, self._team = own, team
        self._acts: list[Act] = []  # that other ranks do before the next step
        self._drawn = DrawnSoFar()
        self._unheard: deque[bytes] = deque()  # digests of steps that other ranks have not answered
        team.await_ready()

    def expect(self, times: StepTimes) -> None:
        """Take measured times of steps; ranks need not agree about times."""
        self._own.expect(times)

    def submit(self, request: SampleRequest) -> None:
        self._own.submit(request)
        self._acts.append(Submit(request))

    def abort(self, ids: Sequence[str]) -> None:
        self._own.abort(ids)
        self._acts.append(Abort(list(ids)))

    def step(self, wait_s: float = 0.0) -> list[DrawnAnswer]:
        with self._team.doing("make a decode step"):
            self._send(Step(self._drawn.digest))
            made = self._own.step(wait_s)
        self._drawn.add(made)
        self._unheard.append(self._drawn.digest)
        self._hear(0 if made else 1)
        return made

    def _hear(self, late: int) -> None:
        """Compare what all ranks drew in all steps but the last `late` ones, for which nobody has to wait."""
        while len(self._unheard) > late:
            self._team.agree(self._unheard.popleft(), "tokens or logprobs")

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        with self._team.doing("hand over samples"):
            self._hear(0)
            self._send(HandOver(list(ids)))
            parts = self._own.hand_over(ids)
        self._drawn.add(parts)
        self._team.agree(self._drawn.digest, "tokens in samples that move")
        return parts

    def prepare(self, patch: Patch) -> None:
        if patch.file is None:
            raise EngineError("other ranks can't read a patch of weights that is in no file")
        self._team.prepare(Prepare(str(patch.file)), lambda: self._own.prepare(patch))

    def install(self, *, recompute: bool) -> dict[str, int]:
        with self._team.doing("install weights"):
            self._hear(0)
            self._send(Install(recompute))
            tokens = self._own.install(recompute=recompute)
        self._team.agree(tokens_digest(tokens), "numbers of tokens in unfinished samples")
        return tokens

    def digests(self) -> dict[str, str]:
        """Return the hash of each slice on each rank."""
        ranks = self._team.hashes(Hash(), self._own.digests)
        return {slice_name(name, rank): one for rank, held in enumerate(ranks) for name, one in held.items()}

    def sleep(self) -> None:
        self._all_do("free memory", Rest(), self._own.sleep)

    def wake(self) -> None:
        self._all_do("take memory again", GoOn(), self._own.wake)

    def _all_do(self, what: str, act: Act, own: Callable[[], None]) -> None:
        with self._team.doing(what):
            self._hear(0)
            self._send(act)
            own()
        self._team.agree(self._drawn.digest, "tokens")

    def unfinished(self) -> dict[str, int]:
        return self._own.unfinished()

    @property
    def running(self) -> int:
        """The samples that have a place in the KV cache."""
        return self._own.running

    @property
    def memory_tokens(self) -> int:
        """The tokens that the KV cache holds, which is divided among the ranks."""
        return self._own.memory_tokens

    def pace(self) -> Pace:
        return self._own.pace()

    def close(self) -> None:
        self._team.close()

    def _send(self, last: Act) -> None:
        """Tell other ranks what they shall do before the next step. One that stands still may block this."""
        self._team.send([*self._acts, last])
        self._acts.clear()
