"""Ranks of other machines: how they find the trainer, are let in, compute, and end."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import queue
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from consumers.learners.learner import TorchLearner
from consumers.ranks import far_member, far_rank, rank_link, rank_processes
from consumers.ranks.choose_learner import learner_of
from consumers.ranks.far_member import FarMember
from consumers.ranks.far_rank import WrongFiles, check_files
from consumers.ranks.member import RankDied
from consumers.ranks.rank_hello import Hello, needed_versions
from consumers.ranks.rank_link import ConnectionLink
from consumers.ranks.rank_processes import RankProcesses
from consumers.ranks.rank_wire import Accumulate, CommandDone, Working
from consumers.ranks.trainer_door import TrainerDoor
from infra.contents import MODEL, contents_of
from infra.errors import Explained
from infra.ranks import doorway, handshake, rendezvous
from infra.ranks.frames import read_frame, write_frame
from infra.ranks.handshake import NotLetIn, introduce, let_in
from infra.ranks.rank_addresses import RanksError, WrongAddress, interface_of
from infra.roles.context import RoleContext, Stopped
from infra.stores.store import StoreError
from infra.waiting import WaitedTooLong
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from tests.factories import OWN_LEARNER, make_context, make_spec, make_tiny_model
from tests.stacks import words_of
from tests.training import train
from tests.waiting import wait_until

KEY = b"k" * 32
HELLOS = msgspec.msgpack.Decoder(Hello)
SPEC = make_spec(
    algorithm={"groups": 6, "group_size": 4}, trainer={"ranks": 3, "least_microbatches": 3},
    placement={"ranks": {"elsewhere": 1}},
)  # fmt: skip
HELLO = Hello(local=2, versions=needed_versions(SPEC))


def context_of(folder: Path, spec: RunSpec = SPEC, role: str = "trainer") -> RoleContext:
    return make_context(spec, folder, role=role)


def open_door(context: RoleContext) -> tuple[TrainerDoor, rendezvous.Rendezvous]:
    """The door of a trainer, and what ranks find out about it."""
    door = TrainerDoor(context.store, context.record, logging.getLogger("test")).open(threading.Event())
    at = rendezvous.newest(context.store, context.record)
    assert at is not None
    return door, at


@contextmanager
def other_side(does: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do something in a thread; yield the list that gets what it returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(does())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        thread.join(150)
        assert not thread.is_alive()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


def test_a_rank_that_knows_the_key_is_let_in() -> None:
    rank, trainer = tcp_pair()
    with rank, trainer:
        with other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
            introduce(rank, KEY, HELLO)
        assert found == [HELLO]
        assert rank.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # a machine that vanishes is noticed


def test_each_side_refuses_one_that_lacks_the_key() -> None:
    rank, trainer = tcp_pair()
    with trainer, other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
        with pytest.raises(NotLetIn, match="does not know"):
            introduce(rank, b"another", HELLO)
        rank.close()
    assert isinstance(found[0], NotLetIn)
    rank, trainer = tcp_pair()
    with rank, trainer, other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
        rank.sendall(b"streamrl rank 2\n" + b"n" * 32)
        rank.recv(64, socket.MSG_WAITALL)
        rank.sendall(b"h" * 32)
    assert isinstance(found[0], NotLetIn)


def test_a_stranger_who_says_little_now_and_then_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PATIENCE_S", 0.5)
    rank, trainer = socket.socketpair()
    with rank, trainer, other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
        for byte in b"streamrl rank 2\n" + b"n" * 32:
            rank.settimeout(0.1)
            with suppress(TimeoutError):
                rank.recv(1)
            rank.send(bytes([byte]))
            if found:
                break
    assert isinstance(found[0], TimeoutError)


@given(st.binary(max_size=200))
def test_a_stranger_is_refused(said: bytes) -> None:
    rank, trainer = socket.socketpair()
    with trainer, other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
        with suppress(OSError):  # it may be refused before all is said
            rank.sendall(said)
        rank.close()
    assert isinstance(found[0], NotLetIn | OSError)


DEEP = b"\x91" * 3000 + b"\x01"  # msgpack: lists in lists


def test_what_is_nested_too_deeply_ends_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for a thread that has met it."""
    hello = b"\x84" + msgspec.msgpack.encode(HELLO)[1:] + b"\xa1x" + DEEP
    rank, trainer = tcp_pair()
    with rank, trainer, other_side(lambda: let_in(trainer, KEY, HELLOS)) as found:
        introduce(rank, KEY, msgspec.Raw(hello))  # type: ignore[arg-type]
    assert isinstance(found[0], NotLetIn)
    rank, trainer = tcp_pair()
    died = threading.Event()
    member = FarMember(trainer, "10.0.0.2", HELLO, died).open(1)
    with rank, rank.makefile("wb") as file:
        write_frame(file, msgspec.Raw(b"\x82\xa4type\xabCommandDone\xa1x" + DEEP))  # type: ignore[arg-type]
        assert died.wait(150)
    assert "recursion" in str(member.obituary())
    member.close(0.0)


