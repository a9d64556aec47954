"""What a resumed run may change: memory, threads, places, who does what; never what is learned."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from infra import runs
from infra.contents import MODEL, content, contents_of
from infra.resuming import BITS, FREE, KEPT_SETTINGS, OF_FILES, settings
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.stores.store import Store
from schemas.runspec import RunSpec
from schemas.section import is_listed, is_named, section_of
from tests.factories import make_spec


def leaves(kind: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[str]:
    """Every setting that a run file may have."""
    for name, field in kind.model_fields.items():
        inner = section_of(field)
        if inner is None or is_named(field) or is_listed(field):
            yield prefix + (field.alias or name)
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def test_every_setting_says_whether_a_resumed_run_may_change_it() -> None:
    tables = Counter(name for table in (KEPT_SETTINGS, OF_FILES, BITS, FREE) for name in settings(table))
    missing = sorted(set(leaves()) - set(tables))
    assert not missing, f"put these into one of the tables of infra/resuming.py: {missing}"
    assert not sorted(set(tables) - set(leaves())), "these are no settings any more"
    assert {name for name, count in tables.items() if count > 1} == set()


class Begun:
    """A run whose task, problems and model lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: Store = open_store(f"file://{folder}/store")
        self.write(folder / "first")
        self.record: RunRecord = runs.create(
            self.store, self.spec("first"), bootstrap_servers="k", model=str(folder / "first" / "model")
        )

    def write(self, place: Path) -> None:
        (place / "model").mkdir(parents=True)
        (place / "task.py").write_text("def reward(problem, completion): return 1.0\n")
        (place / "problems.jsonl").write_text('{"prompt": "1:"}\n')
        (place / "model" / "config.json").write_text('{"model_type": "qwen2"}')
        (place / "model" / "model.safetensors").write_bytes(bytes(1000))

    def spec(self, place: str, **sections: Any) -> RunSpec:
        at = self.folder / place
        task = {"python": None, "jsonl": str(at / "problems.jsonl"), "reward": f"{at}/task.py:reward"}
        return make_spec(
            **{"task": {**task, **sections.pop("task", {})}, "model": {"path": str(at / "model")}, **sections}
        )

    def resume(self, place: str, said: list[str] | None = None, **sections: Any) -> RunRecord:
        spec = self.spec(place, **sections)
        return runs.resume(
            self.store, self.record.id, spec, bootstrap_servers="k", model=spec.model.path,
            say=(said if said is not None else []).append,
        )  # fmt: skip


@pytest.fixture
def begun(tmp_path: Path) -> Begun:
    return Begun(tmp_path)


@pytest.mark.parametrize(
    ("changed", "bits"),
    [
        ({"generator": {"slots": 8}}, False),
        ({"generator": {"kv_cache_mib": 512}}, False),
        ({"trainer": {"microbatch_tokens": 128}}, True),
        ({"trainer": {"logits_chunk": 64}}, True),
        ({"trainer": {"gradient_checkpointing": True}}, True),
        ({"trainer": {"threads": 2}}, True),
        ({"generator": {"threads": 2}}, True),
        ({"task": {"reward_deadline_s": 60.0}}, False),
        ({"task": {"reward_workers": 4}}, False),
        ({"dispatch": {"silence_s": 60.0}}, False),
        ({"dispatch": {"policy": "round_robin"}}, False),
        ({"deadlines": {"progress_s": 3600}}, False),
        ({"placement": {"sites": {"far": {"generators": 2}}}}, False),
    ],
)
def test_means_may_change(begun: Begun, changed: dict[str, Any], bits: bool) -> None:
    said: list[str] = []
    begun.resume("first", said, **changed)
    assert bool(said) == bits
    if bits:
        (section, names), *_ = changed.items()
        assert f"goes on with other {section}.{next(iter(names))}" in said[0]
        assert "the last bits may differ" in said[0]
    assert runs.find(begun.store, begun.record.id).spec == begun.spec("first", **changed)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 8}, {"sampling": {"temperature": 0.5}}, {"loss": {"kl": 0.1}}, {"lengths": {"classes": 3}}],
)
def test_what_is_learned_may_not(begun: Begun, changed: dict[str, Any]) -> None:
    with pytest.raises(runs.RunError, match=r"was started with .* must not change what is learned"):
        begun.resume("first", **changed)


def test_files_may_move(begun: Begun) -> None:
    begun.write(begun.folder / "second")
    shutil.rmtree(begun.folder / "first")
    record = begun.resume("second")
    assert record.model == str(begun.folder / "second" / "model")
    assert record.spec.task.jsonl == str(begun.folder / "second" / "problems.jsonl")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("task.py", r"other content of task\.reward: .*second/task\.py:reward has been changed"),
        ("problems.jsonl", r"other content of task\.jsonl: .*second/problems\.jsonl"),
        ("model/config.json", r"other content of model\.path: .*second/model"),
        ("model/model.safetensors", r"other content of model\.path: .*second/model"),
    ],
)
@pytest.mark.parametrize("place", ["first", "second"])
def test_other_content_is_refused_by_name(begun: Begun, file: str, named: str, place: str) -> None:
    if place == "second":
        begun.write(begun.folder / "second")
    with (begun.folder / place / file).open("ab") as opened:
        opened.write(b" ")
    with pytest.raises(runs.RunError, match=named.replace("second", place)):
        begun.resume(place)


def test_another_function_of_the_same_file_is_refused(begun: Begun) -> None:
    with pytest.raises(runs.RunError, match=r"other content of task\.reward"):
        begun.resume("first", task={"reward": f"{begun.folder}/first/task.py:another"})


def test_a_file_that_is_gone_is_named(begun: Begun) -> None:
    (begun.folder / "first" / "problems.jsonl").unlink()
    with pytest.raises(
        runs.RunError, match=r"a file for task\.jsonl, but there is none at .*/problems\.jsonl: "
    ):
        begun.resume("first")


def test_of_an_old_run_nothing_is_known_of_its_files(begun: Begun) -> None:
    key = f"runs/{begun.record.id}/run.json"
    said = json.loads(begun.store.get(key))
    for name in ("contents", "identity", "store_id", "signature"):
        del said[name]  # as an older version wrote it
    begun.store.put(key, json.dumps(said).encode())
    begun.write(begun.folder / "second")
    with pytest.raises(runs.RunError, match=r"was started with task\.jsonl = "):
        begun.resume("second")
    assert begun.resume("first", generator={"slots": 4}).identity == ""


def test_nothing_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a small one
    assert content("") == "" != content(".")


def test_a_large_folder_is_told_by_its_headers(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.contents._WHOLE", 100)
    monkeypatch.setattr("infra.contents._ENDS", 64)
    model = begun.folder / "first" / "model"
    weights = bytearray(b"\x80" + bytes(7) + b"h" * 128 + b"w" * 1000)
    hashes = []
    for at in (None, 100, len(weights) - 1):  # as it is, another header, another last byte
        changed = bytearray(weights)
        if at is not None:
            changed[at] ^= 1
        (model / "model.safetensors").write_bytes(changed)
        hashes.append(contents_of(begun.spec("first"), str(model))[MODEL])
    assert len(set(hashes)) == 3
