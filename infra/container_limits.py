"""The cores and the memory that a container allows; the kernel's usual figures are of the whole machine.

A process is in a control group, which is in others. Each may have a limit, and the smallest counts. The two
versions of control groups give files other names. Nothing here raises: what can't be read is no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_FILES = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # bytes: version 1 writes a number as large as this where there is none


class ContainerLimits:
    """The limits of this process's control groups."""

    def __init__(self, groups: Path = _GROUPS, files: Path = _FILES) -> None:
        self._groups, self._files = groups, files

    def cores(self) -> int | None:
        """Return the whole cores, at least one, that the smallest quota is worth; None: there is no quota."""
        least = self._least("cpu", _quota)
        return None if least is None else max(1, int(least))

    def memory(self) -> int | None:
        """Return how many bytes may be taken in all; None: there is no limit."""
        return _whole(self._least("memory", _most))

    def memory_left(self) -> int | None:
        """Return how many bytes may still be taken; None: there is no limit.

        Files that a group keeps in memory count as left: the kernel gives them up when memory is short.
        """
        return _whole(self._least("memory", _left))

    def _least(self, controller: str, limit: Callable[[Path], float | None]) -> float | None:
        found = [limit(folder) for folder in self._folders(controller)]
        return min((one for one in found if one is not None), default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's control groups, with those around them.

        A container may see its own group as the root, and still be told the group's place on the machine.
        """
        lines: list[str] = []
        with suppress(OSError):
            lines = self._groups.read_text(errors="surrogateescape").split("\n")
        for line in lines:
            if line.count(":") < 2:
                continue
            _, controllers, place = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # version 1 mounts several controllers together: as they are listed, or one alone as a link
            for root in (
                (self._files / controllers, self._files / controller) if controllers else (self._files,)
            ):
                folder = root / place.lstrip("/")
                while folder != root:
                    yield folder
                    folder = folder.parent
                yield root


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)  # without a quota it says "max"
    with suppress(OSError, ValueError, ArithmeticError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def _most(folder: Path) -> float | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())  # without a limit it says "max"
            return limit if 0 < limit < _NO_LIMIT else None
    return None


def _left(folder: Path) -> float | None:
    limit = _most(folder)
    if limit is None:
        return None
    for name, of_files in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        with suppress(OSError, ValueError):
            taken = int((folder / name).read_text())
            said = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = (said.get(f"{of_files}{state}_file", "0") for state in ("active", "inactive"))
            return max(0, limit - taken + sum(map(int, files)))
    return None


def _whole(size: float | None) -> int | None:
    return None if size is None else int(size)
