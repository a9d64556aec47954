"""Prompts are found by their samples, wherever they stand in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.run.prompt_search import PromptsGone, problems_by_group, prompt_records
from infra.memory_bus import MemoryFetcher
from schemas.messages import Prompt, Sample, shared_fields
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec


def prompt_of(sample: Sample, problem: str = "{}") -> Prompt:
    return Prompt(
        **shared_fields(sample), problem=problem, tokens=np.array([4, 5], np.int32), predictor="", edges=[]
    )


def sent(context: Any, prompts: list[Prompt]) -> None:
    for one in prompts:
        context.writer.send(
            context.topics.prompts, encode(one), key=str(one.group), partition=one.length_class
        )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=40), st.sets(st.integers(0, 39)), st.booleans(), st.data()
)
def test_every_prompt_that_is_there_is_found(
    tmp_path: Path, gaps: list[float], wanted: set[int], set_back: bool, data: st.DataObject
) -> None:
    spec = make_spec()
    context = make_context(spec, tmp_path)
    times = np.cumsum(gaps).tolist()
    if set_back:
        times = data.draw(st.permutations(times))
    samples = [make_sample(spec, group, 0, admitted_at=at) for group, at in enumerate(times)]
    sent(context, [prompt_of(one, f'{{"id": "{one.group}"}}') for one in samples])
    asked = [samples[group] for group in sorted(wanted) if group < len(samples)]
    found = prompt_records(context, context.topics.prompts, [*asked, *asked[:1]])
    assert problems_by_group(found) == {one.group: f'{{"id": "{one.group}"}}' for one in asked}


def test_it_looks_at_few_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(lengths={"classes": 1})
    context = make_context(spec, tmp_path)
    samples = [make_sample(spec, group, 0, admitted_at=float(group)) for group in range(3000)]
    sent(context, [prompt_of(one) for one in samples])
    looked: list[int] = []
    fetch = MemoryFetcher.fetch

    def counted(self: Any, topic: Any, wanted: Any, *, deadline_s: float) -> Any:
        looked.append(sum(map(len, wanted.values())))
        return fetch(self, topic, wanted, deadline_s=deadline_s)

    monkeypatch.setattr(MemoryFetcher, "fetch", counted)
    assert len(prompt_records(context, context.topics.prompts, samples[2000:2008])) == 8
    assert sum(looked) < 50


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    spec = make_spec()
    context = make_context(spec, tmp_path)
    samples = [make_sample(spec, group, 0, admitted_at=float(group)) for group in range(4)]
    sent(context, [prompt_of(one) for one in samples[:2]])
    with pytest.raises(PromptsGone, match=r"test-1.prompts has no prompt of 2 groups, such as 2, 3") as error:
        prompt_records(context, context.topics.prompts, samples)
    assert "retention_hours" in str(error.value) and "step file" in str(error.value)
