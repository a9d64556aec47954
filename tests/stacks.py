"""What the tests of the local stack share: looking at its processes without trusting its own books."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.stack import local
from infra.stack.paths import StackPaths


@contextmanager
def own_broker(paths: StackPaths) -> Iterator[str]:
    """A broker of its own; its bootstrap servers."""
    try:
        address = local.start_stack(kafka=True, prefect=False, paths=paths).bootstrap_servers
        assert address is not None
        yield address
    finally:
        local.stop_stack(paths=paths)


def words_of(process: psutil.Process) -> list[str]:
    """A process's command line; nothing once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process whose command line or environment names this home, this one excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == psutil.Process().pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(home) in word for word in words):
            found.append(process)
    return found


def listens_on(pid: int) -> set[str]:
    """The addresses on which it accepts connections."""
    connections = psutil.Process(pid).net_connections("inet")
    return {str(c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN}
