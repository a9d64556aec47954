"""A rank's process whose engine needs no model: its requests get 1, 2, 3 … as tokens, one a step.

The folder of the model says how it fails: `other` draws other tokens, `hangs` in its third step, `refuses` to
start, `raises` in a step, `unprepared` can't prepare weights.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from infra.supervise.argument_file import read_argument
from infra.weights.patch import Patch
from producers.engines.engine import DrawnAnswer, EngineError, Pace, SampleRequest
from producers.engines.engine_process import answer
from producers.engines.following_rank import FollowingRank, serve_beside
from producers.engines.other_engine_ranks import RankOptions, connections
from producers.engines.pace import StepTimes
from producers.engines.rank_marks import RankMarks


class CountingRank:
    """An engine of one rank."""

    def __init__(self, way: str = "", number: int = 0) -> None:
        self.way = Path(way).name if number else ""
        if self.way == "refuses":
            raise EngineError("there is no such model")
        self.left: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.steps = self.installs = self.slept = 0
        self.root = ""
        self.running = 0

    def submit(self, request: SampleRequest) -> None:
        self.left[request.id], self.made[request.id] = request.max_tokens, 0

    def abort(self, ids: Sequence[str]) -> None:
        for name in ids:
            self.left.pop(name, None)

    def _answer(self, name: str, finish: str) -> DrawnAnswer:
        tokens = np.arange(self.made[name], dtype=np.int32) + (self.way == "other")
        return DrawnAnswer(name, tokens, tokens.astype(np.float32), finish)

    def step(self, wait_s: float = 0.0) -> list[DrawnAnswer]:
        self.steps += 1
        if self.way == "hangs" and self.steps == 3:
            threading.Event().wait()
        if self.way == "raises":
            raise ZeroDivisionError("nothing to divide")
        for name in self.left:
            self.made[name] += 1
        done = [name for name, most in self.left.items() if self.made[name] == most]
        for name in done:
            del self.left[name]
        return [self._answer(name, "length") for name in done]

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        return [self._answer(name, "") for name in ids if self.left.pop(name, None)]

    def prepare(self, patch: Patch) -> None:
        if self.way == "unprepared":
            raise EngineError("it comes as another dtype")
        self.root = patch.root

    def install(self, *, recompute: bool) -> dict[str, int]:
        self.installs += 1
        return self.unfinished()

    def digests(self) -> dict[str, str]:
        return {"w": self.root}

    def unfinished(self) -> dict[str, int]:
        return {name: self.made[name] for name in self.left}

    def pace(self) -> Pace:
        return Pace([1], [0.5])

    def expect(self, times: StepTimes) -> None: ...

    def sleep(self) -> None:
        self.slept += 1

    def wake(self) -> None:
        self.slept -= 1

    @property
    def memory_tokens(self) -> int:
        return 0

    def close(self) -> None: ...


def main() -> None:
    options = msgspec.json.decode(read_argument(sys.argv[1]), type=RankOptions)
    acts, beside = connections(options)

    def serve(link: Any, engine: Any) -> None:
        threading.Thread(target=lambda: serve_beside(beside, engine), daemon=True).start()
        FollowingRank(link, engine, options.number, RankMarks(Path(options.marks))).run()

    answer(acts, lambda: cast(Any, CountingRank(options.engine.model, options.number)), serve)


if __name__ == "__main__":
    main()
