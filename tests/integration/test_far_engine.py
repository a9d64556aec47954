"""An engine with ranks on other machines, without a model: all do the same, and whoever fails is named."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flows.run.commands import RanksHere
from flows.run.joining import joining
from flows.run.request import RunFailed
from infra.errors import Explained
from infra.ranks import rendezvous
from infra.ranks.frames import write_frame
from infra.ranks.rank_addresses import WrongAddress, own_address
from infra.ranks.serving_starts import connect_to_rank_0
from infra.roles.context import RoleContext, Stopped
from infra.runs import create
from infra.stores.opening import open_store
from infra.supervise.children import start_child
from infra.waiting import WaitedTooLong
from infra.weights.bits import Bits
from infra.weights.patch import PatchFile
from producers.engines import engine_end, machine_ranks, other_engine_ranks, rank_team
from producers.engines.engine import EngineError, FarRanksAsked, SampleRequest, engine_of
from producers.engines.engine_door import EngineDoor, config_digest, engine_versions
from producers.engines.engine_messages import EngineOptions
from producers.engines.far_machine import FarMachine, room_for
from producers.engines.far_messages import LinkHello, MachineHello, PatchTaken, StartRanks
from producers.engines.known_layout import no_pickles
from producers.engines.leading_rank import LeadingRank
from producers.engines.other_engine_ranks import RankOptions
from producers.engines.rank_marks import RankMarks
from producers.engines.rank_meeting import FarMeeting, LocalMeeting
from producers.engines.rank_team import RankTeam
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.counting_rank import CountingRank
from tests.stacks import words_of
from tests.waiting import wait_until

LOG = logging.getLogger("streamrl.test")
RANKS = 4
MEETING = FarMeeting("127.0.0.1", 1, "127.0.0.1", [0, 1])
SPEC = make_spec(generator={"tensor_parallel": RANKS}, placement={"engine_ranks": {"elsewhere": 2}})
STARTED: dict[int, RankOptions] = {}  # by process id


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that need no model."""

    def fake(command: list[str], **how: Any) -> Any:
        process = start_child([*command[:2], "tests.fakes.counting_rank", *command[3:]], **how)
        STARTED[process.pid] = msgspec.json.decode(os.pread(int(command[3]), 1 << 20, 0), type=RankOptions)
        return process

    monkeypatch.setattr(other_engine_ranks, "start_child", fake)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Machines:
    """A run, and machines that offer ranks of its engines."""

    def __init__(self, folder: Path, model: Path, way: str) -> None:
        self._folder, self.model = folder, folder / way  # the name tells ranks how to fail
        self.model.symlink_to(model)
        context = self.context()
        self.store, self.record = context.store, context.record
        self._stops: list[Callable[[], None]] = []

    def context(self) -> RoleContext:
        context = make_context(SPEC, self._folder, role="engine_ranks")
        context.record = context.record.model_copy(update={"model": str(self.model)})
        return context

    def open(self, ranks: int, hello: MachineHello | None = None) -> RoleContext:
        """One more machine, in a thread. Its context ends it."""
        context = self.context()

        def work() -> None:
            with suppress(Stopped):
                machine_ranks.body(ranks, None, context)

        thread = threading.Thread(target=work)
        thread.start()

        def stop() -> None:
            context.stop.set()
            thread.join(300)
            assert not thread.is_alive()

        self._stops.append(stop)
        return context

    def door(self) -> EngineDoor:
        return EngineDoor(self.store, self.record, 0, str(self.model), LOG)

    def close(self) -> None:
        for stop in self._stops:
            stop()
        wait_until(lambda: not ranks_of_machines(), what="the end of all ranks")


