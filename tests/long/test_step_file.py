"""Step files: they replay to the same bits with nothing else at hand; hostile ones are refused."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from typer.testing import CliRunner

from consumers.steps.failing import TrainingFailed
from flows.cli import app
from flows.run.replaying import replaying
from infra import runs
from infra.bus import Record
from infra.keys import SIGNING, TRUSTED
from infra.step_file.index import StepFileError
from infra.step_file.layout import can_count, laid_out, packed_records, restored, unpacked_records
from infra.step_file.tar import TarWriter
from infra.step_file.unpacking import open_step_file
from infra.weights.bits import Bits, kind_of
from schemas.messages import Sample
from schemas.wire import Message, encode
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World

Files = list[tuple[str, bytes]]
ALGORITHM = {"iterations": 4, "groups": 2, "group_size": 2, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


def made(
    folder: Path, start: str, monkeypatch: pytest.MonkeyPatch, *words: str,
    edit: Callable[[Sample], Sample] | None = None, **sections: Any,
) -> Path:  # fmt: skip
    """A step file of a run in memory; the run is gone when it is returned."""
    trainer = {"checkpoint_every": 2, "keep_checkpoints": 2}
    spec = make_spec(algorithm=ALGORITHM | sections.pop("algorithm", {}), trainer=trainer, **sections)
    context = make_context(spec, folder / "run")
    runs.create(context.store, spec, bootstrap_servers="none", model=start, topics=set(), run_id="test-1")
    world = World(context, start)
    if edit is not None:
        world.edit = edit
    with contextlib.suppress(TrainingFailed):
        world.live()
    file = folder / "step.tar.zst"
    with monkeypatch.context() as patched:
        patched.setattr("infra.run_bus.connect", lambda record, name: context.bus)
        # The log-probabilities of these samples are made up.
        patched.setattr("flows.run.versions_beside.gap_is_too_wide", lambda metrics, spec: False)
        result = CliRunner().invoke(
            app, ["bundle", "test-1", "--store", context.store.url, "-o", str(file), *words]
        )
    assert result.exit_code == 0, result.output
    return file


@pytest.mark.parametrize(
    ("words", "steps", "sections"),
    [
        ([], [3], {}),
        (["--step", "1-2"], [1, 2], {"loss": {"kind": "grpo", "kl": 0.1}}),
        (["--step", "1"], [1], {"loss": {"kind": "ppo", "value_learning_rate": 1e-2}}),
        (["--step", "0"], [0], {"model": {"dtype": "bfloat16"}}),
        (["--step", "3"], [3], {"model": {"lora": {"rank": 2}}}),
        (["--step", "2"], [2], {"loss": {"kind": "tb", "replay": 0.5}}),
        (
            ["--step", "3"], [2, 3],
            {"loss": {"correction": "decoupled"}, "algorithm": {"optimizer_steps": 2, "iterations": 2}},
        ),
        (["--step", "3"], [3], {"algorithm": {"mode": "async", "staleness": 1}}),
    ],
    ids=["newest", "several, with a reference", "critic", "bfloat16", "lora", "replay", "minis", "async"],
)  # fmt: skip
def test_it_replays_to_the_same_bits_with_nothing_else_at_hand(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, words: list[str], steps: list[int],
    sections: dict[str, Any],
) -> None:  # fmt: skip
    file = made(tmp_path, model, monkeypatch, *words, **sections)

    def unreachable(*_: object) -> None:
        raise AssertionError("a step file needs no broker and no store")

    monkeypatch.setattr("infra.run_bus.connect", unreachable)
    monkeypatch.setattr("flows.run.locations.open_store", unreachable)
    with replaying(str(file), "local", lambda done, total: None) as opened:
        assert opened.index is not None
        found = list(opened.again.each(opened.index.first, opened.index.last))
        assert opened.handle.record.model != model
    assert [one.record.step for one in found] == steps
    assert all(one.equal for one in found)
    assert all(stage.equal for one in found for stage in one.stages)
    result = CliRunner().invoke(app, ["replay", str(file), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["step"], said["equal"], said["first_other"]) == (steps[-1], True, None)
    if len(steps) == 1:
        result = CliRunner().invoke(app, ["replay", str(file), "--step", str(max(0, steps[0] - 1))])
        assert result.exit_code == (0 if steps[0] == 0 else 3)


def test_a_failed_step_can_be_looked_at_elsewhere(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(sample: Sample) -> Sample:
        return structs.replace(sample, reward=1e30) if (sample.group, sample.index) == (5, 1) else sample

    file = made(tmp_path, model, monkeypatch, "--failed", edit=spoil, loss={"kind": "dr_grpo"})
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 0, result.output
    assert "step 2 of iteration 2, run test-1, which could not be taken" in result.output
    assert "sample 0000005-01, by itself: a gradient is NaN, infinite or too large" in result.output


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, model: str) -> Files:
    """The files in an honest step file, in order."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        file = made(tmp_path_factory.mktemp("honest"), model, monkeypatch, "--step", "1")
    raw = zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return [(one.name, tar.extractfile(one).read()) for one in tar.getmembers()]  # type: ignore[union-attr]


