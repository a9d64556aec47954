"""Publish weights, announcements and checkpoints in order, in one thread beside training.

Order of writing at a step; the trainer may crash after any of these:
  1. the ledger record            the decision; from here on the step is taken again exactly as recorded
  2. the weights' manifest        the version exists
  3. the announcement             generators may use it
  4. the checkpoint's manifest    earlier records need not be taken again
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from consumers.learners.lending import MadeWeights
from infra.roles.context import RoleContext
from infra.waiting import Wait
from infra.weights import spent
from infra.weights.announcing import signed
from infra.weights.folder import ModelFolder
from infra.weights.inspection import inspected
from infra.weights.manifest import VersionManifest
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from schemas.messages import WeightsAnnouncement
from schemas.wire import encode

_POLL_S = 0.005
_LARGE = 256 << 10  # bytes: larger manifests are not put into the announcement
_COPIES = 2  # copies of weights that wait or are being stored; one more is of the version before
_AHEAD = 2  # jobs that may wait: a store slower than training holds it up instead of filling the memory


class Publisher:
    """Runs publishing jobs in order; a failure is raised by the next call."""

    def __init__(self, context: RoleContext, trainer_epoch: int, base: str | None = None) -> None:
        self._context, self._epoch, self._base = context, trainer_epoch, base
        # all files of a model are published: other machines need not have the starting model's folder
        self._files = ModelFolder(context.record.model).beside if base is None else {}
        self._weights = WeightStore(context.store, context.run)
        self._jobs: queue.Queue[tuple[Callable[[], object], Callable[[], object]] | None] = queue.Queue()
        self._asked, self._put = 0, 0  # numbers of versions; each is counted by one thread
        self._pieces = 0  # pieces that the store has taken: while their number grows, no wait is over
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="publisher")

    def open(self) -> Publisher:
        """Start the thread. Return itself."""
        self._thread.start()
        return self

    def publish(self, version: int, made: MadeWeights) -> None:
        """Publish and announce a version in the background. Waits while too many copies are held."""
        self._wait(lambda: self._asked - self._put < _COPIES)
        self._asked += 1
        copy = made.copy()
        self.submit(lambda: self._publish(version, made, copy))

    @spent.counted()
    def _publish(self, version: int, made: MadeWeights, copy: Future[dict[str, torch.Tensor]]) -> None:
        tensors = copy.result()
        if (found := inspected(tensors)).root != made.root:
            raise WeightsError(
                f"version {version} is not published: the copy of the weights has root {found.root[:12]}, "
                f"not {made.root[:12]} as in the ledger. The memory of this machine or StreamRL has a fault"
            )
        manifest = self._weights.publish(
            version, tensors, trainer_epoch=self._epoch, base=self._base, files=self._files, known=found,
            progress=lambda done, whole: self.moved(),
        )  # fmt: skip
        self._put += 1
        self._count(manifest)
        self._announce(manifest)

    def _count(self, manifest: VersionManifest) -> None:
        """Count the bytes of a version: those to fetch after the version before it, and all of them."""
        counters = self._context.heart.counters
        way = manifest.path(manifest.version - 1) or manifest.path(None)
        counters["published"] = manifest.version
        counters["published_bytes"] = counters.get("published_bytes", 0) + (way.size if way else 0)
        counters["whole_bytes"] = manifest.size

    def moved(self) -> None:
        """Count a piece that the store has taken; the heartbeat tells all waits of the run."""
        self._pieces += 1
        self._context.heart.counters["stored_pieces"] = self._pieces

    def find(self, version: int) -> VersionManifest | None:
        """Return the manifest of a published version; None if it is not published."""
        return self._weights.find(version)

    def newest(self) -> int:
        """Return the newest published version; -1 if there is none."""
        return max(self._weights.versions(), default=-1)

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a published version."""
        return self._weights.fetch(version)[1]

    def _announce(self, manifest: VersionManifest) -> None:
        packed = manifest.packed
        announcement = WeightsAnnouncement(
            run=self._context.run, version=manifest.version, root=manifest.root,
            manifest=self._weights.manifest_key(manifest.version), size=manifest.size,
            trainer_epoch=self._epoch, announced_at=time.time(),
            content=packed if len(packed) <= _LARGE else b"",
        )  # fmt: skip
        self._context.writer.send(self._context.topics.weights, encode(signed(announcement)), key="newest")
        self._context.writer.flush(self._context.spec.deadlines.progress_s)
        keep = self._context.spec.trainer.keep_weights
        if manifest.version % keep == 0:  # not at each version, since it lists the store
            self._weights.collect(keep)

    def submit(self, job: Callable[[], object], dropped: Callable[[], object] = lambda: None) -> None:
        """Run `job` after earlier ones, in the publisher's thread; if one of those failed, run `dropped`."""
        self._wait(lambda: self._jobs.unfinished_tasks <= _AHEAD)
        self._jobs.put((job, dropped))

    def drain(self) -> None:
        """Return when all jobs are done."""
        self._wait(lambda: not self._jobs.unfinished_tasks)

    def _wait(self, true: Callable[[], bool]) -> None:
        self.check()
        wait = Wait("weights and checkpoints to be in the object store", unblocked_by="the store",
                    deadline_s=self._context.spec.deadlines.progress_s)  # fmt: skip
        seen, heart = (self._jobs.unfinished_tasks, self._pieces), self._context.heart
        while not true():
            heart.waiting(wait.what, unblocked_by=wait.unblocked_by, cause="object store")
            self._context.check_stop()
            if seen != (seen := (self._jobs.unfinished_tasks, self._pieces)):
                wait.progress()
            wait.check()
            time.sleep(_POLL_S)
        heart.working("publishing")
        self.check()

    def close(self) -> None:
        """Finish all jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                job[0 if self._failed is None else 1]()
            except BaseException as error:  # the trainer's own thread raises it
                self._failed = error
            finally:
                self._jobs.task_done()

    def check(self) -> None:
        """Raise the error of a job that failed, if one has."""
        if self._failed is not None:
            raise self._failed
