"""What a process spends on weights is counted, in whichever thread, and its heart says it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from infra.roles.heart import Heart
from infra.weights import spent
from infra.weights.codec.chunks import in_threads
from infra.weights.inspection import inspected


def burn(seconds: float) -> None:
    """Of this thread's time on a processor."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_threads_count_their_own_and_only_while_they_are_at_it() -> None:
    before = spent.seconds()
    burn(0.05)
    assert spent.seconds() == before
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spent.counted()(burn), [0.05, 0.05]))
    assert 0.1 <= spent.seconds() - before < 0.2


@pytest.mark.parametrize("threads", [1, 2])
def test_work_in_threads_is_counted_also_if_there_is_one_alone(threads: int) -> None:
    before = spent.seconds()
    assert len(list(in_threads(burn, [0.03, 0.03], threads))) == 2
    assert 0.06 <= spent.seconds() - before < 0.2


def test_a_heart_says_what_hashing_took() -> None:
    heart = Heart("r-1", "trainer", 0)
    before = heart.message().counters["weights_cpu_s"]
    inspected({"w": torch.ones(1 << 22)})
    assert heart.message().counters["weights_cpu_s"] > before


def test_what_counts_within_what_counts_is_counted_once() -> None:
    before = spent.seconds()
    with spent.counted(), spent.counted():
        burn(0.05)
    assert 0.05 <= spent.seconds() - before < 0.1
