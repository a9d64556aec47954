"""The archive: how quick a pass is, how small its files are, and how long a query over 100,000 samples takes.

archive_mb_s      MB of the log that a pass archives in a second, from a bus in memory to a folder
archive_over_log  bytes of the archive over those of the log
sql_s             the slower of two aggregates over all archived samples, with imports and all
log_sql_s         the same where nothing is archived yet, from a bus in memory
step_s            seconds to read the samples of one iteration back from the archive, the median of some
peak_mb           memory that a pass takes beyond what the log in memory has
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flows.run.archive_query import answered
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.joined_bus import JoinedBus
from infra.memory_bus import MemoryBus
from infra.roles.context import RoleContext
from schemas.wire import encode
from tests.bench._runs import ROOT
from tests.factories import make_context, make_sample, make_spec

QUERIES = (
    "select iteration, count(*), avg(reward), quantile_cont(reward, 0.9) from samples group by 1 order by 1",
    "select problem_id, avg(len(tokens)), max(finished_at - started_at) from samples group by 1 order by 2",
)
_TOKENS = 100  # of an answer, in the mean
_PROMPT = 60
_GROUPS, _SIZE = 64, 8  # a file of the archive then has some 500 samples


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench archive")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.folder:
        return _queries(Path(given.folder))
    with tempfile.TemporaryDirectory() as folder:
        context = make_context(make_spec(algorithm={"groups": _GROUPS, "group_size": _SIZE}), Path(folder))
        _fill(context, given.samples, given.seed)
        log_sql_s = max(_asked(context, sql) for sql in QUERIES)
        writer = ArchiveWriter(context.bus, context.store, context.topics, context.run, "", deadline_s=60)
        with _peak_memory() as peak:
            since = time.perf_counter()
            done = writer.archive(now=time.time())
            took = time.perf_counter() - since
        step_s = _read_back(context, given.samples)
        asked = subprocess.run(
            [sys.executable, "-m", "tests.bench", "archive", "--folder", folder],
            cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=300,
        )  # fmt: skip
        sql_s = float(asked.stdout.rpartition('"sql_s": ')[2].split("}")[0])
        return {
            "samples": given.samples, "log_mb": done.log_bytes / 1e6,
            "archive_mb_s": done.log_bytes / 1e6 / took, "archive_over_log": done.file_bytes / done.log_bytes,
            "sql_s": sql_s, "log_sql_s": log_sql_s, "step_s": step_s,
            "segments": done.segments, "peak_mb": peak[0],
        }  # fmt: skip


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """Yield a list; after the block it has the most MB that this process took beyond those it began with."""
    page, peak, ended = os.sysconf("SC_PAGE_SIZE"), [0.0], threading.Event()

    def taken() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    gc.collect()
    pa.default_memory_pool().release_unused()
    begun = taken()

    def follow() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], (taken() - begun) / 1e6)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _fill(context: RoleContext, count: int, seed: int) -> None:
    """Put samples on the log as a run has them: words by Zipf's law, logprobs near 0, lengths with a tail."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(_TOKENS) - 0.32, 0.8, count), 2, 4_000).astype(int)
    for number, length in enumerate(lengths.tolist()):
        group, index = divmod(number, _SIZE)
        sample = make_sample(
            context.spec, group, index,
            tokens=(draw.zipf(1.2, length) % 150_000).astype(np.int32),
            logprobs=(-draw.exponential(0.4, length)).astype(np.float32),
            prompt_tokens=_prompt(group % 2_000),
            problem_id=str(group % 2_000), reward=float(draw.integers(0, 2)), roots=["0123456789abcdef" * 4],
            seed=int(draw.integers(0, 2**63)), reward_parts={"right": 1.0, "form": 0.5},
            started_at=1.7e9 + number * 0.01, finished_at=1.7e9 + number * 0.01 + length * 0.02,
            scored_at=1.7e9 + number * 0.01 + length * 0.02 + 0.1, generator=f"generator-{number % 16}",
        )  # fmt: skip
        context.writer.send(context.topics.samples, encode(sample), key=sample.id, partition=group % 2)


def _prompt(problem: int) -> np.ndarray:
    return (np.random.default_rng(problem).zipf(1.2, _PROMPT) % 150_000).astype(np.int32)


def _asked(context: RoleContext, sql: str) -> float:
    since = time.perf_counter()
    with answered(context.bus, context.store, context.record, sql) as answer:
        if not [row for rows in answer.rows for row in rows]:
            raise RuntimeError("the query found nothing")
    return time.perf_counter() - since


def _queries(folder: Path) -> dict[str, Any]:
    """Ask in a process of its own, which has imported nothing for it, an empty log and the archive."""
    context = make_context(make_spec(algorithm={"groups": _GROUPS, "group_size": _SIZE}), folder)
    return {"sql_s": max(_asked(context, sql) for sql in QUERIES)}


def _read_back(context: RoleContext, count: int) -> float:
    """Read samples of some iterations by their places, each as a reader that has just begun."""
    assert isinstance(context.bus, MemoryBus)
    ends = [context.bus.end(context.topics.samples, part) for part in range(2)]
    for part, end in enumerate(ends):
        context.bus.truncate(context.topics.samples, part, end)
    took, size = [], _GROUPS * _SIZE // 2
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        since = time.perf_counter()
        joined = JoinedBus(context.bus, context.store, lambda run: "")
        for part, end in enumerate(ends):
            at = int(end * share) // size * size
            reader = joined.reader(context.topics.samples, {part: at}, only=part)
            left = min(size, count)
            while left > 0:
                left -= len(reader.poll(0.0, left))
            reader.close()
        took.append(time.perf_counter() - since)
    return statistics.median(took)