class Made:
    """Engines over these machines."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self._teams = machines, list[RankTeam]()

    def engine(self, deadline_s: float = 60) -> tuple[LeadingRank, RankTeam]:
        options = EngineOptions(model=str(self.machines.model), spec="")
        door = self.machines.door()
        team = RankTeam(options, RANKS, "test", deadline_s=deadline_s, door=door)
        self._teams.append(team)
        return LeadingRank(cast(Any, CountingRank()), team.open()), team

    def close(self) -> None:
        for team in self._teams:
            team.close()
        self.machines.close()


@pytest.fixture
def made(tmp_path: Path, tiny: Path) -> Iterator[Callable[..., Made]]:
    all_made: list[Made] = []

    def make(way: str = "fine") -> Made:
        all_made.append(Made(Machines(tmp_path, tiny, way)))
        return all_made[-1]

    yield make
    for one in all_made:
        one.close()


def ranks_of_machines() -> list[psutil.Process]:
    """Ranks of engines that have some on other machines: all are children of this process."""
    far = {pid for pid, options in STARTED.items() if isinstance(options.meeting, FarMeeting)}
    return [one for one in psutil.Process().children() if one.pid in far and words_of(one)]


def request(number: int, tokens: int = 4) -> SampleRequest:
    return SampleRequest(f"{number}", [1], tokens, 0, 0.0)


def patch() -> PatchFile:
    return PatchFile(
        {}, {"w": Bits("F32", (1000,), np.arange(1000, dtype=np.uint32))}, since=None, root="new"
    )


def test_ranks_here_and_on_two_machines_do_what_rank_0_does(made: Callable[..., Made]) -> None:
    one = made()
    for _ in range(2):
        one.machines.open(1)
    engine, team = one.engine()
    assert isinstance(team.meeting, FarMeeting)
    assert len(ranks_of_machines()) == 3, "two of machines, and one here that meets them"
    for number in range(3):
        engine.submit(request(number))
    engine.abort(["1"])
    engine.step()
    (part,) = engine.hand_over(["0", "nobody"])
    assert part.tokens.tolist() == [0]
    new = patch()
    engine.prepare(new.read())
    assert engine.install(recompute=True) == {"2": 1}
    assert engine.digests() == {f"w on rank {rank}": "new" for rank in range(RANKS)}
    assert [machine.received for machine in team._machines] == [new.path.stat().st_size] * 2
    engine.sleep()
    engine.wake()
    found: list[Any] = []
    while not found:
        found += engine.step()
    assert [answer.id for answer in found] == ["2"]
    assert rendezvous.engine_meetings(one.machines.store, one.machines.record) == [], "nobody else is needed"


def test_a_machine_may_hold_several_ranks_and_reads_a_patch_once(made: Callable[..., Made]) -> None:
    one = made()
    one.machines.open(3)
    engine, team = one.engine()
    new = patch()
    engine.prepare(new.read())
    (machine,) = team._machines
    assert machine.received == new.path.stat().st_size
    assert set(engine.digests()) == {f"w on rank {rank}" for rank in range(RANKS)}


def test_a_killed_far_rank_is_named_and_the_machine_comes_back(made: Callable[..., Made]) -> None:
    one = made()
    one.machines.open(2)
    engine, team = one.engine()
    far = {other.number for other in team._others if other.place == "on 127.0.0.1"}
    assert far == {2, 3}
    victim = next(process for process in ranks_of_machines() if STARTED[process.pid].number == 3)
    victim.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 3 of the engine \(on 127.0.0.1\) ended with status -9"):
        while True:
            engine.step()
    team.close()
    again, _ = one.engine()
    assert len(again.digests()) == RANKS


def test_a_far_rank_that_stands_still_is_named(
    made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marks come over the network. Rank 0 would be in a sum that never ends."""
    monkeypatch.setattr(rank_team, "_GRACE_S", 0.1)
    one = made("hangs")
    one.machines.open(2)
    engine, team = one.engine()
    local = team._others[0]
    assert local.number == 1
    team._deadline = 2.0
    said: list[EngineError] = []
    ended: list[int] = []
    monkeypatch.setattr(engine_end, "_tell", said.append)
    monkeypatch.setattr(rank_team.os, "_exit", ended.append)
    for _ in range(3):
        engine.step()
    with team.doing("make a decode step"):
        wait_until(lambda: ended, what="the end of this process")
        team._error = None  # this test goes on
    assert "took more than 2 s to make a decode step: rank" in str(said[0])
    assert "2: on 127.0.0.1, 3: on 127.0.0.1" in str(said[0])


def test_a_lost_machine_is_named(made: Callable[..., Made]) -> None:
    one = made()
    context = one.machines.open(2)
    engine, _ = one.engine()
    context.stop.set()
    with pytest.raises(EngineError, match=r"rank [23] of the engine \(on 127.0.0.1\) (is lost|ended|clos)"):
        while True:
            engine.step()


def test_a_far_rank_that_can_not_start_says_why(made: Callable[..., Made]) -> None:
    one = made("refuses")
    one.machines.open(2)
    with pytest.raises(EngineError, match=r"rank [123] of the engine .*: there is no such model"):
        one.engine()


def test_a_patch_that_a_machine_can_not_take_ends_the_engine(
    made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_ranks, "largest_patch", lambda model: 100)
    one = made()
    one.machines.open(2)
    engine, _ = one.engine()
    new = patch()
    with pytest.raises(EngineError, match=r"could not take a patch .* the model allows from 1 to 100"):
        engine.prepare(new.read())


