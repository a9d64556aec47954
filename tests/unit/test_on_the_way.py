"""Samples on their way: who goes on with them, whatever happens in between."""

from __future__ import annotations

import numpy as np

from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.jobs import SampleJob
from producers.dispatch.on_the_way import GeneratorStart, Moves
from producers.dispatch.policies.longest_first_policy import LongestFirst
from schemas.identity import SampleKey
from schemas.messages import Part
from tests.unit.test_backlog import prompt

A, B, LATER_A = ("a", "1"), ("b", "1"), ("a", "2")


def part(group: int, generator: str = "a", tokens: int = 3) -> Part:
    return Part(
        run="test-1", group=group, index=0, tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32), version_starts=np.zeros(1, np.int32),
        versions=np.array([4], np.int32), roots=["r"], seed=5, generator=generator, started_at=0.0,
        sent_at=0.0,
    )  # fmt: skip


def moving(*groups: int) -> Moves:
    moves = Moves(patience_s=10.0)
    for group in groups:
        moves.begin(SampleJob(prompt(group, min_version=2), 0), A, B, 0.0)
    return moves


def test_what_arrives_goes_on_once_with_what_it_has() -> None:
    moves = moving(1, 2)
    found = moves.arrived(part(1))
    assert found is not None
    target, job = found
    assert target == B and job.key == (1, 0) and job.part == part(1)
    assert job.needs == 4, "older weights would not go on where it was"
    assert moves.arrived(part(1)) is None, "delivered twice"
    assert moves.arrived(part(3)) is None, "of a dispatcher before this one"
    assert moves.arrived(part(2, generator="c")) is None


def test_what_is_made_does_not_move() -> None:
    moves = moving(1)
    moves.finished((1, 0))
    moves.finished((7, 0))
    assert moves.arrived(part(1)) is None


def there(*processes: GeneratorStart) -> set[GeneratorStart]:
    return set(processes)


def test_what_a_dead_or_silent_source_had_is_begun_anew() -> None:
    moves = moving(1)
    assert moves.lost(there(A, B).__contains__, 5.0) == []
    lost = moves.lost(there(LATER_A, B).__contains__, 6.0)
    assert [(target, job.key, job.part) for target, job in lost] == [(B, (1, 0), None)]
    assert moves.lost(there(B).__contains__, 6.0) == []
    assert [target for target, _ in moving(1).lost(there(A, B).__contains__, 11.0)] == [B]


def test_one_that_was_not_begun_needs_no_part() -> None:
    moves = moving(1)
    moves.returned((1, 0), B)
    moves.returned((2, 0), A)
    assert moves.lost(there(A, B).__contains__, 1.0) == [], "only its source can give it back"
    moves.returned((1, 0), A)
    assert [(target, job.key, job.part) for target, job in moves.lost(there(A, B).__contains__, 1.0)] == [
        (B, (1, 0), None)
    ]


class Insists(LongestFirst):
    """Wants the same job moved again and again."""

    def take_moves(self) -> list[tuple[SampleKey, str]]:
        return [((1, 0), "b"), ((1, 0), "a")]


def test_a_job_on_its_way_is_not_moved_again() -> None:
    """Else one that nobody has could be sent to and fro for ever."""
    dispatcher = Dispatcher(Insists())
    for name in ("a", "b"):
        dispatcher.join(name, 4, np.full(5, 0.01), 0.0)
    dispatcher.admit([SampleJob(prompt(1), 0)], 0.0)
    assert dispatcher.turn(0.0) == {"a": [SampleJob(prompt(1), 0)]}
    assert [target for _, _, target in dispatcher.moved(1.0)] == ["b"]
    assert dispatcher.moved(2.0) == []
    dispatcher.arrived((1, 0))
    assert [target for _, _, target in dispatcher.moved(3.0)] == ["a"]
    dispatcher.leave("a", 4.0)
    assert dispatcher.turn(4.0) == {"b": [SampleJob(prompt(1), 0)]}
