"""The errors of the local stack.

StackError
├── ToolMissing      java, mvn or go is not there, or too old
├── ToolFailed       a tool ran and did not succeed
├── PortTaken        the port that was asked for is in use
├── ServiceDied      a service ended while it was starting
├── NotReady         a service runs but did not answer in time
├── WouldNotStop     a process outlived SIGKILL
├── WrongCredentials the S3 server runs with other keys, or the local Kafka can't take the login
└── Cancelled        the user asked to stop
"""

from infra.errors import Explained


class StackError(Explained):
    """An error: `what` happened and where, and `fix`, what to do about it."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(f"{what}\n  → {fix}")
        self.what = what
        self.fix = fix


class ToolMissing(StackError):
    pass


class ToolFailed(StackError):
    pass


class PortTaken(StackError):
    pass


class ServiceDied(StackError):
    pass


class NotReady(StackError):
    pass


class WouldNotStop(StackError):
    pass


class WrongCredentials(StackError):
    pass


class Cancelled(StackError):
    pass
