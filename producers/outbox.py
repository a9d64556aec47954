"""Sends each prompt to `<run>.prompts` once, and notes where the topics ended before that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from infra.roles.context import RoleContext
from producers.dispatch.jobs import Placed, RecordPlace
from producers.snapshots import Opened
from schemas.messages import TRAIN, Prompt
from schemas.wire import encode


class Outbox:
    """Sends prompts, and knows which open ones were sent."""

    def __init__(
        self, context: RoleContext, *, sent: Iterable[Prompt], iterations: Mapping[int, Opened]
    ) -> None:
        """`sent`: open prompts that are on the topic already.

        `iterations`: where topics ended before their iterations.
        """
        self._context = context
        self._sent = {prompt.group: prompt.iteration for prompt in sent}
        self.iterations = dict(iterations)

    def open(self) -> Outbox:
        """Open the topics whose ends are noted. Return itself."""
        bus, topics = self._context.bus, self._context.topics
        self._prompts, self._dead = bus.reader(topics.prompts), bus.reader(topics.dead)
        return self

    def fresh(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return those of the prompts that were not sent."""
        return [prompt for prompt in prompts if prompt.group not in self._sent]

    def send(self, prompts: Sequence[Prompt]) -> list[Placed]:
        """Send prompts and wait until the broker has them. Return their places."""
        self._open({prompt.iteration for prompt in prompts if prompt.purpose == TRAIN} - set(self.iterations))
        writer, topic = self._context.writer, self._context.topics.prompts
        sent = [
            (prompt, writer.send(topic, encode(prompt), key=str(prompt.group), partition=prompt.length_class))
            for prompt in prompts
        ]
        writer.flush(self._context.spec.deadlines.progress_s)
        self._sent |= {prompt.group: prompt.iteration for prompt in prompts}
        counters = self._context.heart.counters
        counters["admitted"] = counters.get("admitted", 0) + sum(prompt.size for prompt in prompts)
        return [Placed(prompt, RecordPlace(prompt.length_class, record.offset())) for prompt, record in sent]

    def _open(self, iterations: set[int]) -> None:
        if iterations:
            ends = self.ends()
            self.iterations |= dict.fromkeys(iterations, ends)

    def ends(self) -> Opened:
        """Return where prompts and dead letters end now."""
        return Opened(prompts=self._prompts.end_offsets(), dead=self._dead.end_offsets()[0])

    def forget(self, trained: int, evaluated: Collection[int]) -> None:
        """Forget the prompts of iterations before `trained`, but not those of versions in `evaluated`."""
        self.iterations = {
            iteration: opened for iteration, opened in self.iterations.items() if iteration >= trained
        }
        self._sent = {
            group: iteration
            for group, iteration in self._sent.items()
            if iteration >= trained or (group < 0 and iteration in evaluated)
        }

    def close(self) -> None:
        """Close the readers."""
        self._prompts.close()
        self._dead.close()
