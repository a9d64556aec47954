"""A plan as rows: for the command line, for JSON, and for a run that prints what it was predicted to do."""

from __future__ import annotations

import math
import shlex

from flows.planning.machine_pools import MachinePool
from flows.planning.main_memory import GIB_BYTES, in_gib
from flows.planning.stage_times import DeviceRoom
from flows.planning.step_estimate import GeneratorKind, MachineSplit
from flows.plans.interval import Interval
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.run_plan import PlannedSplit, RunPlan, waits_of
from flows.plans.simulated_split import SplitFigures
from schemas.addresses import LOCAL

TAIL = "drawing the tail"


def plan_row(plan: RunPlan) -> dict[str, object]:
    """Return all of a plan."""
    return {
        "run": plan.spec.run,
        "goal": plan.goal.least,
        "deadline_s": plan.goal.deadline_s,
        "split": split_row(plan.chosen.split),
        "step_s": interval_row(plan.step_s),
        "samples_per_s": interval_row(plan.samples_per_s),
        "cost_per_1000": interval_row(plan.cost_per_1000),
        "figures": figures_row(plan.chosen.figures),
        "runner_up": _other_row(plan.others[0]) | {"why_it_lost": plan.why} if plan.others else None,
        "others": [_other_row(one) for one in plan.others[1:]],
        "settings": plan_settings(plan),
        "beyond_settings": beyond_settings(plan.chosen.split, plan.spec.placement.store),
        "splits": {"estimated": plan.estimated, "simulated": plan.simulated},
        "sources": sources_of(plan.inputs, plan.chosen.split),
    }


def interval_row(one: Interval) -> dict[str, float]:
    """Return a figure and its range."""
    return {"value": one.value, "low": one.low, "high": one.high}


def split_row(split: MachineSplit) -> dict[str, object]:
    """Return which machines generate and which train."""
    return {
        "generators": [
            {
                "machines": kind.pool.name, "hardware": kind.pool.hardware, "site": kind.pool.site,
                "generators": count, "devices_of_each": kind.tensor_parallel, "slots": kind.slots,
                "memory": room_row(kind.engine.room, kind.engine.memory_bytes),
            }
            for kind, count in split.generators
        ],
        "trainer": {
            "machines": split.trainer.pool.name, "hardware": split.trainer.pool.hardware,
            "devices": split.trainer.devices,
            "memory": room_row(split.trainer.learner.room, split.trainer.learner.memory_bytes),
        },
        "take_turns": split.takes_turns,
        "staleness": split.lookahead,
        "machines": {pool.name: many for pool, many in split.machines().items()},
        "price_per_hour": split.price,
    }  # fmt: skip


def room_row(room: DeviceRoom | None, main_bytes: float) -> dict[str, float]:
    """Return how much memory something takes, as far as it is known, in GiB."""
    found = {"main_gib": main_bytes / GIB_BYTES} if main_bytes else {}
    if room is not None:
        found |= {
            "device_gib": room.taken / GIB_BYTES,
            "of_gib": room.whole / GIB_BYTES,
            "weights_gib": room.weights / GIB_BYTES,
        }
    return {name: round(size, 2) for name, size in found.items() if size}


def memory_words(split: MachineSplit) -> tuple[str, str]:
    """Return in words how much memory a generator and the trainer take."""
    generators = []
    for kind, _ in split.generators:
        room, main = kind.engine.room, kind.engine.memory_bytes
        if room is not None:
            generators.append(f"{_of_device(room)}, {room.weights / GIB_BYTES:.1f} of them weights")
        else:
            generators.append(f"{in_gib(main)} each" if main else "not known")
    learner, words = split.trainer.learner, []
    if learner.room is not None:
        words.append(_of_device(learner.room))
    if learner.memory_bytes:
        beside = "main memory" if learner.room is not None else "all ranks"
        words.append(f"{in_gib(learner.memory_bytes)} {beside}")
    return "; ".join(generators), "; ".join(words) or "not known"


def _of_device(room: DeviceRoom) -> str:
    return f"{room.taken / GIB_BYTES:.1f} of {in_gib(room.whole)} of a device"


def figures_row(figures: SplitFigures) -> dict[str, object]:
    """Return the figures of a simulated split."""
    return {
        "step_s": figures.step_s,
        "samples_per_s": figures.samples_per_s,
        "cost_per_1000": figures.cost_per_1000,
        "staleness": figures.staleness,
        "staleness_max": figures.staleness_max,
        "generators": _rounded(dict(figures.generators)),
        "trainer": _rounded(dict(figures.trainer)),
        "bytes_per_step": {name: round(many) for name, many in figures.bytes_per_step.items()},
        "link_busy": _rounded(dict(figures.link_busy)),
    }


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {cause: round(share, 4) for cause, share in shares.items()}