def test_no_frame_is_larger_than_its_reader_allows() -> None:
    with pytest.raises(Explained, match="would have 5000000000 bytes"):
        read_frame(io.BytesIO(struct.pack("<Q", 5_000_000_000)))
    with pytest.raises(Explained, match="would have 11 bytes; 10 are allowed"):
        read_frame(io.BytesIO(struct.pack("<Q", 11) + bytes(11)), 10)


def test_the_newest_start_of_the_trainer_is_found(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    store, record = context.store, context.record
    assert rendezvous.newest(store, record) is None
    rendezvous.announce(store, record, "10.0.0.1", 1)
    second = rendezvous.announce(store, record, "10.0.0.2", 2)
    assert rendezvous.newest(store, record) == second
    assert len(bytes.fromhex(second.key)) == 32


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (lambda said: json.dumps(said | {"run": "other-1"}), "is of another run"),
        (lambda said: json.dumps(said | {"identity": "x"}), "is of another run"),
        (lambda said: json.dumps(said | {"key": "no hex"}), "does not say where"),
        (lambda said: json.dumps(said | {"port": "many"}), "does not say where"),
        (lambda said: json.dumps(said | {"port": 10**30}), "does not say where .*no port"),
        (lambda said: json.dumps(said | {"host": "a" * 70}), "does not say where .*aaa"),  # no name at all
        (lambda said: "[" * 100_000, "does not say where"),
        (lambda said: "", "does not say where"),
    ],
)
def test_what_does_not_say_where_the_trainer_is(
    tmp_path: Path, changed: Callable[[dict[str, Any]], str], error: str
) -> None:
    context = context_of(tmp_path)
    rendezvous.announce(context.store, context.record, "10.0.0.1", 1)
    said = json.loads(context.store.get("runs/test-1/ranks.json"))
    context.store.put("runs/test-1/ranks.json", changed(said).encode())
    with pytest.raises(StoreError, match=error):
        rendezvous.newest(context.store, context.record)


def test_a_trusted_key_has_to_sign_where_the_trainer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_files: dict[str, str]
) -> None:
    context = context_of(tmp_path)
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", key_files["own.pub"])
    with pytest.raises(StoreError, match="set STREAMRL_SIGNING_KEY too"):
        rendezvous.announce(context.store, context.record, "10.0.0.1", 1)
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", key_files["own"])
    found = rendezvous.announce(context.store, context.record, "10.0.0.1", 1)
    assert rendezvous.newest(context.store, context.record) == found
    said = context.store.get("runs/test-1/ranks.json").replace(b"10.0.0.1", b"10.0.0.9")
    context.store.put("runs/test-1/ranks.json", said)
    with pytest.raises(Explained, match="is signed by none"):
        rendezvous.newest(context.store, context.record)


