"""The figures for Prometheus: their names, what they say, and where they are served."""

from __future__ import annotations

import ast
import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from flows.monitoring.exporter import exporting, figures_of
from flows.monitoring.process_figures import FORGOTTEN_S, OF_ALL, OF_ROLE
from flows.monitoring.run_figures import step_figure
from flows.view.follow import Follower
from flows.view.run_view import RunView
from infra.bus import Record
from infra.runs import RunRecord
from infra.stack.paths import StackPaths
from schemas.messages import Evaluation, Heartbeat, StepRecord
from schemas.metrics import METRICS
from schemas.wire import encode
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill
from tests.waiting import wait_until

ROOMS = Path(__file__).parents[2]
CONVENTION = re.compile(r"streamrl_[a-z][a-z0-9_]*")


def beat(role: str, *, number: int = 0, waits: str = "", ago_s: float = 0.0, **counters: float) -> Heartbeat:
    now = time.time() - ago_s
    return fill(
        Heartbeat, role=role, number=number, state="working", waits_for=waits, since=now - 3, sent_at=now,
        counters=counters,
    )  # fmt: skip


def step(number: int, at: float | None = None, **metrics: float) -> StepRecord:
    return fill(
        StepRecord, run="count-1", step=number, iteration=number, version_in=number, version_out=number + 1,
        groups=np.zeros(4), partitions=np.zeros(4, int), offsets=np.zeros(4), indexes=np.zeros(4),
        rewards=np.array([0.5, 0.5, 1.0, np.nan]), lengths=np.full(4, 7),
        versions=np.full(4, number), predicted=np.full(4, 5.0), problem_ids=["a", "b", "c", "d"],
        microbatches=np.array([4]), metrics=metrics,
        finished_at=time.time() if at is None else at,
    )  # fmt: skip


def full_view() -> RunView:
    """A view of a run with a process of each role, a step with all metrics, and an evaluation."""
    view = RunView("count-1", make_spec(lengths={"classes": 2}))
    for role, names in OF_ROLE.items():
        view.take(beat(role, **dict.fromkeys([*OF_ALL, *names], 2.0)))
    metrics = {name: 0.25 for name in METRICS if name.islower()}
    families = {"tokens_class_1": 9.0, "reward_part_Digits": 0.75, "gap_of_mine": 3.0}
    view.take(step(0, **metrics, **families))
    evaluated = {"rewards": np.array([0.5]), "lengths": np.array([3]), "problem_ids": ["a"]}
    view.take(fill(Evaluation, version=1, **evaluated))
    view.take_all([], {0: 5, 1: 6}, 2)
    return view


def exported(view: RunView, began_at: float = 0.0) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in figures_of(view, began_at) for sample in family.samples
    }  # fmt: skip


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted({"run": "count-1", **labels}.items()))]


def test_names_follow_prometheus_s_conventions() -> None:
    families: list[Metric] = list(figures_of(full_view(), 0.0))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert CONVENTION.fullmatch(family.name) and family.documentation, family.name
        assert not family.name.endswith(("_s", "_ms", "_mb", "_percent", "_count")), family.name
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert set(sample.labels) <= {"run", "role", "number", "class", "part", "metric"}
            assert sample.labels["run"] == "count-1"


def counters_in_the_code() -> set[str]:
    """The names of counters that roles put into their heartbeats, read from the code itself."""
    found = set[str]()
    for file in [*(ROOMS / "producers").rglob("*.py"), *(ROOMS / "consumers").rglob("*.py"),
                 *(ROOMS / "infra").rglob("*.py")]:  # fmt: skip
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets):
                    subscripts = [one for target in targets for one in ast.walk(target)
                                  if isinstance(one, ast.Subscript)]  # fmt: skip
                    found |= {
                        one.slice.value for one in subscripts
                        if ast.unparse(one.value).endswith("counters") and isinstance(one.slice, ast.Constant)
                    }  # fmt: skip
                case ast.AugAssign(target=target, value=ast.Dict(keys=keys)):
                    if ast.unparse(target).endswith("counters"):
                        found |= {key.value for key in keys if isinstance(key, ast.Constant)}
                case ast.Call(func=ast.Attribute(attr="update", value=called), keywords=keywords):
                    if ast.unparse(called).endswith("counters"):
                        found |= {one.arg for one in keywords if one.arg}
                case ast.FunctionDef(name="counters" | "_used"):
                    dicts = [one for one in ast.walk(node) if isinstance(one, ast.Dict)]
                    found |= {key.value for one in dicts for key in one.keys if isinstance(key, ast.Constant)}
    return found


