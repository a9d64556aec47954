"""The role `rank`: a rank of the trainer on another machine, for as long as the run goes on.

runs/<run>/ranks.json ──► connect, handshake ──► a process that computes ──► it ended: once more
                  ▲                                                              │
                  └──────────── a trainer that starts again writes it anew ◄─────┘

`streamrl join RUN --ranks N` starts N of them. This process holds neither model nor torch: what computes is
a process of its own for each start of the trainer, since no process group can be joined twice.

waits for        unblocked by
the trainer      a start of it that needs ranks
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from consumers.ranks.rank_hello import Hello
from infra.code import child_environment, module
from infra.contents import MODEL, content
from infra.errors import Explained
from infra.keys import KeysError
from infra.ranks import rendezvous
from infra.ranks.handshake import introduce, versions
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.stores.store import StoreError
from infra.supervise import children

_CONNECT_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before the next try; it doubles while each ends soon
_SOON_S = 30.0


class NoModelHere(Explained):
    """The starting model is not on this machine, or is another one."""

    lasting = True


def check_model(context: RoleContext) -> None:
    """Raise NoModelHere unless this machine has the model that the run began with."""
    record = context.record
    if not Path(record.model).is_dir():
        raise NoModelHere(
            f"the run's starting model is not on this machine: bring the folder {record.model} here, and say "
            "where it is with --model FOLDER"
        )
    expected = record.contents.get(MODEL)
    if expected and content(record.model) != expected:
        raise NoModelHere(f"{record.model} has other files than the run's starting model")


def _connected(context: RoleContext, hello: Hello) -> socket.socket | str:
    """Return a connection to the trainer that let this rank in, or why there is none."""
    try:
        at = rendezvous.newest(context.store, context.record)
        if at is None:
            return "the trainer has not said where it is"
        connection = socket.create_connection((at.host, at.port), timeout=_CONNECT_S)
    except (OSError, StoreError, KeysError) as error:
        return str(error)
    try:
        introduce(connection, bytes.fromhex(at.key), hello)
    except (OSError, Explained) as error:
        connection.close()
        return str(error)
    return connection


def _compute(context: RoleContext, connection: socket.socket) -> int:
    """Run the process that computes until it ends; return its exit code."""
    process = children.start_child(
        [sys.executable, "-m", module("consumers.ranks.rank"), "--connection", str(connection.fileno()),
         "--model", context.record.model, "--store", context.store.url],
        stdin=subprocess.DEVNULL, pass_fds=[connection.fileno()], env=child_environment(),
    )  # fmt: skip
    connection.close()
    try:
        while process.poll() is None:
            if context.stop.wait(_PAUSE_S):
                context.check_stop()
        return process.returncode
    finally:
        children.kill(process)


def body(context: RoleContext) -> None:
    """Be a rank of one start of the trainer after the other."""
    check_model(context)
    context.loaded()
    hello = Hello(local=int(os.environ.get("LOCAL_RANK") or 0), versions=versions())
    heart, why, pause_s = context.heart, "", _PAUSE_S
    wait = context.wait("the trainer to need a rank", unblocked_by="a start of the trainer")
    while True:
        context.check_stop()
        found = _connected(context, hello)
        if isinstance(found, str):
            if found != why:
                context.log.info("no rank is needed yet: %s", found)
            why = found
            heart.waiting("the trainer to need a rank", unblocked_by="trainer", cause="trainer")
            wait.check()
            context.stop.wait(_PAUSE_S)
            continue
        why = ""
        heart.working("training as a rank")
        begun = time.monotonic()
        code = _compute(context, found)
        soon = time.monotonic() - begun < _SOON_S
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s) if soon else _PAUSE_S
        context.log.info("the process that computed ended with exit code %d", code)
        context.stop.wait(pause_s)
        wait.progress()


if __name__ == "__main__":
    sys.exit(run_role("rank", body))
