"""Which ranks of other machines fit rank 0: their code, the packages that they compute with, their device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from consumers.ranks import rank_hello
from consumers.ranks.rank_device import UnknownDevice, device_of_ranks
from consumers.ranks.rank_hello import needed_versions, rank_misfit, rank_versions
from consumers.ranks.rank_source import digest_of_source
from hatch_build import lay_out
from infra.code import ROOT
from infra.ranks import handshake
from tests.factories import make_spec

AT = "10.0.0.2"
AGAIN = "start `streamrl join` there again"
PLAIN = make_spec(trainer={"ranks": 2})


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages, of which all others are 2.0, and what the machine computes on."""
    found = {"device": "cpu", "source": "aaaa"}
    monkeypatch.setattr(handshake.metadata, "version", lambda name: found.get(name, "2.0"))
    monkeypatch.setattr(rank_hello, "own_device", lambda: found["device"])
    monkeypatch.setattr(rank_hello, "device_of_ranks", lambda: found["device"])
    monkeypatch.setattr(rank_hello, "source_digest", lambda: found["source"])
    return found


def test_ranks_need_the_packages_that_their_run_computes_with(installed: dict[str, str]) -> None:
    needs_deepspeed = make_spec(trainer={"learner": "deepspeed"})
    draws_an_adapter = make_spec(model={"lora": {"rank": 4}})
    specs = {"deepspeed": needs_deepspeed, "peft": draws_an_adapter, "torch": PLAIN}
    needed = {name: needed_versions(spec) for name, spec in specs.items()}
    assert {rank_misfit(AT, rank_versions(), one) for one in needed.values()} == {""}
    for package, line in needed.items():
        plain = installed.copy()
        installed[package] = "2.1"
        assert rank_misfit(AT, rank_versions(), line) == (
            f"the rank on {AT} has {package} 2.1, and the trainer has {package} 2.0: install the same on "
            f"both, and {AGAIN}"
        )
        if package != "torch":
            assert not rank_misfit(AT, rank_versions(), needed["torch"]), "the run does not use it"
        installed.clear()
        installed |= plain


def test_a_rank_without_a_package_that_is_needed_is_told_its_name() -> None:
    theirs, needed = needed_versions(PLAIN), needed_versions(make_spec(model={"lora": {}}))
    assert f"the rank on {AT} has no peft, and the trainer has peft 2.0" in rank_misfit(AT, theirs, needed)


@pytest.mark.parametrize(("theirs", "own"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_rank_with_another_device_does_not_fit(installed: dict[str, str], theirs: str, own: str) -> None:
    installed["device"] = theirs
    line = rank_versions()
    installed["device"] = own
    assert rank_misfit(AT, line, needed_versions(PLAIN)) == (
        f"the rank on {AT} computes on {theirs}, and the trainer on {own}: set STREAMRL_DEVICE and "
        f"CUDA_VISIBLE_DEVICES so that both use GPUs or neither does, and {AGAIN}"
    )


def test_a_rank_with_other_code_of_one_version_does_not_fit(installed: dict[str, str]) -> None:
    line = rank_versions()
    installed["source"] = "bbbb"
    assert rank_misfit(AT, line, needed_versions(PLAIN)) == (
        f"the rank on {AT} has other code of StreamRL (digest aaaa) than the trainer (digest bbbb): install "
        f"the same on both, and {AGAIN}"
    )


def test_a_rank_of_older_code_says_neither_device_nor_digest(installed: dict[str, str]) -> None:
    said = rank_misfit(AT, handshake.versions(), needed_versions(PLAIN))
    assert "other code of StreamRL (without a digest)" in said and "computes on" not in said


def test_all_that_does_not_fit_is_told_at_once(installed: dict[str, str]) -> None:
    installed["device"] = "cuda"
    said = rank_misfit(AT, "streamrl 1.0, torch 2.0, transformers 2.0, device cpu", needed_versions(PLAIN))
    assert "has streamrl 1.0" in said and "computes on cpu" in said


def test_whoever_holds_a_rank_asks_for_its_device_and_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_DEVICE", "cpu")
    program = (
        "import json, sys; from consumers.ranks.rank_hello import rank_versions; "
        "print(json.dumps([rank_versions(), 'torch' in sys.modules]))"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True).stdout
    line, loads_torch = json.loads(said)
    assert line.endswith(", device cpu") and not loads_torch


def test_a_machine_that_lacks_the_device_that_it_is_to_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_DEVICE", "tpu")
    with pytest.raises(UnknownDevice, match=r"would compute on here is unknown: STREAMRL_DEVICE=tpu is not"):
        device_of_ranks()


def rooms(folder: Path) -> Path:
    for name in ("consumers/loss.py", "infra/sums.py", "schemas/spec.py", "producers/engine.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\nfrom infra.sums import add\n")
    return folder


def test_the_digest_is_of_names_and_contents_of_the_code_of_ranks(tmp_path: Path) -> None:
    checkout = rooms(tmp_path / "checkout")
    plain = digest_of_source(checkout)
    assert digest_of_source(rooms(tmp_path / "elsewhere")) == plain
    (checkout / "producers/engine.py").write_text("# a rank computes nothing with it")
    (checkout / "infra/notes.txt").write_text("no code")
    assert digest_of_source(checkout) == plain
    (checkout / "infra/sums.py").rename(checkout / "infra/moved.py")
    moved = digest_of_source(checkout)
    (checkout / "infra/moved.py").write_text("# infra/sums.py\nfrom infra.sums import sub\n")
    assert len({plain, moved, digest_of_source(checkout)}) == 3


def test_the_wheel_has_the_digest_of_its_checkout(tmp_path: Path) -> None:
    """Though imports have longer names there."""
    checkout = rooms(tmp_path / "checkout")
    for name in ("flows", "examples", "streamrl"):
        (checkout / name).mkdir()
    lay_out(checkout, tmp_path / "wheel")
    assert "from streamrl.infra.sums" in (tmp_path / "wheel/consumers/loss.py").read_text()
    assert digest_of_source(tmp_path / "wheel") == digest_of_source(checkout)
    shutil.rmtree(tmp_path / "wheel/schemas")
    assert digest_of_source(tmp_path / "wheel") != digest_of_source(checkout)
