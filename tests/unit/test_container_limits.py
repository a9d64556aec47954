"""The cores and the memory that a container allows, from files as the kernel shows them."""

import os
from pathlib import Path

import pytest

from infra import choices
from infra.container_limits import ContainerLimits
from infra.machine_memory import free_memory, whole_memory


class Kernel:
    """Files of control groups."""

    def __init__(self, folder: Path) -> None:
        self.groups, self.files = folder / "cgroup", folder / "files"

    def group(self, said: str) -> None:
        self.groups.write_text(said)

    def write(self, place: str, text: str) -> None:
        file = self.files / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def limits(self) -> ContainerLimits:
        return ContainerLimits(self.groups, self.files)

    def cores(self) -> int | None:
        return self.limits().cores()


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_without_a_quota_there_is_none(kernel: Kernel) -> None:
    assert kernel.cores() is None
    kernel.group("0::/\n")
    assert kernel.cores() is None
    kernel.write("cpu.max", "max 100000\n")
    assert kernel.cores() is None


@pytest.mark.parametrize(("said", "cores"), [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_container_that_sees_itself_as_the_root(kernel: Kernel, said: str, cores: int) -> None:
    kernel.group("0::/kubepods/pod1/somewhere/on/the/machine\n")
    kernel.write("cpu.max", f"{said}\n")
    assert kernel.cores() == cores


def test_the_smallest_quota_around_it_counts(kernel: Kernel) -> None:
    kernel.group("0::/pods/pod1/part\n")
    kernel.write("pods/cpu.max", "800000 100000\n")
    kernel.write("pods/pod1/cpu.max", "300000 100000\n")
    kernel.write("pods/pod1/part/cpu.max", "max 100000\n")
    kernel.write("pods/pod2/cpu.max", "100000 100000\n")
    assert kernel.cores() == 3


def test_the_first_version_of_control_groups(kernel: Kernel) -> None:
    kernel.group("4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n1:name=systemd:/docker/1\n")
    kernel.write("cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000\n")
    kernel.write("cpu,cpuacct/docker/1/cpu.cfs_quota_us", "-1\n")
    assert kernel.cores() is None
    kernel.write("cpu,cpuacct/docker/1/cpu.cfs_quota_us", "400000\n")
    assert kernel.cores() == 4


def test_what_makes_no_sense_is_no_quota(kernel: Kernel) -> None:
    kernel.group("0::/\n")
    for said in ("", "many", "1 2 3", "100000 0"):
        kernel.write("cpu.max", said)
        assert kernel.cores() is None


@pytest.mark.parametrize("quota", [None, 1, 100_000])
def test_no_more_cores_than_the_quota_count(monkeypatch: pytest.MonkeyPatch, quota: int | None) -> None:
    monkeypatch.delenv(choices.CORES.variable, raising=False)
    assert ContainerLimits().cores() is None or ContainerLimits().cores() > 0
    monkeypatch.setattr(ContainerLimits, "cores", lambda self: quota)
    assert choices.cores() == min(len(os.sched_getaffinity(0)), quota or 100_000)


@pytest.mark.parametrize(
    "groups",
    [b"", b"\n\n", b"no colons\n", b"0::/a\xff\n", "0::/a\u2028b\n".encode(), b"0::/../..\n", b"0::/\0\n"],
)
def test_any_place_of_a_process_is_read(kernel: Kernel, groups: bytes) -> None:
    kernel.groups.write_bytes(groups)
    kernel.write("cpu.max", "1" * 400 + " 7\n")
    kernel.write("memory.max", "-1\n")
    assert kernel.cores() is None
    assert kernel.limits().memory() is None
    assert kernel.limits().memory_left() is None


def test_a_controller_whose_folder_has_another_name(kernel: Kernel) -> None:
    kernel.group("3:cpuacct,cpu:/docker/1\n")
    kernel.write("cpu/docker/1/cpu.cfs_period_us", "100000\n")
    kernel.write("cpu/docker/1/cpu.cfs_quota_us", "300000\n")
    assert kernel.cores() == 3
    kernel.groups.unlink()
    kernel.groups.mkdir()
    assert kernel.cores() is None


def test_without_a_limit_of_memory_there_is_none(kernel: Kernel) -> None:
    kernel.group("4:memory:/docker/1\n0::/\n")
    kernel.write("memory/docker/1/memory.limit_in_bytes", "9223372036854771712\n")
    kernel.write("memory.max", "max\n")
    assert kernel.limits().memory() is None
    assert kernel.limits().memory_left() is None


def test_files_that_a_group_holds_are_memory_left(kernel: Kernel) -> None:
    kernel.group("0::/pods/pod1\n")
    kernel.write("pods/memory.max", "1000\n")
    kernel.write("pods/memory.current", "700\n")
    kernel.write("pods/memory.stat", "anon 400\nactive_file 100\ninactive_file 150\n")
    kernel.write("pods/pod1/memory.max", "900\n")
    kernel.write("pods/pod1/memory.current", "200\n")
    kernel.write("pods/pod1/memory.stat", "anon 200\n")
    assert kernel.limits().memory() == 900
    assert kernel.limits().memory_left() == 550


def test_memory_in_the_first_version_of_control_groups(kernel: Kernel) -> None:
    kernel.group("4:memory:/docker/1\n")
    kernel.write("memory/docker/1/memory.limit_in_bytes", "1000\n")
    kernel.write("memory/docker/1/memory.usage_in_bytes", "1010\n")
    kernel.write("memory/docker/1/memory.stat", "active_file 5\ntotal_active_file 50\n")
    assert kernel.limits().memory() == 1000
    assert kernel.limits().memory_left() == 40
    kernel.write("memory/docker/1/memory.stat", "")
    assert kernel.limits().memory_left() == 0


def test_a_machine_has_no_more_memory_than_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory() < whole_memory()
    for left in (0, 4096):
        monkeypatch.setattr(ContainerLimits, "memory_left", lambda self, left=left: left)
        assert free_memory() == left
    monkeypatch.setattr(ContainerLimits, "memory", lambda self: 1 << 20)
    assert whole_memory() == 1 << 20
