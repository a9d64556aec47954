"""Has a process serve one start of a rank 0 after the other, for as long as the run goes on.

runs/<run>/<meeting>.json ──► connect, handshake ──► serve ──► it ended: once more
                  ▲                                                │
                  └── a rank 0 that starts again writes it anew ◄──┘
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from infra.errors import Explained
from infra.ranks import rendezvous
from infra.ranks.handshake import introduce
from infra.ranks.rendezvous import Rendezvous
from infra.roles.context import RoleContext

_CONNECT_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before the next try; it doubles while each ends soon
_SOON_S = 30.0


class TurnedAway(Explained):
    """A rank 0 does not take this process."""


class OutOfReach(str):
    """The reason why an announced rank 0 can't be reached."""


Reached = tuple[socket.socket, Rendezvous]  # a connection to a rank 0, and where that is


def connect_to_rank_0(at: Rendezvous, hello: msgspec.Struct) -> socket.socket:
    """Return a connection to a rank 0 that let this process in. Raises OSError, or NotLetIn."""
    connection = socket.create_connection((at.host, at.port), timeout=_CONNECT_S)
    try:
        introduce(connection, bytes.fromhex(at.key), hello)
    except BaseException:
        connection.close()
        raise
    return connection


def reach_rank_0(context: RoleContext, meeting: str, hello: msgspec.Struct) -> Reached | str:
    """Return a connection to the newest start of a rank 0, and where that is; or why there is none."""
    try:
        at = rendezvous.newest(context.store, context.record, meeting)
    except (OSError, Explained) as error:
        return str(error)
    if at is None:
        return "nobody has said where ranks meet"
    try:
        return connect_to_rank_0(at, hello), at
    except OSError as error:
        section = "ranks" if meeting == rendezvous.TRAINER else "engine_ranks"
        return OutOfReach(
            f"rank 0 is announced at {at.host}:{at.port} and can't be reached ({error}). It may have ended, "
            f"or have all its ranks. If not: is placement.{section}.address an address that this machine "
            "reaches, and is the port open?"
        )
    except Explained as error:
        return str(error)


def serve_starts(
    context: RoleContext, *, leader: str, work: str,
    reached: Callable[[], Reached | str],
    serve: Callable[[socket.socket, Rendezvous], str],
) -> None:  # fmt: skip
    """Serve one start after the other, until this process is told to stop.

    `leader`: the role whose starts they are. `work`: the state of this process while it serves. `serve`:
    returns how it ended, or raises TurnedAway.
    """
    heart, why, pause_s = context.heart, "", _PAUSE_S
    what = f"the {leader} to need ranks"
    wait = context.wait(what, unblocked_by=f"a start of the {leader}")
    while True:
        context.check_stop()
        found = reached()
        if isinstance(found, str):
            announced = isinstance(found, OutOfReach)
            if found != why:
                context.log.info("%s%s", "" if announced else "no ranks are needed yet: ", found)
            wait.what = f"a way to rank 0 ({found})" if announced else what
            why = found
            heart.waiting(what, unblocked_by=leader, cause=leader)
            wait.check()
            context.stop.wait(_PAUSE_S)
            continue
        heart.working(work)
        begun = time.monotonic()
        try:
            context.log.info("%s", serve(*found))
            why = ""
            wait.progress()
        except TurnedAway as error:
            if str(error) != why:
                context.log.warning("%s", error)
            why = str(error)
            wait.check()
        soon = time.monotonic() - begun < _SOON_S
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s) if soon else _PAUSE_S
        context.stop.wait(pause_s)
