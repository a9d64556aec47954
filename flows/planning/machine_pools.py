"""The machines that a plan divides: pools of one kind at one place, as the run file names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.planning.main_memory import CORE_BYTES, GIB_BYTES
from flows.planning.preemption import Preemption
from flows.planning.stage_times import TCP_DELAYS, LinkTimes
from infra import choices
from infra.errors import Explained
from infra.machine_memory import whole_memory
from schemas.machines import MachinesSection
from schemas.runspec import PlacementSection

CPU = "CPU"
HERE = "here"  # the pool that a plan takes if the run file names none


class PlanError(Explained):
    """No plan can be made. The message says of what, and what to change."""

    lasting = True


@dataclass(frozen=True)
class MachinePool:
    """Machines of one kind at one place, with one price."""

    name: str
    hardware: str
    machines: int = 1
    devices: int = 1  # of each machine
    price: float = 0.0  # of a machine for an hour
    site: str = ""
    generates: bool = True
    trains: bool = True
    link: LinkTimes | None = None  # to the run's object store; None: they stand beside it
    memory_bytes: float | None = None  # main memory of a machine; None: nobody knows
    free_cores: float | None = None  # that other processes leave, where cores are shared; None: all
    cores_of: str = ""  # the pool on whose cores its processes are; empty: on its own
    preemption: Preemption | None = None  # of its machines; None: they stay

    @property
    def shares_cores(self) -> bool:
        """Whether processes share its devices, as CPU cores can be, rather than have them for themselves."""
        return self.hardware.upper() == CPU

    @property
    def work_cores(self) -> float:
        """The cores that engines and learner may keep busy, where they share them."""
        return float(self.total) if self.free_cores is None else self.free_cores

    def shares_cores_with(self, other: MachinePool) -> bool:
        """Whether its processes are on the same cores as those of another pool, or of this one."""
        here, there = (one.cores_of or one.name for one in (self, other))
        return self.shares_cores and other.shares_cores and here == there

    @property
    def grain(self) -> int:
        """How many devices one side or the other gets at a time: whole machines, if there are several."""
        return self.devices if self.machines > 1 else 1

    @property
    def total(self) -> int:
        """All its devices."""
        return self.machines * self.devices

    def most_generators(self, devices: int, of_each: int) -> int:
        """Return how many generators fit on so many devices, filled by machines: none is on two machines."""
        machines, rest = divmod(devices, self.devices)
        return machines * (self.devices // of_each) + rest // of_each

    def machines_with(self, generators: int, of_each: int, taken: int = 0) -> int:
        """Return how many machines have so many generators beside `taken` devices; none is on two."""
        beside = -taken % self.devices // of_each
        return self.machines_of(taken) + max(0, -(-(generators - beside) // (self.devices // of_each)))

    def machines_of(self, devices: int) -> int:
        """Return how many machines have to be paid for so many devices."""
        return -(-devices // self.devices)


def pools_of(placement: PlacementSection, *, cores: int | None = None) -> tuple[MachinePool, ...]:
    """Return the pools that a run file names; without any, this machine's cores."""
    if not placement.machines:
        here = cores or choices.cores()
        return (MachinePool(HERE, CPU, devices=here, memory_bytes=whole_memory()),)
    return tuple(_pool(name, section, placement) for name, section in placement.machines.items())


def site_links(placement: PlacementSection) -> dict[str, LinkTimes | None]:
    """Return the link of each site; None where the run file does not say it."""
    return {
        name: None
        if site.link_gbit_s is None
        else LinkTimes(site.link_gbit_s * 1e9 / 8, site.link_latency_ms / 1e3, delays=TCP_DELAYS)
        for name, site in placement.sites.items()
    }


def _pool(name: str, section: MachinesSection, placement: PlacementSection) -> MachinePool:
    link = site_links(placement)[section.site] if section.site else None
    rate = section.preempted_per_hour
    preemption = Preemption(rate, section.preemption_notice_s, section.preemption_back_s) if rate else None
    memory = None if section.memory_gib is None else section.memory_gib * GIB_BYTES
    if memory is None and section.hardware.upper() == CPU:
        memory = section.devices * CORE_BYTES
    return MachinePool(
        name, section.hardware, section.count, section.devices, section.price, section.site,
        "generate" in section.uses, "train" in section.uses, link, memory,
        preemption=preemption,
    )  # fmt: skip


def check_pools(pools: Sequence[MachinePool], known: Sequence[str]) -> None:
    """Raise PlanError if there is hardware that no figures are known of. `known`: all that there are."""
    import difflib

    by_upper = {one.upper(): one for one in known}
    for pool in pools:
        if pool.hardware.upper() not in by_upper:
            close = difflib.get_close_matches(pool.hardware.upper(), list(by_upper), n=1)
            hint = f"; did you mean {by_upper[close[0]]}?" if close else ""
            raise PlanError(
                f"placement.machines.{pool.name}.hardware: no figures are known of {pool.hardware!r}{hint} "
                f"(known: {', '.join(known)}). `streamrl profile` measures others"
            )
