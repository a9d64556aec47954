"""Where the ranks of a trainer meet: on this machine, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from infra.ranks.rank_addresses import meeting_place

LISTENS = "0A"


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on a port, as the kernel has them."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(file)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            local, state = line.split()[1], line.split()[3]
            address, _, at = local.rpartition(":")
            if state == LISTENS and int(at, 16) == port:
                found.add(address)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux alone says who listens")
def test_ranks_meet_on_loopback_alone() -> None:
    place = meeting_place(2)
    loopback = "".join(f"{int(part):02X}" for part in reversed(["127", "0", "0", "1"]))
    assert listening(place.port) == {loopback}
    other = dist.TCPStore("127.0.0.1", place.port, 2, is_master=False)
    other.set("said", "here")
    assert place.get("said") == b"here"


def test_every_meeting_has_a_port_of_its_own() -> None:
    places = [meeting_place(2) for _ in range(3)]
    assert len({place.port for place in places}) == 3
