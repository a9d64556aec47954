"""The end of a run, as processes that joined it see it in heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.run.run_end import RunEnd
from infra import runs
from infra.gate import Gate, passed_over
from infra.memory_bus import MemoryBus
from infra.roles import entry
from infra.roles.context import RoleContext, Stopped
from infra.stores.opening import open_store
from producers.tokenizing import TokenizerError
from schemas.messages import Heartbeat
from schemas.topics import Topics
from tests.factories import make_spec
from tests.fakes.fill import fill


@pytest.mark.parametrize(
    ("states", "has_come"),
    [
        ([], False),
        ([("feeder", "feeding"), ("trainer", "training")], False),
        ([("feeder", "feeding"), ("trainer", "training"), ("feeder", "ended")], True),
        ([("feeder", "feeding"), ("generator", "ended"), ("trainer", "ended")], False),
        ([("trainer", "training"), ("feeder", "failed")], False),  # to be started again
        ([("trainer", "training"), ("feeder", "failed"), ("trainer", "ended")], True),  # the run gave up
        ([("feeder", "failed"), ("trainer", "failed")], False),
        ([("feeder", "failed"), ("trainer", "ended"), ("feeder", "starting")], False),  # it was resumed
    ],
)
def test_a_run_ends_with_its_feeder_unless_that_is_started_again(
    states: list[tuple[str, str]], has_come: bool
) -> None:
    end = RunEnd()
    for role, state in states:
        end.hear([fill(Heartbeat, role=role, state=state)])
    assert end.has_come == has_come


@pytest.mark.parametrize(
    ("states", "has_come"),
    [
        ([], False),
        (["training"], False),
        (["training", "ended"], True),
        (["training", "failed"], True),  # the run may have given up: its state says so
        (["training", "ended", "starting"], False),
    ],
)
def test_an_offline_run_ends_with_its_trainer(states: list[str], has_come: bool) -> None:
    """It has no feeder."""
    end = RunEnd(generates=False)
    for state in states:
        end.hear([fill(Heartbeat, role="trainer", state=state)])
    assert end.has_come == has_come


@pytest.mark.parametrize(
    ("error", "state"), [(None, "ended"), (Stopped(), "ended"), (TokenizerError("none"), "failed")]
)
def test_the_last_heartbeat_says_whether_an_error_ended_the_process(
    error: Exception | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: RoleContext) -> None:
        context.heart.working("stepping")
        if error is not None:
            raise error

    bus, store = MemoryBus(), f"file://{tmp_path}"
    record = runs.create(open_store(store), make_spec(), bootstrap_servers="k", model="m", run_id="test-1")
    topics = Topics(record.id, record.spec.lengths.classes)
    bus.create_topics(topics.all())
    monkeypatch.setattr(entry.signal, "signal", lambda *_: None)
    monkeypatch.setattr(entry, "check_owner", lambda *_: None)
    monkeypatch.setattr(entry, "connect_with_archive", lambda *_, **__: bus)
    entry.run_role("trainer", body, ["--store", store, "--run", "test-1"])
    reader = bus.reader(topics.status)
    last = list(Gate(Heartbeat, record.id, passed_over).messages(reader.poll(0.0)))[-1]
    assert (last.state, last.is_last) == (state, True)
    assert last.causes["stepping"] >= 0
    assert set(last.causes) == {"starting", "stepping", "ended"}
