"""Inspects a run without starting anything of it: `streamrl run FILE --check`, and before every start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from flows.run.inspection.finding import Finding
from flows.run.inspection.model import has_tokenizer, look_at_model
from flows.run.inspection.servers import look_at_servers
from flows.run.inspection.store_and_broker import look_at_places
from flows.run.inspection.task import look_at_task
from flows.run.request import RunFailed
from flows.run.start_model import model_at_hand
from infra.gpu_builds import GET_VLLM, wrong_vllm
from infra.hub import is_hub_name
from producers.engines.vllm_engine import VllmSettings
from schemas.loading import RunFileError
from schemas.runspec import RunSpec

__all__ = ["Finding", "inspect_built", "inspect_run", "inspect_start"]

_STAYS_S = 60.0  # how long a spec that was fine need not be looked at again
_fine: dict[str, float] = {}  # specs that were fine, each with the time of the look


def inspect_run(
    spec: RunSpec, told: Sequence[str] = (), say: Callable[[str], None] | None = None
) -> list[Finding]:
    """Return all findings that are not in `told`. A task that is wrong in `told` is not imported.

    `say`: a run is about to start. Whatever takes long is said, and gets as long as the run would give it.
    """
    model = model_at_hand(spec)
    tokenizer = model if model is not None and has_tokenizer(model) else None
    no_task = any(problem.startswith("task.") for problem in told)
    with ThreadPoolExecutor(2, "look") as pool:
        others: list[Future[list[Finding]]] = []

        def look_elsewhere() -> None:
            others.append(pool.submit(_model, spec, model))
            others.append(pool.submit(lambda: [*look_at_places(spec), *look_at_servers(spec, model)]))

        # The task's process is started before any thread: a fork beside threads may hang in their locks.
        of_task = [] if no_task else look_at_task(spec, tokenizer, say, meanwhile=look_elsewhere)
        if not others:
            look_elsewhere()
        of_model, of_places = (look.result() for look in others)
    found = [*of_model, *of_task, *of_places, *_vllm(spec)]
    return [one for one in found if not any(one.said in problem for problem in told)]


def inspect_start(spec: RunSpec, runfile: str, say: Callable[[str], None]) -> None:
    """Look at all that a run needs, before anything is started.

    Raises RunFileError if something must be changed first, RunFailed if something does not answer.
    """
    key, now = spec.model_dump_json(), time.monotonic()
    if now - _fine.get(key, -_STAYS_S) < _STAYS_S:
        return  # the command has looked, and this is its flow
    _judge(inspect_run(spec, say=say), runfile, say)
    _fine.clear()
    _fine[key] = time.monotonic()


def inspect_built(spec: RunSpec, model: Path, runfile: str, say: Callable[[str], None]) -> None:
    """Look at a model that was built since `inspect_start`, and at what the task is with its tokenizer."""
    tokenizer = model if has_tokenizer(model) else None
    _judge([*look_at_model(model), *look_at_task(spec, tokenizer, say)], runfile, say)


def _judge(findings: Sequence[Finding], runfile: str, say: Callable[[str], None]) -> None:
    wrong = [one for one in findings if one.wrong]
    if not wrong:
        for one in findings:
            if one.noted:
                say(one.line)
        return
    lines = "\n".join(f"{runfile}: {one.line}" for one in wrong)
    raise RunFailed(lines) if all(one.away for one in wrong) else RunFileError(lines)


def _model(spec: RunSpec, folder: Path | None) -> list[Finding]:
    if folder is not None:
        return list(look_at_model(folder))
    if spec.model.build:
        return [Finding("model", f"{spec.model.build} is not built yet: a run builds it")]
    if is_hub_name(spec.model.path or ""):
        return [Finding("model", f"{spec.model.path} is not here; a run fetches it from the Hub")]
    return []  # it is told already that there is no such folder


def _vllm(spec: RunSpec) -> list[Finding]:
    """Tell if engines that start on this machine would be on its GPUs, with vLLM's build for CPUs."""
    placement = spec.placement
    here = placement.generators or any(
        one.generators and not one.elsewhere for one in placement.sites.values()
    )
    if not spec.generates or not here or not isinstance(spec.generator, VllmSettings):
        return []
    return [Finding("vllm", f"{wrong}: {GET_VLLM}", wrong=True)] if (wrong := wrong_vllm()) else []
