"""Run records."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import runs
from infra.store import open_store
from schemas.runspec import RunSpec
from tests.factories import make_spec


def test_each_start_gets_a_number_even_at_the_same_time(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")

    def make(_: int) -> str:
        return runs.create(store, make_spec(), bootstrap_servers="k", model="m").id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(make, range(12)))
    assert sorted(ids) == sorted(f"test-{number}" for number in range(1, 13))
    assert runs.runs_of(store, "test")[-1] == "test-12"


def test_find_names_what_is_there(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    record = runs.create(store, make_spec(), bootstrap_servers="k", model="m")
    assert runs.find(store, record.id) == record
    with pytest.raises(runs.RunError, match=r"no run test-9 .* newest there: test-1"):
        runs.find(store, "test-9")


def test_a_number_whose_topics_are_there_is_taken(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    left = ["test-3.ledger", "test-x.ledger", "test.more-7.ledger", "other-9.samples"]
    assert runs.create(store, make_spec(), bootstrap_servers="k", model="m", topics=left).id == "test-4"


def test_the_newest_run_is_found_beside_one_of_another_version(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert runs.newest(store) is None
    record = runs.create(store, make_spec(), bootstrap_servers="k", model="m")
    store.put("runs/test-2/run.json", b'{"id": "test-2", "what": "is this"}')
    assert runs.newest(store) == record


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        (make_spec(algorithm={"iterations": 9}), True),
        (make_spec(trainer={"checkpoint_every": 5}), True),
        (make_spec(placement={"generators": 2}), True),
        (make_spec(algorithm={"learning_rate": 0.5}), False),
        (make_spec(seed=8), False),
        (make_spec(lengths={"classes": 3}), False),
    ],
)
def test_resume_refuses_what_would_change_what_is_learned(
    tmp_path: Path, changed: RunSpec, allowed: bool
) -> None:
    store = open_store(f"file://{tmp_path}")
    run = runs.create(store, make_spec(), bootstrap_servers="k", model="m").id
    if allowed:
        assert runs.resume(store, run, changed, bootstrap_servers="new").spec == changed
        assert runs.find(store, run).bootstrap_servers == "new"
    else:
        with pytest.raises(runs.RunError, match="must not change what is learned"):
            runs.resume(store, run, changed, bootstrap_servers="new")


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_resume_refuses_a_section_that_was_not_there_or_is_gone(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    store = open_store(f"file://{tmp_path}")
    made = make_spec(model={"lora": {"rank": 4}} if lora is None else {})
    run = runs.create(store, made, bootstrap_servers="k", model="m").id
    with pytest.raises(runs.RunError, match=r"was started with model\.lora\S* = "):
        runs.resume(store, run, make_spec(model={"lora": lora}), bootstrap_servers="k")
