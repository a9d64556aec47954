"""Measures all parts of a run file on this machine, in about a minute, with the code that runs have.

prompts ──► engine alone ──► learner alone ──► weights from one to the other ──► both at once
                └──► answers ──► rewards, lengths

Engine and learner are processes like those of a run, and start at the same time, as there. All that was
started ends with this process, or before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import msgspec
import numpy as np

from consumers.learner_process import LearnerOptions
from consumers.timed_training import CallTable
from flows.planning.fitted_curves import DecodeCurve, TrainCurve
from flows.planning.measuring_engine import EngineMeasurement, real_requests
from flows.planning.measuring_learner import MeasuredLearner, TrainingSamples, made_up, measure_learner
from flows.planning.measuring_weights import WeightsWay, scratch
from flows.planning.profile_identity import profile_identity
from flows.planning.profiled_learner import ProfiledLearner, ProfilingFailed
from flows.run.commands import GENERATOR, TRAINER, allocator, environment
from flows.run.dealt_gpus import DealtGpus
from flows.run.gpu_claims import GpuClaims
from flows.run.locations import Places
from infra.code import module
from infra.credentials import without_credentials
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child
from infra.supervise.team import worker_environment
from producers.engines.engine import DrawnAnswer
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote_profile import ProfiledEngine
from producers.engines.step_timing import StepTable, TimedDraw
from producers.first_prompts import FirstPrompt, PromptsAsked, PromptsFound
from producers.rewards import RewardPool
from producers.stopping import stopping_of
from schemas.identity import sample_key
from schemas.profile import (
    DecodePoint,
    GenerationProfile,
    LengthsProfile,
    Profile,
    RewardsProfile,
    TogetherProfile,
    TrainingProfile,
    TrainPoint,
)
from schemas.runspec import RunSpec

ShareDone = Callable[[float, str], None]

_MOST_PROMPTS, _MOST_ANSWERS = 1024, 8192
_VERSIONS = 3
_FEW = 16  # samples of a small batch, most of whose time does not depend on them
_POLL_S = 0.0002
_TURNS = 2  # of engine and learner, alone and both at once


def measure(spec: RunSpec, model: Path, places: Places, progress: ShareDone, *, seconds: float) -> Profile:
    """Measure a run file's parts. `seconds`: about how long, without the starts of engine and learner."""
    began = time.monotonic()
    folder = str(model)
    store = places.open_store()
    with ExitStack() as stack:
        progress(0.0, "reading the task's problems")
        prompts = read_prompts(spec, folder)
        progress(0.02, "starting engine and learner")
        prefix = stack.enter_context(scratch(store))
        engine, learner = stack.enter_context(engine_and_learner(spec, model, places, prefix))
        drawing = EngineMeasurement(engine, prompts, spec, 0.35 * seconds)
        for share in drawing.turn():
            progress(0.2 + 0.15 * share, "measuring decode steps")
        progress(0.35, "drawing real prompts")
        answers = drawing.answers()
        progress(0.5, "measuring rewards")
        rewards, lengths = _scored(spec, folder, prompts, answers, 0.1 * seconds)
        way = WeightsWay(spec, folder, store, prefix)
        way.bring(learner, engine)
        samples = made_up(spec, prompts, lengths.answers)
        trained = _followed(
            measure_learner(learner, samples, 0.3 * seconds),
            lambda share: progress(0.55 + 0.14 * share, "measuring training"),
        )  # fmt: skip
        progress(0.7, "measuring weights")
        _bring_versions(way, learner, engine, samples)
        weights = way.profile()
        for share in drawing.turn():
            progress(0.75 + 0.1 * share, "measuring decode steps again")
        points = drawing.points()
        progress(0.85, "measuring both at once")
        together = _together(
            engine, learner, prompts, spec, points, trained, samples, drawing.turns_apart, 0.15 * seconds
        )
    progress(1.0, "done")
    return Profile(
        made_at=time.time(), took_s=time.monotonic() - began,
        identity=profile_identity(spec, model, root=learner.root),
        generation=GenerationProfile(
            points=points, start_s=engine.start_s, memory_tokens=engine.memory_tokens,
            busy_cores=drawing.busy_cores, disturbed=drawing.disturbed,
        ),
        training=_training(trained, learner.start_s, spec.trainer.ranks),
        weights=weights, rewards=rewards, lengths=lengths,
        together=together,
    )  # fmt: skip


