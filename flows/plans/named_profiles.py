"""Reads the profiles that a run file names for its machines, and refuses those of something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.planning.machine_pools import CPU, PlanError
from flows.planning.model_shape import ModelShape
from flows.planning.profile_file import read_profile
from flows.planning.profile_identity import WrongProfile, differences_by_name, model_shape, profiled_settings
from schemas.profile import Profile
from schemas.runspec import RunSpec


@dataclass(frozen=True)
class HardwareProfile:
    """A profile of one kind of hardware."""

    hardware: str  # as a run file names it
    profile: Profile
    file: str = ""  # that the run file names; empty: the one that is kept of the run file here

    @property
    def source(self) -> str:
        """The profile in words."""
        return self.file or "this machine's profile"


def hardware_of_profile(profile: Profile, known: Sequence[str]) -> str:
    """Return the kind of hardware that a profile was measured on: one of the known ones, or CPU."""
    machine = profile.identity.machine
    return next((one for one in known if one != CPU and _names(machine, one)), CPU)


def _names(machine: str, hardware: str) -> bool:
    """Whether a machine's description has this kind in it, as a word: an H200 is no H20."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(hardware)}(?![A-Za-z0-9])", machine, re.I) is not None


def named_profiles(
    spec: RunSpec, model: Path | None, shape: Callable[[], ModelShape], known: Sequence[str]
) -> list[HardwareProfile]:
    """Return the profiles of `placement.machines`, one for each kind of hardware. Raises WrongProfile.

    `model`: its folder, if its weights are here. `shape`: asked if they are not.
    """
    found: dict[str, HardwareProfile] = {}
    for name, section in spec.placement.machines.items():
        if section.profile is None:
            continue
        setting, hardware = f"placement.machines.{name}.profile", section.hardware
        other = found.get(hardware.upper())
        if other is not None and other.file != section.profile:
            raise PlanError(
                f"{setting}: {section.profile}, and other machines of {hardware} have {other.file}: a kind "
                "of hardware has one profile. Name the same file, or another kind of hardware"
            )
        if other is None:
            profile = read_profile(Path(section.profile))
            _check_hardware(profile, hardware, setting, known)
            _check_run(profile, spec, model, shape, setting)
            found[hardware.upper()] = HardwareProfile(hardware, profile, section.profile)
    return list(found.values())


def _check_hardware(profile: Profile, hardware: str, setting: str, known: Sequence[str]) -> None:
    machine = profile.identity.machine
    there = hardware_of_profile(profile, known)
    fits = there == CPU if hardware.upper() == CPU else _names(machine, hardware)
    if not fits:
        raise WrongProfile(
            f"{setting}: it was made on {machine!r}, and these machines have {hardware}. Name a profile that "
            f"`streamrl profile` made on one of them, or the hardware {there}"
        )


_AS_SERVERS = {
    "generator.engine": '"vllm"', "generator.pipeline_parallel": "1", "generator.expert_parallel": "false",
    "generator.quantization": '"none"',
}  # fmt: skip


def _of_any_engine(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a profile depends on, and of the engine's those that all engines have."""
    return {
        name: value
        for name, value in settings.items()
        if not name.startswith("generator.") or name == "generator.tensor_parallel"
    }


def _check_run(
    profile: Profile, spec: RunSpec, model: Path | None, shape: Callable[[], ModelShape], setting: str
) -> None:
    identity = profile.identity
    there, here = identity.settings, profiled_settings(spec)
    unlike: list[str] = []
    if spec.generator.computes_elsewhere:  # it was made with an engine whose steps can be timed
        unlike = [
            f"the setting {name}: it was {there[name]}, and servers have {plain}"
            for name, plain in _AS_SERVERS.items()
            if there.get(name, plain) != plain
        ]
        there, here = (_of_any_engine(one) for one in (there, here))
    wrong = unlike + differences_by_name("setting", there, here)
    if model is not None:
        if model_shape(model) != identity.model:
            wrong.insert(
                0, f"the model: it has {identity.parameters:,} parameters there, and other ones here"
            )
    else:
        counted = shape()
        # a file of weights may hold the matrix of a tied head twice, or once
        if abs(identity.parameters - counted.parameters) not in (0, counted.embedding):
            counts = f"{identity.parameters:,} parameters there, and {counted.parameters:,} here"
            wrong.insert(0, f"the model: it has {counts}")
    if wrong:
        lines = "\n".join(f"  {one}" for one in wrong)
        raise WrongProfile(
            f"{setting} is a profile of something else, so its times would be wrong:\n{lines}\n"
            "Measure this run file on such a machine: streamrl profile RUNFILE -o FILE"
        )
