"""Whole runs in tests: real Kafka, real processes, a tiny model; started, killed and looked at one by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consumers.stream.sample_stream import CAME_BEFORE
from infra import runs
from infra.bus import read_all
from infra.kafka_bus import KafkaBus
from infra.ownership import claim
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.supervise.children import kill, start_child
from schemas.messages import DeadLetter, Evaluation, GeneratorReport, Sample, StepRecord
from schemas.runspec import RunSpec
from schemas.topics import Topics
from schemas.wire import Message, decode
from tests.factories import TASK
from tests.waiting import wait_until

MODULES = {
    "feeder": "producers.feeder", "trainer": "consumers.trainer", "generator": "producers.generator",
    "relay": "infra.relay",
}  # fmt: skip
ROOT = Path(__file__).parents[1]


class Run:
    """A run whose processes the test holds in its hand."""

    def __init__(
        self, folder: Path, kafka: str, spec: RunSpec, model: Path, store: str | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        task = folder / "task.py"
        task.write_text(TASK)
        spec = spec.model_copy(update={"task": spec.task.model_copy(update={"python": str(task)})})
        self.folder, self.store = folder, open_store(store or f"file://{folder}/store")
        self.record: RunRecord = runs.create(
            self.store,
            spec,
            bootstrap_servers=kafka,
            model=str(model),
            run_id=f"{folder.name}-1".replace("_", "-"),
        )
        self.bus = KafkaBus(kafka)
        self.topics = Topics(self.record.id, spec.lengths.classes)
        self.bus.create_topics(self.topics.all())
        claim(self.bus, self.record, self.topics)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.modules = dict(MODULES)

    def start(self, role: str, number: int = 0, site: str | None = None) -> None:
        """Start a process of the run, at a site with a cache of its own."""
        name = f"{role}-{number}"
        argv = [sys.executable, "-m", self.modules[role], "--store", self.store.url, "--run", self.record.id]
        if site is not None:
            argv += ["--site", site, "--cache", f"file://{self.folder}/{site}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with self.log(name).open("ab") as log:
            self.processes[name] = start_child(
                [*argv, "--number", str(number)], stdout=log, stderr=log, cwd=ROOT, env=environment
            )

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """kill -9, the process alone: what it started has to end by itself."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    @contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        """A process does nothing in the meantime: so the run can't get ahead of what takes its time."""
        self.processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[name].send_signal(signal.SIGCONT)

    def read(self, topic: str, kind: type[Message]) -> list[Any]:
        """All messages of a topic."""
        return [
            decode(r.value, kind) for r in read_all(self.bus, getattr(self.topics, topic), deadline_s=150)
        ]

    def steps(self) -> list[StepRecord]:
        """The ledger."""
        return self.read("ledger", StepRecord)

    def samples(self) -> list[Sample]:
        """All samples, delivered twice or not."""
        return self.read("samples", Sample)

    def dead_letters(self) -> list[DeadLetter]:
        """What could not be used; a sample may come twice where generators die."""
        return [letter for letter in self.read("dead", DeadLetter) if CAME_BEFORE not in letter.reason]

    def evaluations(self) -> list[Evaluation]:
        """What was earned on held-out problems."""
        return self.read("evals", Evaluation)

    def wait_for_steps(self, count: int, deadline_s: float = 120) -> None:
        """Until the ledger has so many records."""
        wait_until(
            lambda: self.check() or len(self.steps()) >= count, what=f"{count} steps", deadline_s=deadline_s
        )

    def wait_for_generators(self, count: int, deadline_s: float = 150) -> None:
        """Until so many generators have reported; one that was started anew counts again."""
        wait_until(
            lambda: self.check() or len({r.start for r in self.read("generators", GeneratorReport)}) >= count,
            what=f"{count} generators", deadline_s=deadline_s,
        )  # fmt: skip

    def wait_for_end(self, deadline_s: float = 180) -> None:
        """Until trainer and feeder have ended well."""
        names = [name for name in self.processes if name.startswith(("trainer", "feeder"))]
        wait_until(
            lambda: self.check() or all(self.processes[name].poll() == 0 for name in names),
            what="the end of the run", deadline_s=deadline_s,
        )  # fmt: skip

    def check(self) -> None:
        """Fail with its log if a process has failed."""
        for name, process in self.processes.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                raise AssertionError(
                    f"{name} ended with {process.poll()}:\n{self.log(name).read_text()[-3000:]}"
                )


@contextmanager
def running(*args: Any, **options: Any) -> Iterator[Run]:
    """A run with feeder, trainer and generators; nothing of it is left afterwards."""
    generators, site = options.pop("generators", 1), options.pop("site", None)
    modules = options.pop("modules", {})
    run = Run(*args, **options)
    run.modules |= modules
    try:
        for role in ("feeder", "trainer"):
            run.start(role)
        if site is not None:
            run.start("relay", 0, site)
        for number in range(generators):
            run.start("generator", number, site)
        yield run
    finally:
        for process in run.processes.values():
            kill(process)


def trained_ids(steps: list[StepRecord]) -> list[tuple[int, int]]:
    """Group and index of all that was trained, in order."""
    return [
        (group, index)
        for step in steps
        for group, index in zip(step.groups.tolist(), step.indexes.tolist(), strict=True)
    ]