def test_the_counters_of_heartbeats_are_those_that_are_exported() -> None:
    # A trainer's step and iteration are the run's; why_policy is a number for a reason.
    known = {name for names in (OF_ALL, *OF_ROLE.values()) for name in names}
    assert counters_in_the_code() - {"step", "iteration", "why_policy"} == known


def test_figures_say_what_heartbeats_and_steps_say() -> None:
    found = exported(full_view())
    trainer = {"role": "trainer", "number": "0"}
    assert value(found, "streamrl_trainer_samples_total", **trainer) == 2.0
    assert value(found, "streamrl_process_cpu_seconds_total", **trainer) == 2.0
    assert value(found, "streamrl_process_silent_seconds", **trainer) < 5
    assert value(found, "streamrl_step_reward") == pytest.approx(2 / 3)
    assert value(found, "streamrl_step_rewards_failed") == 1.0
    assert value(found, "streamrl_step_compute_seconds") == 0.25
    assert value(found, "streamrl_step_clip_fraction_ratio") == 0.25
    assert value(found, "streamrl_step_class_tokens", **{"class": "1"}) == 9.0
    assert value(found, "streamrl_step_reward_part", part="Digits") == 0.75
    assert value(found, "streamrl_step_other", metric="gap_of_mine") == 3.0
    assert value(found, "streamrl_run_steps_total") == 1
    assert value(found, "streamrl_run_dead_letters_total") == 2
    assert value(found, "streamrl_run_generated_samples_total", **{"class": "1"}) == 6
    assert value(found, "streamrl_evaluation_reward") == 0.5
    assert step_figure("samples_per_s") == "streamrl_step_samples_per_second"


def test_a_wait_counts_while_it_goes_on() -> None:
    view = RunView("count-1", make_spec())
    view.take(beat("generator", waits="prompts", idle_s=10.0))
    found = exported(view)
    labels = {"role": "generator", "number": "0"}
    assert value(found, "streamrl_process_idle_seconds_total", **labels) == pytest.approx(13.0)
    assert value(found, "streamrl_process_waiting_seconds", **labels) == pytest.approx(3.0)


def test_who_has_ended_or_is_long_gone_has_no_figures_and_a_liar_adds_none() -> None:
    view = RunView("count-1", make_spec())
    view.take(beat("generator", number=1, ago_s=FORGOTTEN_S + 60))
    view.take(fill(Heartbeat, role="generator", number=2, state="ended", sent_at=time.time()))
    view.take(beat("generator", number=3, **{f"lie_{n}": 1.0 for n in range(1000)}, **{'x"} 1\n': 1.0}))
    names = [f"{begin}{n}" for begin in ("metric_", "reward_part_") for n in (*range(1000), 'y"} 2\n')]
    view.take(step(0, **dict.fromkeys(names, 1.0)))
    found = exported(view)
    numbers = {dict(labels).get("number") for _, labels in found}
    assert numbers == {None, "3"}
    assert not any("lie" in name for name, _ in found) and len(found) < 200
    assert not any('"' in text for _, labels in found for _, text in labels)


def test_a_run_without_steps_is_as_old_as_its_start() -> None:
    view = RunView("count-1", make_spec())
    assert value(exported(view, 1000.0), "streamrl_run_last_step_timestamp_seconds") == 1000.0
    view.take(step(0, at=400.0))  # of the start before this one
    assert value(exported(view, 1000.0), "streamrl_run_last_step_timestamp_seconds") == 1000.0


