"""Draws all samples of an engine in this process, and compares their bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from producers.engines.engine import DrawnAnswer, LocalEngine, SampleRequest


def run(engine: LocalEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    for one in requests:
        engine.submit(one)
    return finish(engine)


def finish(engine: LocalEngine) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}
    while engine.unfinished():
        found |= {one.id: one for one in engine.step(0.0)}
    return found


def check_begins(found: Mapping[str, DrawnAnswer], expected: Iterable[DrawnAnswer]) -> None:
    """Fail unless each of these answers, which may be longer, begins with the bits that were found."""
    for one in expected:
        drawn = found[one.id]
        assert drawn.tokens.size
        np.testing.assert_array_equal(drawn.tokens, one.tokens[: drawn.tokens.size])
        np.testing.assert_array_equal(drawn.logprobs, one.logprobs[: drawn.tokens.size])