@contextmanager
def engine_and_learner(
    spec: RunSpec, model: Path, places: Places, prefix: str
) -> Iterator[tuple[ProfiledEngine, ProfiledLearner]]:
    """Start both as a run does, and end them. `prefix`: of what the learner puts into the store."""
    text = spec.model_dump_json()
    learner_options = LearnerOptions(
        model=str(model), spec=text, store=places.store_url, prefix=f"{prefix}/weights"
    )
    with ExitStack() as stack:
        gpus = _gpus(spec, stack.enter_context(GpuClaims()))
        engine = stack.enter_context(
            closing(
                ProfiledEngine(
                    EngineOptions(model=str(model), spec=text), _environment(GENERATOR, spec, places, gpus),
                    deadline_s=spec.deadlines.start_s,
                ).open()
            )
        )  # fmt: skip
        learner = stack.enter_context(
            closing(
                ProfiledLearner(
                    learner_options, _environment(TRAINER, spec, places, gpus),
                    deadline_s=spec.deadlines.progress_s,
                ).open()
            )
        )  # fmt: skip
        engine.wait_until_ready()
        learner.wait_until_ready()
        yield engine, learner


def _gpus(spec: RunSpec, claims: GpuClaims) -> DealtGpus:
    """Claim GPUs for all ranks of the trainer and of one engine, also where the run has some elsewhere."""
    wanted = replace(DealtGpus.of_run(spec), ranks=spec.trainer.ranks, at_sites=0, each=spec.generator.gpus)
    return claims.deal(wanted, 1)


def _environment(role: str, spec: RunSpec, places: Places, gpus: DealtGpus) -> dict[str, str]:
    own = gpus.for_ranks() if role == TRAINER else gpus.for_generator(0)
    return {**worker_environment(), **places.env, **environment(role, spec), **allocator(), **own}


def _followed(steps: Iterable[float | MeasuredLearner], told: Callable[[float], None]) -> MeasuredLearner:
    """Go through the steps of a measurement, tell the share that is done, and return its result."""
    for one in steps:
        if not isinstance(one, float):
            return one
        told(one)
    raise AssertionError("a measurement ended without a result")


