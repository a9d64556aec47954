"""Ranks on other machines that a run calls by Prefect deployments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.flow_runs import called_ranks
from flows.flow_runs.called_ranks import call_for_ranks
from flows.run import phases
from flows.run.host import Host
from infra.runs import RunRecord
from tests.factories import make_context, make_spec


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    ranks = {"elsewhere": 12, "deployments": {"join-run/b": 8, "join-run/c": 4}}
    return make_context(make_spec(trainer={"ranks": 13}, placement={"ranks": ranks}), tmp_path).record


def test_a_deployment_is_called_but_not_while_its_flow_run_goes_on(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    there: dict[str, list[Any]] = {}

    @contextmanager
    def client(**_: object) -> Iterator[Any]:
        def read_flow_runs(flow_run_filter: Any, **_: object) -> list[Any]:
            (tag,) = flow_run_filter.tags.all_
            return there.get(tag, [])

        yield SimpleNamespace(read_flow_runs=read_flow_runs)

    monkeypatch.setattr(called_ranks, "get_client", client)
    monkeypatch.setattr(called_ranks, "run_deployment", lambda name, **asked: called.append((name, asked)))
    assert call_for_ranks(record, "join-run/b", 8)
    tag = f"ranks:{record.id}:join-run/b"
    parameters = {"run": record.id, "store": record.store, "ranks": 8}
    assert called == [("join-run/b", {"parameters": parameters, "timeout": 0, "tags": [tag]})]
    there[tag] = ["a flow run"]
    assert not call_for_ranks(record, "join-run/b", 8)
    assert call_for_ranks(record, "join-run/c", 4)
    assert len(called) == 2


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_host_that_can_not_call_says_what_to_do(record: RunRecord) -> None:
    class Refusing(Host):
        def call_ranks(self, record: RunRecord) -> bool:
            raise ConnectionError("refused")

    for host, why in (
        (Host(), "only Prefect can call placement.ranks.deployments"),
        (Refusing(), "placement.ranks.deployments can't be called: ConnectionError: refused"),
    ):
        screen = Told()
        phases._call_ranks(host, record, screen)  # type: ignore[arg-type]
        assert [said.partition(" --store ")[0] for said in screen.said] == [
            f"{why}. On the machine of {name} say: streamrl join {record.id} --ranks {count}"
            for name, count in (("join-run/b", 8), ("join-run/c", 4))
        ]
