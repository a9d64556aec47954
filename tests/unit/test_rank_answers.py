"""What rank 0 makes of the answers of other ranks: of their machines, and of their weights after a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from consumers.ranks import rank_processes
from consumers.ranks.member import RanksApart
from consumers.ranks.rank_processes import RankProcesses
from consumers.ranks.rank_wire import CommandDone
from tests.factories import make_spec

OWN = "torch 2.13.0; AuthenticAMD"


class Answering:
    """A rank of another machine that has answered."""

    def __init__(self, number: int, answer: CommandDone) -> None:
        self.name, self._answer = f"rank {number} (on 10.0.0.{number})", answer

    def reply(self, deadline_s: float) -> CommandDone:
        return self._answer

    def hang_up(self) -> None:
        pass

    def close(self, grace_s: float) -> None:
        pass


@pytest.fixture
def crew_of(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., RankProcesses]:
    monkeypatch.setattr(rank_processes, "kind_of_machine", lambda: OWN)

    def made(*answers: CommandDone) -> RankProcesses:
        spec = make_spec(trainer={"ranks": 1 + len(answers)})
        crew = RankProcesses("nowhere", spec, run="test-1", log=logging.getLogger("test"))
        members: Any = [Answering(number, answer) for number, answer in enumerate(answers, 1)]
        crew._members += members
        request.addfinalizer(crew.close)
        return crew

    return made


def test_machines_of_other_kinds_are_named_in_one_warning(
    crew_of: Callable[..., RankProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    crew_of(*(CommandDone(machine=kind) for kind in (OWN, "GenuineIntel", OWN, "GenuineIntel"))).ready()
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "bits may differ from those of machines of one kind: rank 0 computes on torch 2.13.0; AuthenticAMD, "
        "and rank 2 (on 10.0.0.2), rank 4 (on 10.0.0.4) on GenuineIntel"
    )


def test_machines_of_one_kind_give_no_warning(
    crew_of: Callable[..., RankProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    crew_of(CommandDone(machine=OWN), CommandDone(machine=OWN)).ready()
    assert not caplog.records


def test_ranks_whose_weights_are_no_longer_those_of_rank_0_are_named(
    crew_of: Callable[..., RankProcesses],
) -> None:
    largest = 2**64 - 1
    crew_of(CommandDone(weights=largest), CommandDone(weights=largest)).check_weights(largest, 7)
    crew_of(CommandDone()).check_weights(0, 7)  # as with a learner that takes no digests
    crew = crew_of(CommandDone(weights=5), CommandDone(weights=6), CommandDone(weights=4))
    with pytest.raises(RanksApart) as caught:
        crew.check_weights(5, 7)
    assert str(caught.value).startswith(
        "after optimizer step 7 the weights of rank 2 (on 10.0.0.2), rank 3 (on 10.0.0.3) are no longer "
        "rank 0's"
    )
