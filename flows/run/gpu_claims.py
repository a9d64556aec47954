"""The GPUs that a command has claimed for its processes: other commands of the same home pass them over.

.streamrl/gpus/NAME.lock ── held by the command, and by the guard of its processes until they have ended
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import TracebackType

from flows.run.dealt_gpus import DealtGpus
from flows.run.request import RunFailed
from infra.files.locks import SharedLock, locked
from infra.gpus import visible_gpus
from infra.stack.paths import StackPaths

_DEALING_S = 30.0  # another command deals in milliseconds


class GpuClaims:
    """Claims of one command, which end with it, or with `close`."""

    def __init__(self) -> None:
        self._folder = StackPaths.locate().gpus
        self._locks: dict[str, SharedLock] = {}  # in the order in which they are dealt

    def __enter__(self) -> GpuClaims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the locks, for another process that shall hold them."""
        return [lock.descriptor for lock in self._locks.values()]

    def deal(self, wanted: DealtGpus, generators: int) -> DealtGpus:
        """Return `wanted` with GPUs to deal out: first its own claims, then GPUs that nobody has claimed.

        It claims GPUs for its ranks and so many generators; with `shared`, others may claim them, too.
        Raises RunFailed if there are too few.
        """
        if not (visible := visible_gpus()):
            return wanted
        with locked(self._folder / "dealing", what="the list of claimed GPUs", deadline_s=_DEALING_S):
            kept = len(self._locks)
            for name in visible:
                if name not in self._locks and (lock := self._lock(name, alone=not wanted.shared)):
                    self._locks[name] = lock
            taken = tuple(name for name in visible if name not in self._locks)
            dealt = replace(wanted, gpus=tuple(self._locks), taken=taken)
            wrong = dealt.problem(generators)
            for name in list(self._locks)[max(kept, 0 if wrong else dealt.dealt(generators)) :]:
                self._locks.pop(name).close()
        if wrong:
            raise RunFailed(f"{wrong}\n  → or wait until those commands have ended" if taken else wrong)
        return dealt

    def close(self) -> None:
        """Let go of all of them."""
        while self._locks:
            self._locks.popitem()[1].close()

    def _lock(self, name: str, *, alone: bool) -> SharedLock | None:
        """Return the lock of a GPU, taken; None if another command has it."""
        file = re.sub(r"[^\w.-]", "_", name)
        lock = SharedLock(self._folder / f"{file}.lock", what=f"GPU {name}")
        if lock.take(alone=alone):
            return lock
        lock.close()
        return None
