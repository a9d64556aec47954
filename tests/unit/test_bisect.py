"""Conditions on steps, and the first step for which one holds."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.cli import app
from flows.run.bisecting import Bisected, _by_replays
from flows.run.predicates import BadPredicate, Predicate, predicate
from infra import runs
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("grad_norm > 10", {"grad_norm": 11.0}, True), ("grad_norm > 10", {"grad_norm": 9.0}, False),
        ("nan", {"nan": 1.0}, True), ("gap > 0.1", {"logprob_gap": 0.2}, True),
        ("0 < entropy <= 1 and not reward >= 1", {"entropy": 1.0, "reward": 0.5}, True),
        ("abs(loss) > -2 * -1 or max(reward, length) == 3", {"loss": 0.0, "reward": 3.0, "length": 1}, True),
        ("reward / staleness > 1", {"reward": 1.0, "staleness": 0.0}, False),
        ("reward > 0", {}, False),
        ("log(loss) > 1 or nan", {"loss": -1.0, "nan": 1.0}, True), ("log(loss) < 0", {"loss": 0.0}, False),
        ("loss * 1" + "0" * 400 + " > 1", {"loss": 2.0}, False),
    ],
)  # fmt: skip
def test_conditions(text: str, values: dict[str, float], holds: bool) -> None:
    assert predicate(text).holds(values) is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("__import__('os').system('x')", "has no value __import__"), ("reward.__class__", "can't be used"),
        ("grad_nrom > 1", "has no value grad_nrom"), ("reward >", "is no expression"),
        ("'a' < 1", "can't be used"), ("reward if nan else 1", "can't be used"),
        ("reward[0]", "can't be used"),
        ("(" * 300, "is no expression"), ("-" * 200 + "1", "too deeply"),
        ("reward" + " + reward" * 200, "characters; 1000 are the most"),
        ("none.py:f", "there is no file none.py"), ("abs()", "can't be used"),
        ("max(reward) > 1", "can't be used"), ("abs(reward, 2)", "can't be used"),
        ("log(reward, 2, 3) > 1", "can't be used"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_said(text: str, why: str) -> None:
    with pytest.raises(BadPredicate, match=why.replace("(", r"\(")):
        predicate(text)


def test_a_function_of_the_user_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def lacks(values):\n    return values['reward_x'] > 1\n\n\nnumber = 3\n")
    when = predicate(f"{file}:lacks")
    with pytest.raises(BadPredicate, match=r"mine.py:lacks failed at step 4: KeyError: 'reward_x'"):
        when.holds({"step": 4.0})
    with pytest.raises(BadPredicate, match=r"mine.py:number: it is no function"):
        predicate(f"{file}:number")


@given(st.integers(1, 2000), st.integers(0, 2500))
def test_few_steps_are_replayed(steps: int, first: int) -> None:
    taken: list[int] = []

    class Counting:
        def step(self, number: int) -> Any:
            taken.append(number)
            return number

    import flows.run.bisecting as bisecting

    plain, bisecting.values_of_replay = bisecting.values_of_replay, lambda number: {"step": float(number)}  # type: ignore[assignment]
    try:
        when = Predicate("", lambda values: values["step"] >= first, True)
        found = _by_replays(Counting(), when, 0, steps - 1, lambda *_: None)  # type: ignore[arg-type]
    finally:
        bisecting.values_of_replay = plain
    assert found.step == (first if first < steps else None)
    assert found.replays == len(taken) <= math.ceil(math.log2(max(1, steps))) + 2


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    model = str(make_tiny_model(tmp_path / "m", layers=1, width=16))
    spec = make_spec(
        algorithm={"iterations": 8, "groups": 2, "group_size": 2, "learning_rate": 1e-2},
        trainer={"checkpoint_every": 3},
    )
    context = make_context(spec, tmp_path)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    world = World(context, model)

    def tamper(learner: Any) -> None:
        step, taken = learner.step, []

        def stepped(total: float) -> Any:
            taken.append(total)
            return step(total * (1.5 if len(taken) > 5 else 1.0))

        learner.step = stepped

    world.live(tamper=tamper)
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    words = ["bisect", "test-1", "--store", context.store.url, "--json", "--when"]
    norms = [step.metrics["grad_norm"] for step in world.ledger()]
    first = next(number for number, norm in enumerate(norms) if norm > sorted(norms)[4])
    said = json.loads(CliRunner().invoke(app, [*words, f"grad_norm > {sorted(norms)[4]!r}"]).stdout)
    assert (said["step"], said["replays"]) == (first, 0)
    result = CliRunner().invoke(app, [*words, "different"])
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["step"], result.exit_code) == (5, 0)
    assert said["replays"] <= 5 and said["values"]["apart_gradient"] > 0
    result = CliRunner().invoke(app, [*words[:-2], "--when", "reward > 99"])
    assert result.exit_code == 1 and "holds for none of the 8 steps" in result.output
    mine = tmp_path / "mine.py"
    mine.write_text("def late(values):\n    return values['step'] >= 6\n")
    said = json.loads(CliRunner().invoke(app, [*words, f"{mine}:late"]).stdout)
    assert said["step"] == 6


def test_what_is_no_number_is_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    values = {"grad_norm": math.nan, "apart_gradient": math.inf, "nan": 1.0}
    opened = SimpleNamespace(again=None, handle=None)
    monkeypatch.setattr("flows.run.replaying.replaying", lambda *_, **__: nullcontext(opened))
    monkeypatch.setattr("flows.run.bisecting.bisect_run", lambda *_: Bisected(3, values, 0, 9))
    result = CliRunner().invoke(app, ["bisect", "test-1", "--json", "--when", "nan"])
    said = json.loads(result.stdout, parse_constant=refuse)
    assert said["values"] == {"grad_norm": None, "apart_gradient": None, "nan": 1.0}
