"""What came before the trainer, done again: samples and rewards, of runs and of step files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.run.recorded_samples import recorded_samples
from flows.run.version_weights import VersionWeights
from infra import runs
from infra.archive.archive_writing import ArchiveWriter
from infra.bus import NoBroker, read_all
from infra.runs import RunRecord, find
from infra.weights.digest import digests_of, root_digest
from infra.weights.versions import WeightStore
from producers import regenerating
from producers.engines.engine import DrawnAnswer
from producers.engines.redrawing import RedrawBatch
from producers.regenerating import RegenerationError
from producers.tokenizing import load_to_text
from schemas.generation import GeneratorSection
from schemas.messages import Sample
from schemas.wire import decode
from tests.factories import TASK, make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World
from tests.unit.test_prompt_search import prompt_of, sent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@dataclass
class Done:
    """A run that is over."""

    world: World
    folder: Path

    @property
    def task(self) -> Path:
        return self.folder / "task.py"

    def samples(self) -> dict[str, Sample]:
        context = self.world.context
        found = [
            decode(one.value, Sample) for one in read_all(context.bus, context.topics.samples, deadline_s=5)
        ]
        return {one.id: one for one in found}

    def cli(self, *words: str) -> Result:
        env = {"COLUMNS": "170"}
        return CliRunner().invoke(app, [*words, "--store", self.world.context.store.url], env=env)

    def said(self, *words: str) -> dict[str, Any]:
        result = self.cli(*words, "--json")
        assert result.exit_code in (0, 1) and result.stdout.startswith("{"), result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def bundle(self, *words: str) -> Path:
        file = self.folder / "step.tar.zst"
        result = self.cli("bundle", "test-1", "-o", str(file), *words)
        assert result.exit_code == 0, result.output
        return file


@pytest.fixture
def done(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Done:
    return over(tmp_path, model, monkeypatch)


def over(folder: Path, start: str, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Done:
    """A run in memory, with true rewards and prompts."""
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    (folder / "task.py").write_text(TASK)
    algorithm = {"iterations": 4, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
    spec = make_spec(
        task={"python": str(folder / "task.py")}, algorithm=algorithm | sections.pop("algorithm", {}),
        trainer={"checkpoint_every": 2, "keep_checkpoints": 2}, **sections,
    )  # fmt: skip
    context = make_context(spec, folder)
    runs.create(context.store, spec, bootstrap_servers="none", model=start, topics=set(), run_id="test-1")
    world, text = World(context, start), load_to_text(start)

    def rewarded(sample: Sample) -> Sample:
        value = sum(char.isdigit() for char in text(sample.tokens)) / 16
        made = structs.replace(sample, reward=value, reward_parts={"digits": value})
        if sample.index == 0:
            sent(context, [prompt_of(made, json.dumps({"id": made.problem_id, "prompt": "p"}))])
        return made

    world.edit = rewarded
    world.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    return Done(world, folder)


def test_rewards_come_to_the_same_numbers(done: Done) -> None:
    result = done.cli("replay", "test-1", "--step", "1", "--rewards")
    assert result.exit_code == 0, result.output
    assert "rewards of 4 samples come to the same numbers" in result.output
    assert "task.py is as it was when the run began" in result.output
    said = done.said("replay", "test-1", "--rewards")["rewards"]
    assert (said["step"], said["equal"], said["samples_equal"], said["others"]) == (3, True, 4, [])


def test_rewards_of_an_archive_need_no_broker(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    context, record = done.world.context, find(done.world.context.store, "test-1")
    ArchiveWriter(
        context.bus, context.store, context.topics, "test-1", record.identity, deadline_s=5
    ).archive(now=1.0)

    def away(record: RunRecord, name: str) -> NoReturn:
        raise NoBroker("Kafka at nowhere can't be reached")

    monkeypatch.setattr("infra.run_bus.connect", away)
    assert done.cli("replay", "test-1", "--step", "1", "--rewards").exit_code != 0
    said = done.said("replay", "test-1", "--step", "1", "--rewards", "--archive")["rewards"]
    assert (said["equal"], said["samples_equal"]) == (True, 4)


def test_a_reward_that_changed_is_named_with_its_parts(done: Done) -> None:
    (name,) = [one for one in done.samples() if one.startswith("0000002-01")]
    other_reward = "if problem['id'] == '2':\n        return {'digits': 1.0, 'bonus': 0.5}\n    return {"
    done.task.write_text(TASK.replace("return {", other_reward))
    said = done.said("replay", "test-1", "--sample", name, "--rewards")["rewards"]
    assert (said["step"], said["equal"], said["code_changed"]) == (1, False, True)
    (other,) = said["others"]
    assert (other["sample"], other["reward_found"]) == (name, 1.5)
    assert other["parts_found"] == {"digits": 1.0, "bonus": 0.5}
    result = done.cli("replay", "test-1", "--step", "1", "--rewards")
    assert result.exit_code == 1 and "2 are OTHERS now" in result.output
    assert "1.5 (digits 1, bonus 0.5)" in result.output and "that may be the reason" in result.output


def test_a_reward_that_fails_now_is_named(done: Done) -> None:
    done.task.write_text(
        "def problems(split): return []\ndef reward(problem, completion): raise KeyError('x')"
    )
    other = done.said("replay", "test-1", "--step", "0", "--rewards")["rewards"]["others"][0]
    assert other["error"] == "" and "KeyError" in other["error_found"] and other["reward_found"] is None
    done.task.unlink()
    result = done.cli("replay", "test-1", "--step", "0", "--rewards")
    assert result.exit_code == 1
    assert "there is no file" in result.output and "rewards as they are recorded" in result.output


def test_a_step_file_runs_a_reward_only_if_the_user_says_so(done: Done) -> None:
    file = str(done.bundle("--step", "1"))
    result = done.cli("replay", file, "--rewards")
    assert result.exit_code == 1 and "--own-code" in result.output
    result = done.cli("replay", file, "--rewards", "--own-code")
    assert result.exit_code == 0, result.output
    assert "rewards of 4 samples come to the same numbers" in result.output


def test_without_prompts_a_step_file_says_what_it_can_not(done: Done) -> None:
    bus, topic = done.world.context.bus, done.world.context.topics.prompts
    for part in bus.log(topic):  # type: ignore[attr-defined]
        part.clear()
    result = done.cli("replay", "test-1", "--step", "1", "--rewards")
    assert result.exit_code == 1 and "has no prompt of 2 groups" in result.output
    result = done.cli("bundle", "test-1", "--step", "1", "-o", str(done.folder / "bare.tar.zst"))
    assert result.exit_code == 0 and "has no prompts, so rewards can't be computed again" in result.output
    result = done.cli("replay", str(done.folder / "bare.tar.zst"), "--rewards", "--own-code")
    assert result.exit_code == 1 and "has no prompts, which a reward needs" in result.output
    assert done.cli("replay", str(done.folder / "bare.tar.zst")).exit_code == 0


class Parrot:
    """An engine that says what was recorded, and looks which weights it gets."""

    def __init__(self, samples: Mapping[str, Sample]) -> None:
        self.samples, self.firsts = samples, list[dict[str, str]]()

    def __call__(self, options: object, *, start_s: float) -> Parrot:
        return self

    def open(self) -> Parrot:
        return self

    def draw(self, batch: RedrawBatch) -> list[DrawnAnswer]:
        if batch.first is not None:
            self.firsts.append(batch.first.digests)
        found = [self.samples[one.id] for one in batch.requests]
        assert [one.seed for one in found] == [one.seed for one in batch.requests]
        return [DrawnAnswer(one.id, one.tokens, one.logprobs, one.finish) for one in found]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("sections", "words", "extra"),
    [
        ({}, [], []),
        ({"algorithm": {"mode": "async", "staleness": 1}}, ["--regenerate"], [1, 2]),
        ({"model": {"lora": {"rank": 2}}}, ["--regenerate"], []),
        (
            {"model": {"dtype": "bfloat16"}, "algorithm": {"mode": "async", "staleness": 1}},
            ["--regenerate"], [1, 2],
        ),
        ({"algorithm": {"optimizer_steps": 2, "iterations": 2}}, ["--regenerate"], [1]),
    ],
    ids=["sync", "async", "lora", "bfloat16", "inside an iteration"],
)  # fmt: skip
def test_samples_are_drawn_by_the_weights_that_they_name(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], words: list[str],
    extra: list[int],
) -> None:  # fmt: skip
    done = over(tmp_path, model, monkeypatch, **sections)
    # The log-probabilities of these samples are made up.
    monkeypatch.setattr("flows.run.versions_beside.gap_is_too_wide", lambda metrics, spec: False)
    parrot = Parrot(done.samples())
    monkeypatch.setattr(regenerating, "RedrawEngine", parrot)
    said = done.said("replay", "test-1", "--step", "3", "--regenerate")["regenerated"]
    assert (said["equal"], said["first_other"]) == (True, None) and said["samples"] in (2, 4)
    if "lora" not in sections.get("model", {}):
        roots = {root for one in done.samples().values() for root in one.roots}
        assert {root_digest(one) for one in parrot.firsts} <= roots
    store = WeightStore(done.world.context.store, "test-1")
    made = json.loads(
        done.cli(
            "bundle", "test-1", "--step", "3", "-o", str(tmp_path / "a.tar.zst"), *words, "--json"
        ).stdout
    )
    assert set(made["versions"]) <= set(extra) and bool(made["versions"]) == bool(extra)
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: pytest.fail("no broker is needed"))
    with recorded_samples(str(tmp_path / "a.tar.zst"), "local", None, None) as opened:
        weights = VersionWeights(opened.handle, opened.begins, lambda done, total: None)
        for one in opened.samples:
            (version,), (root,) = one.versions.tolist(), one.roots
            found = weights.published(version, root)
            assert root_digest(digests_of(found)) == root
            theirs = store.fetch(version)[1]
            assert all(torch.equal(found[name], theirs[name]) for name in theirs)
        weights.close()
        with pytest.raises(RegenerationError, match=r"and the samples name other|step 5 can't be reached"):
            VersionWeights(opened.handle, opened.begins, lambda done, total: None).published(3, "other")


def test_weights_that_are_not_kept_are_trained_again(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot(done.samples())
    monkeypatch.setattr(regenerating, "RedrawEngine", parrot)
    store = done.world.context.store
    for key in [one for one in store.list("runs/test-1/weights") if "v000002" in one or "v000001" in one]:
        store.delete(key)
    for step in ("1", "2"):
        said = done.said("replay", "test-1", "--step", step, "--regenerate")["regenerated"]
        assert said["equal"]
    ledger = {step.version_out: step.root_out for step in done.world.ledger()}
    assert [root_digest(one) for one in parrot.firsts] == [ledger[1], ledger[2]]


def test_a_step_file_without_old_weights_says_how_to_get_them(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = over(tmp_path, model, monkeypatch, algorithm={"mode": "async", "staleness": 1})
    monkeypatch.setattr(regenerating, "RedrawEngine", Parrot(done.samples()))
    file = str(done.bundle("--step", "3"))
    result = done.cli("replay", file, "--regenerate")
    assert result.exit_code == 1
    assert "the step file has no weights of it" in result.output
    assert "streamrl bundle --regenerate" in result.output


def test_an_engine_that_can_not_draw_again_is_named(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeneratorSection, "draws_again", False)
    result = done.cli("replay", "test-1", "--step", "1", "--regenerate")
    assert result.exit_code == 1 and "can't draw a recorded sample again" in result.output


def test_without_vllm_it_says_what_to_install(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest)
    )
    result = done.cli("replay", "test-1", "--step", "1", "--regenerate")
    assert result.exit_code == 1 and "vLLM is not installed here" in result.output
    assert "streamrl[cpu]" in result.output


class Wrong(Parrot):
    """One that says the last token of each answer otherwise."""

    def draw(self, batch: RedrawBatch) -> list[DrawnAnswer]:
        found = super().draw(batch)
        return [said_otherwise(one) for one in found]


def said_otherwise(one: DrawnAnswer) -> DrawnAnswer:
    tokens, logprobs = one.tokens.copy(), one.logprobs.copy()
    logprobs[1] -= 1e-4
    tokens[-1] += 1
    return DrawnAnswer(one.id, tokens, logprobs, one.finish)


def test_the_first_sample_and_token_that_differ_are_named(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = done.samples()
    monkeypatch.setattr(regenerating, "RedrawEngine", Wrong(samples))
    result = done.cli("replay", "test-1", "--step", "1", "--regenerate")
    assert result.exit_code == 1
    assert "4 samples come to OTHER BITS" in result.output and "something is wrong" in result.output
    said = done.said("replay", "test-1", "--step", "1", "--regenerate")["regenerated"]
    first = said["first_other"]
    assert (first["token"], first["versions"]) == (1, [1])
    assert first["same_tokens"] == samples[first["sample"]].tokens.size - 1
    assert 0.9e-4 < first["apart"] < 1.1e-4 and first["logprob_found"] < first["logprob"]
    monkeypatch.setattr("flows.run.recorded_samples.kind_of_machine", lambda: "another")
    result = done.cli("replay", "test-1", "--step", "1", "--regenerate")
    assert result.exit_code == 0
    assert "judged by its tolerance for logprobs, 0.001: it is within that" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "0-1", "--regenerate"], "look at one step"),
        (["--step", "1", "--sample", "0000002-00"], "--sample goes with --regenerate or --rewards"),
        (["--rewards", "--sample", "none"], "is no sample's id, such as"),
        (["--rewards", "--sample", "0000999-00"], "has trained sample 0000999-00"),
        (["--rewards", "--step", "1", "--sample", "0000000-00"], "as step 1"),
        (["--rewards", "--step", "99"], "ends with step 3: it has no step 99"),
        (["--rewards", "--failed"], "no record of a failed step"),
    ],
)  # fmt: skip
def test_bad_questions_are_answered(done: Done, words: list[str], said: str) -> None:
    result = done.cli("replay", "test-1", *words)
    assert result.exit_code in (1, 2) and said in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
