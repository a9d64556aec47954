"""The feeder's own decisions; what it plans is tested with the planner."""

from __future__ import annotations

import logging

import pytest

from producers.feeder import that_fit
from producers.tasks import TaskError

PROBLEMS = [{"id": str(n), "prompt": "x" * n} for n in range(6)]
LOG = logging.getLogger("streamrl.test")


def test_prompts_that_do_not_fit_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit = that_fit(PROBLEMS, lambda text: [1] * len(text), 3, LOG)
    assert [problem["id"] for problem in fit] == ["1", "2", "3"]
    assert "3 of 6 problems are left out" in caplog.text


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(TaskError, match="no problem has a prompt of 1 to 0 tokens"):
        that_fit(PROBLEMS, lambda text: [1] * len(text), 0, LOG)
