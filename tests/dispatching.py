"""A dispatcher beside the one reading of samples, put together as the feeder does."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from infra.roles.context import RoleContext
from producers.dispatch.jobs import Placed
from producers.dispatch.recovery import Past
from producers.dispatch.service import Dispatching
from producers.feeder import finished_of
from producers.restart import letters_of
from producers.sample_feed import FeederRoots, SampleFeed


class Dispatched:
    """What a feeder that starts now has of both; weights of any root count as published."""

    def __init__(self, context: RoleContext, known: Sequence[Placed] = ()) -> None:
        roots = FeederRoots(context)
        roots._published = lambda version: "r"  # type: ignore[method-assign]
        self.feed = SampleFeed(context, {}, 0, roots).open()
        self.feed.admitted(one.prompt for one in known)
        finished = self.feed.subscribe(finished_of)
        self.feed.read_back()
        letters = letters_of(context, 0)
        unfit = letters.of(context.topics.samples)
        self.done = {one.key: one.length for one in finished.take() if one.place not in unfit}
        past = Past(dict(self.done), 0, unfit, letters.position)
        self.service = Dispatching(context, known, past, finished).open()
        self.feed.follow()

    def admit(self, prompts: Sequence[Placed]) -> None:
        """As the feeder sends prompts."""
        self.service.admit(prompts)
        self.feed.admitted(one.prompt for one in prompts)

    def close(self) -> None:
        """End both threads."""
        self.feed.close()
        self.service.close()

    def __enter__(self) -> Dispatched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.service.check()
