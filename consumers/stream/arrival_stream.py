"""The sample stream of a run with `algorithm.order: arrival`: a step takes the first whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from consumers.batches.training_rows import TrainingRow
from consumers.stream.arrival_order import ArrivalOrder
from consumers.stream.sample_stream import Bundle, RootOf, SampleStream, StepKey
from infra.roles.context import RoleContext
from schemas.messages import Sample
from schemas.taken import TakenGroups


class ArrivalStream(SampleStream):
    """Keeps all groups that are not trained; each is a bundle of its own."""

    def __init__(
        self, context: RoleContext, vocabulary: int, start: Mapping[int, int], trained: StepKey,
        root_of: RootOf, *, taken: TakenGroups, fence: Callable[[], None] = lambda: None,
        letters: int | None = 0,
    ) -> None:  # fmt: skip
        """`taken` is shared with the trainer, which notes a step there before it calls `trained`."""
        super().__init__(context, vocabulary, start, trained, root_of, fence=fence, letters=letters)
        self._taken = taken
        self._whole: dict[int, Bundle] = {}  # not chosen yet, in the order in which they became whole
        self._chosen: dict[int, Bundle] = {}  # for the step in work
        self._order: tuple[StepKey, ArrivalOrder] | None = None

    def _is_trained(self, sample: Sample) -> bool:
        return sample.group in self._taken

    def _is_finished(self, group: int) -> bool:
        return group in self._taken

    def _grew(self, bundle: Bundle) -> None:
        if bundle.complete:
            self._whole[bundle.number] = bundle

    def complete(self, key: StepKey) -> list[Bundle]:
        """Return the whole groups that the step has chosen so far. A chosen group stays chosen."""
        order = self._order_of(key)
        for group, bundle in list(self._whole.items()):
            is_final = bool(bundle.settled(self._resample))  # else another is drawn, and it takes no place
            if order.left and (order.takes(group) or not is_final):
                self._chosen[group] = self._whole.pop(group)
                if is_final:
                    order.took(group)
        return [self._chosen[group] for group in sorted(self._chosen)]

    def _order_of(self, key: StepKey) -> ArrivalOrder:
        if self._order is None or self._order[0] != key:
            self._order = key, ArrivalOrder(self._context.spec.algorithm, self._taken, *key)
        return self._order[1]

    def groups(self, key: StepKey) -> Iterator[list[TrainingRow]]:
        """Yield the rows of the chosen groups. The other ones may be trained by a later step."""
        for group, bundle in self._chosen.items():
            rows = bundle.rows[group]
            yield [rows[index] for index in sorted(rows)]

    def outstanding(self, key: StepKey) -> int:
        """Return how many samples the step lacks, if the groups with the most samples become whole first."""
        left = self._order_of(key).left
        parts = (
            len(rows)
            for group, rows in self._rows.items()
            if group not in self._chosen and group not in self._whole
        )
        return left * self._context.spec.algorithm.group_size - sum(sorted(parts, reverse=True)[:left])

    def trained(self, key: StepKey) -> None:
        """Let go of the groups that were taken."""
        for bundles in self._bundles.values():
            for group in [group for group in bundles if group in self._taken]:
                del bundles[group], self._rows[group]
        self._bundles = {step: bundles for step, bundles in self._bundles.items() if bundles}
        # chosen, but another trainer has taken the step without them: they still came before the others
        whole = self._chosen | self._whole
        self._whole = {group: bundle for group, bundle in whole.items() if group not in self._taken}
        self._chosen, self._order = {}, None
        self._go_on(key)
