"""The GPUs that a replay computes on: such as no other command of this home has claimed, if there are any."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flows.run.dealt_gpus import DealtGpus
from flows.run.gpu_claims import GpuClaims
from flows.run.request import RunFailed
from infra.gpus import VISIBLE, visible_gpus
from infra.run_handle import RunHandle

_held = threading.Lock()  # while this process has claimed GPUs: what computes in it shares them


@contextmanager
def gpus_of_replay(handle: RunHandle) -> Iterator[None]:
    """Show this process and its children free GPUs: as many as a trainer or an engine of the run takes."""
    if not visible_gpus() or not _held.acquire(blocking=False):
        yield
        return
    before = os.environ.get(VISIBLE)
    try:
        with GpuClaims() as claims:
            os.environ.update(_free(claims, handle))
            yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before
        _held.release()


def _free(claims: GpuClaims, handle: RunHandle) -> dict[str, str]:
    count = max(handle.spec.trainer.ranks, handle.spec.generator.gpus)
    try:
        return claims.deal(DealtGpus((), ranks=count), 0).for_ranks()
    except RunFailed as error:
        handle.log.warning("the replay shares GPUs with other commands: %s", str(error).splitlines()[0])
        return {}