def test_a_member_tells_that_it_works_replies_and_is_missed() -> None:
    rank, trainer = tcp_pair()
    died = threading.Event()
    member = FarMember(trainer, "10.0.0.2", HELLO, died).open(5)
    with rank.makefile("rwb") as file:
        member.send(Accumulate([], 3), 10.0)
        assert b"Accumulate" in (read_frame(file) or b"")  # type: ignore[arg-type]
        with pytest.raises(WaitedTooLong, match=r"rank 5 \(on 10.0.0.2\)"):
            member.reply(0.2)
        write_frame(file, Working(1.0))  # type: ignore[arg-type]
        write_frame(file, CommandDone())  # type: ignore[arg-type]
        assert member.reply(30.0) == CommandDone()
        file.write(struct.pack("<Q", 7) + b"garbage")
    rank.close()
    with pytest.raises(EOFError):
        member.reply(30.0)
    assert died.wait(150)
    error = member.obituary()
    assert isinstance(error, RankDied)
    assert str(error).startswith("rank 5 (on 10.0.0.2) is lost: ")
    member.close(0.0)


def test_ranks_that_are_lost_one_after_the_other_have_other_stories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that ends twice with the same words is not started again."""
    stories = set()
    for at in (" at 10:00:00", " at 10:05:00"):
        monkeypatch.setattr(far_member.time, "strftime", lambda form, at=at: at)
        rank, trainer = tcp_pair()
        member = FarMember(trainer, "10.0.0.2", HELLO, threading.Event()).open(1)
        rank.close()
        assert member.ended.wait(150)
        stories.add(str(member.obituary()))
        member.close(0.0)
    assert stories == {
        f"rank 1 (on 10.0.0.2) closed its connection at {at}; its machine's log says why"
        for at in ("10:00:00", "10:05:00")
    }


def test_a_rank_that_ended_before_its_part_was_written_says_how() -> None:
    crew = RankProcesses("nowhere", SPEC, run="test-1", log=logging.getLogger("test"))
    rank, trainer = tcp_pair()
    member = FarMember(trainer, "10.0.0.2", HELLO, threading.Event()).open(1)
    crew._members.append(member)
    crew.check()
    rank.close()
    assert member.ended.wait(150)
    with pytest.raises(RanksError, match=r"rank 1 \(on 10.0.0.2\) ended before .*: it closed its connection"):
        crew.check()
    crew.close()


def test_ranks_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a trainer that is told to stop would be killed before it has said that it ends."""
    monkeypatch.setattr(rank_processes, "_GRACE_S", 0.2)
    crew = RankProcesses("nowhere", SPEC, run="test-1", log=logging.getLogger("test"))
    waited: list[float] = []

    def closed(grace_s: float) -> None:
        waited.append(grace_s)
        threading.Event().wait(grace_s)

    crew._members += [cast(Any, SimpleNamespace(hang_up=lambda: None, close=closed)) for _ in range(3)]
    crew.close()
    assert sum(waited) < 0.25


def test_a_rank_that_works_is_waited_for() -> None:
    """The deadline is shorter than its answer takes."""
    rank, trainer = tcp_pair()
    member = FarMember(trainer, "10.0.0.2", HELLO, threading.Event()).open(1)
    with rank.makefile("wb") as file, other_side(lambda: member.reply(1.2)) as found:
        for second in range(1, 15):
            write_frame(file, Working(second * 0.5))
            if threading.Event().wait(0.2):
                break
        write_frame(file, CommandDone())
    assert found == [CommandDone()]
    rank.close()
    member.close(5.0)


def test_a_machine_is_missed_by_name(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"placement": make_spec(
        trainer={"ranks": 3}, placement={"ranks": {"elsewhere": 2}}).placement})  # fmt: skip
    record, said = context_of(tmp_path, spec).record, set()
    for _ in range(2):
        door = TrainerDoor(tmp_store(tmp_path), record, logging.getLogger("test")).open(threading.Event())
        with pytest.raises(
            WaitedTooLong, match=r" at 127.0.0.1:.*`streamrl join test-1 .* --ranks 2`"
        ) as late:
            door.members(0.1)
        door.close()
        said.add(str(late.value))
    assert len(said) == 2, "a trainer that ends twice with the same words is not started again"


