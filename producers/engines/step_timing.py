"""Times an engine's decode steps while it draws given samples, as a generator has it draw them.

requests ──► a free slot takes the next ──► step ──► how long it took, and what was in it

An engine does not say what a step did; that is told from the tokens that its samples have before and after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from infra.core_waits import WorkTime, WorkWatch
from producers.engines.engine import DrawnAnswer, LocalEngine, SampleRequest

WAITING = 4.0  # times as long as without waits for a core may a draw take


class TimedDraw(msgspec.Struct, frozen=True, kw_only=True, tag="timed_draw"):
    """An order: draw these samples, at most `slots` at once, and time each step."""

    requests: list[SampleRequest]
    slots: int
    most_s: float  # without waits for a core; then the samples that are left are handed over as they are
    most_steps: int
    begin_s: float | None = None  # samples begin until then, so that those begun may end; None: all begin


class StepTable(msgspec.Struct, kw_only=True, tag="step_table"):
    """The steps of a draw: an entry in each list for each step."""

    samples: list[int] = []  # that got a token
    context: list[int] = []  # tokens that they attend to, all together
    begun: list[int] = []  # of them, those that got their first one
    prompt: list[int] = []  # tokens of the prompts of these, without those that others had computed
    ended: list[int] = []
    seconds: list[float] = []  # for one token of each sample, without waits for a core
    waited: list[float] = []
    busy_cores: float = 0.0

    @property
    def disturbed(self) -> float:
        """The share of the time in which the engine waited for a core."""
        waited = sum(self.waited)
        return waited / max(1e-9, waited + sum(self.seconds))


def draw_timed(
    engine: LocalEngine, order: TimedDraw, listen: Callable[[], object] = lambda: None
) -> tuple[StepTable, list[DrawnAnswer]]:
    """Draw an order's samples, and return its steps and the answers; those without a finish are cut off.

    `listen`: done with each step, as an engine process looks for orders there.
    """
    waiting = deque(order.requests)
    prompts = {request.id: len(request.prompt) for request in order.requests}
    tokens: dict[str, int] = {}
    table, answers, watch = StepTable(), [], WorkWatch()
    noted = engine.pace().shared
    until = time.monotonic() + WAITING * order.most_s
    begin_s = order.most_s if order.begin_s is None else order.begin_s
    while (
        ((waiting and watch.seconds < begin_s) or tokens) and len(table.seconds) < order.most_steps
        and watch.seconds < order.most_s and time.monotonic() < until
    ):  # fmt: skip
        fresh = []
        while waiting and len(tokens) < order.slots and watch.seconds < begin_s:
            fresh.append(request := waiting.popleft())
            tokens[request.id] = 0
        watch.begin()
        for request in fresh:
            engine.submit(request)
        listen()
        done = engine.step(0.0)
        took = watch.end()
        after = engine.unfinished()
        _note(table, prompts, tokens, after, done, took)
        shared = min(table.prompt[-1], engine.pace().shared - noted)
        table.prompt[-1] -= shared
        noted += shared
        answers += done
        tokens = {name: after[name] for name in tokens if name in after}
    answers += engine.hand_over(list(tokens))  # as far as they have come
    table.busy_cores = watch.busy_cores
    return table, answers


def _note(
    table: StepTable, prompts: dict[str, int], before: dict[str, int], after: dict[str, int],
    done: list[DrawnAnswer], took: WorkTime,
) -> None:  # fmt: skip
    """Add a step to the table. If samples got several tokens, its time is that for one of each."""
    now = after | {one.id: len(one.tokens) for one in done}
    samples = context = drawn = begun = prompt = 0
    for name, had in before.items():
        if not (got := now.get(name, had) - had):
            continue
        samples += 1
        drawn += got
        context += prompts[name] + had
        if not had:
            begun += 1
            prompt += prompts[name]
    table.samples.append(samples)
    table.context.append(context)
    table.begun.append(begun)
    table.prompt.append(prompt)
    table.ended.append(len(done))
    table.seconds.append(took.seconds * samples / max(1, drawn))
    table.waited.append(took.waited_s)
