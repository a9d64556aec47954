"""A whole generator on the bus in memory: assignments in, samples out, and what it says of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.roles.context import Stopped
from infra.roles.turns import LearnersLocks
from infra.weights.patch import PatchFile
from infra.weights.weights_error import WeightsError
from producers import generator
from producers.engines.engine import EngineError, Installed, SampleRequest
from producers.engines.remote import RemoteEngine
from producers.engines.without_model import Clock, RealClock, ReplayEngine
from producers.stopping import Stopping
from schemas.identity import sample_id
from schemas.messages import GeneratorReport, Part, Sample
from tests.factories import make_context, make_spec
from tests.generators import Rewards, Running
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

LENGTH, STEP_S = 5, 0.002
ENDLESS = "0000007-01"


def _length(request: SampleRequest) -> int:
    return 10**9 if request.id == ENDLESS else LENGTH


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))  # for the locks of turns
    started: list[Running] = []

    def make(engine: type[ReplayEngine] = ReplayEngine, **sections: Any) -> Running:
        spec = make_spec(generator={"slots": 2}, **sections)
        bell = threading.Event()
        replay = engine(np.full(3, STEP_S), _length, RealClock(bell))
        started.append(Running(make_context(spec, tmp_path, role="generator"), replay, bell))
        return started[-1]

    yield make
    for one in started:
        one.stop()


def test_makes_what_is_assigned_and_says_which_weights_made_it(start: Callable[[], Running]) -> None:
    running = start()
    running.assign(prompt(0), prompt(1, problem='{"bad": 1}'), start="of a process before")
    running.assign(prompt(0), prompt(1, problem='{"bad": 1}'))
    running.assign(prompt(0))  # a dispatcher that starts anew may give it again
    root = running.announce(0)
    wait_until(lambda: len(running.read("samples", Sample)) >= 4, what="four samples")
    running.stop()
    samples = {(sample.group, sample.index): sample for sample in running.read("samples", Sample)}
    assert len(running.read("samples", Sample)) == len(samples) == 4
    for (group, _), sample in samples.items():
        assert sample.roots == [root] and sample.versions.tolist() == [0]
        assert sample.true_length == LENGTH and sample.generator == running.context.name
        assert sample.reward_error == ("it is bad" if group else "")
        assert sample.reward == 1.0 or group
    assert running.context.heart.counters["failed_rewards"] == 2
    assert running.context.heart.message().trouble in {
        f"sample {name} has no reward: it is bad" for name in ("0000001-00", "0000001-01")
    }


def test_reports_what_it_has_gives_back_and_leaves(start: Callable[[], Running]) -> None:
    running = start()
    running.assign(prompt(8), prompt(9))  # of weights that are not there
    names = [f"{group:07d}-{index:02d}" for group in (8, 9) for index in (0, 1)]

    def held() -> set[int]:
        running.ask()
        return set(running.last_whole.groups.tolist())

    wait_until(lambda: held() == {8, 9}, what="a report of both groups")
    running.assign(withdrawn=(names[2], names[3], "0000077-00"))
    wait_until(lambda: held() == {8}, what="a report without the withdrawn")
    running.stop()
    reports = running.read("generators", GeneratorReport)
    assert [name for report in reports for name in report.returned] == names[2:]
    assert (reports[-1].tokens == -1).all() and reports[-1].leaving and not reports[0].leaving
    assert reports[0].batches == [1, 2] and reports[0].version == -1
    assert isinstance(running.ended[0], Stopped) and running.rewards.closed


def test_it_can_be_told_to_stop_while_its_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting(RemoteEngine):
        """No report of it ever comes."""

        def open(self) -> RemoteEngine:
            context.stop.set()
            return self

    context = make_context(make_spec(deadlines={"start_s": 5}), tmp_path, role="generator")
    monkeypatch.setattr(generator, "RemoteEngine", Starting)
    monkeypatch.setattr(generator, "RewardPool", lambda task: Rewards())
    monkeypatch.setattr(generator, "stopping_of", lambda model, spec: Stopping(str))
    with pytest.raises(Stopped):
        generator.body(context)


COLOCATED = {"kind": "colocated"}


class Slow(ReplayEngine):
    """Takes a fifth of a second for a sample."""

    def __init__(self, seconds: np.ndarray, length_of: Callable[[SampleRequest], int], clock: Clock) -> None:
        super().__init__(20 * seconds, length_of, clock)


def test_samples_share_a_request_while_half_of_the_slots_draw(
    start: Callable[[], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_HOLD_S", "_HOLD_IN_SYNC_S"):
        monkeypatch.setattr(generator, name, 1e6)
    running = start()
    running.announce(0)
    running.assign(prompt(7, iteration=0, min_version=0))
    counters = running.context.heart.counters
    wait_until(lambda: counters.get("made"), what="the sample that ends")
    assert not running.read("samples", Sample)
    running.move(ENDLESS)
    wait_until(lambda: running.read("samples", Sample), what="the sample, as nothing is drawn any more")


def test_in_sync_mode_it_draws_what_the_weights_may_draw_before_it_rests(
    start: Callable[..., Running],
) -> None:
    running = start(Slow, placement=COLOCATED)
    learner = LearnersLocks(running.context)
    running.announce(0)
    running.assign(prompt(0), prompt(1), prompt(9))
    wait_until(lambda: running.engine.unfinished(), what="its first tokens")
    learner.take()
    wait_until(lambda: len(running.read("samples", Sample)) == 4, what="all that version 0 may draw")
    running.announce(2)
    wait_until(lambda: running.context.heart.message().waits_for, what="its wait")
    said = running.context.heart.message()
    assert (said.waits_for, said.unblocked_by) == ("the learner's turn to end", "trainer")
    assert not running.engine.unfinished() and "wait: the other's turn" in said.causes
    learner.pass_on(lambda: None)
    wait_until(lambda: len(running.read("samples", Sample)) == 6, what="the samples of version 2")


def test_in_async_mode_it_rests_at_once_and_goes_on_where_it_was(start: Callable[..., Running]) -> None:
    algorithm = {"mode": "async", "staleness": 1.0}
    running = start(placement=COLOCATED, algorithm=algorithm, deadlines={"progress_s": 1.0})
    learner = LearnersLocks(running.context)
    running.announce(1)
    running.assign(prompt(7))
    wait_until(lambda: running.engine.unfinished().get(ENDLESS, 0) > 3, what="some tokens of the endless")
    learner.take()
    tokens = running.engine.unfinished()[ENDLESS]
    running.assign(prompt(4))
    running.ask()
    wait_until(lambda: 4 in running.last_whole.groups, what="a report of what came meanwhile")
    assert running.engine.unfinished() == {ENDLESS: tokens}
    learner.pass_on(lambda: None)
    wait_until(lambda: running.engine.unfinished()[ENDLESS] > tokens, what="more tokens")
    learner.take()
    wait_until(lambda: running.ended, what="its end")
    said = str(running.ended[0])
    assert "for the learner's turn to end without progress; the trainer would unblock it" in said


def test_one_that_is_told_to_leave_hands_over_what_it_has_begun(start: Callable[[], Running]) -> None:
    running = start()
    running.announce(0)
    wait_until(lambda: running.context.heart.counters.get("version") == 0, what="version 0")
    running.announce(1)
    running.assign(prompt(7))

    def made() -> int:
        running.ask()
        return int(running.last_whole.tokens.max(initial=-1))

    wait_until(lambda: made() > LENGTH, what="some tokens")
    running.stop()
    (part,) = running.read("parts", Part)
    assert sample_id(part.group, part.index) == ENDLESS and part.versions.tolist() == [1]
    assert part.tokens.size == part.logprobs.size > LENGTH
    assert len(running.read("samples", Sample)) == 1
    last = running.read("generators", GeneratorReport)[-1]
    assert last.leaving and last.handed == 1 and not last.groups.size


class Tampered(ReplayEngine):
    """Holds other weights than it was given from version 1 on, and says so when it is asked to."""

    installs = 0
    says = threading.Event()

    def install(self, *, recompute: bool) -> Installed:
        installed = super().install(recompute=recompute)
        self.installs += 1
        if self.installs > 1:
            self._model["w"].data[0] ^= 1
        return installed

    def digests(self) -> dict[str, str] | None:
        return super().digests() if self.installs < 2 or self.says.is_set() else None


def test_an_engine_that_holds_other_weights_is_not_used(start: Callable[..., Running]) -> None:
    running = start(Tampered)
    running.announce(0)
    running.assign(prompt(0))
    wait_until(lambda: len(running.read("samples", Sample)) >= 2, what="the samples of version 0")
    running.announce(1)
    wait_until(lambda: running.engine.installs == 2, what="version 1 in the engine")
    running.assign(prompt(7))

    def held() -> dict[tuple[int, int], int]:
        running.ask()
        report = running.last_whole
        keys = zip(report.groups.tolist(), report.indexes.tolist(), strict=True)
        return dict(zip(keys, report.tokens.tolist(), strict=True))

    wait_until(lambda: held().get((7, 0)) == LENGTH, what="a report of the sample that is held back")
    running.move("0000007-00", ENDLESS)
    running.assign(prompt(9))
    wait_until(lambda: (9, 0) in held(), what="a report of what came behind the move")
    assert held()[7, 1] > 0, "it is not handed over"
    Tampered.says.set()
    wait_until(lambda: running.ended, what="its end")
    assert isinstance(running.ended[0], WeightsError) and "does not hold version 1" in str(running.ended[0])
    samples = running.read("samples", Sample)
    assert len(samples) == 2 and all(sample.versions.tolist() == [0] for sample in samples)
    assert running.read("parts", Part) == []


def test_a_replay_engine_takes_only_a_patch_of_what_it_holds() -> None:
    engine = ReplayEngine(np.full(3, STEP_S), lambda request: LENGTH, RealClock(threading.Event()))
    engine.prepare(PatchFile({}, {}, since="another", root="b"))
    with pytest.raises(EngineError, match="the patch is for the weights another; the engine holds None"):
        engine.install(recompute=False)
    engine.submit(SampleRequest("a", [1], 9, 0, 1.0))
    assert list(engine.unfinished()) == ["a"]


def test_waiting_for_a_replay_engine_ends_with_the_bell() -> None:
    bell = threading.Event()
    engine = ReplayEngine(np.full(3, 1e6), lambda request: LENGTH, RealClock(bell))
    engine.submit(SampleRequest("a", [1], 9, 0, 1.0))
    bell.set()
    assert engine.step(1e6) == []
