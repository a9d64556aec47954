"""Ranks that a launcher starts, such as torchrun: its numbers, and what it may not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from consumers.ranks import far_rank
from flows.cli import app
from flows.run.commands import RanksHere, launched_as, ranks_here
from infra.ranks.launcher import WrongLaunch, local_rank, processes_everywhere, processes_here
from tests.factories import make_context, make_spec

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process_without_a_number() -> None:
    assert (local_rank(), processes_here(), processes_everywhere()) == (None, 1, 1)


@pytest.mark.parametrize("said", ["one", "-1", "1.5", "0x1", "٣", "9" * 5000, "1\x1b[31m"])
def test_a_number_that_is_none_is_said(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, said)
    assert processes_everywhere() == 1
    with pytest.raises(WrongLaunch, match=r"^LOCAL_RANK=.* is not a whole number from 0 on: ") as found:
        launched_as(1)
    assert len(str(found.value)) < 300 and "\x1b" not in str(found.value)
    assert launched_as(0) is None, "generators have no such number"
    monkeypatch.setattr(far_rank, "check_files", lambda _: None)
    with pytest.raises(WrongLaunch, match="LOCAL_RANK"):
        far_rank.body(make_context(make_spec(), tmp_path, role="rank"))
    result = CliRunner().invoke(app, ["join", "test-1", "--ranks", "1", "--wait", "600"])
    assert result.exit_code == 3 and result.stderr.startswith("LOCAL_RANK="), "before it waits"


@pytest.mark.parametrize(
    ("name", "said"), [("LOCAL_WORLD_SIZE", "4"), ("LOCAL_SIZE", "4"), ("LOCAL_RANK", "3")]
)
def test_a_launcher_of_several_processes_starts_one_rank_in_each(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, said)
    assert processes_here() == 4
    assert ranks_here(1, 0, None) == RanksHere(1)
    assert ranks_here(0, 4, 2) == RanksHere(0, 4, 2)
    with pytest.raises(WrongLaunch, match=r"--ranks 4: .* each of them would start 4 .* Say --ranks 1"):
        ranks_here(4, 0, None)


def test_a_launcher_of_one_process_on_each_machine_may_start_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, said in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": " 0 "}.items():
        monkeypatch.setenv(name, said)
    assert ranks_here(4, 0, None) == RanksHere(4)
    assert launched_as(1) == "0"
