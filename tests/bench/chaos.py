"""Random kills, stops, twins, poison, full disks and vanished stores over whole runs, checked from outside.

    python -m tests.bench chaos --minutes 10 --seed 7

One run after the other, sync and async, by hand and as a Prefect flow, until the time is up. Each is
disturbed every few seconds in a way that the seed draws, and started again as a supervisor or a person would:
where a process says which command lets the run go on, that command is given. In the end it must have kept all
promises: every sample trained, none twice, none too stale, and in sync mode the same bits as a run that
nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from infra.bus import Reader
from infra.runs import newest_run
from infra.stack import local
from infra.stores.opening import open_store
from infra.supervise.children import kill as kill_all
from schemas.runspec import RunSpec
from schemas.topics import Topics
from tests.bench import _chaos_events as events
from tests.bench._chaos_checker import Expected, Findings, check
from tests.bench._runs import ROOT, bus_of, own_stack
from tests.factories import TASK, make_spec, make_tiny_model
from tests.harness import Run

_STALLED_S = 120.0  # without a step after an event
_RUNS = 2  # at least: a sync and an async one
_STARTS = 25  # so often is a process of one run started again before that counts as a failure
_STORE_MIB = 192
_SKIP = re.compile(r"streamrl skip (\S+) '([^']+)' --store (\S+)")
_MODES, _HOWS = ("sync", "async"), ("by hand", "flow")


@dataclass
class Result:
    """A run, and all that befell it."""

    name: str
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    starts: int = 0  # of processes, or of the flow, beyond the first
    problems: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)


def spec_of(mode: str, servers: str, folder: Path, *, iterations: int) -> RunSpec:
    """A small run of a mode."""
    algorithm: dict[str, Any] = {
        "iterations": iterations,
        "groups": 8,
        "group_size": 4,
        "learning_rate": 1e-3,
    }
    if mode == "async":
        algorithm |= {"mode": "async", "staleness": 2.0}
    (folder / "task.py").write_text(TASK)
    return make_spec(
        run=f"chaos-{mode}",
        task={"python": str(folder / "task.py")},
        model={"path": str(folder / "model")},
        algorithm=algorithm,
        trainer={"checkpoint_every": 7, "bundle_tokens": 64},
        dispatch={"silence_s": 3.0},
        placement={
            "kafka": {"bootstrap_servers": servers}, "store": f"file://{folder}/disk/store",
            "restarts": _STARTS,
        },
        report=str(folder / "runs"),
    )  # fmt: skip


def expected(spec: RunSpec) -> Expected:
    """What the checker has to know of a run file."""
    algorithm = spec.algorithm
    return Expected(
        algorithm.iterations, algorithm.groups, algorithm.group_size, algorithm.staleness,
        algorithm.mode == "sync",
    )  # fmt: skip


class Pace:
    """When the next event is due: the run has got on since the last one, and a moment has passed."""

    def __init__(self, scene: Scene, *, most_s: float) -> None:
        self._scene, self._most_s = scene, most_s
        self._steps, self._since, self._due = 0, time.monotonic(), 0.0

    def is_due(self) -> bool:
        """Also notes that the run has stalled."""
        scene, now = self._scene, time.monotonic()
        if not self._due and scene.run and (steps := scene.steps()) > self._steps:
            self._steps, self._since = steps, now
            self._due = now + scene.draw.uniform(0.0, self._most_s)
        if now - self._since > _STALLED_S:
            scene.give_up(f"no step within {_STALLED_S:g} s after: {', '.join(scene.story[-3:])}")
        return self._due != 0.0 and now >= self._due

    def happened(self) -> None:
        """An event: from now on the run has to get on again."""
        self._due, self._since = 0.0, time.monotonic()


class Scene:
    """A run under way, with what the disturber may do to it."""

    def __init__(self, stack: local.Stack, folder: Path, draw: random.Random, disk: Path | None) -> None:
        self.stack, self.folder, self.draw, self.disk = stack, folder, draw, disk
        self.result = Result("")
        self.run = ""
        self.story: list[str] = []  # the events, in order
        self._ledger: Reader | None = None
        self.lost = False  # this run will not end

    def give_up(self, why: str) -> None:
        """Say what is wrong with a run that will not end."""
        self.result.problems.append(why)
        self.lost = True

    def steps(self) -> int:
        """How many records the ledger has; 0 while the broker is away."""
        try:
            if self._ledger is None:
                self._ledger = bus_of(self.stack).reader(Topics(self.run, 1).ledger)
            return self._ledger.end_offsets()[0]
        except Exception:  # the broker is what is killed here
            self.close()
            return 0

    def close(self) -> None:
        """Let go of the ledger."""
        if self._ledger is not None:
            with contextlib.suppress(Exception):
                self._ledger.close()
        self._ledger = None

    @property
    def servers(self) -> str:
        """The broker."""
        assert self.stack.bootstrap_servers is not None
        return self.stack.bootstrap_servers

    def disturb(self, *, twins: Callable[[str], None] | None, flow: Callable[[], None] | None) -> None:
        """One event; what can't happen to this run is drawn again."""
        happenings: list[tuple[str, Callable[[], object]]] = [
            ("poison", self._poison),
            ("more poison", self._poison),
            ("poison on the ledger", self._poison_ledger),
            ("broker killed", self._kill_broker),
            ("store vanishes", self._vanish),
        ]
        for role in ("trainer", "feeder", "generator", "engine", "reward"):
            happenings.append((f"kill {role}", partial(events.kill, self.run, role)))
        for role in ("trainer", "feeder", "generator"):
            happenings.append((f"stop {role}", partial(self._stop, role)))
        if self.disk is not None:
            happenings.append(("disk full", self._fill))
        if twins is not None:
            happenings += [(f"second {role}", partial(twins, role)) for role in ("trainer", "feeder")]
        if flow is not None:
            happenings.append(("guard killed", partial(events.kill, str(self.folder), "guard")))
            happenings.append(("flow killed", flow))
        name, happen = self.draw.choice(happenings)
        self.story.append(name)
        happen()
        self.result.events[name] += 1

    def _stop(self, role: str) -> None:
        with events.standing_still(self.run, role):
            time.sleep(self.draw.uniform(0.5, 5.0))

    def _poison(self) -> None:
        self.story[-1] = events.poison(self.servers, self.run, self.draw)

    def _poison_ledger(self) -> None:
        step = self.steps() + self.draw.randrange(3)  # those to come
        self.story[-1] = events.poison(self.servers, self.run, self.draw, step=step)

    def _kill_broker(self) -> None:
        for state in local.stack_state(paths=self.stack.paths):
            if state.name == "kafka" and state.pid is not None:
                events.kill_process(state.pid)
        with contextlib.suppress(Exception):  # a flow may be faster to start it again
            local.start_stack(kafka=True, prefect=False, paths=self.stack.paths)

    def _vanish(self) -> None:
        with events.vanished(self.folder / "disk" / "store") as empty:
            time.sleep(self.draw.uniform(0.3, 2.0))
            if written := [str(file.relative_to(empty)) for file in empty.rglob("*") if file.is_file()]:
                self.result.problems.append(f"written into a store that is not the run's: {written[:3]}")

    def _fill(self) -> None:
        assert self.disk is not None
        with events.full(self.disk):
            time.sleep(self.draw.uniform(0.5, 2.0))