def packed(files: Files, path: Path, edit: Callable[[tarfile.TarInfo], None] | None = None) -> Path:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for number, (name, raw) in enumerate(files):
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            if edit is not None and number == 1:
                edit(member)
            tar.addfile(member, io.BytesIO(raw))
    path.write_bytes(zstandard.compress(plain.getvalue()))
    return path


def sealed(said: dict[str, Any]) -> bytes:
    """An index with the digest that belongs to it: anyone can make one."""
    said.pop("digest", None)
    said["digest"] = str(blake3(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest())
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def changed(files: Files, change: Callable[[dict[str, Any]], None]) -> Files:
    said = json.loads(files[0][1])
    change(said)
    return [("index.json", sealed(said)), *files[1:]]


def replaced(files: Files, name: str, raw: bytes) -> Files:
    """Another file in place of one, and the index that fits it."""

    def change(said: dict[str, Any]) -> None:
        for member in said["members"]:
            if member["name"] == name:
                member |= {"size": len(raw), "digest": str(blake3(raw).hexdigest())}

    return changed([(one, raw if one == name else old) for one, old in files], change)


def refused(files: Files, folder: Path, why: str, edit: Any = None) -> None:
    with pytest.raises(StepFileError, match=why) as error:
        open_step_file(packed(files, folder / "hostile.tar.zst", edit), folder)
    assert "hostile.tar.zst" in str(error.value)
    assert {one.name for one in folder.iterdir()} <= {"hostile.tar.zst", "model"}


def test_an_honest_one_opens(tmp_path: Path, honest: Files) -> None:
    found = open_step_file(packed(honest, tmp_path / "honest.tar.zst"), tmp_path)
    assert found.index.asked == 1
    assert sorted(one.name for one in (tmp_path / "model").iterdir())[-1] == "tokenizer_config.json"


def _kind(kind: bytes) -> Callable[[tarfile.TarInfo], None]:
    def edit(member: tarfile.TarInfo) -> None:
        member.type, member.linkname = kind, "/etc/passwd"

    return edit


def _named(name: str) -> Callable[[tarfile.TarInfo], None]:
    def edit(member: tarfile.TarInfo) -> None:
        member.name = name

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        _kind(tarfile.SYMTYPE), _kind(tarfile.LNKTYPE), _kind(tarfile.CHRTYPE), _kind(tarfile.XHDTYPE),
        _named("../../run.json"), _named("/etc/cron.d/run"), _named("x" * 300),
    ],
)  # fmt: skip
def test_links_devices_and_paths_are_refused(
    tmp_path: Path, honest: Files, edit: Callable[[tarfile.TarInfo], None]
) -> None:
    refused(honest, tmp_path, "comes where run.json should|has .* bytes, which it should not", edit)


_STATE = "weights.model.norm.weight"  # a tensor of the state