def read_prompts(spec: RunSpec, model: str) -> list[FirstPrompt]:
    """Return the first prompts that the run would admit. Raises ProfilingFailed if the task has none."""
    group = spec.algorithm.group_size
    wanted = max(1, min(_MOST_PROMPTS, spec.task.limit, _MOST_ANSWERS // group))
    link, theirs = Pipe()
    asked = PromptsAsked(spec=spec.model_dump_json(), model=model, count=wanted)
    env = {**without_credentials(worker_environment()), **environment("feeder", spec)}
    with argument_file(msgspec.json.encode(asked)) as said:
        process = start_child(
            [sys.executable, "-m", module("producers.first_prompts"), str(said), str(theirs.fileno())],
            pass_fds=[said, theirs.fileno()], env=env,
        )  # fmt: skip
    theirs.close()
    try:
        if not link.poll(spec.deadlines.start_s):
            raise ProfilingFailed(
                f"the task gave no problems within {spec.deadlines.start_s:g} s (deadlines.start_s)"
            )
        found = msgspec.msgpack.decode(link.recv_bytes(), type=PromptsFound)
    except EOFError:
        raise ProfilingFailed("the process that reads the task's problems ended without them") from None
    finally:
        kill(process)
        link.close()
    if found.error:
        failed = ProfilingFailed(found.error)
        failed.lasting = True
        raise failed
    return found.prompts


def _scored(
    spec: RunSpec, model: str, prompts: Sequence[FirstPrompt], answers: Mapping[str, DrawnAnswer],
    most_s: float,
) -> tuple[RewardsProfile, LengthsProfile]:  # fmt: skip
    """Time the rewards of drawn answers, and return their lengths."""
    names = {sample_key(one.id): one for one in answers.values()}
    to_text = stopping_of(model, spec).text
    texts = [
        (group, prompts[group].problem, to_text(one.tokens)) for (group, _), one in sorted(names.items())
    ]
    with closing(RewardPool(spec.task)) as pool:
        rewards, totals = time_rewards(pool, texts, most_s)
    size = spec.algorithm.group_size
    lengths, cut = _lengths(prompts, names, size)
    whole = [one for one in totals.values() if len(one) == size]
    differ = [one for one in whole if max(one) > min(one)]
    return rewards, LengthsProfile(
        prompts=[len(prompts[group].tokens) for group in lengths],
        answers=[length for group in lengths.values() for length in group],
        group=size, cut=cut, informative=len(differ) / len(whole) if whole else 1.0,
    )  # fmt: skip


def time_rewards(
    pool: RewardPool, texts: Sequence[tuple[int, str, str]], most_s: float
) -> tuple[RewardsProfile, dict[int, list[float]]]:
    """Score texts (group, problem, answer) one after the other. Return the times, and rewards by group."""
    taken: list[float] = []
    totals: dict[int, list[float]] = {}
    failed, cpu_s = 0, 0.0
    until = 0.0
    for number, (group, problem, text) in enumerate(texts):
        pool.score(str(number), problem, text)
        since = time.perf_counter()
        while not (scores := pool.poll()):  # the pool ends each wait: for its process, and for a reward
            time.sleep(_POLL_S)
        if number:
            taken.append(time.perf_counter() - since)
        else:  # the start of the process is in the first one
            cpu_s, until = pool.cpu_s(), time.monotonic() + most_s
        failed += bool(scores[0].error)
        totals.setdefault(group, []).append(scores[0].total)
        if time.monotonic() > until:
            break
    used = pool.cpu_s() - cpu_s
    return RewardsProfile(
        seconds=float(np.mean(taken)) if taken else 0.0, cpu_s=max(0.0, used) / max(1, len(taken)),
        scored=len(taken), failed=failed,
    ), totals  # fmt: skip


def _lengths(
    prompts: Sequence[FirstPrompt], answers: Mapping[tuple[int, int], DrawnAnswer], size: int
) -> tuple[dict[int, list[int]], int]:
    """Return the lengths of the answers of each whole group, and how many of them were cut off."""
    found: dict[int, list[int]] = {}
    cut = 0
    for group in range(len(prompts)):
        members = [answers.get((group, index)) for index in range(size)]
        if all(one is not None for one in members):
            found[group] = [len(one.tokens) for one in members if one is not None]
            cut += sum(not one.finish for one in members if one is not None)
    return found, cut


def _bring_versions(
    way: WeightsWay, learner: ProfiledLearner, engine: ProfiledEngine, samples: TrainingSamples
) -> None:
    """Train some steps, and bring the weights of each into the engine."""
    repeats = samples.bundles[-1].repeats
    for number in range(_VERSIONS):
        learner.begin_training([repeats[number % len(repeats)]])
        learner.trained()
        learner.step()
        way.bring(learner, engine)


def _together(
    engine: ProfiledEngine, learner: ProfiledLearner, prompts: Sequence[FirstPrompt], spec: RunSpec,
    points: Sequence[DecodePoint], trained: MeasuredLearner, samples: TrainingSamples,
    grid: Sequence[float], seconds: float,
) -> TogetherProfile:  # fmt: skip
    """Have both work at once, with few samples at once and with many, and compare with each alone.

    Each has short turns alone and with the other: a machine is faster in one minute than in another. By how
    much, these turns tell, and those of the engine's grid.
    """
    decode, training = DecodeCurve.fitted(points), TrainCurve.fitted(trained.points)
    requests = real_requests(prompts, spec)
    *small, _ = [one for one in samples.bundles if one.held_out]  # a turn lasts until its last call ends
    bundles = [members for one in small for members in one.repeats]
    slots = spec.generator.slots
    sizes = (max(1, min(_FEW, slots // 4)), slots)
    part_s = seconds / (_TURNS * (2 * len(sizes) + 1))

    def decode_ratio(at_once: int) -> float:
        order = TimedDraw(requests=requests, slots=at_once, most_s=part_s, most_steps=1_000_000)
        return _ratio(_slowdown_of_steps(engine.draw(order)[0], decode, at_once))

    def train_ratio() -> float:
        table = learner.trained()
        return _ratio(
            [took / said for took, said in zip(table.seconds, _alone(training, table), strict=True)]
        )

    steps: list[list[float]] = [[] for _ in sizes]
    calls: list[float] = []
    training_alone: list[float] = []
    decoding_alone: list[list[float]] = [[] for _ in sizes]
    for _ in range(_TURNS):
        learner.begin_training(bundles, most_s=part_s)
        training_alone.append(train_ratio())
        for at_once, ratios, alone in zip(sizes, steps, decoding_alone, strict=True):
            alone.append(decode_ratio(at_once))
            learner.begin_training(bundles, most_s=part_s)
            ratios.append(decode_ratio(at_once) / alone[-1])
            calls.append(train_ratio() / training_alone[-1])
    few, many = map(_ratio, steps)
    fixed = decode.batch_s(1) / decode.batch_s(slots)  # the share of a full step that all steps have
    return TogetherProfile(
        step=few,
        samples=float(np.clip((many - fixed * few) / max(0.05, 1 - fixed), 1.0, max(1.0, few))),
        training=_ratio(calls),
        unsteady=unsteadiness([grid, training_alone, *decoding_alone]),
    )


def unsteadiness(works: Sequence[Sequence[float]]) -> float:
    """Return the relative standard deviation of the seconds of the same work. `works`: those of each work."""
    logs = [np.log(np.array(seconds)) for seconds in works if len(seconds) > 1]
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in logs)
    return min(1.0, (squares / max(1, sum(one.size - 1 for one in logs))) ** 0.5)


def _slowdown_of_steps(table: StepTable, curve: DecodeCurve, at_once: int) -> list[float]:
    points = [
        DecodePoint(samples=samples, context=context, begun=begun, prompt=prompt, ended=ended,
                    filled=float(begun > 0), steps=1, seconds=seconds)
        for samples, context, begun, prompt, ended, seconds in zip(
            table.samples, table.context, table.begun, table.prompt, table.ended, table.seconds, strict=True
        )
        if samples > 0.9 * at_once
    ]  # fmt: skip
    return [one.seconds / curve.seconds(one) for one in points]


def _alone(curve: TrainCurve, calls: CallTable) -> list[float]:
    return [
        curve.seconds(TrainPoint(samples=a, tokens=b, context=c, micro_batches=d, calls=1, seconds=1.0))
        for a, b, c, d in zip(calls.samples, calls.tokens, calls.context, calls.micro_batches, strict=True)
    ]


def _ratio(ratios: Sequence[float]) -> float:
    return float(np.clip(np.median(ratios), 0.1, 1000.0)) if len(ratios) else 1.0


def _training(trained: MeasuredLearner, start_s: float, ranks: int) -> TrainingProfile:
    steps = np.array([one.step_s for one in trained.steps])
    return TrainingProfile(
        points=trained.points, start_s=start_s, read_s=trained.read_s, step_s=float(np.median(steps)),
        hash_s=float(np.median([one.hash_s for one in trained.steps])),
        record_s=float(np.median([one.record_s for one in trained.steps])),
        record_samples=round(np.median([one.samples for one in trained.steps])),
        snapshot_s=trained.snapshot_s, busy_cores=trained.busy_cores * ranks,
        disturbed=min(1.0, trained.disturbed),
    )  # fmt: skip