class Operator:
    """Reads what the processes of a run say, and gives the commands that they ask for."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._read: dict[Path, int] = {}  # of each log, so far
        self._given: set[str] = set()

    def look(self) -> None:
        """What was said since the last time."""
        for log in self._scene.folder.rglob("*.log"):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                said = file.read()
            whole = said[: said.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for run, place, store in _SKIP.findall(whole.decode(errors="replace")):
                self._skip(run, place, store)

    def _skip(self, run: str, place: str, store: str) -> None:
        if place in self._given:
            return
        self._given.add(place)
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "skip", run, place, "--store", store],
            cwd=ROOT, env={**os.environ, **self._scene.stack.env()}, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:  # the broker or the store may be away: the message comes again
            self._given.remove(place)
            self._scene.story.append(f"skip refused: {done.stdout.decode()[-300:]}")
        else:
            self._scene.result.events["skipped"] += 1


def _run_of(scene: Scene, spec: RunSpec) -> Run:
    """A run named after its folder: all of them are on one broker."""
    folder = scene.folder
    return Run(folder / folder.name, scene.servers, spec, folder / "model", store=spec.placement.store)


def by_hand(scene: Scene, spec: RunSpec) -> None:
    """Processes that we start again ourselves, as any supervisor would."""
    made = _run_of(scene, spec)
    scene.run = made.record.id
    names = ("feeder-0", "trainer-0", "generator-0", "generator-1")

    def start(name: str) -> None:
        role, _, number = name.partition("-")
        made.start(role, int(number))

    def twin(role: str) -> None:
        name = f"{role}-{9 if f'{role}-9' not in made.processes else 0}"
        if name not in made.processes or made.processes[name].poll() is not None:
            start(name)

    def of(role: str) -> list[subprocess.Popen[bytes]]:
        return [process for name, process in made.processes.items() if name.startswith(f"{role}-")]

    def is_done(role: str) -> bool:
        return any(process.poll() == 0 for process in of(role))

    def is_missed(name: str) -> bool:
        role = name.partition("-")[0]
        if made.processes[name].poll() is None or is_done(role):
            return False
        return role == "generator" or all(process.poll() is not None for process in of(role))

    try:
        for name in names:
            start(name)
        pace, operator = Pace(scene, most_s=2.0), Operator(scene)
        while not (is_done("trainer") and is_done("feeder")) and not scene.lost:
            for name in names:
                if is_missed(name):
                    scene.result.starts += 1
                    if scene.result.starts > _STARTS:
                        scene.give_up(_last_words(made, name))
                    start(name)
            operator.look()
            if pace.is_due():
                scene.disturb(twins=twin, flow=None)
                pace.happened()
            time.sleep(0.1)
    finally:
        for process in made.processes.values():
            kill_all(process)
        made.bus.close()


def _last_words(made: Run, name: str) -> str:
    return f"{name} was started too often; it said last: {made.log(name).read_text()[-600:]}"


def as_flow(scene: Scene, spec: RunSpec) -> None:
    """`streamrl run`, and `--resume` whenever it has ended before its time."""
    file = scene.folder / "run.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    environment = {**os.environ, **scene.stack.env(), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "flows.cli", "run", str(file)]
    log = scene.folder / "flow.log"

    def begin(*more: str) -> psutil.Popen:
        with log.open("ab") as out:
            return psutil.Popen(
                [*argv, *more], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    flow = begin()
    store = open_store(f"{spec.placement.store}")
    pace, operator = Pace(scene, most_s=3.0), Operator(scene)
    try:
        while not scene.lost:
            if not scene.run and (record := newest_run(store)) is not None:
                scene.run = record.id
            code = flow.poll()
            if code == 0:
                return
            if code is not None:
                scene.result.starts += 1
                if scene.result.starts > _STARTS:
                    scene.give_up(f"the flow failed too often: {log.read_text()[-600:]}")
                flow = begin(*(["--resume", scene.run] if scene.run else []))
            operator.look()
            if pace.is_due():
                scene.disturb(twins=None, flow=flow.kill)
                pace.happened()
            time.sleep(0.1)
    finally:
        with contextlib.suppress(psutil.Error):
            flow.send_signal(signal.SIGINT)
            flow.wait(30)
        with contextlib.suppress(psutil.Error):
            flow.kill()


@contextlib.contextmanager
def scene_of(stack: local.Stack, folder: Path, draw: random.Random) -> Iterator[Scene]:
    """A folder with a model and a disk of its own."""
    folder.mkdir()
    make_tiny_model(folder / "model")
    with events.small_disk(folder / "disk", _STORE_MIB) as disk:
        yield Scene(stack, folder, draw, disk)


def one(
    stack: local.Stack, folder: Path, mode: str, how: str, seed: int, calm: list[str] | None, iterations: int
) -> Result:  # fmt: skip
    """One run, disturbed and checked."""
    began = time.monotonic()
    with scene_of(stack, folder, random.Random(seed)) as scene:
        scene.result.name = f"{mode}, {how}, seed {seed}"
        spec = spec_of(mode, scene.servers, folder, iterations=iterations)
        (by_hand if how == "by hand" else as_flow)(scene, spec)
        if not scene.lost:
            found = check(scene.servers, scene.run, folder / "disk" / "store", expected(spec), calm)
            scene.result.problems += found.problems()
            scene.result.roots = found.roots
        scene.close()
        scene.result.seconds = time.monotonic() - began
        return scene.result


def undisturbed(stack: local.Stack, folder: Path, iterations: int) -> list[str]:
    """The roots that the sync run ends with when nobody disturbs it."""
    with scene_of(stack, folder, random.Random(0)) as scene:
        spec = spec_of("sync", scene.servers, folder, iterations=iterations)
        made = _run_of(scene, spec)
        try:
            for role in ("feeder", "trainer", "generator"):
                made.start(role)
            made.wait_for_end(240)
            found: Findings = check(
                scene.servers, made.record.id, folder / "disk" / "store", expected(spec), None
            )
        finally:
            for process in made.processes.values():
                kill_all(process)
            made.bus.close()
        if found.problems():
            raise RuntimeError(f"a run that nobody disturbed breaks its promises: {found.problems()}")
        return found.roots


def keep(folder: Path, place: Path) -> None:
    """The logs of a run."""
    place.mkdir(parents=True, exist_ok=True)
    for file in folder.rglob("*.log"):
        shutil.copy(file, place)


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=2.0 if quick else 10.0, help="begin runs for so long"
    )
    parser.add_argument("--seed", type=int, default=0, help="what happens follows from it")
    parser.add_argument("--iterations", type=int, default=50, help="of each run: about two an event")
    parser.add_argument("--mode", choices=_MODES, help="only runs of this mode")
    parser.add_argument("--how", choices=_HOWS, help="only runs that are started like this")
    parser.add_argument("--keep", type=Path, help="folder for the logs of runs that broke a promise")
    given = parser.parse_args(argv)
    console = Console(stderr=True)
    modes, hows = ((given.mode,) if given.mode else _MODES), ((given.how,) if given.how else _HOWS)
    kinds = [(mode, how) for how in hows for mode in modes]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-chaos-") as temporary, own_stack() as stack:
        folder = Path(temporary)
        calm: list[str] = []
        if "sync" in modes:
            console.print("a run that nobody disturbs …")
            calm = undisturbed(stack, folder / "calm", given.iterations)
        until = time.monotonic() + 60 * given.minutes
        while time.monotonic() < until or len(results) < _RUNS:
            mode, how = kinds[len(results) % len(kinds)]
            seed = given.seed * 1000 + len(results)
            console.print(f"{mode}, {how}, seed {seed} …")
            wanted = calm if mode == "sync" else None
            results.append(one(stack, folder / f"r{seed}", mode, how, seed, wanted, given.iterations))
            if results[-1].problems and given.keep is not None:
                keep(folder / f"r{seed}", given.keep / f"{mode}-{seed}")
            console.print(f"  {results[-1].seconds:.0f} s, {dict(results[-1].events)}, "
                          f"{results[-1].problems or 'all promises kept'}")  # fmt: skip
    return _report(results)


def _report(results: Sequence[Result]) -> dict[str, Any]:
    table = Table(title="runs under chaos")
    for column in ("run", "seconds", "events", "started again", "problems"):
        table.add_column(column)
    for result in results:
        table.add_row(
            result.name, f"{result.seconds:.0f}", str(result.events.total()), str(result.starts),
            "\n".join(result.problems) or "none",
        )  # fmt: skip
    Console(width=150).print(table)
    total = sum((result.events for result in results), Counter[str]())
    return {
        "runs": len(results),
        "events": total.total(),
        "by_kind": dict(sorted(total.items())),
        "started_again": sum(result.starts for result in results),
        "problems": [f"{result.name}: {problem}" for result in results for problem in result.problems],
    }
