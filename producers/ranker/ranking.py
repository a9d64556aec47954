"""The ranker as a consumer: follows `<run>.samples`, learns iteration by iteration, keeps each version.

    <run>.samples ──► lengths by window ──► learned ──► ranker 0, 1, 2 … ──► the object store
                                                           └─► planner: n ranks what is admitted at n

Version n has learned from the samples of iterations 0 .. n-1, in the order of their groups, so it does not
depend on timing: a feeder that starts again loads the newest version that it may use and learns the rest
from the log. Learning happens in a thread, mostly while the trainer still trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from infra.bus import Reader
from infra.process import Context
from infra.store import Missing, StoreError
from producers.dispatch.recovery import behind
from producers.ranker.ranker import Answered, Backbone, NoBackbone, Question, Ranker, Score, score_of
from producers.ranker.states import RankerError, States, start_from
from schemas.admission import window_of
from schemas.identity import round_of
from schemas.messages import TRAIN, Sample, StepRecord
from schemas.wire import Unreadable, decode

_POLL_S = 0.25  # a poll costs milliseconds, whatever it brings
_KEPT = 8  # versions in the store, beyond the lookahead


def backbone_of(name: str) -> Backbone:
    """The backbone that the run file names."""
    if name == "none":
        return NoBackbone()
    from producers.ranker.language_model import LanguageModel

    return LanguageModel(name)


class Ranking:
    """A thread that learns until it is closed."""

    def __init__(
        self,
        context: Context,
        question: Callable[[str], Question],
        steps: Sequence[StepRecord],
        *,
        wanted: int,
    ) -> None:
        """`question`: of a problem's id. `steps`: the ledger. `wanted`: the oldest to be asked for."""
        self._context, self._question = context, question
        algorithm = context.spec.algorithm
        self._groups, self._size = algorithm.groups, algorithm.group_size
        self._states = States.of_run(context.store, context.run)
        ranker = self._begin(wanted)
        self._rankers = {ranker.version: ranker}
        self._newest = ranker.version
        self.scores: dict[int, Score] = {}  # of windows, as they were ranked before they were generated
        self._windows: dict[int, dict[int, dict[int, tuple[int, float, str]]]] = {}
        start = behind(steps, ranker.version, algorithm.lookahead)
        self._reader: Reader = context.bus.reader(context.topics.samples, start)
        self._changed = threading.Condition()
        self._asked = threading.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="ranker")
        self._thread.start()

    def at(self, version: int) -> Ranker:
        """The ranker that has learned from all iterations before `version`."""
        wait = self._context.wait(
            f"samples of iteration {version - 1} (the ranker has learned from {self._newest})",
            unblocked_by="the generators",
        )
        with self._changed:
            while version not in self._rankers:
                self._context.check_stop()
                if self._failure is not None:
                    raise self._failure
                wait.check()
                self._asked.set()
                self._changed.wait(_POLL_S)
            for old in [number for number in self._rankers if number < version]:
                del self._rankers[old]
            return self._rankers[version]

    def key(self, version: int) -> str:
        """Where a version lies in the store."""
        return self._states.key(version)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._asked.set()
        self._thread.join()
        self._reader.close()

    def _begin(self, wanted: int) -> Ranker:
        """The newest stored version that is not too new; else the one that the run starts with."""
        spec = self._context.spec
        backbone = backbone_of(spec.lengths.backbone)
        for number in reversed([n for n in self._states.numbers() if n <= wanted]):
            try:
                return self._states.get(number, backbone)
            except (RankerError, Missing) as error:
                self._context.log.warning("%s; older ones are tried, what they lack is learned anew", error)
        if spec.lengths.start:
            return start_from(spec.lengths.start, self._context.store, backbone)
        return Ranker.fresh(spec.seed, backbone, typical=max(2.0, spec.sampling.max_tokens / 8))

    def _run(self) -> None:
        try:
            if self._newest == 0:
                self._keep(self._rankers[0])
            while not self._closed:
                self._asked.wait(_POLL_S)
                self._asked.clear()
                while self._take():
                    pass
                while self._is_whole(self._newest):
                    self._learn(self._newest)
        except Exception as error:  # whatever it is: the feeder's own thread raises it
            self._failure = error

    def _take(self) -> bool:
        """What is on the log now; False if there is nothing."""
        records = self._reader.poll(0.0)
        for record in records:
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue  # the trainer reports it
            if self._is_ours(sample) and sample.window >= self._newest:
                group = self._windows.setdefault(sample.window, {}).setdefault(sample.group, {})
                group.setdefault(sample.index, (sample.true_length, sample.predicted, sample.problem_id))
        return bool(records)

    def _is_ours(self, sample: Sample) -> bool:
        return (
            sample.run == self._context.run
            and sample.purpose == TRAIN
            and sample.window == window_of(sample.group, self._groups)
            and 0 <= sample.index < self._size
            and not round_of(sample.group)  # a version learns from as many groups, whatever they came to
        )

    def _is_whole(self, window: int) -> bool:
        groups = self._windows.get(window, {})
        return len(groups) == self._groups and all(len(group) == self._size for group in groups.values())

    def _learn(self, window: int) -> None:
        began = time.thread_time()
        groups = [members for _, members in sorted(self._windows.pop(window).items())]
        lengths = [[length for _, (length, _, _) in sorted(group.items())] for group in groups]
        answered = [
            Answered(self._question(group[0][2]), mine) for group, mine in zip(groups, lengths, strict=True)
        ]
        self.scores[window] = score_of([group[0][1] for group in groups], lengths)
        ranker = self._rankers[window].learned(answered)
        seconds = time.thread_time() - began
        counters = self._context.heart.counters
        counters["ranker"], counters["ranker_cpu_s"] = window + 1, counters.get("ranker_cpu_s", 0.0) + seconds
        with self._changed:
            self._rankers[ranker.version] = ranker
            self._newest = ranker.version
            self._changed.notify_all()
        self._keep(ranker)

    def _keep(self, ranker: Ranker) -> None:
        try:
            self._states.put(ranker.version, ranker)
            self._states.collect(_KEPT + int(self._context.spec.algorithm.staleness))
        except StoreError as error:  # it can be learned from the log again
            self._context.log.warning("ranker %d is not kept: %s", ranker.version, error)
