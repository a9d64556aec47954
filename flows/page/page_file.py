"""Writes the page of a run as a file, within a deadline, whether or not its broker answers.

report folder ──► files ──────────────────────────┐
topics ──► view, samples ──► topic facts ──► page.html
                 └── kept in topics.json, for the time when the broker is away
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from flows.page.page import page_html
from flows.page.page_data import PageData, SaidState
from flows.page.run_files import RunFiles, read_json
from flows.page.sample_texts import samples_to_read
from flows.page.topic_facts import FACTS_FILE, TopicFacts, facts_from, facts_of
from flows.view.follow import look_once
from flows.view.plain_json import plain_json
from infra.errors import Explained
from infra.files.writing import write_whole
from infra.run_bus import connect
from infra.run_handle import RunHandle, opened_run
from infra.runs import RunRecord
from infra.stores.store import Store

PAGE_FILE = "report.html"
DEADLINE_S, _SAMPLES_S = 30.0, 10.0
_NOT_SAID = SaidState()


def write_page(
    record: RunRecord, store: Store, folder: Path, target: Path | None = None, *,
    said: SaidState = _NOT_SAID, deadline_s: float = DEADLINE_S,
) -> Path:  # fmt: skip
    """Write a run's page and return its path. The page names all that can't be read by the deadline.

    `folder`: the report folder of the run. `said`: its state, as its flow said.
    `target`: the file; by default report.html in that folder.
    """
    files = RunFiles(folder)
    files.refresh()
    data = PageData(record, files, said=said)
    add_facts(data, *_facts_within(record, store, deadline_s))
    target = target or folder / PAGE_FILE
    write_whole(target, page_html(data))
    return target


def add_facts(data: PageData, facts: TopicFacts | None, trouble: str, *, keep: bool = True) -> None:
    """Add to a page what its topics say, or else what they said when a page was made before.

    `keep` the facts in a file for pages to come.
    """
    kept = data.files.folder / FACTS_FILE
    if facts is not None:
        data.facts = facts
        if keep:
            with contextlib.suppress(OSError):  # the page itself is not lost with it
                write_whole(kept, plain_json(facts.as_json()))
        return
    data.missing.append(f"The run's topics can't be read: {trouble}")
    if (before := facts_from(read_json(kept))) is not None:
        data.facts, data.old_facts = before, True
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(before.at))
        data.missing[-1] += f"\nLengths, samples, processes and dead letters are as they were at {at}."


def _facts_within(record: RunRecord, store: Store, deadline_s: float) -> tuple[TopicFacts | None, str]:
    """Read the topics in a thread, since a broker that hangs must not hang the caller."""
    found: list[TopicFacts] = []
    trouble = [f"there was no answer within {deadline_s:.0f} s"]

    def read() -> None:
        try:
            connect(record, "streamrl-page").check()
            facts = facts_of(look_once(record, deadline_s=deadline_s))
            with topics_of(record, store) as handle:
                add_samples(facts, handle)
            found.append(facts)
        except Exception as error:  # whatever it is: the page says so, and shows the rest
            trouble[0] = str(error)[:1000] or type(error).__name__

    thread = threading.Thread(target=read, name="page", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return (found[0], "") if found else (None, trouble[0])


@contextlib.contextmanager
def topics_of(record: RunRecord, store: Store) -> Iterator[RunHandle]:
    """Open a run for the reading of its page."""
    with opened_run(store, record, "streamrl-page") as handle:
        yield handle


def add_samples(facts: TopicFacts, handle: RunHandle) -> None:
    """Add the texts of samples, or why there are none."""
    try:
        facts.samples = samples_to_read(handle, deadline_s=_SAMPLES_S)
    except Explained as error:
        facts.samples_missing = f"Samples can't be read: {str(error)[:500]}"
    except Exception as error:  # of a tokenizer, which is foreign code
        facts.samples_missing = f"Samples can't be read: {type(error).__name__}: {str(error)[:300]}"
