"""How a rank of another machine and rank 0 show each other that they know the key of a meeting.

rank ──► rank 0   greeting, nonce
rank ◄── rank 0   nonce, HMAC of both nonces
rank ──► rank 0   HMAC of both nonces; a frame that says who it is

So nobody who lacks the key becomes a rank or takes the place of rank 0. All that follows is neither encrypted
nor signed, and neither are the sums that gloo and NCCL send.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from importlib import metadata
from typing import TypeVar

import msgspec

from infra.errors import Explained
from infra.ranks.frames import FRAME_LENGTH, write_frame

_GREETING = b"streamrl rank 2\n"
_NONCE, _DIGEST = 32, 32
_PATIENCE_S = 10.0  # for the whole handshake: whoever has no key may not stay
_GREETING_S = 3.0  # for its first bytes, which a rank sends at once
_LARGEST_HELLO = 4096
_KEEPALIVE_S, _PROBES = 5, 6  # a machine that vanished is found after about half a minute

_Hello = TypeVar("_Hello")


class NotLetIn(Explained):
    """A handshake failed; the message says why."""


def versions(*more: str) -> str:
    """Return the versions of the code that computes, which all ranks must have in common.

    `more`: names of packages that these ranks need, too; one that is not installed is left out.
    """
    found = []
    for name in ("streamrl", "torch", "transformers", *more):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found += [] if name in more else [f"{name} (not installed)"]
    return ", ".join(found)


def introduce(connection: socket.socket, key: bytes, hello: msgspec.Struct) -> None:
    """Show rank 0 that this is a rank of its meeting, and have it show the same. Raise NotLetIn if not."""
    until = time.monotonic() + _PATIENCE_S
    connection.settimeout(_PATIENCE_S)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + own)
    theirs, said = _received(connection, _NONCE, until), _received(connection, _DIGEST, until)
    if not hmac.compare_digest(said, _digest(key, b"rank 0", own, theirs)):
        raise NotLetIn("the process at the address of rank 0 does not know the key: it is another one")
    connection.sendall(_digest(key, b"rank", own, theirs))
    with connection.makefile("wb") as file:
        write_frame(file, hello)
    connection.settimeout(None)
    _notice_silence(connection)


def let_in(connection: socket.socket, key: bytes, hello: msgspec.msgpack.Decoder[_Hello]) -> _Hello:
    """Return the first frame of a rank that knows the key. Raise NotLetIn if it does not."""
    now = time.monotonic()
    until = now + _PATIENCE_S
    if _received(connection, len(_GREETING), now + _GREETING_S) != _GREETING:
        raise NotLetIn("it is no rank")
    theirs, own = _received(connection, _NONCE, until), secrets.token_bytes(_NONCE)
    connection.sendall(own + _digest(key, b"rank 0", theirs, own))
    said = _received(connection, _DIGEST, until)
    if not hmac.compare_digest(said, _digest(key, b"rank", theirs, own)):
        raise NotLetIn("it does not know the key of this start of rank 0")
    (size,) = FRAME_LENGTH.unpack(_received(connection, FRAME_LENGTH.size, until))
    if size > _LARGEST_HELLO:
        raise NotLetIn(f"its first message has {size} bytes, and {_LARGEST_HELLO} are allowed")
    try:
        first = hello.decode(_received(connection, size, until))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotLetIn(f"its first message can't be read: {error}") from error
    connection.settimeout(None)
    _notice_silence(connection)
    return first


def _digest(key: bytes, side: bytes, rank: bytes, leader: bytes) -> bytes:
    return hmac.digest(key, side + rank + leader, "sha256")


def _received(connection: socket.socket, size: int, until: float) -> bytes:
    found = b""
    while len(found) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
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