def test_nobody_waits_for_ranks_in_a_trainer_that_is_told_to_stop(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    log = logging.getLogger("test")
    door = TrainerDoor(context.store, context.record, log, context).open(threading.Event())
    with other_side(lambda: door.members(60.0)) as found:
        context.stop.set()
    assert isinstance(found[0], Stopped)


def test_a_trainer_that_has_its_ranks_does_not_say_that_it_waits_for_them(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    log, heart = logging.getLogger("test"), context.heart
    door = TrainerDoor(context.store, context.record, log, context).open(threading.Event())
    at = rendezvous.newest(context.store, context.record)
    assert at is not None
    with other_side(lambda: door.members(30.0)) as found:
        wait_until(lambda: heart.message().waits_for == "ranks of other machines", what="the wait")
        with socket.create_connection((at.host, at.port)) as good:
            introduce(good, bytes.fromhex(at.key), HELLO)
            wait_until(lambda: found, what="the rank")
    assert (heart.message().state, heart.message().waits_for) == ("starting", "")
    found[0][0].close(1.0)


def test_a_door_that_could_not_be_opened_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the trainer's start fails: the reason is told."""

    def taken(*given: Any, **named: Any) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    context = context_of(tmp_path)
    door = TrainerDoor(context.store, context.record, logging.getLogger("test"))
    monkeypatch.setattr(doorway.socket, "create_server", taken)
    with pytest.raises(OSError, match="Cannot assign"):
        door.open(threading.Event())
    door.close()


def tmp_store(folder: Path) -> Any:
    return context_of(folder).store


def test_only_ranks_of_the_run_come_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Strangers, ranks with other code, and those that are gone again are not counted."""
    door, at = open_door(context_of(tmp_path))
    where, key = (at.host, at.port), bytes.fromhex(at.key)
    strange = socket.create_connection(where)
    strange.sendall(b"GET / HTTP/1.1\r\n\r\n")
    other = socket.create_connection(where)
    introduce(other, key, Hello(0, "streamrl 0.1"))
    with other.makefile("rb") as file:
        assert b"install the same on both" in (read_frame(file) or b"")
    gone = socket.create_connection(where)
    introduce(gone, key, HELLO)
    gone.close()
    good = socket.create_connection(where)
    with other_side(lambda: door.members(30.0)) as found:
        introduce(good, key, HELLO)
    (member,) = found[0]
    assert (member.address, member.local) == ("127.0.0.1", 2)
    with pytest.raises(OSError):
        socket.create_connection(where)  # the door is shut
    for one in (strange, other, good):
        one.close()
    member.close(1.0)


class Refusing:
    """A listening socket that first finds too many open files."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening, self.refused = listening, 0

    def accept(self) -> Any:
        if not self.refused:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)


def test_a_door_stays_open_though_a_connection_could_not_be_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "_AGAIN_S", 0.01)
    plain = socket.create_server
    monkeypatch.setattr(doorway.socket, "create_server", lambda *a, **k: Refusing(plain(*a, **k)))
    door, at = open_door(context_of(tmp_path))
    with (
        socket.create_connection((at.host, at.port)) as good,
        other_side(lambda: door.members(30.0)) as found,
    ):
        introduce(good, bytes.fromhex(at.key), HELLO)
    assert len(found[0]) == 1 and "could not be taken: [Errno 24] Too many open files" in caplog.text
    found[0][0].close(1.0)


