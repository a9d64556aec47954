"""Reports: no more than has changed, and all when somebody asks."""

from __future__ import annotations

from pathlib import Path

from infra.bus import read_all
from infra.roles.context import RoleContext
from producers.dispatch import beat_s
from producers.engines.engine import Pace
from producers.generator_reports import GeneratorReports, GeneratorState
from schemas.messages import GeneratorReport
from schemas.wire import decode
from tests.factories import make_context, make_spec

DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Reports:
    """A generator's reports by a clock of ours."""

    def __init__(self, folder: Path, *, held: int = 0, silence_s: float = 10.0) -> None:
        spec = make_spec(generator={"slots": 256}, dispatch={"silence_s": silence_s})
        self.context: RoleContext = make_context(spec, folder, role="generator")
        self.clock = Clock()
        self.reporting = GeneratorReports(self.context, "1", self.clock)
        self.pace = Pace([1, 2, 4, 256], [0.01, 0.011, 0.012, 0.05])
        self.held = [((number, 0), 5) for number in range(held)]
        self._seen = 0

    def state(self) -> GeneratorState:
        return GeneratorState(self.pace, 0, self.held)

    def run(self, seconds: float, every_s: float = 0.2) -> list[GeneratorReport]:
        """What it says in that time."""
        until = self.clock.time + seconds
        while self.clock.time < until:
            self.clock.time += every_s
            self.reporting.report(self.state)
        return self.fresh()

    def fresh(self) -> list[GeneratorReport]:
        records = read_all(self.context.bus, self.context.topics.generators, deadline_s=5)
        found = [decode(record.value, GeneratorReport) for record in records[self._seen :]]
        self._seen = len(records)
        return found

    @property
    def bytes(self) -> int:
        records = read_all(self.context.bus, self.context.topics.generators, deadline_s=5)
        return sum(len(record.value) for record in records)


def test_a_busy_generator_says_little(tmp_path: Path) -> None:
    reports = Reports(tmp_path, held=300)
    reports.run(600)
    a_day = reports.bytes / 600 * DAY_S
    assert a_day < 50e6, f"{a_day / 1e6:.0f} MB a day"
    assert all(now.sent_at >= 0 for now in reports.fresh())


def test_it_is_heard_often_enough_not_to_be_taken_for_gone(tmp_path: Path) -> None:
    for silence_s in (0.4, 2.0, 10.0, 600.0):
        reports = Reports(tmp_path / str(silence_s), silence_s=silence_s)
        found = reports.run(20 * silence_s, every_s=silence_s / 100)
        assert len(found) >= 20 * 3
        assert beat_s(silence_s) <= silence_s / 3
        assert not any(one.whole for one in found[1:]), "nothing is new"


def test_a_curve_is_said_when_it_changes(tmp_path: Path) -> None:
    reports = Reports(tmp_path)
    first, *others = reports.run(30)
    assert first.batches == [1, 2, 4, 256] and first.whole
    assert others and not any(one.batches for one in others)
    reports.pace = Pace([1, 2, 4, 256], [0.0101, 0.011, 0.012, 0.05])
    assert not any(one.batches for one in reports.run(30)), "that is hardly another one"
    reports.pace = Pace([1, 2, 4, 256], [0.02, 0.021, 0.022, 0.06])
    assert len([one for one in reports.run(30) if one.batches]) == 1


def test_all_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    reports = Reports(tmp_path, held=3)
    reports.run(5)
    reports.reporting.tell()
    (one,) = reports.run(0.4)
    assert one.whole and one.groups.tolist() == [0, 1, 2] and one.batches == [1, 2, 4, 256]


def test_what_is_given_back_is_said_at_once(tmp_path: Path) -> None:
    reports = Reports(tmp_path, held=3)
    reports.run(5)
    reports.reporting.gives_back(["0000001-00"])
    (one,) = reports.run(0.4)
    assert one.returned == ["0000001-00"]
    assert not any(later.returned for later in reports.run(10))


def test_what_it_has_is_said_now_and_then_while_it_works(tmp_path: Path) -> None:
    reports = Reports(tmp_path, held=256)
    found = [one for one in reports.run(300) if one.whole]
    assert 4 <= len(found) <= 60
    assert all(one.groups.size == 256 for one in found)
    reports.reporting.report(reports.state, leaving=True)
    (last,) = reports.fresh()
    assert last.leaving
