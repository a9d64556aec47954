"""The weights of a run's versions: from a step file, from the store, or trained again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from consumers.replay import Again, StepProgress
from flows.run.replaying import taking_again
from flows.run.step_files import OpenStepFile, tensor_of
from infra.errors import Explained
from infra.run_handle import RunHandle
from infra.stores.store import Missing, StoreError
from infra.weights.digest import digests_of, model_digests, root_digest
from infra.weights.expected import Expected
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.regenerating import RegenerationError


class VersionWeights:
    """Finds published weights by number and root. A replay makes those that the store has no more."""

    def __init__(self, handle: RunHandle, begins: OpenStepFile | None, progress: StepProgress) -> None:
        """`begins`: the step file that the run is read from; None: it is a run."""
        self._handle, self._begins, self._progress = handle, begins, progress
        self._again: Again | None = None

    def kept(self, version: int, root: str | None = None) -> Mapping[str, torch.Tensor] | None:
        """Return a version's tensors as the step file or the store has them; None if they are not kept.

        `root`: those of another root are not meant.
        """
        if self._begins is None:
            try:
                return self._store.fetch(version, root=root)[1]
            except (Missing, WeightsError):
                return None
        held = self._begins.versions.get(version)
        if held is None or (root is not None and root_digest(model_digests(held)) != root):
            return None
        return {name: tensor_of(bits) for name, bits in held.items()}

    def of_file(self, version: int) -> Mapping[str, torch.Tensor] | None:
        """Return a version that a step file's own steps begin with or come to; None if it is no such one."""
        if self._begins is None:
            return None
        index, step = self._begins.index, version * self._handle.spec.algorithm.optimizer_steps
        if not index.first <= step <= index.last + (not index.failed):
            return None
        again = self._standing_before(step)
        root, found = again[1], again[0].learner.weights()
        return found if root is None or root_digest(digests_of(found)) == root else None

    def published(self, version: int, root: str) -> Mapping[str, torch.Tensor]:
        """Return a version's tensors; of an adapter, the adapter's. Raises RegenerationError."""
        reason = "the step file has no weights of it"
        if self._begins is not None:
            if (held := self.kept(version, root)) is not None:
                return held
        else:
            try:
                return self._store.fetch(version, root=root)[1]
            except (StoreError, WeightsError) as error:
                reason = str(error)
        return self._trained(version, root, reason)

    @cached_property
    def _store(self) -> WeightStore:
        record = self._handle.record
        expected = Expected(record.spec.model, ModelFolder(record.model))
        return WeightStore(self._handle.store, self._handle.run, check=expected.check)

    def _trained(self, version: int, root: str, reason: str) -> Mapping[str, torch.Tensor]:
        """Train a version again; `reason`: why it can't be had otherwise."""
        try:
            again, _ = self._standing_before(version * self._handle.spec.algorithm.optimizer_steps)
        except Explained as error:
            raise RegenerationError(
                f"version {version} of the weights, which drew some of the samples, can't be had: {reason}; "
                f"and it can't be trained again: {error}. {self._advice}"
            ) from error
        found = again.learner.weights()
        if (came_to := root_digest(digests_of(found))) != root:
            raise RegenerationError(
                f"version {version} of the weights, which drew some of the samples, can't be had: {reason}; "
                f"trained again it has root {came_to[:12]}, and the samples name {root[:12]}. {self._advice}"
            )
        return found

    def _standing_before(self, step: int) -> tuple[Again, str | None]:
        """Take steps up to one; return what took them, and the root that the weights should have."""
        if self._again is None:
            start = self._begins.start if self._begins else None
            self._again = taking_again(self._handle, self._progress, start)
        return self._again, self._again.stand_before(step)

    @property
    def _advice(self) -> str:
        if self._begins is not None:
            return (
                "`streamrl bundle --regenerate` puts the weights of all versions that drew samples into a "
                "step file; without them, `streamrl replay` and `--rewards` go"
            )
        return "`streamrl replay` and `--rewards` go without them; trainer.keep_weights keeps more versions"

    def close(self) -> None:
        """Close the learner, if there is one."""
        if self._again is not None:
            self._again.close()