class Seen:
    """A follower whose view stays."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def see(self, look: Callable[[RunView], Any]) -> Any:
        return look(self._view)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("STREAMRL_LISTEN", raising=False)
    yield tmp_path / "home"


def test_figures_come_from_what_processes_send(home: Path, tmp_path: Path) -> None:
    context = make_context(make_spec(prometheus={"port": 0}), tmp_path, role="generator", run="count-1")
    context.bus.create_topics(context.topics.all())
    said = list[str]()
    with (
        Follower(context.record, connected=lambda record, name: context.bus) as follower,
        exporting(context.record, follower, said.append),
    ):
        context.heart.counters["made"] = 5.0
        context.dead_letter(Record(context.topics.prompts.name, 0, 0, b"", b"x"), "it is no prompt")
        context.heart.beat(context.writer, context.topics)
        context.writer.send(context.topics.ledger, encode(step(3, grad_norm=0.5)), key="k")

        def answer() -> dict[str, float]:
            with urllib.request.urlopen(said[0].rpartition(" ")[2], timeout=10) as found:
                families = text_string_to_metric_families(found.read().decode())
                return {sample.name: sample.value for family in families for sample in family.samples}

        wait_until(lambda: "streamrl_step_grad_norm" in answer(), what="the step")
        wait_until(lambda: "streamrl_generator_samples_total" in answer(), what="the heartbeat")
        wait_until(lambda: answer()["streamrl_run_dead_letters_total"] == 1.0, what="the dead letter")
        found = answer()
    assert found["streamrl_generator_samples_total"] == 5.0 and found["streamrl_run_steps_total"] == 4
    assert found["streamrl_process_dead_letters_total"] == 1.0 and found["streamrl_step_grad_norm"] == 0.5


def record(run: str, **sections: Any) -> RunRecord:
    spec = make_spec(**sections)
    return RunRecord(id=run, spec=spec, bootstrap_servers="", store="", model="", created_at=0.0)


def test_runs_on_one_machine_have_ports_and_files_of_their_own(home: Path) -> None:
    follower: Any = Seen(full_view())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said, section = list[str](), {"port": port}
        with (
            exporting(record("count-1", prometheus=section), follower, said.append),
            exporting(record("count-2", prometheus=section), follower, said.append),
            exporting(record("count-3", prometheus={"port": 0}), follower, said.append),
        ):
            targets = [json.loads(file.read_text())[0]["targets"][0]
                       for file in sorted(StackPaths.locate().targets.glob("*.json"))]  # fmt: skip
            assert len(set(targets)) == 3 and all(one.startswith("127.0.0.1:") for one in targets)
            assert f"127.0.0.1:{port}" not in targets
            for target, line in zip(targets, said, strict=True):
                assert line == f"figures for Prometheus: http://{target}/metrics"
                with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                    text = answer.read().decode()
                families = {family.name for family in text_string_to_metric_families(text)}
                assert {"streamrl_run_steps", "streamrl_trainer_samples"} <= families
    assert not list(StackPaths.locate().targets.glob("*.json"))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{targets[0]}/metrics", timeout=10)


def test_a_run_that_was_killed_is_named_until_the_next_one_starts(home: Path) -> None:
    folder = StackPaths.locate().targets
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "count-1.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {}}]))
    (folder / "mine.json").write_text("not ours")
    follower: Any = Seen(full_view())
    with exporting(record("count-2", prometheus={"port": 0}), follower, lambda text: None):
        assert sorted(file.name for file in folder.glob("*.json")) == ["count-2.json", "mine.json"]


def test_nothing_is_served_unless_the_run_file_says_so(home: Path) -> None:
    said = list[str]()
    follower: Any = Seen(full_view())
    with exporting(record("count-1"), follower, said.append):
        assert not said and not home.exists()


def test_a_run_goes_on_if_nothing_can_be_served(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_LISTEN", "192.0.2.1")  # an address that no machine has
    said = list[str]()
    follower: Any = Seen(full_view())
    with exporting(record("count-1", prometheus={}), follower, said.append):
        assert said[0].startswith("the run goes on without figures for Prometheus") and "9464" in said[0]
