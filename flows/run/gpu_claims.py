"""The GPUs that a command has claimed for its processes: other commands of the same home pass them over.

.streamrl/gpus/BOOT/NAME.lock ── held by the command, and by the guard of its processes until they have ended

The guard inherits the opened files of all GPUs: so it also holds what is claimed after its start.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import TracebackType

from flows.run.dealt_gpus import DealtGpus
from flows.run.request import RunFailed
from infra.files.locks import SharedLock, locked
from infra.gpus import VISIBLE, visible_gpus
from infra.stack.paths import StackPaths

_DEALING_S = 30.0  # another command deals in milliseconds


class GpuClaims:
    """Claims of one command, which end with it, or with `close`."""

    def __init__(self) -> None:
        self._folder = StackPaths.locate().gpus
        self._files: dict[str, SharedLock] = {}  # of all GPUs, opened
        self._locks: dict[str, SharedLock] = {}  # those that are taken, in the order in which they are dealt

    def __enter__(self) -> GpuClaims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the locks of all GPUs: who inherits them holds what is claimed, also later."""
        return [self._file(name).descriptor for name in visible_gpus()]

    def deal(self, wanted: DealtGpus, generators: int, *, launched: str | None = None) -> DealtGpus:
        """Return `wanted` with GPUs to deal out: first its own claims, then GPUs that nobody has claimed.

        It claims GPUs for its ranks and so many generators; with `shared`, others may claim them, too.
        `launched`: the number that a launcher gave to the one rank that is started, which is that of its GPU.
        Raises RunFailed if there are too few.
        """
        if not (visible := visible_gpus()):
            return wanted
        if launched is not None and launched.isdecimal() and int(launched) < len(visible):
            visible = [visible[int(launched)]]
        with locked(self._folder / "dealing", what="the list of claimed GPUs", deadline_s=_DEALING_S):
            kept = len(self._locks)
            for name in visible:
                if name not in self._locks and self._file(name).take(alone=not wanted.shared):
                    self._locks[name] = self._file(name)
            taken = tuple(name for name in visible if name not in self._locks)
            dealt = replace(wanted, gpus=tuple(self._locks), taken=taken)
            wrong = dealt.problem(generators)
            if wrong and launched is not None:
                wrong += f". A launcher gave this rank LOCAL_RANK={launched}: show it other GPUs by {VISIBLE}"
            for name in list(self._locks)[max(kept, 0 if wrong else dealt.dealt(generators)) :]:
                self._locks.pop(name).give()
        if wrong:
            raise RunFailed(f"{wrong}\n  → or wait until those commands have ended" if taken else wrong)
        return dealt

    def close(self) -> None:
        """Let go of all of them. A guard that is still there holds them until it ends."""
        self._locks.clear()
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, name: str) -> SharedLock:
        """Return the lock of a GPU, opened."""
        if name not in self._files:
            file = re.sub(r"[^\w.-]", "_", name)
            self._files[name] = SharedLock(self._folder / f"{file}.lock", what=f"GPU {name}")
        return self._files[name]
