"""Begins and ends the process of a role.

A role is started as `python -m producers.feeder --store URL --run count-1 [--number 0]`, by the run flow or
by hand. Exit codes: 0 done, 1 failed (another start may go well), 3 told to stop, 4 a newer start of the same
process has replaced it, so it must not be started again, 5 failed, and another start would fail likewise. The
last line of the log says why, and so do the last words (`infra.supervise.last_words`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from infra.bus import SMALL_BATCH, BusError
from infra.epochs import Replaced
from infra.errors import Explained
from infra.liveness import Pulses, Pulsing
from infra.logs import set_up
from infra.ownership import check_owner
from infra.roles.context import RoleContext, Stopped
from infra.roles.heart import HEARTBEAT_S, STEADY_S, Heart
from infra.run_bus import connect_with_archive
from infra.runs import find
from infra.sites.place import site_of
from infra.stores.opening import open_store
from infra.stores.store_identity import check_identity
from infra.supervise.last_words import leave_last_words
from infra.waiting import NoSigns, Signs
from schemas import messages
from schemas.importing import BadImport, said
from schemas.loading import RunFileError
from schemas.topics import Topics

DONE, FAILED, STOPPED, REPLACED, LASTING = 0, 1, 3, 4, 5

_NEW_WRITER_S = 5.0  # between tries to get a writer that works
# What these send is told again soon, except a relay's dead letters. All others end when a record is lost.
_MAY_LOSE = ("rank", "engine_ranks", "relay")


def arguments(role: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a role's command line."""
    parser = argparse.ArgumentParser(prog=f"python -m …{role}", description=f"The {role} of a run.")
    parser.add_argument("--store", required=True, help="object store of the run: s3://… or file://…")
    parser.add_argument("--run", required=True, help="id of the run, such as count-1")
    parser.add_argument("--number", type=int, default=0, help="number of this process among its role")
    parser.add_argument("--model", help="folder of the starting model, if it is elsewhere on this machine")
    parser.add_argument("--reward", help="FILE.py:function, if the reward is elsewhere on this machine")
    parser.add_argument("--site", help="name of the site that it is at, if that is far from the object store")
    parser.add_argument("--cache", default="local", help="where that site keeps weights: a URL, or local")
    parser.add_argument("--share", default="0/1", help="of a relay: which of how many relays of its site")
    return parser.parse_args(argv)


def run_role(role: str, body: Callable[[RoleContext], None], argv: Sequence[str] | None = None) -> int:
    """Open the run, call `body`, and end in an orderly way whatever happens. Return the exit code."""
    given = arguments(role, argv)
    log = set_up(given.run, f"{role}-{given.number}")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ended = threading.Event()
    context: RoleContext | None = None
    last = messages.FAILED
    try:
        store = open_store(given.store)
        record = find(store, given.run).here(given.model, given.reward)
        check_identity(store, record.store_id)
        bus = connect_with_archive(record, f"{role}-{given.number}", store, patient=True, stop=stop)
        topics = Topics(record.id, record.spec.lengths.classes)
        if record.identity:
            check_owner(bus, record, topics)
        heart = Heart(record.id, role, given.number)
        site = site_of(given.site, given.cache, given.share)
        context = RoleContext(
            record, store, bus, topics, log, role, given.number, bus.writer(_batch(role)), heart, stop, site
        )
        gc.disable()  # until all is loaded: among millions of new objects that stay it costs seconds
        threading.Thread(target=_beats, args=(context, ended), daemon=True, name="heart").start()
        context.signs = _signs(context)
        body(context)
        last = messages.ENDED
        return DONE
    except Stopped:
        log.info("this process was told to stop, and ends")
        last = messages.ENDED
        return STOPPED
    except Replaced as error:
        return _ends(log, str(error), REPLACED)
    except Explained as error:
        return _ends(log, str(error), LASTING if error.lasting else FAILED)
    except (RunFileError, BadImport) as error:
        return _ends(log, str(error), LASTING)
    except MemoryError as error:
        return _ends(log, f"there is not enough memory on this machine ({said(error)})", FAILED)
    except Exception as error:
        log.exception("failed")
        leave_last_words(f"an error that StreamRL does not explain, {said(error)}")
        return FAILED
    finally:
        ended.set()
        if context is not None:
            context.signs.close()
            _say_goodbye(context, last, log)
        sys.stdout.flush()


def _ends(log: logging.Logger, words: str, code: int) -> int:
    """Say why this process ends, and return its exit code."""
    log.error("%s", words)
    leave_last_words(words)
    return code


def _signs(context: RoleContext) -> Signs:
    """Return a role's signs of life: heartbeats for the feeder, none for a relay, pulses for the others."""
    deadline_s = context.spec.deadlines.progress_s
    if context.role == "feeder":
        return Pulsing(context.bus, context.writer, context.topics, context.run, deadline_s=deadline_s).open()
    if context.role in ("generator", "trainer", "rank", "engine_ranks"):
        return Pulses(context.bus, context.topics, context.run, deadline_s=deadline_s).open()
    return NoSigns()


def _batch(role: str) -> int | None:
    """Return the bytes of a batch: few for the feeder, whose prompts are fetched one by one; else None."""
    return SMALL_BATCH if role == "feeder" else None


def _beats(context: RoleContext, ended: threading.Event) -> None:
    steady_s, failed = min(STEADY_S, context.spec.deadlines.progress_s / 10), False
    while not ended.wait(_NEW_WRITER_S if failed else HEARTBEAT_S):
        try:
            if failed:  # a writer that has lost a record takes no other
                old, context.writer = context.writer, context.bus.writer(_batch(context.role))
                failed = False
                with contextlib.suppress(BusError):
                    old.close()
            if context.heart.is_due(steady_s):
                context.heart.beat(context.writer, context.topics)
        except BusError as error:
            if context.role not in _MAY_LOSE:
                return  # the role itself meets the same error and reports it
            if not failed:
                context.log.warning("heartbeats stop until the broker is back: %s", error)
            failed = True
        except Exception:  # this heartbeat is missing; the next one may work
            context.log.exception("a heartbeat can't be sent")


def _say_goodbye(context: RoleContext, state: str, log: logging.Logger) -> None:
    try:
        context.heart.working(state, cause=messages.ENDED)
        context.heart.beat(context.writer, context.topics)
        context.writer.close()
    except BusError as error:
        log.warning("the last heartbeat could not be sent: %s", error)
