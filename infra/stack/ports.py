"""Chooses the address and the port of a service.

STREAMRL_LISTEN=10.0.0.5    the address of this machine in a network that is trusted: there is no password on
                            Kafka and Prefect. Not set: loopback, for this machine alone

STREAMRL_<NAME>_PORT=9092   that port, or an error if it is in use
STREAMRL_<NAME>_PORT=0      the port of last time if it is free, else any free one
not set                     the port of last time, else the service's usual one, else the next free one

The port of last time comes first so that clients which outlive a restart find the service again.
"""

import os
import random
import socket
from pathlib import Path

import psutil

from infra.stack.stack_errors import PortTaken

LOOPBACK = "127.0.0.1"


def address() -> str:
    """Return the address where services listen and where clients find them."""
    return os.environ.get("STREAMRL_LISTEN", "").strip() or LOOPBACK


# Below the range from which the kernel takes source ports (32768 and up on Linux). A client that keeps trying
# a closed port inside it can be given the same number as its own end, and is then connected to itself.
FREE_RANGE = range(20_000, 30_000)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address(), port))
        except OSError:
            return False
        return True


def any_free_port() -> int:
    for port in random.sample(FREE_RANGE, 200):
        if is_free(port):
            return port
    raise PortTaken(
        f"200 of the ports {FREE_RANGE.start}–{FREE_RANGE.stop} were tried and all are in use",
        fix="end what holds them (ss -ltnp lists it)",
    )


def choose_port(name: str, usual: int, *, remembered: Path | None = None) -> int:
    """Return the port for the service `name`. `remembered` is the file with the port of last time."""
    variable = f"STREAMRL_{name.upper()}_PORT"
    asked = os.environ.get(variable, "").strip()
    before = read_port(remembered)
    if before is not None and asked in ("", "0", str(before)) and is_free(before):
        return before
    if asked == "0":
        return any_free_port()
    if asked:
        return _exactly(asked, variable)
    return next_free_port(usual)


def next_free_port(first: int) -> int:
    for port in range(first, first + 100):
        if is_free(port):
            return port
    raise PortTaken(
        f"the ports {first}–{first + 99} are all in use",
        fix="set the service's STREAMRL_…_PORT to a free one",
    )


def read_port(path: Path | None) -> int | None:
    try:
        return int(path.read_text()) if path is not None else None
    except (OSError, ValueError):
        return None


def accepts(port: int, *, timeout_s: float = 0.5) -> bool:
    """Return whether anything listens on a port."""
    try:
        with socket.create_connection((address(), port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _exactly(asked: str, variable: str) -> int:
    if not asked.isdigit() or not 0 < int(asked) < 65_536:
        raise PortTaken(
            f"{variable}={asked} is not a port", fix=f"set {variable} to a number from 0 to 65535"
        )
    port = int(asked)
    if not is_free(port):
        raise PortTaken(
            f"port {port} ({variable}) is in use{_by_whom(port)}",
            fix=f"end that process, choose another port, or unset {variable} to get the next free one",
        )
    return port


def _by_whom(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            address = tuple(connection.laddr)  # empty, or host and port
            if connection.status == psutil.CONN_LISTEN and address[1:] == (port,) and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, PermissionError):
        pass  # the system does not tell everybody; the port itself is what matters
    return ""