def of_version(said: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A tensor of a version's weights, like one of the state."""
    base = next(one for one in said["tensors"] if one["name"] == _STATE)
    return {**base, "of": "version", "name": "model.norm.weight", "version": 1, "minus": "", **fields}


def _member(name: str, size: int = 1) -> dict[str, Any]:
    return {"name": name, "size": size, "digest": ""}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said: said["members"].append(_member("model/../../x")), "which no step file has"),
        (lambda said: said["members"].append(_member("model/run.py")), "which no step file has"),
        (lambda said: said["members"].append(_member("model/config.json", 1 << 40)), "at most"),
        (lambda said: said["members"].append(said["members"][0]), "names something twice"),
        (lambda said: said["members"][0].update(size=-1), "greater than or equal to 0"),
        (lambda said: said["members"].pop(0), "it has no run.json"),
        (lambda said: said["tensors"][0].update(shape=[1 << 40]), "it is no step file of ours"),
        (lambda said: said["tensors"][0].update(dtype="PICKLE"), "unknown type"),
        (lambda said: said["tensors"][0].update(minus="weights"), "which can't be"),
        (lambda said: said.update(format=3), "format 3; this version of StreamRL reads formats 1 to 2"),
        (lambda said: said["tensors"][0].update(of="version"), "does not say of which version it is"),
        (lambda said: said["tensors"][0].update(version=3), "does not say of which version it is"),
        (lambda said: said["tensors"][0].update(of="version", version=-1), "greater than or equal to 0"),
        (lambda said: said["tensors"].append(of_version(said, minus="weights.none")), "which can't be"),
        (lambda said: said["tensors"].insert(0, of_version(said, minus=_STATE)), "which can't be"),
        (lambda said: said["tensors"].append(of_version(said, minus=_STATE, shape=[1])), "which can't be"),
        (lambda said: said["tensors"].append(of_version(said, minus=_STATE, dtype="U8")), "which can't be"),
        (lambda said: said["tensors"].extend([of_version(said)] * 2), "names something twice"),
        (
            lambda said: said["tensors"].extend(of_version(said, version=n) for n in range(1025)),
            "weights of more than 1024 versions",
        ),
        (lambda said: said.update(format=1, tensors=[*said["tensors"], of_version(said)]), "has format 1"),
        (
            lambda said: said.update(format=1, members=[*said["members"], _member("records/prompts")]),
            "has format 1",
        ),
        (lambda said: said.update(run="other-1"), "is of run other-1"),
        (lambda said: said.update(first=5), "is about step 1"),
        (lambda said: said.update(partitions=1 << 40), "partitions"),
        (lambda said: said.update(more=1), "more"),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused(
    tmp_path: Path, honest: Files, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    refused(changed(honest, change), tmp_path, why)


def test_what_is_damaged_is_refused(tmp_path: Path, honest: Files) -> None:
    for number, (name, raw) in enumerate(honest):
        if raw:
            flipped = bytes([raw[0] ^ 1]) + raw[1:]
            refused(
                [*honest[:number], (name, flipped), *honest[number + 1 :]], tmp_path, "damaged|index|JSON"
            )
    refused(honest[:-1], tmp_path, "where tensors/.* should begin")
    file = packed(honest, tmp_path / "short.tar.zst")
    (tmp_path / "cut.tar.zst").write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(StepFileError, match=r"ends too early|damaged"):
        open_step_file(tmp_path / "cut.tar.zst", tmp_path)
    (tmp_path / "text.tar.zst").write_text("no step file at all" * 100)
    with pytest.raises(StepFileError, match="damaged, or no step file"):
        open_step_file(tmp_path / "text.tar.zst", tmp_path)
    with pytest.raises(StepFileError, match="No such file"):
        open_step_file(tmp_path / "none.tar.zst", tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("model/config.json", b'{"auto_map": {"AutoModel": "evil.py"}}', "has auto_map, by which code"),
        ("model/config.json", b'{"text": {"_attn_implementation": "org/kernel"}}', "_attn_impl"),
        ("model/config.json", b"[" * 100_000, "is no JSON"),
        ("run.json", b"{}", "is not a run's record as this version"),
        ("records/samples", b"\0" * 17, "end in the middle of one"),
        ("records/samples", b"\0\0" + b"\0" * 8 + b"\xff" * 8, "which can't be"),
    ],
)  # fmt: skip
def test_files_that_lie_are_refused(tmp_path: Path, honest: Files, name: str, raw: bytes, why: str) -> None:
    refused(replaced(honest, name, raw), tmp_path, why)


def test_a_file_of_format_1_is_still_read(tmp_path: Path, honest: Files) -> None:
    def older(said: dict[str, Any]) -> None:
        said["format"] = 1
        for one in said["tensors"]:
            del one["version"]

    files = changed(honest, older)
    assert not any(name.startswith("records/prompts") for name, _ in files)
    file = packed(files, tmp_path / "older.tar.zst")
    assert CliRunner().invoke(app, ["replay", str(file)]).exit_code == 0
    result = CliRunner().invoke(app, ["replay", str(file), "--rewards", "--own-code"])
    assert result.exit_code == 1 and "has no prompts" in result.output