def _other_row(one: PlannedSplit) -> dict[str, object]:
    return {"split": split_row(one.split), "figures": figures_row(one.figures)}


def plan_settings(plan: RunPlan) -> dict[str, object]:
    """Return the settings of the run file that a plan comes to; sites that it does not use get none."""
    split, spec = plan.chosen.split, plan.spec
    found: dict[str, object] = {"placement.kind": "colocated" if split.takes_turns else "disaggregated"}
    found["placement.generators"] = sum(_beside_trainer(split, *one) for one in split.generators)
    at_sites = dict.fromkeys(spec.placement.sites, 0)
    for kind, count in split.generators:
        if kind.pool.site:
            at_sites[kind.pool.site] = at_sites.get(kind.pool.site, 0) + count
    for name, count in at_sites.items():
        found[f"placement.sites.{name}.generators"] = count
        if count and name in spec.placement.sites and not spec.placement.sites[name].elsewhere:
            found[f"placement.sites.{name}.elsewhere"] = True  # its machines are others than the trainer's
    found["generator.slots"] = spec.generator.slots
    on_cores = [kind.tensor_parallel for kind, _ in split.generators if kind.pool.shares_cores]
    if on_cores:
        found["generator.threads"] = max(1, max(on_cores) // spec.generator.devices)
    if (ranks := _ranks(split)) and len(ranks) == 1:
        found["generator.tensor_parallel"] = max(1, ranks.pop() // spec.generator.layout.stretches)
    if spec.algorithm.mode == "async":
        found["algorithm.staleness"] = spec.algorithm.staleness
    threads = spec.trainer.threads if split.trainer.pool.shares_cores else 1
    found["trainer.ranks"] = ranks_there = max(1, split.trainer.devices // threads)
    elsewhere = max(0, ranks_there - max(1, split.trainer.pool.devices // threads))
    if elsewhere or spec.placement.ranks.elsewhere:
        found["placement.ranks.elsewhere"] = elsewhere
    return found


def _beside_trainer(split: MachineSplit, kind: GeneratorKind, count: int) -> int:
    """Return how many of so many generators are on the trainer's own machine, where the run starts them."""
    pool = kind.pool
    if pool != split.trainer.pool:
        return 0
    shared = split.takes_turns or pool.shares_cores
    room = pool.devices if shared else max(0, pool.devices - split.trainer.devices)
    return min(count, room // kind.tensor_parallel)


def best_and_next(plan: RunPlan) -> list[tuple[str, PlannedSplit]]:
    """Return the best split and the runner-up, if there is one, with their names."""
    return [("best", plan.chosen), *(("runner-up", one) for one in plan.others[:1])]


def settings_words(plan: RunPlan) -> str:
    """Return the settings that a plan comes to, as options of a command."""
    return " ".join(f"--set {name}={str(value).lower()}" for name, value in plan_settings(plan).items())


def beyond_settings(split: MachineSplit, store: str) -> list[str]:
    """Return in words how a split uses devices in ways for which a run file has no setting.

    `store`: of the run, for commands on other machines.
    """
    command = f"streamrl join RUN --store {'URL' if store == LOCAL else shlex.quote(store)}"
    joining = [*_joining_ranks(split, command), *_joining_generators(split, command)]
    if joining and store == LOCAL:
        joining.append("set placement.store to a URL that these machines reach: they join with it as URL")
    if len(_ranks(split)) <= 1:
        return joining
    uneven = [
        f"each generator on {kind.pool.name} takes {kind.tensor_parallel} devices: a run file has one "
        "generator.tensor_parallel for all generators"
        for kind, _ in split.generators
        if not kind.pool.shares_cores
    ]
    return uneven + joining


def _joining_ranks(split: MachineSplit, command: str) -> list[str]:
    """Return the commands that start the trainer's ranks on further machines than its own."""
    pool, beyond = split.trainer.pool, split.trainer.devices - split.trainer.pool.devices
    if beyond <= 0:
        return []
    found = _joining(pool, "further ", beyond, pool.devices, f"{command} --ranks")
    if pool.shares_cores:
        found.append("divide these --ranks by trainer.threads: a rank takes so many cores")
    return [*found, "set placement.ranks.address to an address at which they reach the trainer's machine"]


def _joining_generators(split: MachineSplit, command: str) -> list[str]:
    """Return the commands that start generators on other machines than the trainer's."""
    found = []
    for kind, count in split.generators:
        pool, beyond = kind.pool, count - _beside_trainer(split, kind, count)
        which = "further " if pool == split.trainer.pool else ""
        words = f"{command} --site {pool.site} --generators" if pool.site else f"{command} --generators"
        found += _joining(pool, which, beyond, max(1, pool.devices // kind.tensor_parallel), words)
    return found


def _joining(pool: MachinePool, which: str, count: int, of_each: int, words: str) -> list[str]:
    """Return the command that starts so many processes on machines, and another for a rest of them."""
    full, rest = divmod(count, of_each)
    found = []
    if full:
        where = f"each of {full} {which}machines" if full > 1 else f"one {which}machine"
        found.append(f"on {where} of {pool.name}: {words} {of_each}")
    if rest:
        found.append(f"on one {which}machine of {pool.name}: {words} {rest}")
    return found


def _ranks(split: MachineSplit) -> set[int]:
    """Return how many ranks engines have that have devices of their own."""
    return {kind.tensor_parallel for kind, _ in split.generators if not kind.pool.shares_cores}


def sources_of(inputs: PlanningInputs, split: MachineSplit) -> list[str]:
    """Return where the figures come from, in words."""
    trainer, times = split.trainer, inputs.times
    said: dict[str, dict[str, str]] = {}  # by hardware and side
    for kind, _ in split.generators:
        words = times.engine_source(kind.pool.hardware, kind.tensor_parallel, kind.slots)
        said.setdefault(kind.pool.hardware, {})["generators"] = words
    words = times.learner_source(trainer.pool.hardware, trainer.devices)
    said.setdefault(trainer.pool.hardware, {})["trainer"] = words
    found = []
    for hardware, sides in sorted(said.items()):
        if len(set(sides.values())) == 1:
            found.append(f"{hardware}: {next(iter(sides.values()))}")
        else:
            found += [f"{hardware} ({side}): {words}" for side, words in sides.items()]
    links = {kind.pool.site for kind, _ in split.generators if kind.pool.site}
    found += [f"link to {site}: as the run file says" for site in sorted(links)]
    return [*found, f"lengths: {inputs.lengths.source}"]


def bubbles_of(figures: SplitFigures) -> list[str]:
    """Return for each side how much of its time is no work, by cause, in words."""
    found = []
    for side, shares in (("generators", dict(figures.generators)), ("trainer", dict(figures.trainer))):
        waits = waits_of(shares)
        causes = [f"{share:.1%} {cause}" for cause, share in sorted(waits.items(), key=lambda one: -one[1])]
        said = f"{side}: {', '.join(causes) or 'no waiting'}"
        if side == "generators" and shares.get(TAIL, 0.0) > 0.0005:
            said += f"; {shares[TAIL]:.1%} {TAIL}"
        found.append(said)
    return found


def link_lines(split: MachineSplit, figures: SplitFigures) -> list[str]:
    """Return for each place of generators how many bytes a new version takes there, in words."""
    return [
        f"weights to {f'{pool.site} ({pool.name})' if pool.site else pool.name}: "
        f"{figures.bytes_per_step.get(pool.name, 0) / 1e6:,.1f} MB for a step; the link is busy "
        f"{figures.link_busy.get(pool.name, 0):.1%} of the time"
        for pool in (kind.pool for kind, _ in split.generators if kind.pool.link is not None)
    ]


def split_words(split: MachineSplit) -> tuple[str, str]:
    """Return what generates and what trains, in words."""
    generators = [
        f"{count} on {kind.pool.name}"
        + (f", {kind.tensor_parallel} devices each" if kind.tensor_parallel > 1 else "")
        + f" ({kind.slots} slots)"
        for kind, count in split.generators
    ]
    many = "1 device" if split.trainer.devices == 1 else f"{split.trainer.devices} devices"
    trainer = "the same, in turns" if split.takes_turns else f"{many} of {split.trainer.pool.name}"
    return "; ".join(generators), trainer


def range_words(one: Interval, unit: str = "") -> str:
    """Return a figure with its range."""
    return f"{figure(one.value)}{unit} ({figure(one.low)} to {figure(one.high)})"


def figure(value: float) -> str:
    """Write a figure with three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