def test_silent_strangers_keep_no_rank_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "_MOST_AT_ONCE", 3)
    for patience in ("_GREETING_S", "_PATIENCE_S"):
        monkeypatch.setattr(handshake, patience, 60.0)
    door, at = open_door(context_of(tmp_path))
    address = (at.host, at.port)
    strangers = [socket.create_connection(address, timeout=timeout) for timeout in (30.0, 0.1, 0.1)]
    try:
        with (
            socket.create_connection(address) as good,
            other_side(lambda: door.members(30.0)) as found,
        ):
            introduce(good, bytes.fromhex(at.key), HELLO)
        assert not strangers[0].recv(1), "the oldest was sent away"
        for one in strangers[1:]:
            with pytest.raises(TimeoutError):  # there was room for the others
                one.recv(1)
    finally:
        for one in strangers:
            one.close()
    found[0][0].close(1.0)


def test_a_flood_from_one_address_pushes_out_no_slow_rank_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doorway, "_MOST_AT_ONCE", 3)
    door, at = open_door(context_of(tmp_path))
    with (
        socket.create_connection((at.host, at.port)) as slow,
        other_side(lambda: door.members(30.0)) as found,
    ):
        for _ in range(12):  # each is taken before the next one comes
            stranger = socket.create_connection((at.host, at.port), source_address=("127.0.0.2", 0))
            stranger.sendall(b"GET / HTTP/1.1\r\n")  # as long as the greeting of a rank
            assert not stranger.recv(1)
            stranger.close()
        crowd = [
            socket.create_connection((at.host, at.port), source_address=("127.0.0.2", 0)) for _ in range(9)
        ]
        assert not crowd[0].recv(1), "the oldest of the address with the most was sent away"
        introduce(slow, bytes.fromhex(at.key), HELLO)
    for one in crowd:
        one.close()
    assert len(found[0]) == 1 and caplog.text.count("was not let in") == 1
    found[0][0].close(1.0)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ("streamrl 0.1", "has streamrl 0.1"),
        (HELLO.versions.replace("device ", "device other-"), "computes on other-.*set STREAMRL_DEVICE and"),
        (HELLO.versions.replace("source ", "source 0"), "has other code of StreamRL .digest 0"),
    ],
    ids=["package", "device", "source"],
)
def test_a_rank_that_is_turned_away_is_named_to_whoever_waits(
    tmp_path: Path, versions: str, reason: str
) -> None:
    door, at = open_door(context_of(tmp_path))
    with socket.create_connection((at.host, at.port)) as other:
        introduce(other, bytes.fromhex(at.key), Hello(0, versions))
        assert other.makefile("rb").read()
        with pytest.raises(WaitedTooLong, match=rf"turned away: the rank on 127\.0\.0\.1 {reason}"):
            door.members(0.5)


