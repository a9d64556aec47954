"""Generators that a run calls as flow runs of a Prefect deployment, and cancels again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.states import Pending, Running, Scheduled

from flows.balancing.staff import CannotChange
from flows.flow_runs import called_generators
from flows.flow_runs.called_generators import CalledGenerators, called_for
from infra.runs import RunRecord
from schemas.balancing import BalanceSection
from tests.factories import make_context, make_spec


class Server:
    """A Prefect server, as far as these calls need one."""

    def __init__(self) -> None:
        self.called: list[tuple[str, dict[str, Any], list[str]]] = []
        self.found: list[SimpleNamespace] = []
        self.states: list[tuple[str, str]] = []
        self.asked: dict[str, Any] = {}
        self.error: Exception | None = None

    def run_deployment(self, name: str, *, parameters: dict[str, Any], timeout: int, tags: list[str]) -> None:
        if self.error is not None:
            raise self.error
        self.called.append((name, parameters, tags))

    @contextmanager
    def get_client(self, *, sync_client: bool) -> Iterator[Server]:
        if self.error is not None:
            raise self.error
        yield self

    def read_flow_runs(self, **asked: Any) -> list[SimpleNamespace]:
        self.asked = asked
        return self.found[: asked["limit"]]

    def set_flow_run_state(self, number: str, state: Any) -> None:
        self.states.append((number, state.type.value))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(called_generators, "run_deployment", server.run_deployment)
    monkeypatch.setattr(called_generators, "get_client", server.get_client)
    return server


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return make_context(make_spec(placement={"sites": {"far": {"relays": 1}}}), tmp_path).record


def test_it_calls_the_deployment_with_the_run_and_its_store(server: Server, record: RunRecord) -> None:
    CalledGenerators("join-run/spare", record).grow()
    expected = {"run": "test-1", "store": record.store, "generators": 1}
    assert server.called == [("join-run/spare", expected, ["balance:test-1"])]


def test_none_is_called_while_the_last_one_waits_for_a_worker(server: Server, record: RunRecord) -> None:
    spare = CalledGenerators("join-run/spare", record)
    server.found = [SimpleNamespace(id="a", state=Scheduled())]
    with pytest.raises(CannotChange, match="join-run/spare that was called last has not begun: has its work"):
        spare.grow()
    assert not server.called
    server.found = [SimpleNamespace(id="a", state=Running())]
    spare.grow()
    assert len(server.called) == 1


@pytest.mark.parametrize(("site", "more"), [("far", {"relays": 0}), ("other", {})])
def test_a_site_that_is_there_has_its_relays(
    server: Server, record: RunRecord, site: str, more: dict[str, int]
) -> None:
    CalledGenerators(f"sync-weights/{site}", record).grow()
    (_, asked, _), *_ = server.called
    assert asked == {"run": "test-1", "store": record.store, "generators": 1, "site": site, **more}


@pytest.mark.parametrize(("state", "becomes"), [(Running(), "CANCELLING"), (Pending(), "CANCELLED")])
def test_the_one_that_was_called_last_is_cancelled(
    server: Server, record: RunRecord, state: Any, becomes: str
) -> None:
    server.found = [SimpleNamespace(id="b", state=state), SimpleNamespace(id="a", state=Running())]
    CalledGenerators("join-run/spare", record).shrink()
    assert server.states == [("b", becomes)]
    assert server.asked["flow_run_filter"].tags.all_ == ["balance:test-1"]


def test_what_fails_is_said_and_does_not_end_the_run(server: Server, record: RunRecord) -> None:
    spare = CalledGenerators("join-run/spare", record)
    with pytest.raises(CannotChange, match="no flow run of join-run/spare is left"):
        spare.shrink()
    server.error = ConnectionError("refused")
    with pytest.raises(CannotChange, match="join-run/spare can't be called: refused"):
        spare.grow()
    with pytest.raises(CannotChange, match="no generator can be cancelled: refused"):
        spare.shrink()
    server.error = ObjectNotFound(Exception("404"))
    with pytest.raises(CannotChange, match="there is no Prefect deployment join-run/spare"):
        spare.grow()


def test_who_is_called(record: RunRecord) -> None:
    assert called_for(record, None) is None
    assert called_for(record, BalanceSection(most=2)) is None
    assert called_for(record, BalanceSection(most=2, deployment="join-run/spare", dry=True)) is None
    assert called_for(record, BalanceSection(most=2, deployment="join-run/spare")) is not None
