"""Addresses at which ranks of other machines reach this one, and the store in which all of them meet."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil

from infra.errors import Explained
from infra.stack.ports import LOOPBACK

if TYPE_CHECKING:
    import torch.distributed as dist


class RanksError(Explained):
    """Ranks can't work together; the message names them and says what to do."""


class WrongAddress(RanksError):
    """Raised if this machine does not have the address at which other ranks are to reach it."""

    lasting = True


def interface_of(address: str, setting: str = "placement.ranks.address") -> str:
    """Return the name of the network interface that has an address. Raise WrongAddress if none has it.

    `setting`: the name of the setting that says the address, for the message.
    """
    addresses = _own_addresses()
    if address in addresses:
        return addresses[address]
    raise WrongAddress(
        f"{address} is no address of this machine, which has {', '.join(sorted(addresses))}: set {setting}"
    )


def own_address(said: str, setting: str) -> str:
    """Return the IPv4 address of this machine that a setting means: by itself, by name or by its network.

    Raise WrongAddress if this machine has no such address.
    """
    if "/" in said:
        network = ipaddress.ip_network(said, strict=False)
        addresses = _own_addresses()
        for one in sorted(addresses):
            if ipaddress.ip_address(one) in network:
                return one
        raise WrongAddress(
            f"this machine has no address in {said}, but {', '.join(sorted(addresses))}: set {setting}"
        )
    try:
        found = str(socket.getaddrinfo(said, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WrongAddress(f"{setting}: {said} has no IPv4 address: {error}") from error
    if found != said and found not in _own_addresses():
        raise WrongAddress(
            f"{setting}: {said} is {found} on this machine (/etc/hosts or DNS), which is none of its "
            f"addresses ({', '.join(sorted(_own_addresses()))}): set one of these"
        )
    interface_of(found, setting)  # names the setting if this machine has no such address
    return found


def meeting_place(ranks: int, host: str = LOOPBACK) -> dist.TCPStore:
    """Open the store where the other ranks find rank 0, on a free port of one address of this machine.

    The store gets a socket that is open already: by itself it listens on all interfaces, whatever its host.
    """
    import torch.distributed as dist  # processes that only wait for ranks need no torch

    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _own_addresses() -> dict[str, str]:
    """Return the names of this machine's interfaces by their IPv4 addresses."""
    return {
        one.address: name for name, some in psutil.net_if_addrs().items() for one in some
        if one.family == socket.AF_INET
    }  # fmt: skip
