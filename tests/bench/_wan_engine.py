"""A generator at a far site, as far as weights and engine go: how long each version stops its decoding."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator

import numpy as np

from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from producers.dispatch.jobs import SampleJob
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from producers.generator_core import Decoding
from producers.weights_watch import WeightsWatch
from schemas.messages import EVAL, Prompt


def body(context: RoleContext) -> None:
    """Decode all the time, until told to stop."""
    spec, bell = context.spec, threading.Event()
    options = EngineOptions(model=context.record.model, spec=spec.model_dump_json())
    engine = RemoteEngine(options, bell, deadline_s=spec.deadlines.start_s).open()
    tail = WeightsWatch(context, bell).open()
    try:
        engine.wait_until_ready()
        decoding, jobs = Decoding(spec, engine), _jobs()
        told, pause_s, roots = -1, 0.0, dict[int, str]()
        while True:
            context.check_stop()
            for version in tail.take():
                roots[version.version] = version.root
                decoding.update(version)
            while decoding.queued + decoding.running < spec.generator.slots:
                decoding.take(next(jobs))
            decoding.fill()
            decoding.step(0.2 if decoding.running else 0.0)
            if decoding.version > told and decoding.is_verified:
                told, took = decoding.version, decoding.pause_s - pause_s
                pause_s = decoding.pause_s
                said = {"reader": 0, "version": told, "root": roots[told], "pause_ms": took * 1e3}
                print(json.dumps(said), flush=True)
    finally:
        tail.close()
        engine.close()


def _jobs() -> Iterator[SampleJob]:
    for group in itertools.count(1):
        prompt = Prompt(
            run="wan", purpose=EVAL, group=-group, size=1, problem_id="0", problem="{}", epoch=0,
            tokens=np.array([4, 5, 6], np.int32), iteration=0, mini=0, bundle=0, bundle_groups=1,
            min_version=0, predicted=0.0, predictor="", length_class=0, edges=[], admitted_at=0.0,
        )  # fmt: skip
        yield SampleJob(prompt, 0)


if __name__ == "__main__":
    sys.exit(run_role("generator", body))
