"""Run records."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import runs
from infra.keys import KeysError, ring_from_env
from infra.memory_bus import MemoryBus
from infra.ownership import NotOurTopics, check_owner, claim
from infra.stores.opening import open_store
from infra.stores.store import Store, StoreError
from infra.stores.store_identity import identify, identity_of
from schemas.runspec import RunSpec
from schemas.topics import Topics
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


def test_a_record_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}")
    record = runs.create(store, make_spec(), bootstrap_servers="k", model="m")
    monkeypatch.setattr(runs, "_LARGEST", 64)
    with pytest.raises(runs.RunError, match=r"run\.json is not a run record: it has more than 64 bytes"):
        runs.find(store, record.id)


def test_a_number_whose_topics_are_there_is_taken(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    left = ["test-3.ledger", "test-x.ledger", "test.more-7.ledger", "other-9.samples"]
    assert runs.create(store, make_spec(), bootstrap_servers="k", model="m", topics=left).id == "test-4"


def test_the_newest_run_is_found_beside_one_of_another_version(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert runs.newest_run(store) is None
    record = runs.create(store, make_spec(), bootstrap_servers="k", model="m")
    store.put("runs/test-2/run.json", b'{"id": "test-2", "what": "is this"}')
    assert runs.newest_run(store) == record


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


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key to sign with, which is trusted; and one that is not."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("own", "other"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / name).write_bytes(private)
        (tmp_path / f"{name}.pub").write_bytes(public)
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(tmp_path / "own"))
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", str(tmp_path / "own.pub"))
    return tmp_path


def make(folder: Path) -> tuple[Store, runs.RunRecord]:
    store = open_store(f"file://{folder}/store")
    return store, runs.create(store, make_spec(), bootstrap_servers="k", model="m")


def test_a_record_is_signed_and_a_changed_one_refused(keys: Path) -> None:
    store, record = make(keys)
    assert runs.find(store, record.id).identity == record.identity
    resumed = runs.resume(store, record.id, make_spec(algorithm={"iterations": 9}), bootstrap_servers="k")
    assert runs.find(store, record.id).spec == resumed.spec
    key = f"runs/{record.id}/run.json"
    for name, value in {"model": "/theirs", "bootstrap_servers": "theirs:9092", "signature": None}.items():
        said = json.loads(store.get(key))
        said[name] = value
        store.put("runs/copy/run.json", json.dumps({**said, "id": "copy"}).encode())
        before = store.get(key)
        store.put(key, json.dumps(said).encode())
        with pytest.raises(KeysError, match=r"run\.json is (not signed|signed by none)"):
            runs.find(store, record.id)
        store.put(key, before)
    with pytest.raises(KeysError, match=r"copy/run\.json is not signed"):
        runs.find(store, "copy")
    store.put("runs/test-9/run.json", store.get(key))  # signed, but for another run
    with pytest.raises(runs.RunError, match=r"is the record of run test-1, not of test-9"):
        runs.find(store, "test-9")


def test_a_record_of_somebody_else_is_refused(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(keys / "other"))
    store, record = make(keys)
    with pytest.raises(KeysError, match="signed by none of the keys in STREAMRL_TRUSTED_KEYS"):
        runs.find(store, record.id)


def test_a_run_that_nobody_would_believe_is_not_made(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMRL_SIGNING_KEY")
    with pytest.raises(runs.RunError, match="test-1 can't be written down unsigned"):
        make(keys)
    assert runs.runs_of(open_store(f"file://{keys}/store")) == []


def test_a_signature_is_for_one_kind_of_thing(keys: Path) -> None:
    ring = ring_from_env()
    signature = ring.sign(b"the same bytes", "run")
    ring.verify(b"the same bytes", signature, "it", "run")
    for kind in ("checkpoint", ""):
        with pytest.raises(KeysError, match="it is signed by none"):
            ring.verify(b"the same bytes", signature, "it", kind)


def test_a_run_has_an_identity_and_knows_its_store(tmp_path: Path) -> None:
    store, record = make(tmp_path)
    other_store, other = make(tmp_path / "other")
    assert record.id == other.id and record.identity and record.identity != other.identity
    assert record.store_id == identity_of(store) != identity_of(other_store)


def test_a_run_is_not_resumed_in_a_store_that_is_not_its_own(tmp_path: Path) -> None:
    store, record = make(tmp_path)
    other = open_store(f"file://{tmp_path}/other")
    identify(other)
    other.put(f"runs/{record.id}/run.json", store.get(f"runs/{record.id}/run.json"))
    with pytest.raises(StoreError, match="is not the one that this run began in"):
        runs.resume(other, record.id, make_spec(), bootstrap_servers="k")


def test_topics_belong_to_the_run_that_claimed_them_first(tmp_path: Path) -> None:
    _, mine = make(tmp_path)
    _, theirs = make(tmp_path / "other")
    bus, topics = MemoryBus(), Topics(mine.id, 2)
    bus.create_topics(topics.all())
    check_owner(bus, mine, topics)  # nobody's
    bus.append(topics.owner, 0, b"x", b"garbage")
    for _ in range(2):  # a run is resumed
        claim(bus, mine, topics)
        check_owner(bus, mine, topics)
    for refused in (claim, check_owner):
        with pytest.raises(NotOurTopics, match=rf"topics test-1\.\* .* in the store {mine.store}; this one"):
            refused(bus, theirs, topics)
    assert len(bus.log(topics.owner)[0]) == 2
