"""Two sites on one machine: network namespaces, and between them a link with a delay and a bandwidth.

near 10.77.0.1 ── tun ── a process: each packet waits for its turn and its way ── tun ── 10.77.0.2 far

Needs root (ip netns, /dev/net/tun). On a fast link packets have up to 9,000 bytes, so that the relay keeps
up. On a slow one they have 1,500, as between two sites: TCP begins with ten of them on each connection, and
ten large ones on a dozen connections at once would not fit into the link's queue.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DELAY_S = 0.05  # each way
RATE = 100e6 / 8  # bytes a second
_QUEUE_S = 0.2  # what does not fit into so much of a queue is dropped
_LARGEST, _USUAL = 9000, 1500  # bytes of a packet
_SLOW = 50e6 / 8  # bytes a second
_NEW_NET = 0x40000000
_TUN_SET, _TUN_NO_INFO, _TUN = 0x400454CA, 0x1000, 0x0001


@dataclass(frozen=True)
class Link:
    """Between two namespaces."""

    near: str
    far: str
    relay: subprocess.Popen[bytes]
    near_address: str = "10.77.0.1"

    def at_far(self, argv: Sequence[str]) -> list[str]:
        """A command, at the far site."""
        return ["ip", "netns", "exec", self.far, *argv]

    def crossed(self) -> int:
        """Bytes that have come to the far site, headers and all."""
        path = "/sys/class/net/tun0/statistics/rx_bytes"
        return int(subprocess.check_output(self.at_far(["cat", path])))

    def cut(self) -> None:
        """Nothing gets through any more."""
        self.relay.send_signal(signal.SIGUSR1)

    def mend(self) -> None:
        """It does again."""
        self.relay.send_signal(signal.SIGUSR2)


@contextmanager
def two_sites(rate: float = RATE, delay_s: float = DELAY_S) -> Iterator[Link]:
    """This process, and what it starts from now on, is at the near site. `rate`: bytes a second."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise SystemExit("this bench makes network namespaces: run it as root, with /dev/net/tun")
    near, far = (f"srl-{side}-{os.getpid()}" for side in ("near", "far"))
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    tuns: list[int] = []
    packet = _USUAL if rate <= _SLOW else _LARGEST
    relay: subprocess.Popen[bytes] | None = None
    try:
        for name, address in ((near, "10.77.0.1"), (far, "10.77.0.2")):
            _ip("netns", "add", name)
            tuns.append(_tun_in(name))
            for words in (
                ("link", "set", "lo", "up"), ("link", "set", "tun0", "mtu", str(packet)),
                ("addr", "add", f"{address}/24", "dev", "tun0"), ("link", "set", "tun0", "up"),
            ):  # fmt: skip
                _ip("-n", name, *words)
        relay = subprocess.Popen([sys.executable, __file__, *map(str, (*tuns, rate, delay_s))], pass_fds=tuns)
        _enter(f"/var/run/netns/{near}")
        yield Link(near, far, relay)
    finally:
        _set(before)
        if relay is not None:
            relay.kill()
            relay.wait()
        for tun in tuns:
            os.close(tun)
        for name in (near, far):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        os.close(before)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _set(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NET):
        raise OSError(ctypes.get_errno(), "setns")


def _enter(path: str) -> None:
    namespace = os.open(path, os.O_RDONLY)
    try:
        _set(namespace)
    finally:
        os.close(namespace)


def _tun_in(name: str) -> int:
    """A TUN device of a namespace. A thread goes there for it: this one stays."""
    made: list[int] = []

    def make() -> None:
        _enter(f"/var/run/netns/{name}")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUN_SET, struct.pack("16sH", b"tun0", _TUN | _TUN_NO_INFO))
        made.append(tun)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _relay(one: int, other: int, rate: float, delay_s: float) -> None:
    """Move packets until killed. A link waits for no processor, so this goes before all other processes."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    cut = False

    def set_cut(number: int, frame: object) -> None:
        nonlocal cut
        cut = number == signal.SIGUSR1

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, set_cut)
    ways = {one: other, other: one}
    queues: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}  # by where from
    free_at = dict.fromkeys(ways, 0.0)
    poll = select.epoll()
    for end in ways:
        poll.register(end, select.EPOLLIN)
    while True:
        now = time.monotonic()
        for end, queue in queues.items():
            while queue and queue[0][0] <= now:
                packet = queue.popleft()[1]
                with suppress(OSError):  # an interface that is going away
                    os.write(ways[end], packet)
        soonest = min((queue[0][0] for queue in queues.values() if queue), default=now + 1.0)
        for end, _ in poll.poll(max(0.0, soonest - now)):
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(end, _LARGEST)
                    now = time.monotonic()
                    start = max(now, free_at[end])
                    if cut or start - now > _QUEUE_S:
                        continue
                    free_at[end] = start + len(packet) / rate
                    queues[end].append((free_at[end] + delay_s, packet))


if __name__ == "__main__":
    _relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
