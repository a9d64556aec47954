"""Who is started again, who is not, and when a run is done."""

from pathlib import Path

import pytest

from flows.run.commands import ENGINE_RANKS, FEEDER, GENERATOR, RANK, RELAY, TRAINER, Worker
from flows.run.request import LastingFailure, RunFailed
from flows.run.supervision import RunProcesses
from infra.roles.entry import LASTING, REPLACED
from infra.supervise.team import Ended, GuardDied


class FakeTeam:
    def __init__(self) -> None:
        self.started: list[str] = []
        self.running: dict[str, int] = {}
        self.renewed = 0

    def start(self, name: str, argv: list[str], env: dict[str, str]) -> int:
        self.started.append(name)
        self.running[name] = len(self.started)
        return len(self.started)

    def poll(self, wait_s: float) -> list[Ended]:
        lost, self.running = [ended(name, signal=9) for name in self.running], {}
        raise GuardDied("the guard (process 5) was killed by SIGKILL", lost)

    def renew(self) -> None:
        self.renewed += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ended(name: str, code: int = 0, signal: int = 0, last: str = "", error: str = "") -> Ended:
    log = Path(f"{name}.log")
    return Ended(name, 7, code, signal, asked=False, log=log, last_lines=last, error=error)


@pytest.fixture
def team() -> FakeTeam:
    return FakeTeam()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def crew(team: FakeTeam, clock: Clock, said: list[str]) -> RunProcesses:
    workers = [Worker("trainer", TRAINER, [], {}), Worker("feeder", FEEDER, [], {}),
               *(Worker(f"generator-{number}", GENERATOR, [], {}) for number in range(2))]  # fmt: skip
    found = RunProcesses(team, workers, restarts=2, say=said.append, clock=clock)  # type: ignore[arg-type]
    found.start()
    team.started.clear()
    return found


def test_who_was_replaced_is_not_started_again(crew: RunProcesses, team: FakeTeam) -> None:
    """Two flows that start it again and again would end each other's trainers for ever."""
    with pytest.raises(
        LastingFailure,
        match=r"it was started elsewhere, and the run goes on there: trainer .*exit code 4",
    ):
        crew.heard(ended("trainer", code=REPLACED, last="start 3 of the trainer has replaced this one"))
    assert not team.started


def test_done_when_trainer_and_feeder_are(crew: RunProcesses) -> None:
    crew.heard(ended("generator-0"))
    crew.heard(ended("feeder"))
    assert not crew.done
    crew.heard(ended("trainer"))
    assert crew.done


def dies(crew: RunProcesses, team: FakeTeam, name: str, **how: object) -> None:
    team.running.pop(name, None)
    crew.heard(ended(name, **how))  # type: ignore[arg-type]


def test_who_dies_is_started_again_until_it_is_too_often(
    crew: RunProcesses, team: FakeTeam, clock: Clock
) -> None:
    for number in (1, 2):
        dies(crew, team, "trainer", signal=9)
        clock.now += 2.0 * (number - 1)
        crew.start_again()
        assert team.started == ["trainer"] * number
    with pytest.raises(RunFailed, match=r"since it died 3 times within an hour: trainer .* SIGKILL"):
        dies(crew, team, "trainer", signal=9)


def test_restarts_are_counted_within_an_hour_so_that_weeks_of_a_run_may_have_many(
    crew: RunProcesses, team: FakeTeam, clock: Clock
) -> None:
    for _ in range(50):
        dies(crew, team, "trainer", code=1, last="10:00:00 the store was away")
        crew.start_again()
        clock.now += 2000.0
    assert team.started == ["trainer"] * 50


