"""A server under a steady load: how long a first token and each further one take, with so many in flight.

requests in flight ──► prefill, one after the other ──► decoding, all together ──► a new one for each done

Serving benches load an engine like this. A run that generates in batches is simulated instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.planning.roofline import BudgetError, RooflineEngine

_BUSIEST = 0.9  # of the time for prefill; beyond that a queue's length says nothing


@dataclass(frozen=True)
class ServingTimes:
    """Times as a client of the server sees them."""

    first_token_s: float
    token_s: float  # of each further one
    running: int  # samples that are decoded together


def serving_times(
    engine: RooflineEngine, *, prompt: int, answer: int, in_flight: int, prefill_first: bool = False,
    burst_share: float = 0.1,
) -> ServingTimes:  # fmt: skip
    """Return the times of requests that are all alike, `in_flight` of them at any moment.

    `prefill_first`: the engine decodes nothing while prompts wait. Requests that are all alike then end
    together, and come together again. Else only the first ones come together: `burst_share` of all.
    """
    if min(prompt, answer, in_flight) < 1:
        raise BudgetError("requests need a prompt, an answer and one in flight, of at least 1 each")
    context = prompt + answer / 2
    running = max(1, min(in_flight, int(engine.kv_tokens() / context)))
    computes_s = prompt * engine.prefill_s(prompt)
    prefill_s = computes_s + engine.batch_s(1)  # a step at the least
    step_s = engine.step_s(running, context)
    burst_s = prefill_s * (running + 1) / 2
    others_s = computes_s * (running - 1) / answer  # for each token of mine
    if prefill_first:
        first_s, token_s = burst_s, step_s + others_s / 2
    else:
        busy = min(_BUSIEST, running * prefill_s / (running * prefill_s + answer * step_s))
        alone_s = prefill_s * (1 + busy / (2 * (1 - busy)))
        first_s = burst_share * burst_s + (1 - burst_share) * alone_s
        token_s = step_s + others_s
    waits_for_slot = (in_flight - running) / running
    return ServingTimes(first_s + waits_for_slot * (first_s + answer * token_s), token_s, running)
