"""Kinds of hardware, as their vendors describe them: how much they compute, hold and move.

Figures are of one device, without sparsity, and links are in one direction. `streamrl profile` measures a
run's parts; this table serves where nothing can be measured yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from infra.errors import Explained

_GIB = 1 << 30


class HardwareError(Explained):
    """A kind of hardware is unknown, or cannot exist."""

    lasting = True


@dataclass(frozen=True)
class Hardware:
    """One kind of device."""

    name: str
    bf16_flops: float  # a second, dense
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its machine
    network_bytes_per_s: float  # its share of its machine's network
    per_machine: int = 8
    fp8_flops: float | None = None  # None: it has no such units
    price: float | None = None  # of an hour, in any one unit; None: nobody has said

    def __post_init__(self) -> None:
        """Raise HardwareError for figures that no device has."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name != "price"):
                raise HardwareError(
                    f"hardware {self.name}: {field.name} is {value}; it must be a number above 0"
                )


# H800, H20: table 1 and section 5.1 of the StreamRL paper (arXiv 2504.15930), with its prices and networks
# (8 x 200 Gb/s RoCE a machine; 100 Gb/s TCP a machine). H100, H200 (SXM), A100 (SXM, 80 GB), L40S: NVIDIA's
# data sheets; networks of 400 Gb/s (Hopper) and 200 Gb/s a device are those of its DGX machines. A vendor's
# NVLink figure counts both directions: half of it is here. L40S has PCIe 4.0 only. GB of HBM are GiB,
# as drivers report about that. RTX 4090, RTX 3090: NVIDIA's papers on Ada and on Ampere GA102, products that
# are added in float32; PCIe 4.0, and a network of 2.5 Gb/s. CPU: a socket of 16 cores with AVX-512 and 8
# channels of DDR5-4800; such machines differ by a factor of ten, so measure yours.
_KINDS = (
    Hardware("H800", 989.5e12, 80 * _GIB, 3.35e12, 200e9, 25e9, fp8_flops=1979e12, price=2.85),
    Hardware("H20", 148e12, 96 * _GIB, 4.0e12, 450e9, 12.5e9 / 8, fp8_flops=296e12, price=1.0),
    Hardware("H100", 989.5e12, 80 * _GIB, 3.35e12, 450e9, 50e9, fp8_flops=1979e12),
    Hardware("H200", 989.5e12, 141 * _GIB, 4.8e12, 450e9, 50e9, fp8_flops=1979e12),
    Hardware("A100", 312e12, 80 * _GIB, 2.039e12, 300e9, 25e9),
    Hardware("L40S", 362e12, 48 * _GIB, 0.864e12, 32e9, 12.5e9, fp8_flops=733e12),
    Hardware("RTX 4090", 165.2e12, 24 * _GIB, 1.008e12, 32e9, 2.5e9 / 8, per_machine=2, fp8_flops=330.3e12),
    Hardware("RTX 3090", 71e12, 24 * _GIB, 0.936e12, 32e9, 2.5e9 / 8, per_machine=2),
    Hardware("CPU", 1.3e12, 64 * _GIB, 0.2e12, 20e9, 1.25e9, per_machine=1),
)
HARDWARE: Mapping[str, Hardware] = {kind.name: kind for kind in _KINDS}


def hardware_of(name: str, more: Mapping[str, Hardware] | None = None) -> Hardware:
    """Return the kind of hardware of this name. `more`: kinds of the user's own, which come first."""
    known = dict(HARDWARE) | dict(more or {})
    if name not in known:
        raise HardwareError(
            f"hardware {name!r} is unknown: known are {', '.join(known)}. Give its figures, or measure it"
            " with `streamrl profile`"
        )
    return known[name]
