"""Ranks of one engine without a model: all do the same, and whoever fails is named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest

from infra.supervise.children import inherited_descriptors, start_child
from infra.weights.patch import Patch, PatchFile
from producers.engines import engine_end, other_engine_ranks, rank_team
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.far_machine import FarMachine
from producers.engines.leading_rank import LeadingRank
from producers.engines.other_engine_ranks import OtherEngineRank
from producers.engines.rank_marks import RankMarks
from producers.engines.rank_messages import Did
from producers.engines.rank_team import RankTeam
from producers.engines.same_work import DrawnSoFar, tokens_digest
from tests.fakes.counting_rank import CountingRank
from tests.waiting import wait_until

Opened = Callable[..., RankTeam]
Made = Callable[..., tuple[LeadingRank, RankTeam]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Teams without rank 0's own engine."""

    def fake(command: list[str], **how: Any) -> Any:
        return start_child([*command[:2], "tests.fakes.counting_rank", *command[3:]], **how)

    monkeypatch.setattr(other_engine_ranks, "start_child", fake)
    teams: list[RankTeam] = []
    monkeypatch.setattr(engine_end, "_tell", engine_end._to_log)  # as it was, afterwards

    def open_one(way: str, ranks: int) -> RankTeam:
        teams.append(RankTeam(EngineOptions(model=way, spec=""), ranks, "test", deadline_s=300).open())
        return teams[-1]

    yield open_one
    for team in teams:
        team.close()


@pytest.fixture
def made(opened: Opened) -> Made:
    def make(way: str = "fine", ranks: int = 3) -> tuple[LeadingRank, RankTeam]:
        team = opened(way, ranks)
        return LeadingRank(cast(Any, CountingRank()), team), team

    return make


def request(number: int, tokens: int = 4) -> SampleRequest:
    return SampleRequest(f"{number}", [1], tokens, 0, 0.0)


def until_ended(engine: LeadingRank, count: int) -> list[DrawnAnswer]:
    found: list[DrawnAnswer] = []
    while len(found) < count:
        found += engine.step()
    return found


def test_all_ranks_do_what_rank_0_does(made: Made) -> None:
    engine, _ = made()
    for number in range(3):
        engine.submit(request(number))
    engine.abort(["1"])
    engine.step()
    (part,) = engine.hand_over(["0", "nobody"])
    assert part.tokens.tolist() == [0]
    patch = PatchFile({}, {}, since=None, root="new")
    engine.prepare(patch.read())
    assert engine.install(recompute=True) == {"2": 1}
    assert engine.digests() == {f"w on rank {rank}": "new" for rank in range(3)}
    engine.sleep()
    engine.wake()
    assert [one.id for one in until_ended(engine, 1)] == ["2"]
    assert engine.unfinished() == {}


def test_weights_that_are_in_no_file_can_not_be_prepared_by_other_ranks(made: Made) -> None:
    engine, _ = made(ranks=2)
    with pytest.raises(EngineError, match="in no file"):
        engine.prepare(Patch(None, "r", {}))


def test_a_rank_that_draws_otherwise_ends_the_engine(made: Made) -> None:
    engine, _ = made("other")
    said: list[EngineError] = []
    engine_end.tell_by(said.append)
    engine.submit(request(0))
    with pytest.raises(EngineError, match=r"rank [12] .* other tokens or logprobs"):
        while True:
            assert not engine.step(), "what ranks don't agree about is not given away"
    assert not said, "rank 0 noticed by itself"


def test_moves_and_installs_are_compared_at_once(made: Made) -> None:
    engine, _ = made("other", ranks=2)
    engine.submit(request(0))
    engine.step()
    with pytest.raises(EngineError, match="other tokens in samples that move: the ranks of the engine don't"):
        engine.hand_over(["0"])


def test_a_rank_that_can_not_start_says_why(made: Made) -> None:
    with pytest.raises(EngineError, match=r"rank [12] of the engine \(process \d+\): there is no such model"):
        made("refuses")


def test_a_rank_whose_step_fails_says_why(made: Made) -> None:
    engine, _ = made("raises", ranks=2)
    engine.submit(request(0))
    with pytest.raises(EngineError, match=r"rank 1 .*failed while it works: ZeroDivisionError"):
        while True:
            engine.step()


def test_a_rank_that_can_not_prepare_weights_says_why(made: Made) -> None:
    engine, _ = made("unprepared", ranks=2)
    patch = PatchFile({}, {}, since=None, root="new")
    with pytest.raises(EngineError, match=r"rank 1 .*: it comes as another dtype"):
        engine.prepare(patch.read())


def test_a_rank_that_is_killed_is_named(made: Made) -> None:
    engine, team = made(ranks=2)
    process = team._others[0].process.pid
    os.kill(process, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"rank 1 .* \(process {process}\) ended with status -9"):
        while True:
            engine.step()


def test_a_rank_that_stands_still_between_steps_is_named(made: Made) -> None:
    engine, team = made(ranks=2)
    team._deadline = 1.0
    os.kill(team._others[0].process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"rank 1 .* took more than 1 s to do what rank 0 has done"):
        engine.install(recompute=False)


