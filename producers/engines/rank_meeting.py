"""The place where the ranks of an engine join, as torch sees it: on one machine, or over several.

one machine       a file in memory that has no name, so a killed rank leaves nothing behind
several machines  a store that rank 0 keeps at an address of its machine
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from infra.ranks.rank_addresses import interface_of

ADDRESS = "placement.engine_ranks.address"


class LocalMeeting(msgspec.Struct, frozen=True, tag="local"):
    """All ranks are on this machine, and talk over its loopback interface."""

    file: str  # that all ranks can open

    def environment(self) -> dict[str, str]:
        """Return the variables by which gloo, NCCL and vLLM choose an address."""
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}

    def store(self, ranks: int, deadline_s: float) -> Any:
        """Return torch's store in which ranks find each other."""
        import torch.distributed as dist

        return dist.FileStore(self.file, ranks)


class FarMeeting(msgspec.Struct, frozen=True, tag="far"):
    """Some ranks are on other machines."""

    host: str  # the address of rank 0's machine
    port: int  # of the store there
    address: str  # of the machine of this rank, as the others reach it
    machines: list[int]  # by rank, the number of its machine; 0: that of rank 0

    def environment(self) -> dict[str, str]:
        """Return the variables by which gloo, NCCL and vLLM choose an address."""
        interface = interface_of(self.address, ADDRESS)
        return {
            "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}",
            "VLLM_HOST_IP": self.address,
        }  # fmt: skip

    def store(self, ranks: int, deadline_s: float) -> Any:
        """Return torch's store in which ranks find each other."""
        import torch.distributed as dist

        deadline = timedelta(seconds=deadline_s)
        return dist.TCPStore(self.host, self.port, ranks, is_master=False, timeout=deadline)


EngineMeeting = LocalMeeting | FarMeeting
