"""How a rank of another machine and the trainer show each other that they know the key of a meeting.

rank ──► trainer   greeting, nonce
rank ◄── trainer   nonce, HMAC of both nonces
rank ──► trainer   HMAC of both nonces; a frame with Hello

So nobody who lacks the key becomes a rank or takes the trainer's place. All that follows is neither encrypted
nor signed, and neither are the sums that gloo and NCCL send.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from importlib import metadata

import msgspec

from consumers.ranks.frames import read_frame, write_frame
from infra.errors import Explained

_GREETING = b"streamrl rank 1\n"
_NONCE, _DIGEST = 32, 32
_PATIENCE_S = 10.0  # for each part of the handshake
_LARGEST_HELLO = 4096
_KEEPALIVE_S, _PROBES = 5, 6  # a machine that vanished is found after about half a minute


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of a rank of another machine."""

    local: int  # number among the ranks of its machine
    versions: str  # of the code that computes


class NotLetIn(Explained):
    """A handshake failed; the message says why."""


def versions() -> str:
    """Return the versions of the code that computes, which all ranks must have in common."""
    found = []
    for name in ("streamrl", "torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return ", ".join(found)


def introduce(connection: socket.socket, key: bytes, hello: Hello) -> None:
    """Show the trainer that this is a rank of its run, and have it show the same. Raise NotLetIn if not."""
    connection.settimeout(_PATIENCE_S)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + own)
    theirs, said = _received(connection, _NONCE), _received(connection, _DIGEST)
    if not hmac.compare_digest(said, _digest(key, b"trainer", own, theirs)):
        raise NotLetIn("the process at the trainer's address does not know the run's key: it is another one")
    connection.sendall(_digest(key, b"rank", own, theirs))
    with connection.makefile("wb") as file:
        write_frame(file, hello)
    connection.settimeout(None)
    _notice_silence(connection)


def let_in(connection: socket.socket, key: bytes) -> Hello:
    """Return the first frame of a rank that knows the key. Raise NotLetIn if it does not."""
    connection.settimeout(_PATIENCE_S)
    if _received(connection, len(_GREETING)) != _GREETING:
        raise NotLetIn("it is no rank")
    theirs, own = _received(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(own + _digest(key, b"trainer", theirs, own))
    if not hmac.compare_digest(_received(connection, _DIGEST), _digest(key, b"rank", theirs, own)):
        raise NotLetIn("it does not know the key of this start of the trainer")
    with connection.makefile("rb", buffering=0) as file:
        raw = read_frame(file, _LARGEST_HELLO)  # type: ignore[arg-type]
    try:
        hello = msgspec.msgpack.decode(raw or b"", type=Hello)
    except msgspec.MsgspecError as error:
        raise NotLetIn(f"its first message can't be read: {error}") from error
    connection.settimeout(None)
    _notice_silence(connection)
    return hello


def _digest(key: bytes, side: bytes, rank: bytes, trainer: bytes) -> bytes:
    return hmac.digest(key, side + rank + trainer, "sha256")


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise NotLetIn("the other side closed the connection")
        found += part
    return found


def _notice_silence(connection: socket.socket) -> None:
    """Have the kernel end the connection when the other machine does not answer any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", _KEEPALIVE_S), ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", 1000 * _KEEPALIVE_S * (_PROBES + 1)),
    ):  # fmt: skip
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
