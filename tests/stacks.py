"""What the tests of the local stack share: looking at its processes without trusting its own books."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.stack import local
from infra.stack.paths import StackPaths

ROOT = Path(__file__).parents[1]

_STOP_AFTER_US = """
import sys
from pathlib import Path
home = Path(sys.stdin.read())
from infra.stack import local
from infra.stack.paths import StackPaths
local.stop_stack(paths=StackPaths.locate(home))
"""


@contextmanager
def ending_with_us(paths: StackPaths) -> Iterator[None]:
    """Services that are started within end with it, and also if this process is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", _STOP_AFTER_US], cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
    ) as stops:
        assert stops.stdin is not None
        stops.stdin.write(bytes(paths.home))
        stops.stdin.flush()
        try:
            yield
        finally:
            local.stop_stack(paths=paths)
            stops.kill()


@contextmanager
def own_broker(paths: StackPaths) -> Iterator[str]:
    """A broker of its own; its bootstrap servers."""
    with ending_with_us(paths):
        address = local.start_stack(kafka=True, prefect=False, paths=paths).bootstrap_servers
        assert address is not None
        yield address


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
