"""Ranks on other machines that a run calls by Prefect deployments."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from flows.flow_runs import called_ranks
from flows.flow_runs.called_ranks import call_for_ranks
from flows.run import rank_calls
from flows.run.host import CannotCall, Host
from flows.run.rank_calls import RankCalls
from infra.runs import RunRecord
from tests.factories import make_context, make_spec
from tests.waiting import wait_until


def refusal(status: int) -> PrefectHTTPStatusError:
    """The answer of a server."""
    request = httpx.Request("POST", "http://127.0.0.1/api/deployments")
    answer = httpx.Response(status, json={"detail": "'runfile' is required"}, request=request)
    return PrefectHTTPStatusError("refused", request=request, response=answer)


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
    tag = f"ranks:{record.id}::join-run/b"
    parameters = {"run": record.id, "store": record.store, "ranks": 8}
    assert called == [("join-run/b", {"parameters": parameters, "timeout": 0, "tags": [tag]})]
    there[tag] = ["a flow run"]
    assert not call_for_ranks(record, "join-run/b", 8)
    assert call_for_ranks(record, "join-run/c", 4)
    assert len(called) == 2
    removed = record.model_copy(update={"identity": "another run"})
    assert call_for_ranks(removed, "join-run/b", 8)


@pytest.mark.parametrize(
    ("deployment", "error", "why"),
    [
        ("join-run/b", ObjectNotFound(None), "there is no Prefect deployment join-run/b"),
        ("train/b", refusal(409), "train/b does not take a run and a number of ranks.*runfile"),
        ("b", None, "b names no flow, as join-run/b does"),
    ],
)
def test_a_deployment_that_can_not_be_called(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, deployment: str, error: Exception | None, why: str
) -> None:
    def refuses(*_: object, **named: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(called_ranks, "get_client", lambda **_: nullcontext())
    monkeypatch.setattr(called_ranks, "open_flow_runs", lambda *_: [])
    monkeypatch.setattr(called_ranks, "run_deployment", refuses)
    with pytest.raises(CannotCall, match=why):
        call_for_ranks(record, deployment, 8)


def test_an_error_of_the_server_is_not_one_of_a_deployment(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **named: object) -> None:
        raise refusal(503)

    monkeypatch.setattr(called_ranks, "get_client", lambda **_: nullcontext())
    monkeypatch.setattr(called_ranks, "open_flow_runs", lambda *_: [])
    monkeypatch.setattr(called_ranks, "run_deployment", fails)
    with pytest.raises(PrefectHTTPStatusError):
        call_for_ranks(record, "join-run/b", 8)


class Told:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_host_that_can_not_call_says_what_to_do(record: RunRecord) -> None:
    class Refusing(Host):
        called = 0

        def call_ranks(self, record: RunRecord, deployment: str, ranks: int) -> bool:
            self.called += 1
            raise ConnectionError("refused")

    refusing = Refusing()
    for host, why in (
        (Host(), "only Prefect can call placement.ranks.deployments"),
        (refusing, "placement.ranks.deployments can't be called: ConnectionError: refused"),
    ):
        screen = Told()
        with RankCalls(host, record, screen):  # type: ignore[arg-type]
            pass
        assert [said.partition(" --store ")[0] for said in screen.said] == [
            f"{why}. On the machine of {name} say: streamrl join {record.id} --ranks {count}"
            for name, count in (("join-run/b", 8), ("join-run/c", 4))
        ]
    assert refusing.called == 1  # each call would wait for the server


def test_one_deployment_that_can_not_be_called_holds_up_no_other(record: RunRecord) -> None:
    called: list[tuple[str, int]] = []

    class Missing(Host):
        def call_ranks(self, record: RunRecord, deployment: str, ranks: int) -> bool:
            if deployment == "join-run/b":
                raise CannotCall("there is no join-run/b")
            called.append((deployment, ranks))
            return True

    screen = Told()
    with RankCalls(Missing(), record, screen):  # type: ignore[arg-type]
        pass
    assert called == [("join-run/c", 4)]
    (said,) = screen.said
    assert said.startswith("there is no join-run/b. On the machine of join-run/b say: streamrl join")


class Jobs(Host):
    """Deployments of which the jobs end as a test wants."""

    def __init__(self) -> None:
        self.goes_on, self.away = set[str](), False
        self.called: list[str] = []

    def call_ranks(self, record: RunRecord, deployment: str, ranks: int) -> bool:
        if self.away:
            raise ConnectionError("refused")
        if deployment in self.goes_on:
            return False
        self.goes_on.add(deployment)
        self.called.append(deployment)
        return True


def test_a_deployment_whose_job_has_ended_is_called_again(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_calls, "LOOK_AGAIN_S", 0.01)
    jobs, screen = Jobs(), Told()
    with RankCalls(jobs, record, screen):  # type: ignore[arg-type]
        assert jobs.called == ["join-run/b", "join-run/c"]
        jobs.goes_on.discard("join-run/c")
        wait_until(lambda: len(screen.said) == 1, what="the call")
        assert jobs.called == ["join-run/b", "join-run/c", "join-run/c"]
        assert screen.said == ["join-run/c had ended, and was called again for 4 ranks"]
    jobs.goes_on.clear()
    wait_until(lambda: not any(one.name == "rank calls" for one in threading.enumerate()), what="its end")
    assert len(jobs.called) == 3


def test_jobs_that_end_soon_are_called_more_and_more_seldom(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(rank_calls.time, "monotonic", lambda: now[0])
    jobs, screen = Jobs(), Told()
    calls = RankCalls(jobs, record, screen)  # type: ignore[arg-type]
    one = calls.call()[0]
    called_at = [0.0]

    def look(times: int, *, ended: bool) -> None:
        for _ in range(times):
            now[0] += rank_calls.LOOK_AGAIN_S
            before = len(jobs.called)
            if ended:
                jobs.goes_on.clear()
            calls.look(one)
            called_at.extend([now[0]] * (len(jobs.called) - before))

    look(200, ended=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(called_at)]
    assert pauses[:7] == [30, 60, 120, 240, 480, 900, 900]
    look(40, ended=False)  # this job lives
    look(1, ended=True)
    assert called_at[-1] == now[0]
    jobs.away, said = True, len(screen.said)
    look(100, ended=True)
    assert screen.said[said:] == ["join-run/b can't be called: ConnectionError: refused"]
