"""Who is started again, who is not, and when a run is done."""

from pathlib import Path

import pytest

from flows import crew as crew_module
from flows.crew import Crew
from flows.request import RunFailed
from flows.workers import FEEDER, GENERATOR, TRAINER, Worker
from infra.supervise.team import Ended


class FakeTeam:
    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, name: str, argv: list[str], env: dict[str, str]) -> int:
        self.started.append(name)
        return len(self.started)


def ended(name: str, code: int = 0, signal: int = 0, last: str = "") -> Ended:
    return Ended(name, 7, code, signal, asked=False, log=Path(f"{name}.log"), last_lines=last)


@pytest.fixture
def team() -> FakeTeam:
    return FakeTeam()


@pytest.fixture
def crew(team: FakeTeam, monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setattr(crew_module, "PAUSES_S", (0.0,))
    workers = [Worker("trainer", TRAINER, [], {}), Worker("feeder", FEEDER, [], {}),
               Worker("generator-0", GENERATOR, [], {})]  # fmt: skip
    found = Crew(team, workers, restarts=2, say=lambda text: None)  # type: ignore[arg-type]
    found.start()
    team.started.clear()
    return found


def test_done_when_trainer_and_feeder_are(crew: Crew) -> None:
    crew.heard(ended("generator-0"))
    crew.heard(ended("feeder"))
    assert not crew.done
    crew.heard(ended("trainer"))
    assert crew.done


def test_who_dies_is_started_again_until_it_is_too_often(crew: Crew, team: FakeTeam) -> None:
    for number in (1, 2):
        crew.heard(ended("generator-0", signal=9))
        crew.start_again()
        assert team.started == ["generator-0"] * number
    with pytest.raises(RunFailed, match=r"died 3 times, the last time: generator-0 .* SIGKILL; its log is"):
        crew.heard(ended("generator-0", signal=9))


def test_the_same_error_twice_is_enough(crew: Crew) -> None:
    crew.heard(ended("trainer", code=1, last="10:00:00 run trainer ERROR no such model"))
    with pytest.raises(RunFailed, match=r"twice of the same: trainer .* exit code 1"):
        crew.heard(ended("trainer", code=1, last="10:00:07 run trainer ERROR no such model"))


def test_deaths_of_a_broker_that_was_away_cost_nothing(crew: Crew, team: FakeTeam) -> None:
    for _ in range(5):
        crew.heard(ended("trainer", code=1, last="10:00:00 Kafka is gone"), excused=True)
        crew.start_again()
    assert team.started == ["trainer"] * 5


def test_a_generator_that_was_done_serves_a_trainer_that_came_back(crew: Crew, team: FakeTeam) -> None:
    crew.heard(ended("generator-0"))
    crew.heard(ended("trainer", signal=11))
    crew.start_again()
    crew.start_again()
    assert team.started == ["trainer", "generator-0"]