def test_rank_0_is_ended_if_it_waits_for_a_rank_that_stands_still(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would be in a sum that never ends."""
    monkeypatch.setattr(rank_team, "_GRACE_S", 0.1)
    engine, team = made("hangs", ranks=2)
    with team.doing("start", marked=False):
        pass
    team._deadline = 1.0
    said: list[EngineError] = []
    ended: list[int] = []
    engine_end.tell_by(said.append)
    monkeypatch.setattr(rank_team.os, "_exit", ended.append)
    for _ in range(2):
        engine.step()
    wait_until(lambda: team._marks.behind(2) == [], what="rank 1's steps: it has done as much as rank 0")
    engine.step()
    with team.doing("make a decode step"):
        wait_until(lambda: ended, what="the end of this process")
        team._error = None  # this test goes on
    assert ended == [1]
    assert "took more than 1 s to make a decode step: rank 1 is behind (0: process " in str(said[0])


def test_why_a_rank_can_not_start_is_told_while_rank_0_waits_for_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs rank 0 would be in a sum, and not notice that the other rank has ended."""
    monkeypatch.setattr(rank_team, "_GRACE_S", 0.1)
    said: list[EngineError] = []
    ended: list[int] = []
    engine_end.tell_by(said.append)
    monkeypatch.setattr(rank_team.os, "_exit", ended.append)
    team = opened("refuses", 2)
    with pytest.raises(EngineError), team.doing("start", marked=False):
        wait_until(lambda: ended, what="the end of this process")
    assert ended == [1] and "rank 1 of the engine" in str(said[0])
    assert "there is no such model" in str(said[0])


def test_rank_0_is_ended_if_a_rank_takes_no_more_acts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for room in the connection, though a thread beside its steps hears of it."""
    monkeypatch.setattr(rank_team, "_GRACE_S", 0.5)
    engine, team = made(ranks=2)
    team._deadline = 1.0
    said: list[EngineError] = []
    ended: list[int] = []
    engine_end.tell_by(said.append)
    monkeypatch.setattr(rank_team.os, "_exit", ended.append)
    os.kill(team._others[0].process.pid, signal.SIGSTOP)

    def beside() -> None:
        wait_until(lambda: team._error, what="the standstill")
        with pytest.raises(EngineError):
            engine.prepare(PatchFile({}, {}, since=None, root="new").read())

    def unblock() -> None:
        wait_until(lambda: ended, what="the end of this process")
        os.kill(team._others[0].process.pid, signal.SIGKILL)

    threads = [threading.Thread(target=work) for work in (beside, unblock)]
    for thread in threads:
        thread.start()
    engine.submit(SampleRequest("0", list(range(1_000_000)), 4, 0, 0.0))
    with pytest.raises(EngineError, match="took more than 1 s to make a decode step: rank 1 is behind"):
        engine.step()
    for thread in threads:
        thread.join()
    assert ended == [1] and len(said) == 1


class Babbling(OtherEngineRank):
    """A rank that may say anything."""

    place = "on 10.0.0.2"

    def __init__(self) -> None:
        super().__init__(1)
        self.acts, self.far = Pipe()
        self.beside, self.far_beside = Pipe()

    def how_it_ended(self) -> str:
        return "ended"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"abc", r"rank 1 of the engine \(on 10\.0\.0\.2\) sends messages that can't be read"),
        (msgspec.msgpack.encode([Did(b"")]), "says Did where Ready is due"),
    ],
)
def test_a_rank_that_says_other_things_is_named(raw: bytes, message: str) -> None:
    team, other, dropped = (
        RankTeam(EngineOptions(model="", spec=""), 2, "test", deadline_s=30),
        Babbling(),
        [],
    )
    team._owner, team._others = threading.get_ident(), [other]
    team._machines = [cast(FarMachine, SimpleNamespace(drop=lambda: dropped.append(1)))]
    team._watch.start()
    other.far.send_bytes(raw)
    with pytest.raises(EngineError, match=message):
        team.await_ready()
    assert len(dropped) == (raw == b"abc"), "no patch on its way may hold up the error"
    other.far_beside.send_bytes(b"abc")
    team._error = None
    with pytest.raises(EngineError, match="sends messages that can't be read"):
        list(team._held("hash weights"))
    team.close()


def test_other_ranks_end_with_the_team(made: Made) -> None:
    _, team = made(ranks=3)
    processes = [other.process.pid for other in team._others]
    team.close()
    assert not any(map(psutil.pid_exists, processes))


def test_marks_say_who_is_behind() -> None:
    marks = RankMarks()
    other = RankMarks(marks.path)
    assert marks.behind(3) == []
    for rank in (0, 2):
        other.begin(rank)
    assert marks.behind(3) == [1]
    marks.begin(1)
    assert marks.behind(3) == []  # all are in it
    for rank in (0, 1):
        marks.end(rank)
    assert other.behind(3) == [2]


def test_the_order_of_answers_does_not_matter() -> None:
    one, two = (
        DrawnAnswer(name, np.arange(3, dtype=np.int32), np.zeros(3, np.float32), "stop") for name in "ab"
    )
    first, second = DrawnSoFar(), DrawnSoFar()
    first.add([one, two])
    second.add([two, one])
    assert first.digest == second.digest != DrawnSoFar().digest
    assert tokens_digest({"a": 1, "b": 2}) == tokens_digest({"b": 2, "a": 1}) != tokens_digest({"a": 12})


def test_what_a_parent_passed_on_may_be_passed_on(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        before = inherited_descriptors()
        assert file.fileno() not in before
        os.set_inheritable(file.fileno(), True)
        assert set(inherited_descriptors()) == {*before, file.fileno()}
