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

import socket
import subprocess
import sys
from pathlib import Path

from consumers.ranks.rank_hello import Hello, rank_versions
from infra.code import child_environment, module
from infra.contents import MODEL, content
from infra.errors import Explained
from infra.ranks import rendezvous
from infra.ranks.launcher import local_rank
from infra.ranks.serving_starts import reach_rank_0, serve_starts
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.supervise import children

_LOOK_S = 1.0


class WrongFiles(Explained):
    """A file or folder that a rank computes with is not on this machine, or is another one."""

    lasting = True


def check_files(context: RoleContext) -> None:
    """Raise WrongFiles unless this machine has the files of the run that ranks need."""
    record = context.record
    if not Path(record.model).is_dir():
        raise WrongFiles(
            f"the run's starting model is not on this machine: bring the folder {record.model} here, and say "
            "where it is with --model FOLDER"
        )
    expected = record.contents
    if MODEL in expected and content(record.model) != expected[MODEL]:
        raise WrongFiles(f"{record.model} has other files than the run's starting model")
    loss, trainer = record.spec.loss, record.spec.trainer
    named = {
        "loss.reference": loss.reference,
        "loss.import": loss.imported,
        "trainer.import": trainer.imported,
    }
    if expected.get("loss.reference") == expected.get(MODEL):
        named.pop("loss.reference")  # ranks take this machine's copy of the starting model
    for setting, value in named.items():
        if value and setting in expected and (here := content(value)) != expected[setting]:
            how = (
                "has other content here than" if here else "is not on this machine: bring it here, as it was"
            )
            raise WrongFiles(f"{setting}: {value} {how} where the run was started")


def _compute(context: RoleContext, connection: socket.socket) -> str:
    """Run the process that computes until it ends; return how that was."""
    process = children.start_child(
        [sys.executable, "-m", module("consumers.ranks.rank"), "--connection", str(connection.fileno()),
         "--model", context.record.model, "--store", context.store.url],
        stdin=subprocess.DEVNULL, pass_fds=[connection.fileno()], env=child_environment(),
    )  # fmt: skip
    connection.close()
    try:
        while process.poll() is None:
            if context.stop.wait(_LOOK_S):
                context.check_stop()
        return f"the process that computed ended with exit code {process.returncode}"
    finally:
        children.kill(process)


def body(context: RoleContext) -> None:
    """Be a rank of one start of the trainer after the other."""
    check_files(context)
    context.loaded()
    hello = Hello(local=local_rank() or 0, versions=rank_versions())
    serve_starts(
        context, leader="trainer", work="training as a rank",
        reached=lambda: reach_rank_0(context, rendezvous.TRAINER, hello),
        serve=lambda connection, at: _compute(context, connection),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_role("rank", body))
