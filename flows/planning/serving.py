"""A server under a steady load: how long a token and a first token take, with so many requests in flight.

requests in flight ──► prefill, one after the other ──► decoding, all together ──► a new request for each done

While a prompt is computed, decoding stands still. This is how serving benches load an engine; a run that
generates in batches is simulated instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.planning.roofline import BudgetError, Decoding

_ROUNDS = 200


@dataclass(frozen=True)
class ServingTimes:
    """What a client of the server sees."""

    first_token_s: float
    token_s: float  # of each further one
    running: float  # samples that are decoded together, in the mean


def serving_times(engine: Decoding, *, prompt: int, answer: int, in_flight: int) -> ServingTimes:
    """Return the times of requests of one kind, `in_flight` of them at any moment."""
    if min(prompt, answer, in_flight) < 1:
        raise BudgetError("requests need a prompt, an answer and one in flight at least")
    prefill_s = prompt * engine.prefill_s(prompt) + engine.batch_s(1) - engine.read_s(1)
    context = prompt + answer / 2
    slots = min(in_flight, max(1, int(engine.kv_tokens() / context)))
    running, queued = float(slots), 0.0
    first_s = prefill_s
    token_s = engine.step_s(running, context)
    for _ in range(_ROUNDS):
        rate = in_flight / (first_s + answer * token_s)
        busy = min(0.95, rate * prefill_s)
        running += 0.2 * (min(slots, max(1.0, rate * answer * token_s)) - running)
        token_s = engine.step_s(running, context) / (1 - busy)
        waits_for_slot = max(0.0, in_flight - slots) / rate
        queued += 0.2 * (min(in_flight - 1, busy * busy / (2 * (1 - busy))) - queued)
        first_s = prefill_s * (1 + queued) + waits_for_slot + token_s / 2
    return ServingTimes(first_s, token_s, running)
