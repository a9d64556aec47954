"""Makes a fork: a new run that goes on from a step of another one, with the same past and own topics.

record and topics ─► ranker ─► samples to replay ─► feeder's snapshot ─► weights ─► checkpoint, last

The fork is then a run that was interrupted there: `streamrl run FILE --resume FORK` goes on with it. Steps,
iterations, groups and versions are counted on, so its curves continue those of its run; and as seeds follow
from the run file's name, it draws what its run drew as long as the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from consumers.replay import Again
from consumers.steps.checkpoint import Checkpoints, RunPosition
from consumers.stream.inherited_groups import CopyProgress, inherit
from flows.run.fork_settings import drawn_otherwise, forked_settings, rewarded_otherwise
from flows.run.groups_in_work import GroupsInWork, give_groups_in_work, none_in_work
from flows.run.locations import store_url
from flows.run.request import RunFailed
from infra import runs
from infra.bus import ends_of
from infra.errors import Explained
from infra.ownership import claim, topics_owner
from infra.run_handle import RunHandle
from infra.runs import ForkOrigin, RunRecord
from infra.stores.store import Missing, Store
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from producers.ranker.ranker import Ranker
from producers.ranker.states import RankerError, States
from producers.ranking import backbone_of
from producers.snapshots import Announced, FeederSnapshot, Opened, PlannerState, Snapshots
from schemas.admission import first_open
from schemas.taken import TakenGroups
from schemas.topics import Topics

_Say = Callable[[str], None]


@dataclass(frozen=True)
class ForkRequest:
    """A fork that somebody asks for."""

    at: int  # the first step that is the fork's own
    changes: Sequence[str] = ()
    name: str | None = None  # for its id; None: the name of its run


def make_fork(
    again: Again, parent: RunHandle, request: ForkRequest, *, say: _Say,
    copying: CopyProgress = lambda done, total: None,
) -> RunRecord:  # fmt: skip
    """Make a fork, with topics of its own, and return its record. `copying` hears of earlier groups."""
    iteration = _iteration(parent, request.at, again.newest())
    spec = forked_settings(parent.record, request.changes, iteration)
    if store_url(spec.placement.store) != parent.store.url:  # its run file must name the store that it is in
        placement = spec.placement.model_copy(update={"store": parent.store.url})
        spec = spec.model_copy(update={"placement": placement})
    expected = again.stand_before(request.at)
    _mend(again, parent, iteration, expected, say)
    origin = ForkOrigin(run=parent.run, identity=parent.record.identity, step=request.at, iteration=iteration)
    record = runs.create(
        parent.store, spec, bootstrap_servers=parent.record.bootstrap_servers, model=parent.record.model,
        topics=parent.bus.topic_names(), name=request.name or parent.run.rpartition("-")[0], fork=origin,
    )  # fmt: skip
    fork = RunHandle(record, parent.store, parent.bus, Topics(record.id, spec.lengths.classes), parent.log)
    try:
        parent.bus.create_topics(fork.topics.all())
        claim(parent.bus, record, fork.topics)
        if spec.algorithm.mode == "offline":
            _copy(parent.store, f"runs/{parent.run}/recorded.json", f"runs/{record.id}/recorded.json")
        else:
            _give_ranker(parent, record, iteration, say)
            if spec.loss.old_groups:
                _give_groups(parent, fork, say, copying)
        samples = ends_of(fork.bus, fork.topics.samples)  # what stands there was trained
        roots = again.roots.known() | {iteration: again.learner.made().root}
        work = _work(again, parent, fork, roots, say)
        _give_snapshot(parent, fork, samples, work, roots)
        _give_state(again, parent, fork, samples, work, roots)
    except BaseException:
        _undo(fork)
        raise
    return record


def _work(
    again: Again, parent: RunHandle, fork: RunHandle, roots: Mapping[int, str], say: _Say
) -> GroupsInWork:
    """Give the fork the groups that were in work, unless they would be drawn otherwise."""
    assert fork.record.fork is not None
    iteration, theirs, ours = fork.record.fork.iteration, parent.spec.algorithm, fork.spec.algorithm
    if ours.mode == "offline":
        return GroupsInWork(0, (), ())
    taken = again.taken
    if ours.order == "arrival" and theirs.order == "window":
        trained = range(first_open(iteration, ours), iteration * ours.groups)
        taken = TakenGroups(ours, iteration, trained)
    if not theirs.staleness:
        return none_in_work(parent, fork, taken, iteration)
    if changed := drawn_otherwise(parent.record, fork.record):
        say(f"groups that were admitted before step {fork.record.fork.step} and not trained are drawn anew, "
            f"with other {', '.join(changed)}")  # fmt: skip
        return none_in_work(parent, fork, taken, iteration)
    return give_groups_in_work(again, parent, fork, roots)


def _undo(fork: RunHandle) -> None:
    for key in fork.store.list(f"runs/{fork.run}"):
        if key.startswith(f"runs/{fork.run}/"):
            fork.store.delete(key)
    owner = topics_owner(fork.bus, fork.topics, fork.run)
    if owner is not None and owner.identity == fork.record.identity:
        fork.bus.delete_topics([topic.name for topic in fork.topics.all()])


def _iteration(parent: RunHandle, at: int, newest: int) -> int:
    """Return the iteration that begins with a step. Raises RunFailed if no fork can be made there."""
    algorithm = parent.spec.algorithm
    iteration, mini = divmod(at, algorithm.optimizer_steps)
    if mini:
        before, after = at - mini, at - mini + algorithm.optimizer_steps
        nearest = f"step {before} or {after}" if before else f"step {after}"
        raise RunFailed(
            f"step {at} is inside iteration {iteration}, and a fork begins with an iteration: {nearest}"
        )
    if not 0 < at <= newest + 1:
        raise RunFailed(
            f"a fork of run {parent.run} can begin with step {algorithm.optimizer_steps} to {newest + 1}, "
            f"not with {at}. To begin with step 0, start a new run"
        )
    return iteration


def _mend(again: Again, parent: RunHandle, iteration: int, expected: str | None, say: _Say) -> None:
    """Take the weights that the run published, if this machine came to other bits."""
    found = again.learner.made().root
    if expected in (None, found):
        return
    try:
        _, weights = WeightStore(parent.store, parent.run).fetch(iteration, root=expected)
    except (WeightsError, Missing):
        say(f"the steps up to iteration {iteration} came to other bits on this machine, and the run's "
            "weights of then are not kept: the fork begins with those of this machine")  # fmt: skip
        return
    again.learner.adopt(weights)
    say(f"the steps up to iteration {iteration} came to other bits on this machine: the fork begins with the "
        "weights that the run published; the optimizer's state is this machine's")  # fmt: skip


def _copy(store: Store, source: str, target: str) -> None:
    store.put_new(target, store.get(source))


def _give_ranker(parent: RunHandle, record: RunRecord, iteration: int, say: _Say) -> None:
    """Give the fork the ranker of its first iteration, by which prompts are bundled."""
    store = parent.store
    theirs, ours = States.of_run(store, parent.run), States.of_run(store, record.id)
    try:
        _copy(store, theirs.key(iteration), ours.key(iteration))
        return
    except Missing:
        pass
    spec = record.spec
    backbone = backbone_of(spec.lengths.backbone)
    found = Ranker.fresh(spec.seed, backbone, typical=max(2.0, spec.sampling.max_tokens / 8))
    for number in sorted(theirs.numbers(), key=lambda one: (one > iteration, abs(one - iteration))):
        try:
            found = theirs.get(number, backbone)
            break
        except (RankerError, Missing):
            continue
    say(f"the ranker of iteration {iteration} is not kept any more, and another one stands in for it: "
        "answers are bundled otherwise, so sums may be rounded otherwise")  # fmt: skip
    ours.put(iteration, found.renumbered(iteration))


def _give_groups(parent: RunHandle, fork: RunHandle, say: _Say, copying: CopyProgress) -> None:
    """Give the fork the groups that its run could train again then (`loss.replay`)."""
    if changed := rewarded_otherwise(parent.record, fork.record):
        say(f"loss.replay: the fork trains no groups of its run again, only those of its own steps: with "
            f"other {', '.join(changed)} their samples or rewards would be others")  # fmt: skip
    elif gone := inherit(parent, fork, copying):
        say(f"loss.replay: of {gone} earlier groups neither log nor archive has the samples any more, so the "
            "fork's steps train other groups again than its run did")  # fmt: skip


def _give_snapshot(
    parent: RunHandle, fork: RunHandle, samples: Mapping[int, int], work: GroupsInWork,
    roots: Mapping[int, str],
) -> None:  # fmt: skip
    """Give the fork's feeder its state: all before the iteration is trained, and some groups are in work."""
    spec, origin = fork.spec, fork.record.fork
    assert origin is not None
    edges = list(work.planned.edges)
    if not edges:
        known = Snapshots(parent.store, parent.run, parent.log.warning).newest(lambda one: "")
        if known is not None:
            edges = known.planner.edges
        elif isinstance(spec.lengths.edges, str):
            edges = [float("inf")] * (spec.lengths.classes - 1)
        else:
            edges = list(spec.lengths.edges)
    offline = spec.algorithm.mode == "offline"
    planner = PlannerState(
        version=origin.iteration, steps=origin.step, planned=origin.iteration - 1, edges=edges,
        admitted=work.admitted, recent=list(work.planned.recent), lots=list(work.planned.lots),
        taken=list(work.taken),
    )  # fmt: skip
    Snapshots(parent.store, fork.run, parent.log.warning).put(
        FeederSnapshot(
            run=fork.run,
            epoch=0,
            planner=planner,
            ledger=0,
            began={},
            samples=dict(samples),
            samples_of={},
            iterations={},
            ends=Opened(),
            evals=0,
            evaluated=[],
            evaluations=[],
            announced=Announced(),
            roots={
                version: root
                for version, root in roots.items()
                if 0 < origin.iteration - version <= spec.algorithm.most_stale and not offline
            },
        )
    )


def _give_state(
    again: Again, parent: RunHandle, fork: RunHandle, samples: Mapping[int, int], work: GroupsInWork,
    roots: Mapping[int, str],
) -> None:  # fmt: skip
    """Publish the weights of the fork's first version, and commit its checkpoint."""
    record, origin = fork.record, fork.record.fork
    assert origin is not None
    learner, iteration = again.learner, origin.iteration
    root = learner.made().root
    files = ModelFolder(record.model).beside if learner.base is None else {}
    manifest = WeightStore(parent.store, record.id).publish(
        iteration, learner.weights(), trainer_epoch=0, base=learner.base, files=files
    )
    if manifest.root != root:
        raise Explained(
            f"the weights of version {iteration} have root {manifest.root[:12]} as published, and "
            f"{root[:12]} in the learner: the memory of this machine or StreamRL has a fault"
        )
    at = RunPosition(
        iteration=iteration, trainer_epoch=0, step=origin.step, root=root, positions=samples, ledger=0,
        letters=0, roots=roots, taken=work.taken, redrawn=work.redrawn,
    )  # fmt: skip
    keep = record.spec.trainer.keep_checkpoints
    Checkpoints(parent.store, record.id).save(learner.state(), at, keep=keep)
