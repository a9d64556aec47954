"""The first words of a trainer's rank on another machine, and whether it fits rank 0."""

from __future__ import annotations

import msgspec

from consumers.ranks.rank_device import device_of_ranks, own_device
from consumers.ranks.rank_source import source_digest
from infra.ranks.handshake import versions
from schemas.runspec import RunSpec

_SOURCE, _DEVICE = "source", "device"
_AGAIN = "start `streamrl join` there again"


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of a rank of another machine."""

    local: int  # number among the ranks of its machine
    versions: str  # of the code that computes, with its digest, and the kind of device


def rank_versions() -> str:
    """Return the versions that ranks started by this process have, the code's digest, and their device.

    Optional packages are among them if they are there. This process loads no torch.
    """
    return _line(device_of_ranks(), "deepspeed", "peft")


def needed_versions(spec: RunSpec) -> str:
    """Return what ranks elsewhere must have in common with this process, which is rank 0 of a run."""
    more = ["deepspeed"] if spec.trainer.needs_deepspeed else []
    more += ["peft"] if spec.model.lora else []  # each rank draws the adapter's first weights by itself
    return _line(own_device(), *more)


def _line(device: str, *more: str) -> str:
    return f"{versions(*more)}, {_SOURCE} {source_digest()}, {_DEVICE} {device}"


def rank_misfit(address: str, theirs: str, needed: str) -> str:
    """Return why a rank at an address does not fit rank 0, and what to do; empty if it fits.

    `theirs`: what the rank has. `needed`: what it must have; all else is of no interest.
    """
    has, needs = _by_name(theirs), _by_name(needed)
    wrong = [name for name in needs if has.get(name) != needs[name]]
    found = []
    if packages := [name for name in wrong if name not in (_SOURCE, _DEVICE)]:
        there = ", ".join(f"{name} {has[name]}" if name in has else f"no {name}" for name in packages)
        here = ", ".join(f"{name} {needs[name]}" for name in packages)
        found.append(
            f"the rank on {address} has {there}, and the trainer has {here}: install the same on both, and "
            f"{_AGAIN}"
        )
    elif _SOURCE in wrong:
        digest = f"digest {has[_SOURCE]}" if _SOURCE in has else "without a digest"
        found.append(
            f"the rank on {address} has other code of StreamRL ({digest}) than the trainer (digest "
            f"{needs[_SOURCE]}): install the same on both, and {_AGAIN}"
        )
    if _DEVICE in wrong and _DEVICE in has:
        found.append(
            f"the rank on {address} computes on {has[_DEVICE]}, and the trainer on {needs[_DEVICE]}: set "
            f"STREAMRL_DEVICE and CUDA_VISIBLE_DEVICES so that both use GPUs or neither does, and {_AGAIN}"
        )
    return "; ".join(found)


def _by_name(line: str) -> dict[str, str]:
    return {name: said for name, _, said in (item.partition(" ") for item in line.split(", "))}
