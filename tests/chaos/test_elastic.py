"""Generators come and go in the middle of a run: the same samples, and in sync mode the same bits.

Where many of them start, their engine is one that starts in a second; `test_kills` kills vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus import read_all
from infra.sites.news import News
from schemas.messages import GeneratorReport, Part, SiteReport
from tests.factories import make_spec
from tests.harness import ROOT, Run, running, trained_ids
from tests.waiting import wait_until

ITERATIONS = 50
PACED = {"import": f"{ROOT}/tests/fakes/paced_engine.py:PacedSettings", "context_s": 1e-3}
SPEC = make_spec(
    algorithm={"iterations": ITERATIONS, "groups": 8, "group_size": 4, "learning_rate": 1e-3},
    trainer={"checkpoint_every": 100, "bundle_tokens": 64},
    generator={**PACED, "slots": 8},  # so that each of them is needed
    dispatch={"silence_s": 2.0},
)


def join(run: Run, *numbers: int) -> None:
    """Start generators, and let the run go on when they are there."""
    there = len({report.start for report in run.read("generators", GeneratorReport)})
    with run.standing_still("trainer-0"):
        for number in numbers:
            run.start("generator", number)
        run.wait_for_generators(there + len(numbers))


def kill(run: Run, *numbers: int) -> None:
    """kill -9, each in the middle of its work: others take it over."""
    for number in numbers:
        wait_for_samples_of(run, f"generator-{number}")
        run.kill(f"generator-{number}")


def wait_for_samples_of(run: Run, generator: str) -> None:
    """Until a generator has published samples of an iteration that is not trained yet."""
    after = len(run.steps())
    wait_until(
        lambda: run.check()
        or any(s.generator.startswith(f"{generator}@") and s.iteration >= after for s in run.samples()),
        what=f"samples of {generator} after iteration {after}", deadline_s=120,
    )  # fmt: skip


def reached(run: Run, version: int) -> bool:
    """Whether a relay has brought a version to its site."""
    records, news = read_all(run.bus, run.topics.weights, deadline_s=150), News(run.record.id)
    return any(said.version >= version for said in map(news.of, records) if isinstance(said, SiteReport))


@pytest.mark.thorough
def test_running_samples_move_all_the_time(tmp_path: Path, kafka: str, tiny_model: Path) -> None:
    spec = make_spec(  # of longer samples: there must be time to move
        sampling={"max_tokens": 200},
        algorithm={"iterations": 12, "groups": 8, "group_size": 4, "learning_rate": 1e-3},
        trainer={"bundle_tokens": 64, "microbatch_tokens": 1024},
    )
    with running(tmp_path / "still", kafka, spec, tiny_model) as run:
        run.wait_for_end()
        still = [step.root_out for step in run.steps()]
    restless = {"feeder": "tests.fakes.restless"}
    with running(tmp_path / "restless", kafka, spec, tiny_model, generators=2, modules=restless) as run:
        run.wait_for_end()
        steps, parts = run.steps(), run.read("parts", Part)
        assert len(steps) == 12
        assert len([part for part in parts if part.tokens.size]) >= 3, "hardly anything moved"
        assert len(trained_ids(steps)) == len(set(trained_ids(steps))) == 12 * 32
        assert [step.root_out for step in steps] == still
        assert not run.dead_letters()


@pytest.mark.thorough
def test_numbers_speeds_and_sites_of_generators_change_no_bit(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    """The second time they are slow, and at a site whose relay dies on the way."""
    roots = []
    for generators, slots, site in ((1, 16, None), (2, 3, "far")):
        spec = make_spec(
            algorithm={"iterations": 6, "groups": 8, "group_size": 4, "learning_rate": 1e-3},
            generator={**PACED, "slots": slots},
        )
        folder = tmp_path / f"with-{generators}"
        with running(folder, kafka, spec, tiny_model, generators=generators, site=site) as run:
            with run.standing_still("trainer-0"):
                run.wait_for_generators(generators)
            if site is not None:
                wait_until(
                    lambda: run.check() or reached(run, 2), what="version 2 at the site", deadline_s=120
                )
                run.kill("relay-0")
            run.wait_for_end()
            steps = run.steps()
            assert len(trained_ids(steps)) == len(set(trained_ids(steps))) == 6 * 32
            assert len({sample.generator for sample in run.samples()}) == generators
            roots.append([step.root_out for step in steps])
    assert len(set(roots[0])) == 6
    assert roots[0] == roots[1]


@pytest.mark.thorough
def test_five_join_and_five_die(tmp_path: Path, kafka: str, tiny_model: Path) -> None:
    with running(tmp_path / "calm", kafka, SPEC, tiny_model) as run:
        run.wait_for_end()
        calm = [step.root_out for step in run.steps()]
    with running(tmp_path / "wild", kafka, SPEC, tiny_model) as run:
        run.wait_for_steps(2)
        join(run, 1, 2)
        kill(run, 0, 1)
        join(run, 0, 3)  # one of them comes back
        kill(run, 2, 0)
        join(run, 4)
        kill(run, 3)
        wait_for_samples_of(run, "generator-4")
        assert len(run.steps()) < ITERATIONS, "the run ended before all was done to it"
        run.wait_for_end()
        steps = run.steps()
        assert len(steps) == ITERATIONS
        assert len(trained_ids(steps)) == len(set(trained_ids(steps))) == ITERATIONS * 32
        assert [step.root_out for step in steps] == calm
        assert not run.dead_letters()
