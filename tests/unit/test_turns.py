"""Turns by locks: never both sides at once, and whoever dies passes its turn on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.files.locks import LockError, SharedLock
from infra.roles.context import Stopped
from infra.roles.turns import EnginesLocks, LearnersLocks, NoTurns, engines_turn, learners_turn
from infra.waiting import WaitedTooLong
from tests.factories import make_context, make_spec
from tests.waiting import wait_until

SPEC = make_spec(placement={"kind": "colocated"}, deadlines={"progress_s": 0.3})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))


def nothing() -> None: ...


class Engine:
    """A generator's side that counts its rests."""

    def __init__(self, folder: Path) -> None:
        self.turn = EnginesLocks(make_context(SPEC, folder, role="generator"))
        self.rests = 0

    def mine(self, *, may_rest: bool = True) -> bool:
        return self.turn.mine(may_rest=may_rest, rest=self._rest)

    def _rest(self) -> None:
        self.rests += 1


def test_engines_share_a_turn_and_the_learner_has_its_own_alone(tmp_path: Path) -> None:
    learner, one, two = LearnersLocks(make_context(SPEC, tmp_path)), Engine(tmp_path), Engine(tmp_path)
    assert one.mine() and two.mine()
    taken = threading.Thread(target=learner.take)
    taken.start()
    wait_until(lambda: not one.mine(), what="one engine at rest")
    assert two.mine(may_rest=False), "it has samples to finish first"
    assert taken.is_alive() and not one.mine()
    assert not two.mine() and (one.rests, two.rests) == (1, 1)
    taken.join(10)
    assert not taken.is_alive() and not one.mine() and (one.rests, two.rests) == (1, 1)
    learner.take()  # it is its turn already
    freed = []
    learner.pass_on(lambda: freed.append(one.mine()))
    assert freed == [False], "memory is given back before the engines wake"
    learner.pass_on(lambda: freed.append(True))
    assert freed == [False] and one.mine() and two.mine()


def test_a_learner_that_waits_too_long_says_who_does_not_rest(tmp_path: Path) -> None:
    context, engine = make_context(SPEC, tmp_path), Engine(tmp_path)
    learner = LearnersLocks(context)
    assert engine.mine()
    with pytest.raises(WaitedTooLong, match=r"for the turn to compute.* the generators would unblock it"):
        learner.take()
    said = context.heart.message()
    assert (said.waits_for, said.unblocked_by) == ("the engines to rest", "generators")
    assert "wait: the other's turn" in said.causes
    second = make_context(SPEC, tmp_path)
    with pytest.raises(WaitedTooLong):
        LearnersLocks(second).take()
    assert second.heart.message().waits_for == "an earlier trainer of this run to end"
    second.stop.set()
    with pytest.raises(Stopped):
        LearnersLocks(second).take()


def test_only_a_colocated_run_takes_turns(tmp_path: Path) -> None:
    context = make_context(make_spec(), tmp_path)
    learner, engine = learners_turn(context), engines_turn(context)
    assert isinstance(learner, NoTurns) and isinstance(engine, NoTurns) and engine.descriptors == ()
    learner.take()
    assert engine.mine(may_rest=True, rest=lambda: pytest.fail("it need not rest"))
    assert isinstance(learners_turn(make_context(SPEC, tmp_path)), LearnersLocks)
    assert not (tmp_path / "home" / "turns" / "none").exists()


def test_two_runs_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    engine = EnginesLocks(make_context(SPEC, tmp_path, role="generator", run="test-2"))
    LearnersLocks(make_context(SPEC, tmp_path)).take()
    assert engine.mine(may_rest=True, rest=nothing)


HOLDER = """
import sys, time
from pathlib import Path
from infra.files.locks import SharedLock
locks = [SharedLock(Path(one), what="it") for one in sys.argv[2:]]
assert all(lock.take(alone=sys.argv[1] == "alone") for lock in locks)
print("held", flush=True)
time.sleep(600)
"""


def holder(how: str, *files: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, how, *map(str, files)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_who_is_killed_in_its_turn_passes_it_on(tmp_path: Path) -> None:
    engine, learner = Engine(tmp_path), LearnersLocks(make_context(SPEC, tmp_path))
    folder = tmp_path / "home" / "turns"
    wanted, working = sorted(folder.iterdir())
    assert (wanted.suffix, working.suffix) == (".wanted", ".working")
    trainer = holder("alone", wanted, working)
    assert not engine.mine()
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert engine.mine()
    engine.turn.close()
    generator = holder("shared", working)
    with pytest.raises(WaitedTooLong):
        learner.take()
    os.kill(generator.pid, signal.SIGKILL)
    generator.communicate()
    learner.take()


def test_a_child_that_inherits_a_lock_holds_it(tmp_path: Path) -> None:
    """An engine process that outlives its generator for a moment may still have the GPU."""
    lock, other = (SharedLock(tmp_path / "lock", what="it") for _ in range(2))
    assert lock.take(alone=False)
    child = subprocess.Popen(["sleep", "600"], pass_fds=[lock.descriptor])
    lock.close()
    assert not other.take(alone=True)
    child.kill()
    child.wait()
    assert other.take(alone=True)
    other.give()
    assert SharedLock(tmp_path / "lock", what="it").take(alone=True)


def test_a_lock_that_can_not_be_had_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockError, match="the turn can't be locked"):
        SharedLock(tmp_path / "file" / "lock", what="the turn")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["take", "pass", "draw", "finish", "draw 2"]), max_size=40))
def test_never_both(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    folder = tmp_path_factory.mktemp("turns")
    learner, engines = LearnersLocks(make_context(SPEC, folder)), (Engine(folder), Engine(folder))
    drawing = [False, False]
    computing = False
    for move in moves:
        if move == "take":
            computing = learner._try()
        elif move == "pass":
            learner.pass_on(nothing)
            computing = False
        else:
            number = int(move == "draw 2")
            drawing[number] = engines[number].mine(may_rest=move != "finish")
        assert not (computing and any(drawing))
    learner.close()
    for engine in engines:
        engine.turn.close()