class NewerStep(Message, frozen=True, kw_only=True):
    KIND: ClassVar[str] = "step"
    VERSION: ClassVar[int] = 99


class NewerSample(Message, frozen=True, kw_only=True):
    KIND: ClassVar[str] = "sample"
    VERSION: ClassVar[int] = 99


def test_a_record_of_another_schema_names_its_maker(tmp_path: Path, honest: Files) -> None:
    for name, kind in (("ledger", NewerStep), ("samples", NewerSample)):
        records = packed_records([Record(name, 0, 1, b"1", encode(kind()))])
        file = packed(replaced(honest, f"records/{name}", records), tmp_path / "newer.tar.zst")
        result = CliRunner().invoke(app, ["replay", str(file)])
        said = result.output.replace("\n", " ")
        assert result.exit_code == 1 and f"its {name} can't be read" in said, said
        assert "open it with that version" in said


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, honest: Files) -> None:
    def grow(said: dict[str, Any]) -> None:
        for member in said["members"]:
            if member["name"] == "records/samples":
                member["size"] = 1 << 60

    refused(changed(honest, grow), tmp_path, "it is no step file of ours")


def test_code_of_the_run_is_imported_only_if_the_user_says_so(
    tmp_path: Path, honest: Files, model: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('imported')")
    run = json.loads(dict(honest)["run.json"])
    run["spec"]["loss"] = {"import": f"{mine}:Mine"}
    file = packed(replaced(honest, "run.json", json.dumps(run).encode()), tmp_path / "own.tar.zst")
    for command in ("replay", "inspect"):
        result = CliRunner().invoke(app, [command, str(file)])
        assert result.exit_code == 1 and "--own-code" in result.output and "imported" not in result.output
        result = CliRunner().invoke(app, [command, str(file), "--own-code"])
        assert "imported" in result.output


def test_with_trusted_keys_a_step_file_must_be_signed(
    tmp_path: Path, model: str, honest: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, (private, public) = Ed25519PrivateKey.generate(), (tmp_path / "key.pem", tmp_path / "public.pem")
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    monkeypatch.setenv(SIGNING, str(private))
    monkeypatch.setenv(TRUSTED, str(public))
    file = made(tmp_path, model, monkeypatch, "--step", "1")
    assert CliRunner().invoke(app, ["replay", str(file)]).exit_code == 0
    unsigned = packed(honest, tmp_path / "unsigned.tar.zst")
    result = CliRunner().invoke(app, ["replay", str(unsigned)])
    assert result.exit_code and "unsigned.tar.zst is not signed" in result.output.replace("\n", "")


_DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "F64": 8}


@given(st.sampled_from(sorted(_DTYPES)), st.integers(0, 50), st.data())
def test_tensors_come_back_as_they_were(dtype: str, count: int, data: st.DataObject) -> None:
    width = _DTYPES[dtype]
    raw = data.draw(st.binary(min_size=count * width, max_size=count * width))
    bits = _bits(dtype, raw)
    assert restored(laid_out(bits, None), dtype, (count,), None).raw == bits.raw
    for other, size in (("F32", 4), ("BF16", 2), ("F16", 2)):
        base = _bits(other, data.draw(st.binary(min_size=count * size, max_size=count * size)))
        if can_count(bits, base):
            assert restored(laid_out(bits, base), dtype, (count,), base).raw == bits.raw


def _bits(dtype: str, raw: bytes) -> Bits:
    return Bits(
        dtype, (len(raw) // _DTYPES[dtype],), np.frombuffer(raw, np.uint8).view(kind_of(dtype).unsigned)
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 1 << 60), st.binary(max_size=9), st.binary(max_size=99))
    )
)
def test_records_come_back_as_they_were(some: list[tuple[int, int, bytes, bytes]]) -> None:
    records = [Record("topic", *one) for one in some]
    assert list(unpacked_records(packed_records(records), "topic", "here")) == records


def test_a_disk_that_is_full_at_the_end_keeps_no_half_of_a_file(tmp_path: Path) -> None:
    (tmp_path / ".a.tar.zst.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), TarWriter(tmp_path / "a.tar.zst") as tar:
        tar.add("index.json", 2, [b"{}"])
    assert not list(tmp_path.iterdir())
