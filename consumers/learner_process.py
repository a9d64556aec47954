"""The process of a learner that is profiled: it obeys orders of the process that started it.

`streamrl profile` starts it. The learner is the trainer's, with all its ranks.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from multiprocessing.connection import Connection

import msgspec

from consumers.ranks.choose_learner import learner_of
from consumers.timed_training import CallTable, StepSeconds, TimedTraining, VersionPut
from infra.errors import Explained
from infra.stores.opening import open_store
from infra.supervise.argument_file import read_argument
from schemas.importing import said
from schemas.runspec import RunSpec


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the process."""

    model: str  # folder
    spec: str  # the run spec, as JSON
    store: str  # URL
    prefix: str  # of the versions in the store


class TakeSamples(msgspec.Struct, frozen=True, kw_only=True, tag="take"):
    """An order: take these samples, as their topic has them."""

    records: list[bytes]


class TrainBundles(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """An order: train bundles, each a list of numbers of samples. With `most_s`, again until then."""

    bundles: list[list[int]]
    most_s: float = 0.0


class TakeStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """An order: take an optimizer step."""


class PutVersion(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """An order: put the weights into the store."""

    version: int


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """An order: take a checkpoint's snapshot."""


class LearnerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The learner is loaded."""

    root: str  # of its weights
    ready_at: float


class SecondsReport(msgspec.Struct, frozen=True, kw_only=True, tag="seconds"):
    """How long an order took."""

    seconds: float


class CallsReport(msgspec.Struct, frozen=True, kw_only=True, tag="calls"):
    """The calls of an order to train."""

    table: CallTable


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    """An optimizer step."""

    took: StepSeconds


class PutReport(msgspec.Struct, frozen=True, kw_only=True, tag="put_report"):
    """A version that is in the store."""

    put: VersionPut


class LearnerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The error that ends the process."""

    reason: str
    lasting: bool = False


LearnerOrder = TakeSamples | TrainBundles | TakeStep | PutVersion | TakeSnapshot
LearnerReport = LearnerReady | SecondsReport | CallsReport | StepReport | PutReport | LearnerFailed

_orders = msgspec.msgpack.Decoder(LearnerOrder)
_encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    """Obey orders until the other end is closed."""
    options = msgspec.json.decode(read_argument(sys.argv[1]), type=LearnerOptions)
    link = Connection(int(sys.argv[2]))
    try:
        serve_orders(link, options)
    except (EOFError, BrokenPipeError):
        pass
    except Explained as error:
        link.send_bytes(_encode(LearnerFailed(reason=str(error), lasting=error.lasting)))
    except Exception as error:  # the learner or the loss may be the user's own
        traceback.print_exc()
        link.send_bytes(_encode(LearnerFailed(reason=f"the learner failed: {said(error)}")))


def serve_orders(link: Connection, options: LearnerOptions) -> None:
    """Load the learner, and obey."""
    spec = RunSpec.model_validate_json(options.spec)
    learner = learner_of(options.model, spec, run="profile-1", log=logging.getLogger("streamrl"))
    try:
        timed = TimedTraining(spec, options.model, learner)
        link.send_bytes(_encode(LearnerReady(root=timed.root(), ready_at=time.time())))
        while True:
            link.send_bytes(_encode(_obeyed(timed, _orders.decode(link.recv_bytes()), options)))
    finally:
        learner.close()


def _obeyed(timed: TimedTraining, order: LearnerOrder, options: LearnerOptions) -> LearnerReport:
    if isinstance(order, TakeSamples):
        return SecondsReport(seconds=timed.take(order.records))
    if isinstance(order, TrainBundles):
        until = time.monotonic() + order.most_s
        table = timed.train(order.bundles)
        while time.monotonic() < until:
            table = _joined(table, timed.train(order.bundles))
        return CallsReport(table=table)
    if isinstance(order, TakeStep):
        return StepReport(took=timed.step())
    if isinstance(order, PutVersion):
        return PutReport(put=timed.put(open_store(options.store), options.prefix, order.version))
    return SecondsReport(seconds=timed.snapshot())


def _joined(first: CallTable, second: CallTable) -> CallTable:
    return CallTable(
        **{name: getattr(first, name) + getattr(second, name)
           for name in ("samples", "tokens", "context", "micro_batches", "seconds")},
        busy_cores=second.busy_cores, disturbed=max(first.disturbed, second.disturbed),
    )  # fmt: skip


if __name__ == "__main__":
    main()
