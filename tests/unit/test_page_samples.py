"""The page reads a few samples of the newest step, and keeps all that the topics said."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flows.page import live_page
from flows.page.live_page import LivePage
from flows.page.page_data import SaidState
from flows.page.sample_texts import samples_to_read
from flows.page.topic_facts import facts_from, facts_of
from flows.view.follow import Follower
from flows.view.run_view import RunView
from infra.roles.context import RoleContext
from producers.tokenizing import TokenizerError
from schemas.messages import StepRecord
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.feeding import make_step
from tests.pages import make_facts, process_line, write_lines
from tests.waiting import wait_until

SPEC = make_spec()


def trained(context: RoleContext, *, number: int = 0) -> StepRecord:
    """Put four samples and their step on the topics."""
    samples = [
        make_sample(SPEC, 1 + row // 2, row % 2, length=length, reward=reward, predicted=5.0)
        for row, (length, reward) in enumerate([(7, 0.5), (3, 0.1), (12, 1.0), (5, 0.0)])
    ]
    for sample in samples:
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    places = [(0, 4 * number + row) for row in range(4)]
    record = make_step(SPEC, number, samples, places=places)
    context.writer.send(context.topics.ledger, encode(record), key=str(number))
    return record


def test_a_handful_of_samples_of_the_newest_step_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(SPEC, tmp_path)
    assert samples_to_read(context, deadline_s=5) == []
    trained(context)
    trained(context, number=1)
    with pytest.raises(TokenizerError):
        samples_to_read(context, deadline_s=5)
    monkeypatch.setattr("flows.page.sample_texts.load_to_text", lambda model: lambda tokens: "x" * 9000)
    found = samples_to_read(context, deadline_s=5)
    assert {one.why: (one.length, one.reward) for one in found} == {
        "best, longest, length least expected": (12, 1.0),
        "worst": (5, 0.0),
        "median reward": (7, 0.5),
        "shortest": (3, pytest.approx(0.1)),
    }
    assert {one.step for one in found} == {1}
    assert found[0].completion.endswith("(3000 more characters)"), "a text is bounded"


def test_a_sample_without_a_reward_is_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(SPEC, tmp_path)
    sample = make_sample(SPEC, 1, 0, length=5, reward=0.0, reward_error="it raised")
    others = [make_sample(SPEC, 1, 1, length=6, reward=-1.0)]
    for one in (sample, *others):
        context.writer.send(context.topics.samples, encode(one), key=one.id)
    record = make_step(SPEC, 0, [sample, *others], rewards=np.array([np.nan, -1.0]))
    context.writer.send(context.topics.ledger, encode(record), key="0")
    monkeypatch.setattr("flows.page.sample_texts.load_to_text", lambda model: lambda tokens: "x")
    found = {one.why.partition(",")[0]: one for one in samples_to_read(context, deadline_s=5)}
    assert found["worst"].reward_error == "it raised"


def test_facts_are_the_same_after_they_were_kept_in_a_file(tmp_path: Path) -> None:
    view = RunView("test-1", SPEC)
    view.take(trained(make_context(SPEC, tmp_path)))
    for facts in (facts_of(view), make_facts()):
        assert facts.lengths
        assert facts_from(json.loads(json.dumps(facts.as_json()))) == facts


@pytest.mark.parametrize("found", [{}, {"at": "x"}, {"at": 1, "samples": [{}]}, {"at": 1, "lengths": [5]}])
def test_a_file_of_something_else_is_no_facts(found: dict[str, object]) -> None:
    assert facts_from(found) is None


def test_a_live_page_follows_files_and_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(SPEC, tmp_path)
    folder = tmp_path / "report"
    monkeypatch.setattr(live_page, "Follower", partial(Follower, connected=lambda *_: context.bus))
    monkeypatch.setattr(live_page, "topics_of", lambda *_: contextlib.nullcontext(context))
    monkeypatch.setattr("flows.page.sample_texts.load_to_text", lambda model: lambda tokens: "some text")
    monkeypatch.setattr(live_page, "_PAGE_S", 0.0)
    monkeypatch.setattr(live_page, "_SAMPLES_S", 0.02)
    trained(context)
    live = LivePage(context.record, context.store, folder, lambda: SaidState("running")).open()
    try:
        wait_until(lambda: b"1 optimizer steps" in live.page(), what="the first step")
        wait_until(lambda: b"some text" in live.page(), what="its samples")
        trained(context, number=1)
        wait_until(lambda: b"2 optimizer steps" in live.page(), what="the next step")
        write_lines(folder / "processes.jsonl", [process_line("trainer-0", 50.0, {"training": 3.0})])
        write_lines(folder / "processes.jsonl", [process_line("trainer-0", 60.0, {"training": 13.0})])
        wait_until(lambda: b"training 100%" in live.page(), what="the notes")
        assert b"pill live" in live.page() and b"connect-src 'self'" in live.page()
    finally:
        live.close()
    assert not (folder / "topics.json").exists(), "a page that is shown again and again keeps nothing"
