"""A simulated run: closed forms, each sample once whatever fails, and where the time of both sides goes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.planning.stage_times import EngineTimes, LearnerTimes, LinkTimes
from flows.planning.workload import DrawnLengths, LogNormalLengths, Workload
from flows.simulation.simulated_run import (
    MessageTimes,
    Outage,
    SimulatedRun,
    SimulatedSite,
    SimulationError,
)
from flows.simulation.simulation_result import Simulation
from flows.simulation.site_links import SiteLink
from flows.simulation.world import simulate
from tests.factories import make_spec

SIZE = 2
ENGINE = EngineTimes((0.01, 0.01, 0.012, 0.014, 0.016))
LEARNER = LearnerTimes(1e-4, microbatch_s=0.05, step_s=0.5, publish_s=0.25, version_bytes=1000)
WORKLOAD = Workload(LogNormalLengths(100, 0.8), LogNormalLengths(20), ranker_sigma=0.3)


def spec_of(mode: str = "sync", **algorithm: Any) -> Any:
    if mode == "async":
        algorithm = {"staleness": 1, **algorithm}
    return make_spec(
        sampling={"max_tokens": 1000, "max_prompt_tokens": 100}, trainer={"microbatch_tokens": 2000},
        algorithm={"mode": mode, "iterations": 4, "groups": 4, "group_size": SIZE, **algorithm},
        dispatch={"policy": "longest_first"},
    )  # fmt: skip


def run_of(spec: Any = None, *engines: EngineTimes, **fields: Any) -> SimulatedRun:
    site = SimulatedSite("here", engines or (ENGINE, ENGINE))
    values = {"sites": (site,), "workload": WORKLOAD, "learner": LEARNER, **fields}
    return SimulatedRun(spec or spec_of(), **values)


def given_lengths(answers: list[list[int]], prompt: int = 10) -> DrawnLengths:
    drawn = np.array(answers)
    return DrawnLengths(drawn, np.full(len(drawn), prompt), drawn.mean(axis=1))


def digest(result: Simulation) -> str:
    return hashlib.sha256(repr(result).encode()).hexdigest()


def check_whole(result: Simulation, run: SimulatedRun, generators: int | None) -> None:
    """Each group was trained once, and all time is accounted for."""
    algorithm = run.spec.algorithm
    trained = sorted(group for step in result.steps for group in step.groups)
    assert trained == list(range(algorithm.iterations * algorithm.groups))
    drawn = run.workload.draw(run.spec, run.seed) if isinstance(run.workload, Workload) else run.workload
    assert result.tokens == drawn.answers.sum()
    assert result.steps[-1].made == (drawn.answers.size, drawn.answers.sum())
    for step in result.steps:
        assert 0 <= min(step.staleness) <= max(step.staleness) <= algorithm.most_stale
        assert sum(step.learned.values()) == pytest.approx(step.ended_at)
        if generators is not None:
            assert sum(step.generated.values()) == pytest.approx(step.ended_at * generators)


def test_one_generator_without_overlap_takes_the_sum_of_its_parts() -> None:
    """One slot and one group an iteration, in sync mode: nothing happens beside anything else."""
    engine = EngineTimes((0.01, 0.01), context_s=1e-5, prefill_s=1e-3, install_s=3.0)
    link = LinkTimes(1000.0, latency_s=0.5)
    lengths = given_lengths([[30, 50], [7, 9], [100, 1]])
    run = run_of(
        spec_of(groups=1, iterations=3), workload=lengths, sites=(SimulatedSite("far", (engine,), link),)
    )
    ends, now = [], 0.0
    for iteration, group in enumerate(lengths.answers.tolist()):
        # published, fetched and installed; jobs and their prompts are there before that, but at first
        now += 0.25 + link.fetch_s(1000) + 3.0 if iteration else 3 * link.message_s
        for length in group:
            now += 10 * 1e-3 + length * 0.01 + 1e-5 * sum(10 + made for made in range(length))
        now += link.message_s  # and then trained in one micro-batch, and stepped
        now += 1e-4 * (sum(group) + 20) + 0.05 + 0.5
        ends.append(now)
    result = simulate(run)
    assert [step.ended_at for step in result.steps] == pytest.approx(ends)
    assert (result.link_bytes, result.link_s) == (
        {"far": 2000},
        {"far": pytest.approx(2 * link.fetch_s(1000))},
    )
    spent = result.steps[-1].generated
    assert spent["installing"] == pytest.approx(6.0)
    assert spent["prefilling"] == pytest.approx(6 * 0.01)
    assert spent["drawing"] + spent["drawing the tail"] == pytest.approx(
        sum(
            length * 0.01 + 1e-5 * sum(10 + made for made in range(length)) for length in lengths.answers.flat
        )
    )
    turns = simulate(replace(run, colocated=True, switch_s=2.0))
    assert turns.ended_at == pytest.approx(ends[-1] + 5 * 2.0 - 2 * min(2.0, 0.25 + link.fetch_s(1000)))


def test_engines_share_a_core_evenly() -> None:
    """Both have half a core, in turns, until the shorter sample is done; then the other one goes on alone."""
    engine = EngineTimes((0.1, 0.1), cores=1.0)
    run = run_of(
        spec_of(groups=1, iterations=1), engine, engine, workload=given_lengths([[10, 30]], 0), cores=1.0
    )
    spent = 10 * 0.1 * 2 * 1.65 + 20 * 0.1
    assert simulate(run).ended_at == pytest.approx(spent + 40 * 1e-4 + 0.05 + 0.5)
    assert simulate(replace(run, cores=2.0)).ended_at == pytest.approx(30 * 0.1 + 40 * 1e-4 + 0.05 + 0.5)
    learning = replace(run, learner=replace(LEARNER, cores=2.0))
    assert simulate(learning).ended_at == pytest.approx(spent + 2 * (40 * 1e-4 + 0.05 + 0.5))


def test_engines_of_a_site_with_its_own_cores_share_these_alone() -> None:
    engine = EngineTimes((0.1, 0.1), cores=1.0)
    run = run_of(spec_of(groups=1, iterations=1), workload=given_lengths([[10, 30]], 0), cores=1.0)
    apart = SimulatedSite("far", (engine, engine), cores=2.0)
    training = 40 * 1e-4 + 0.05 + 0.5
    assert simulate(replace(run, sites=(apart,))).ended_at == pytest.approx(30 * 0.1 + training)
    narrow = replace(apart, cores=1.0)
    assert simulate(replace(run, sites=(narrow,))).ended_at == pytest.approx(
        (20 * 1.65 + 20) * 0.1 + training
    )


def test_turns_cost_a_step_with_many_samples_no_more_than_one_with_few() -> None:
    lengths = given_lengths([[10, 10], [10, 10]], 0)
    run = run_of(spec_of(groups=2, iterations=1), workload=lengths, cores=1.0)
    training = 40 * 1e-4 + 2 * 0.05 + 0.5
    for second, step_s in ((0.1, 0.1 + 0.065), (0.2, 0.2 + 0.065)):
        engine = EngineTimes((0.1, 0.1, second), cores=1.0)
        one = replace(run, sites=(SimulatedSite("here", (engine, engine)),))
        assert simulate(one).ended_at == pytest.approx(10 * 2 * step_s + training)


def test_in_turns_engines_are_as_quick_as_without_a_learner() -> None:
    engine = EngineTimes((0.1, 0.1), cores=1.0, beside_step=1.5)
    run = run_of(
        spec_of(groups=1, iterations=1), engine, workload=given_lengths([[10, 10]], 0), colocated=True,
        learner=replace(LEARNER, cores=1.0, beside=2.0),
    )  # fmt: skip
    assert simulate(run).ended_at == pytest.approx(20 * 0.1 + 2 * (20 * 1e-4 + 0.05 + 0.5))


def test_engines_are_slower_while_the_learner_computes_and_the_more_the_more_want_the_cores() -> None:
    """The first group is trained while the second one is drawn: then both have half of a core."""
    engine = EngineTimes((0.1, 0.1), cores=1.0, beside_step=1.5)
    learner = replace(LEARNER, token_s=0.01, microbatch_s=0.0, cores=1.0)
    spec = spec_of(groups=2, iterations=1)
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"bundle_tokens": 1})})
    run = run_of(spec, engine, workload=given_lengths([[10, 10], [10, 10]]), learner=learner, cores=1.0)
    trained_s = 40 * 0.01  # of a group
    drawn_s = trained_s / (1.5 + 0.65)  # of the second group's work, while the first one is trained
    expected_s = 20 * 0.1 + 2 * trained_s + (20 * 0.1 - drawn_s) + trained_s + 0.5
    assert simulate(run).ended_at == pytest.approx(expected_s)


def test_engines_take_less_from_each_other_than_a_learner_takes() -> None:
    engine = EngineTimes((0.1, 0.1), cores=1.0, beside_step=1.5)
    learner = replace(LEARNER, token_s=0.0, microbatch_s=0.0, step_s=0.0, cores=1.0)
    run = run_of(
        spec_of(groups=1, iterations=1), engine, engine, learner=learner, cores=4.0,
        workload=given_lengths([[10, 30]], 0),
    )  # fmt: skip
    assert simulate(run).ended_at == pytest.approx((10 * 1.2 + 20) * 0.1)  # while both of them draw


def test_a_barrier_costs_time_and_never_gains_any() -> None:
    for seed in range(3):
        run = run_of(spec_of("async", iterations=6), seed=seed)
        ours, paper = simulate(run), simulate(replace(run, barrier=True))
        check_whole(paper, run, 2)
        assert paper.ended_at >= ours.ended_at
        assert paper.steps[-1].learned["waiting for weights"] > 0
        assert simulate(run_of(spec_of("sync", iterations=6), seed=seed)).ended_at >= ours.ended_at


OUTAGES = st.lists(
    st.builds(
        Outage, st.integers(0, 2), st.floats(0, 12), st.floats(0.1, 20),
        notice_s=st.sampled_from([0.0, 0.2, 5.0]),
    ),
    max_size=3,
)  # fmt: skip


@given(
    st.integers(0, 1 << 20), OUTAGES, st.sampled_from(["sync", "async"]),
    st.sampled_from(["window", "arrival"]), st.sampled_from(["continue", "recompute", "wait"]),
    st.sampled_from(
        [{}, {"colocated": True, "switch_s": 0.3}, {"cores": 2.0}, {"barrier": True}]
    ), st.sampled_from([0.0, 0.2]), st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_each_sample_is_trained_once_whatever_fails(
    seed: int, outages: list[Outage], mode: str, order: str, on_update: str, fields: Mapping[str, Any],
    late_s: float, optimizer_steps: int,
) -> None:  # fmt: skip
    if mode == "sync" or "barrier" in fields:
        order = "window"
    mode = "async" if "barrier" in fields else mode
    spec = spec_of(mode, order=order, optimizer_steps=optimizer_steps)
    section = spec.generator.model_copy(update={"on_update": on_update})
    spec = spec.model_copy(update={"generator": section})
    engine = replace(ENGINE, prefill_s=1e-4, install_s=0.1, context_s=1e-6, cores=1.0, reward_s=late_s / 2)
    sites = SimulatedSite("here", (engine, engine)), SimulatedSite("far", (engine,), LinkTimes(500.0, 0.1))
    run = run_of(
        spec, sites=sites, failures=tuple(outages), seed=seed, messages=MessageTimes(delivery_s=late_s),
        learner=replace(LEARNER, cores=1.0), **fields,
    )  # fmt: skip
    check_whole(simulate(run), run, 3)


def test_a_run_is_the_same_whenever_it_is_simulated() -> None:
    """Also in another process, whose sets are in another order, and with choices of plans."""
    code = (
        "from tests.unit.test_simulation import *\n"
        "sync = make_spec(sampling={'max_tokens': 1000, 'max_prompt_tokens': 100},"
        " trainer={'microbatch_tokens': 2000}, algorithm={'groups': 40, 'iterations': 3, 'group_size': 4})\n"
        "for spec in (sync, spec_of('async', order='arrival', iterations=8)):\n"
        "    failing = run_of(spec, failures=(Outage(1, 3.0, 2.0),), messages=MessageTimes(choice_s=0.0))\n"
        "    sys.stdout.write(digest(simulate(failing)))\n"
    )

    def said(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = said("1")
    assert len(first) == 128
    assert first == said("2")
    run = run_of(spec_of("async"))
    assert digest(simulate(run)) == digest(simulate(run)) != digest(simulate(replace(run, seed=1)))


def test_a_dead_generator_is_missed_after_a_while() -> None:
    run = run_of(spec_of("async", iterations=6))
    whole = simulate(run)
    missed = simulate(replace(run, failures=(Outage(0, 1.0),)))
    told = simulate(replace(run, failures=(Outage(0, 1.0, notice_s=1.0),)))
    assert whole.ended_at < told.ended_at < missed.ended_at
    assert missed.steps[-1].generated["away"] == pytest.approx(missed.ended_at - 1.0)
    with pytest.raises(SimulationError, match=r"stands still at .* Has every generator failed"):
        simulate(replace(run, failures=(Outage(0, 1.0), Outage(1, 2.0))))


def test_cost_counts_the_time_for_which_each_part_is_there() -> None:
    site = SimulatedSite("here", (ENGINE, ENGINE), price_per_hour=3.0)
    run = run_of(sites=(site,), learner_price_per_hour=4.0)
    result = simulate(run)
    assert result.cost == pytest.approx(result.ended_at / 3600 * (2 * 3.0 + 4.0))
    assert result.cost_per_1000 == pytest.approx(result.cost / result.samples * 1000)
    early = simulate(replace(run, failures=(Outage(0, 1.0, notice_s=1.0),)))
    assert early.cost == pytest.approx((early.ended_at * 7.0 + 2.0 * 3.0) / 3600), "also for the notice"


def test_a_picture_has_bars_of_one_iteration_and_of_its_samples_that_end_later() -> None:
    run = run_of(spec_of("async"), picture_of=2)
    result = simulate(run)
    begin, end = result.steps[1].ended_at, result.steps[2].ended_at
    assert {span.kind for span in result.spans} == {"sample", "training", "stepping"}
    assert all(begin <= span.end for span in result.spans)
    assert any(span.end > end for span in result.spans)
    assert not simulate(replace(run, picture_of=None)).spans


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sites": (SimulatedSite("a", ()),)}, "no site has an engine"),
        ({"sites": (SimulatedSite("a", (ENGINE,)),) * 2}, "two sites have one name"),
        ({"sites": (SimulatedSite("a", (EngineTimes((0.1,)),)),)}, "at least one slot"),
        ({"sites": (SimulatedSite("a", (EngineTimes((0.1, 0.0)),)),)}, "above 0"),
        ({"sites": (SimulatedSite("a", (ENGINE,), LinkTimes(0.0)),)}, "carries no bytes"),
        ({"sites": (SimulatedSite("a", (ENGINE,), price_per_hour=-1.0),)}, "price"),
        ({"cores": 0.0}, "cores"),
        ({"sites": (SimulatedSite("a", (ENGINE,), cores=0.0),)}, "site a: it has 0 cores"),
        ({"barrier": True}, "mode async"),
        ({"iterations": 0}, "iterations"),
        ({"failures": (Outage(2, 1.0),)}, "generator 2"),
        ({"failures": (Outage(0, -1.0),)}, "at_s"),
        ({"learner": LearnerTimes(-1.0)}, "learner"),
        ({"workload": given_lengths([[1, 2]])}, "given lengths"),
    ],
)
def test_an_impossible_run_is_refused(fields: Mapping[str, Any], words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        run_of(**fields)


def test_tcp_delays_the_beginning_of_a_fetch() -> None:
    """By a share of a round trip and of what crosses in the first few; the rest comes at the link's rate."""
    steady, real = LinkTimes(1e6, 0.1), LinkTimes(1e6, 0.1, delays=(0.0, 2.0))
    assert real.fetch_s(200_000, 0.0) == steady.fetch_s(200_000) == pytest.approx(0.25 + 0.2)
    assert real.fetch_s(200_000, 2.0) == pytest.approx(0.45 + 2 * (0.1 + 0.2))
    assert real.fetch_s(200_000) == pytest.approx(0.45 + 0.1 + 0.2)
    assert real.fetch_s(10**9, 2.0) == pytest.approx(steady.fetch_s(10**9) + 2 * (0.1 + 0.4))
    near = LinkTimes(1e6, delays=(2.0,))
    assert near.fetch_s(200_000) == pytest.approx(0.2)


def test_each_fetch_is_delayed_by_chance_and_again_by_the_same() -> None:
    link = LinkTimes(1e6, 0.1, delays=(0.0, 0.5, 2.0))
    found = []
    for seed in (1, 1, 2):
        way = SiteLink(link, 1000, np.random.default_rng(seed))
        seconds = []
        for version in range(1, 40):
            way.announced(version)
            seconds.append(way.fetch())
            way.fetched()
        found.append(seconds)
    assert found[0] == found[1] != found[2]
    assert set(found[0]) == {link.fetch_s(1000, delay) for delay in link.delays}