def test_the_pause_before_a_restart_doubles_and_is_short_again_after_a_healthy_time(
    clock: Clock, team: FakeTeam, said: list[str]
) -> None:
    crew = RunProcesses(
        team, [Worker("generator-0", GENERATOR, [], {})], restarts=99, say=said.append, clock=clock
    )  # type: ignore[arg-type]
    crew.start()

    def pause_s() -> float:
        began, count = clock.now, len(team.started)
        dies(crew, team, "generator-0", signal=9)
        while len(team.started) == count:
            crew.start_again()
            clock.now += 1.0
        return clock.now - began - 1.0

    assert [pause_s() for _ in range(11)] == [0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    clock.now += 700.0
    assert pause_s() == 0


def test_a_generator_that_dies_too_often_is_left_out_and_the_run_goes_on(
    crew: RunProcesses, team: FakeTeam, clock: Clock, said: list[str]
) -> None:
    for _ in range(3):
        dies(crew, team, "generator-0", signal=9)
        clock.now += 20.0
        crew.start_again()
        crew.check()
    assert list(crew.left_out) == ["generator-0"]
    assert "died 3 times within an hour" in crew.left_out["generator-0"]
    assert sum("generator-0 is left out" in line for line in said) == 1
    count = len(team.started)
    clock.now += 600.0
    crew.start_again()
    assert team.started[count:] == ["generator-0"], "it is tried again: machines come back"
    clock.now += 700.0
    crew.start_again()
    assert crew.left_out == {} and said[-1] == "generator-0 runs again, and is not left out any more"


def test_one_of_two_generators_with_the_same_error_twice_costs_that_one(
    crew: RunProcesses, team: FakeTeam
) -> None:
    for _ in range(2):
        dies(crew, team, "generator-1", code=1, last="10:00:00 no such device")
        crew.start_again()
    crew.check()
    assert list(crew.left_out) == ["generator-1"]


def test_the_run_ends_when_nobody_can_make_samples_here_or_elsewhere(
    crew: RunProcesses, team: FakeTeam
) -> None:
    for name in ("generator-0", "generator-1"):
        crew.check()
        for _ in range(2):
            dies(crew, team, name, code=1, last="10:00:00 no such device")
            crew.start_again()
    crew.check(others=lambda: True)
    with pytest.raises(
        RunFailed, match=r"no samples can be made.* 2 generators are left out: it ended twice"
    ):
        crew.check(others=lambda: False)


def test_a_killed_guard_costs_its_workers_no_restart(
    crew: RunProcesses, team: FakeTeam, said: list[str]
) -> None:
    for number in (1, 2):
        crew.poll(0.0)
        assert team.running == {} and team.renewed == number
        crew.start_again()
        assert sorted(team.running) == ["feeder", "generator-0", "generator-1", "trainer"]
    assert "the guard (process 5) was killed by SIGKILL; guard and workers are started again" in said
    with pytest.raises(GuardDied):  # but not for ever
        crew.poll(0.0)


def test_a_guard_that_dies_while_a_worker_is_started_loses_none(
    crew: RunProcesses, team: FakeTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(crew, team, "trainer", signal=9)

    def dead(name: str, argv: list[str], env: dict[str, str]) -> int:
        return len(team.poll(0.0))

    with monkeypatch.context() as patch:
        patch.setattr(team, "start", dead)
        crew.start_again()
    assert team.renewed == 1
    crew.start_again()
    assert sorted(team.running) == ["feeder", "generator-0", "generator-1", "trainer"]


def test_the_same_error_twice_is_enough(crew: RunProcesses) -> None:
    crew.heard(ended("trainer", code=1, last="10:00:00 run trainer ERROR no such model"))
    with pytest.raises(RunFailed, match=r"it ended twice with the same last line: trainer .* exit code 1"):
        crew.heard(ended("trainer", code=1, last="10:00:07 run trainer ERROR no such model"))


def test_deaths_of_a_broker_that_was_away_cost_nothing(crew: RunProcesses, team: FakeTeam) -> None:
    for _ in range(5):
        crew.heard(ended("trainer", code=1, last="10:00:00 Kafka is gone"), excused=True)
        crew.start_again()
    assert team.started == ["trainer"] * 5


def test_a_generator_that_was_done_serves_a_trainer_that_came_back(
    crew: RunProcesses, team: FakeTeam
) -> None:
    crew.heard(ended("generator-0"))
    crew.heard(ended("trainer", signal=11))
    crew.start_again()
    crew.start_again()
    assert team.started == ["trainer", "generator-0"]


WRONG_TASK = "task.py: problems('train') failed: OSError: no disk"


@pytest.mark.parametrize("name", ["trainer", "feeder"])
def test_an_error_that_lasts_ends_the_run_at_once_in_one_paragraph(
    name: str, crew: RunProcesses, team: FakeTeam, said: list[str]
) -> None:
    with pytest.raises(LastingFailure) as caught:
        dies(crew, team, name, code=LASTING, error=WRONG_TASK, last="Traceback (most recent call last)")
    assert str(caught.value) == (
        f"{WRONG_TASK}\n({name} ended by this error, and another start would, too; the log is {name}.log)"
    )
    assert caught.value.lasting
    assert not team.started and not said


def test_an_error_that_lasts_of_all_generators_is_said_once(
    crew: RunProcesses, team: FakeTeam, said: list[str]
) -> None:
    dies(crew, team, "generator-0", code=LASTING, error=WRONG_TASK)
    crew.check()
    assert not team.started and len(said) == 1
    dies(crew, team, "generator-1", code=LASTING, error=WRONG_TASK)
    with pytest.raises(LastingFailure) as caught:
        crew.check()
    assert str(caught.value).count(WRONG_TASK) == 1
    assert "(all 2 generators ended by this error" in str(caught.value)
    assert not team.started


def test_the_only_generator_is_not_said_to_be_left_out(team: FakeTeam, clock: Clock, said: list[str]) -> None:
    worker = Worker("generator-0", GENERATOR, [], {})
    crew = RunProcesses(team, [worker], restarts=3, say=said.append, clock=clock)  # type: ignore[arg-type]
    crew.start()
    dies(crew, team, "generator-0", code=LASTING, error=WRONG_TASK)
    with pytest.raises(LastingFailure, match=r"\(generator-0 ended by this error"):
        crew.check()
    assert said == []
    for _ in range(2):
        crew.check(others=lambda: True)
    assert len(said) == 1 and f"ended with exit code 5: {WRONG_TASK}; log: generator-0.log" in said[0]


def test_errors_of_generators_that_differ_are_each_said_once(crew: RunProcesses, team: FakeTeam) -> None:
    dies(crew, team, "generator-0", code=LASTING, error=WRONG_TASK)
    dies(crew, team, "generator-1", code=LASTING, error="no such model")
    with pytest.raises(RunFailed, match=r"no samples can be made") as caught:
        crew.check()
    assert str(caught.value).count(WRONG_TASK) == str(caught.value).count("no such model") == 1


NO_GPU = "--engine-ranks: 2 ranks of an engine need a GPU each, and this machine shows 1"
NOT_NEEDED = "waited 600 s for the generator to need ranks without progress"


def joined(team: FakeTeam, clock: Clock, said: list[str], *roles: str) -> RunProcesses:
    workers = [Worker(f"{role}-{number}", role, [], {}) for number, role in enumerate(roles)]
    crew = RunProcesses(team, workers, restarts=2, say=said.append, clock=clock)  # type: ignore[arg-type]
    crew.start()
    return crew


@pytest.mark.parametrize("role", [RANK, ENGINE_RANKS, RELAY])
def test_what_joined_without_generators_ends_by_an_error_that_lasts(
    role: str, team: FakeTeam, clock: Clock, said: list[str]
) -> None:
    crew = joined(team, clock, said, role)
    crew.check()
    dies(crew, team, f"{role}-0", code=LASTING, error=NO_GPU)
    with pytest.raises(LastingFailure) as caught:
        crew.check()
    assert str(caught.value).startswith(f"{NO_GPU}\n({role}-0 ended by this error") and not said


def test_ranks_alone_end_when_nobody_needs_them_again_and_again(
    team: FakeTeam, clock: Clock, said: list[str]
) -> None:
    crew = joined(team, clock, said, ENGINE_RANKS)
    for _ in range(3):
        crew.check()
        clock.now += 605.0
        dies(crew, team, "engine_ranks-0", code=1, error=NOT_NEEDED)
        crew.start_again()
    with pytest.raises(RunFailed, match=r"nothing goes on here: all 1 processes .* 3 times .*need ranks"):
        crew.check()


def test_ranks_go_on_without_the_generator_that_joined_with_them(
    team: FakeTeam, clock: Clock, said: list[str]
) -> None:
    crew = joined(team, clock, said, RANK, GENERATOR)
    dies(crew, team, "generator-1", code=LASTING, error=WRONG_TASK)
    crew.check()
    assert len(said) == 1 and "generator-1 is left out" in said[0]
    dies(crew, team, "rank-0", code=LASTING, error=NO_GPU)
    with pytest.raises(RunFailed, match=r"nothing goes on here: all 2 processes are left out"):
        crew.check()


def test_ranks_alone_end_only_when_all_are_left_out(team: FakeTeam, clock: Clock, said: list[str]) -> None:
    crew = joined(team, clock, said, RANK, RANK)
    dies(crew, team, "rank-0", code=LASTING, error=NO_GPU)
    crew.check()
    assert len(said) == 1 and "rank-0 is left out" in said[0]
    clock.now += 600.0
    crew.start_again()  # rank-0 is tried again
    dies(crew, team, "rank-1", code=LASTING, error=NO_GPU)
    crew.check()
    dies(crew, team, "rank-0", code=LASTING, error=NO_GPU)
    with pytest.raises(LastingFailure, match=r"\(all 2 processes ended by this error"):
        crew.check()


def test_ranks_of_a_run_that_makes_samples_here_do_not_end_it(
    team: FakeTeam, clock: Clock, said: list[str]
) -> None:
    crew = joined(team, clock, said, RANK, GENERATOR)
    dies(crew, team, "rank-0", code=LASTING, error=NO_GPU)
    crew.check()
    assert crew.left_out and team.running == {"generator-1": 2}
