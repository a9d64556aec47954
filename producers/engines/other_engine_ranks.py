"""The other ranks of an engine, as rank 0 sees them: processes of its machine, and of other machines.

Both have a connection for acts, and one for work beside steps: pipes, or TCP connections.
"""

from __future__ import annotations

import queue
import subprocess
import sys
from abc import ABC, abstractmethod
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from infra.code import child_environment, module
from infra.supervise.argument_file import argument_file
from infra.supervise.children import inherited_descriptors, kill, start_child
from producers.engines.engine_messages import EngineOptions, Ready
from producers.engines.far_machine import FarMachine
from producers.engines.rank_meeting import EngineMeeting
from producers.engines.rank_messages import Did

_GRACE_S = 5.0  # for the end of a process to be known


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a rank's process."""

    engine: EngineOptions
    number: int
    local: int  # number among the ranks of its machine
    meeting: EngineMeeting  # where ranks join
    group: str  # the name of this engine's ranks
    marks: str  # the file of `RankMarks`
    acts: int  # descriptor of the connection
    beside: int  # the same, for work beside steps


class OtherEngineRank(ABC):
    """One other rank."""

    acts: Connection
    beside: Connection

    def __init__(self, number: int) -> None:
        self.number = number
        self.reports: queue.SimpleQueue[Ready | Did | None] = queue.SimpleQueue()  # None: it failed

    @property
    def name(self) -> str:
        """The rank's name in messages for people."""
        return f"rank {self.number} of the engine ({self.place})"

    @property
    @abstractmethod
    def place(self) -> str:
        """Its process, or its machine, in words."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """Return in words how it ended, when its connection is closed."""

    def close(self) -> None:
        """End it."""
        self.acts.close()
        self.beside.close()


class LocalEngineRank(OtherEngineRank):
    """The process of a rank on this machine."""

    def open(
        self, options: EngineOptions, *, meeting: EngineMeeting, group: str, marks: str
    ) -> LocalEngineRank:
        """Start the process. Return itself."""
        self.acts, acts = Pipe()
        self.beside, beside = Pipe()
        said = RankOptions(
            engine=options, number=self.number, local=self.number, meeting=meeting, group=group,
            marks=marks, acts=acts.fileno(), beside=beside.fileno(),
        )  # fmt: skip
        self.process = start_rank(said, inherited_descriptors())
        acts.close()
        beside.close()
        return self

    @property
    def place(self) -> str:
        return f"process {self.process.pid}"

    def how_it_ended(self) -> str:
        try:
            status = self.process.wait(_GRACE_S)
            return f"ended with status {status}; the log above has its last words"
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def close(self) -> None:
        kill(self.process)
        super().close()


class FarEngineRank(OtherEngineRank):
    """A rank on another machine."""

    def __init__(self, number: int, machine: FarMachine, acts: Connection, beside: Connection) -> None:
        super().__init__(number)
        self.machine, self.acts, self.beside = machine, acts, beside

    @property
    def place(self) -> str:
        return f"on {self.machine.address}"

    def how_it_ended(self) -> str:
        return self.machine.how_it_ended(self.number, _GRACE_S)


def start_rank(options: RankOptions, more: list[int]) -> subprocess.Popen[bytes]:
    """Start the process of a rank, from a thread that lives as long as it shall.

    It gets the descriptors of its connections, and `more` of them.
    """
    with argument_file(msgspec.json.encode(options)) as said:
        return start_child(
            [sys.executable, "-m", module("producers.engines.rank_process"), str(said)],
            pass_fds=[said, options.acts, options.beside, *more],
            env=child_environment(),
        )


def connections(options: RankOptions) -> tuple[Connection, Connection]:
    """Return a rank's ends of its connections: for acts, and for work beside steps."""
    return Connection(options.acts), Connection(options.beside)