def test_ranks_that_do_not_come_are_missed_with_the_command(made: Callable[..., Made]) -> None:
    one = made()
    one.machines.open(1)  # and 2 are wanted
    with pytest.raises(WaitedTooLong, match=r"2 ranks .*`streamrl join test-1 .* --engine-ranks 2` there"):
        one.engine(deadline_s=3.0)


def test_machines_with_other_code_or_another_model_are_turned_away(
    made: Callable[..., Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = made().machines.door().open()
    at = door._door.announced
    good = MachineHello(1, engine_versions(), door._config)
    for hello, reason in (
        (msgspec.structs.replace(good, versions="vllm 0.1"), b"install the same on both"),
        (msgspec.structs.replace(good, config="0"), b"another config.json"),
        (msgspec.structs.replace(good, gpus="NVIDIA L40S"), b"need the same kind"),
        (msgspec.structs.replace(good, ranks=0), b"offers no ranks"),
        (LinkHello("guess", 2, True), b""),
        (LinkHello("g\u00fcss", 2, False), b""),
    ):
        with connect_to_rank_0(at, hello) as connection:
            assert reason in connection.makefile("rb").read()
    wrong = msgspec.structs.replace(at, key="00" * 32)
    with pytest.raises(Explained, match="does not know the key"):
        connect_to_rank_0(wrong, good)
    door.expect(range(2, 4))
    with connect_to_rank_0(at, LinkHello(door.token, 1, beside=True)) as connection:
        assert connection.recv(1) == b"", "rank 1 is on this machine"
    links = [connect_to_rank_0(at, LinkHello(door.token, 2, beside)) for beside in (False, True)]
    with pytest.raises(EngineError, match=r"ranks 3 of the engine did not connect"):
        door.links(1.0)
    for one in links:
        one.close()
    door.close()


def test_a_machine_that_is_turned_away_is_named_to_whoever_waits(
    made: Callable[..., Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made()
    here = iter(["NVIDIA L40S"])  # the machine says it once, and the door another kind
    monkeypatch.setattr(machine_ranks, "gpu_kinds", lambda: next(here))
    one.machines.open(2)
    with pytest.raises(WaitedTooLong, match=r"One came, and was turned away: .* has NVIDIA L40S"):
        one.engine(deadline_s=3.0)
    said = "the engine does not take this machine: the machine 127.0.0.1 has NVIDIA L40S"
    wait_until(lambda: said in caplog.text, what="the warning")


def test_each_engine_gets_a_machine_of_those_that_ask_for_any(made: Callable[..., Made]) -> None:
    one = made()
    doors = [EngineDoor(one.machines.store, one.machines.record, n, str(one.machines.model), LOG).open()
             for n in (3, 11)]  # fmt: skip
    assert rendezvous.engine_meetings(one.machines.store, one.machines.record) == [
        "engine_ranks/3", "engine_ranks/11",
    ]  # fmt: skip
    for door in doors:
        one.machines.open(2)
        (machine,) = door.machines(30.0)
        door.close()
        machine.drop()


def test_a_newer_start_of_an_engine_is_not_withdrawn(made: Callable[..., Made]) -> None:
    one = made()
    old, new = one.machines.door().open(), one.machines.door().open()
    old.close()
    at = rendezvous.newest(one.machines.store, one.machines.record, "engine_ranks/0")
    assert at == new._door.announced
    new.close()


def test_a_pickle_of_another_rank_is_not_read() -> None:
    from torch.distributed import distributed_c10d as torch_ranks

    plain = torch_ranks._tensor_to_object
    with no_pickles(), pytest.raises(EngineError, match="send pickles"):
        torch_ranks._tensor_to_object(None, 0, None)
    assert torch_ranks._tensor_to_object is plain


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


@given(st.binary(max_size=60))
def test_a_machine_that_talks_nonsense_is_lost_and_no_more(said: bytes) -> None:
    far, near = tcp_pair()
    machine = FarMachine(near, "10.0.0.2", MachineHello(1, "", ""))
    machine.start(StartRanks(EngineOptions(model="", spec=""), [1], MEETING, "g", "t"), RankMarks(), 30)
    far.sendall(said)
    far.shutdown(socket.SHUT_WR)
    assert machine.how_it_ended(1, 30.0).startswith("is lost with its machine: ")
    far.close()
    machine.drop()


def test_marks_of_ranks_that_a_machine_does_not_hold_are_passed_over() -> None:
    far, near = tcp_pair()
    marks = RankMarks()
    machine = FarMachine(near, "10.0.0.2", MachineHello(2, "", ""))
    machine.start(StartRanks(EngineOptions(model="", spec=""), [1], MEETING, "g", "t"), marks, 30)
    with far.makefile("wb") as file:
        write_frame(file, machine_ranks.Marked([(1, 7, 6), (9999, 1, 1), (0, 5, 5)]))
        write_frame(file, PatchTaken("/a"))  # of none
        write_frame(file, machine_ranks.RankEnded(7, "ended"))  # one of another machine
        file.write(struct.pack("<Q", 1 << 40))
    assert "would have" in machine.how_it_ended(1, 30.0)
    far.close()  # not before: what it has not read would make the kernel drop what it has said
    assert marks.of([0, 1]) == [(0, 0, 0), (1, 7, 6)]
    assert not machine._ended and machine._patches.get(timeout=150) is None
    machine.drop()


def test_the_largest_machines_are_taken_until_there_is_room() -> None:
    machines = [FarMachine(*pair, MachineHello(ranks, "", "")) for pair, ranks in
                (((tcp_pair()[1], f"10.0.0.{n}"), n) for n in (1, 2, 3))]  # fmt: skip
    assert [one.ranks for one in room_for(4, machines)] == [3, 2]
    assert [one.ranks for one in room_for(6, machines)] == [3, 2, 1]
    assert room_for(7, machines) == []
    for one in machines:
        one.drop()


def test_configs_are_compared_by_what_they_say(tmp_path: Path) -> None:
    digests = set()
    for number, text in enumerate(('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": 1, "b": 3}')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(text)
        digests.add(config_digest(str(folder)))
    assert len(digests) == 2
    with pytest.raises(EngineError, match=r"config.json of the model in nowhere can't be read"):
        config_digest("nowhere")


def test_settings_of_ranks_elsewhere_are_checked() -> None:
    with pytest.raises(ValidationError, match=r"engine_ranks.elsewhere \(2\) must be less than the ranks"):
        make_spec(generator={"tensor_parallel": 2}, placement={"engine_ranks": {"elsewhere": 2}})
    served = {"engine": "served", "urls": ["http://127.0.0.1:1"], "tensor_parallel": 2}
    with pytest.raises(ValidationError, match=r"engine served has no ranks on other machines"):
        make_spec(generator=served, placement={"engine_ranks": {"elsewhere": 1}})
    for address in ("10.0.0.1:29400", "10.0.0.0/40", "a/24", "", "::1/64"):
        with pytest.raises(ValidationError, match=r"placement.engine_ranks.address"):
            make_spec(placement={"engine_ranks": {"address": address}})


def test_an_address_may_be_told_by_its_network() -> None:
    assert own_address("127.0.0.0/8", "here").startswith("127.")
    assert own_address("localhost", "here") == "127.0.0.1"
    with pytest.raises(WrongAddress, match=r"no address in 203.0.113.0/24, but .*: set here"):
        own_address("203.0.113.0/24", "here")
    with pytest.raises(WrongAddress, match=r"203.0.113.7 is no address of this machine.*: set here"):
        own_address("203.0.113.7", "here")


def test_ranks_of_one_machine_meet_on_loopback_and_others_on_the_interface_of_the_address() -> None:
    assert LocalMeeting("/x").environment()["GLOO_SOCKET_IFNAME"] == "lo"
    found = MEETING.environment()
    assert (found["NCCL_SOCKET_IFNAME"], found["VLLM_HOST_IP"]) == ("=lo", "127.0.0.1")
    with pytest.raises(WrongAddress, match=r"set placement.engine_ranks.address"):
        FarMeeting("127.0.0.1", 1, "203.0.113.7", [0, 1]).environment()


def test_an_engine_that_has_no_far_ranks_says_so() -> None:
    spec = make_spec(generator={"engine": "served", "urls": ["http://127.0.0.1:1"]})
    with pytest.raises(EngineError, match="engine served has no ranks on other machines"):
        engine_of("model", spec, FarRanksAsked("file:///s", "r-1", 0))


def test_a_run_whose_engines_have_no_far_ranks_takes_none(tmp_path: Path, tiny: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    create(store, make_spec(), bootstrap_servers="none", model=str(tiny), run_id="near-engine-1")
    with pytest.raises(RunFailed, match=r"have all their ranks beside their generators: set placement"):
        joining("near-engine-1", store=store.url, ranks=RanksHere(engine=1))
    with pytest.raises(RunFailed, match="nothing to start"):
        joining("near-engine-1", store=store.url, generators=0)
    create(store, SPEC, bootstrap_servers="none", model=str(tiny), run_id="far-engine-2")
    (worker,) = joining("far-engine-2", store=store.url, ranks=RanksHere(engine=2, generator=5)).workers
    assert worker.argv[2] == "producers.engines.machine_ranks"
    assert worker.argv[-4:] == ["--ranks", "2", "--generator", "5"]
