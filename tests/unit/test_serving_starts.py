"""Serving starts of a rank 0 says why it has none: nobody needs ranks, or it is out of reach."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from infra.ranks import rendezvous
from infra.ranks.serving_starts import OutOfReach, reach_rank_0, serve_starts
from infra.roles.context import RoleContext, Stopped
from tests.factories import make_context, make_spec
from tests.waiting import wait_until


class Greeting(msgspec.Struct):
    """No words."""


@pytest.fixture
def context(tmp_path: Path) -> RoleContext:
    return make_context(make_spec(), tmp_path, role="rank")


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize(
    ("meeting", "setting"),
    [
        (rendezvous.TRAINER, "placement.ranks.address"),
        (rendezvous.engine_meeting(3), "placement.engine_ranks.address"),
    ],
)
def test_a_rank_0_that_is_out_of_reach_is_named_with_its_setting(
    meeting: str, setting: str, context: RoleContext
) -> None:
    port = closed_port()
    rendezvous.announce(context.store, context.record, "127.0.0.1", port, meeting)
    found = reach_rank_0(context, meeting, Greeting())
    assert isinstance(found, OutOfReach)
    assert found.startswith(f"rank 0 is announced at 127.0.0.1:{port} and can't be reached ([Errno 111] Conn")
    assert f"is {setting} an address that this machine reaches, and is the port open?" in found


def test_ranks_are_not_needed_yet_only_where_nobody_has_announced_a_rank_0(
    context: RoleContext, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        with suppress(Stopped):
            serve_starts(
                context, leader="trainer", work="training",
                reached=lambda: reach_rank_0(context, rendezvous.TRAINER, Greeting()),
                serve=lambda *_: "",
            )  # fmt: skip

    thread = threading.Thread(target=serve)
    with caplog.at_level(logging.INFO, "streamrl.test"):
        thread.start()
        try:
            wait_until(lambda: caplog.messages, what="its first words")
            rendezvous.announce(context.store, context.record, "127.0.0.1", closed_port())
            wait_until(lambda: len(caplog.messages) > 1, what="words of the rank 0")
        finally:
            context.stop.set()
            thread.join(60)
    first, second = caplog.messages
    assert first == "no ranks are needed yet: nobody has said where ranks meet"
    assert second.startswith("rank 0 is announced at 127.0.0.1:")
