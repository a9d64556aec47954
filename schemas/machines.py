"""The run file's section about the machines that a plan may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from schemas.addresses import FilePath, Word
from schemas.section import Section
from schemas.shortening import shown

Use = Literal["generate", "train"]


class MachinesSection(Section):
    """Machines of one kind at one place, which `streamrl plan` may divide between generators and trainer."""

    hardware: Word = Field(
        "CPU",
        description="The kind of processor that a machine has, such as H100. `streamrl plan` knows some "
        "kinds, and those that a profile was measured on.",
    )
    count: int = Field(1, gt=0, le=100_000, description="Number of machines.")
    devices: int = Field(
        1, gt=0, le=1024, description="Processors of each machine: GPUs, or with hardware CPU its cores."
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="GiB of main memory of each machine. With hardware CPU generators and trainer share it; "
        "by default 4 for each core. With GPUs the trainer's moments (trainer.offload_optimizer) and copies "
        "of weights lie there; by default that is not checked. The memory of GPUs is known by their kind.",
    )
    price: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="Price of a machine for an hour, in any currency. It counts from the whole machine, also "
        "if only some of its devices are used.",
    )
    preempted_per_hour: float = Field(
        0.0,
        ge=0,
        le=60,
        description="How often an hour, on the average, each machine is taken away, as those of a spot "
        "market are. Simulations draw such moments, so that plans count them. The trainer's machine stays.",
    )
    preemption_notice_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds that a machine is told before it is taken away. With fewer than a hand-over "
        "takes, what its generators have begun is lost.",
    )
    preemption_back_s: float = Field(
        120.0,
        gt=0,
        le=604_800,
        description="Seconds until a machine that was taken away, or another one in its place, is there.",
    )
    site: Annotated[str, Field(max_length=49)] = Field(
        "",
        description="The site (a key of `sites`) at which the machines stand. Empty: beside the run's object "
        "store.",
    )
    profile: FilePath | None = Field(
        None,
        description="A file that `streamrl profile -o FILE` made of this run file on one such machine. Times "
        "are then those that it measured, and for other devices and slots those of the hardware table, "
        "corrected by it. It holds for all machines of the same hardware.",
    )
    use: list[Use] | None = Field(
        None,
        min_length=1,
        max_length=2,
        description="[generate], [train] or both. By default both, and at a site [generate]: the trainer "
        "stands beside the object store.",
    )

    @field_validator("use")
    @classmethod
    def _once(cls, use: list[Use] | None) -> list[Use] | None:
        if use is not None and len(set(use)) < len(use):
            raise ValueError(f"each use is named once (found {shown(use)})")
        return use

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses that the machines may be put to."""
        if self.use is not None:
            return tuple(self.use)
        return ("generate",) if self.site else ("generate", "train")


def check_uses(machines: dict[str, MachinesSection], links: dict[str, float | None]) -> None:
    """Raise ValueError if machines are at no site, at one without a link, or can't make up a run.

    `links`: by site, its gigabits a second, if they are known.
    """
    for name, section in machines.items():
        if not section.site:
            continue
        where = f"machines.{name}.site"
        if section.site not in links:
            known = f"; sites has {', '.join(sorted(links)[:8])}" if links else "; sites is empty"
            raise ValueError(f"{where}: there is no site {shown(section.site)}{known}")
        if links[section.site] is None:
            raise ValueError(
                f"{where}: the site {shown(section.site)} has no link: set sites.{section.site}.link_gbit_s, "
                "so that a plan knows how long weights take to get there"
            )
        if "train" in section.uses:
            raise ValueError(
                f"machines.{name}.use: machines of a site can't train, for the trainer stands beside the "
                "object store: write [generate], or leave the site empty"
            )
    uses: tuple[Use, ...] = ("generate", "train")
    for use in uses:
        if machines and not any(use in section.uses for section in machines.values()):
            raise ValueError(f"machines: none of them may {use}: add {use} to the `use` of one of them")