def test_a_rank_says_nothing_before_its_first_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the door looks whether its connection has an end to read."""
    monkeypatch.setattr(rank_link, "_TELL_S", 0.01)
    monkeypatch.setattr(rank_link, "_GRACE_S", 0.0)
    exits = queue.SimpleQueue[int]()
    monkeypatch.setattr(rank_link.os, "_exit", exits.put)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, there = socket.create_connection(server.getsockname()), server.accept()[0]
    with here, there, here.makefile("rwb") as file:
        link = ConnectionLink(there).open()
        assert "working" not in {one.name for one in threading.enumerate()}
        write_frame(file, CommandDone())
        assert link.next()
        assert msgspec.msgpack.decode(read_frame(file) or b"", type=Working).used_s > 0
        here.shutdown(socket.SHUT_RDWR)
        assert exits.get(timeout=150) == 1


def test_settings_of_ranks_are_checked() -> None:
    with pytest.raises(ValidationError, match=r"placement.ranks.elsewhere \(2\) must be less than"):
        make_spec(trainer={"ranks": 2}, placement={"ranks": {"elsewhere": 2}})
    for address in ("10.0.0.1:29400", "http://a", "", "a b", "[::1]"):
        with pytest.raises(ValidationError, match=r"placement.ranks.address"):
            make_spec(placement={"ranks": {"address": address}})
    with pytest.raises(WrongAddress, match=r"203.0.113.7 is no address of this machine, which has 127.0.0.1"):
        interface_of("203.0.113.7")
    assert interface_of("127.0.0.1") == "lo"


def test_a_machine_without_the_starting_model_says_so(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    with pytest.raises(WrongFiles, match=r"bring the folder .*model here, and say where it is with --model"):
        check_files(context)
    (tmp_path / "model").mkdir()
    check_files(context)
    context.record = context.record.model_copy(update={"contents": {MODEL: "0" * 32}})
    with pytest.raises(WrongFiles, match="has other files than the run's starting model"):
        check_files(context)


def test_a_machine_with_another_reference_or_other_code_says_so(tmp_path: Path) -> None:
    context, reference, code = context_of(tmp_path), tmp_path / "reference", tmp_path / "own.py"
    (tmp_path / "model").mkdir()
    reference.mkdir()
    (reference / "config.json").write_text("{}")
    code.write_text(OWN_LEARNER)
    spec = make_spec(
        loss={"kl": 0.1, "reference": str(reference)}, trainer={"import": f"{code}:Gentle", "ranks": 2}
    )
    contents = contents_of(spec, str(tmp_path / "model"))
    context.record = context.record.model_copy(update={"spec": spec, "contents": contents})
    check_files(context)
    code.write_text(OWN_LEARNER + "\n")
    with pytest.raises(WrongFiles, match=r"trainer\.import: .*own\.py:Gentle has other content here than"):
        check_files(context)
    (reference / "config.json").unlink()
    reference.rmdir()
    with pytest.raises(
        WrongFiles, match=r"loss\.reference: .*reference is not on this machine: bring it here"
    ):
        check_files(context)


def test_a_reference_that_is_the_starting_model_lies_where_that_lies_here(tmp_path: Path) -> None:
    """The machine has one copy of both, at another path than the trainer's machine."""
    context, there, here = context_of(tmp_path), tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "config.json").write_text("{}")
    spec = make_spec(loss={"kl": 0.1, "reference": str(there)})
    record = context.record.model_copy(update={"spec": spec, "contents": contents_of(spec, str(there))})
    there.rename(here)
    context.record = record.here(str(here), None)
    check_files(context)


@contextmanager
def rank_elsewhere(folder: Path) -> Iterator[None]:
    """The role of a rank, in a thread."""
    context = context_of(folder, role="rank")
    thread = threading.Thread(target=lambda: suppressed(context))
    thread.start()
    try:
        yield
    finally:
        context.stop.set()
        thread.join(300)
        assert not thread.is_alive()


def suppressed(context: RoleContext) -> None:
    with suppress(Stopped):
        far_rank.body(context)


def processes() -> list[psutil.Process]:
    return [one for one in psutil.Process(os.getpid()).children() if "--connection" in words_of(one)]


def test_ranks_here_and_elsewhere_compute_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is killed ends the learner by name. The next start of it gets a rank anew."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(rank_processes, "kind_of_machine", lambda: "another kind")
    model = str(make_tiny_model(tmp_path / "model"))
    alone = TorchLearner(model, SPEC)
    train(alone, SPEC, 2)
    context, log = context_of(tmp_path), logging.getLogger("streamrl.test")
    with rank_elsewhere(tmp_path):
        for kill in (True, False):
            door = TrainerDoor(context.store, context.record, log)
            learner = learner_of(model, SPEC, run="test-1", log=log, door=door)
            try:
                train(learner, SPEC, 1)
                if kill:
                    (process,) = processes()
                    process.send_signal(signal.SIGKILL)
                    with pytest.raises(RankDied, match=r"rank 2 \(on 127.0.0.1\) closed its connection"):
                        train(learner, SPEC, 1)
                else:
                    train(learner, SPEC, 1)
                    assert digests_of(learner.weights()) == digests_of(alone.weights())
            finally:
                learner.close()
    wait_until(lambda: not processes(), what="the end of the rank")
    named = r"rank 0 computes on another kind, and rank 1 .*, rank 2 \(on 127\.0\.0\.1\) on torch "
    assert re.search(named, caplog.text)
