"""What stands before a server of vLLM: the key, the claim of one generator, and patches as they are."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from infra.files.sealed_memory import is_sealed
from producers.engines.received_patch import PatchRefused, ReceivedPatch
from producers.engines.server_claim import NotClaimed, ServerClaim
from producers.engines.server_door import ServerDoor
from producers.engines.server_facts import CLAIM_HEADER, CLAIM_S, DIGEST_BYTES
from producers.engines.shared_names import meeting_without_name, remove_meeting_names

FIRST, SECOND = "a" * 32, "b" * 32
CHANGING = (
    "/start_weight_update", "/update_weights", "/finish_weight_update", "/init_weight_transfer_engine",
    "/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/update_weight_version", "/sleep",
    "/wake_up", "/collective_rpc", "/v1/load_lora_adapter", "/a_path_of_a_later_release",
)  # fmt: skip


@dataclass
class Server:
    """What lies behind the door: it answers 200 and notes what came."""

    limit: int = 1000
    came: list[tuple[str, Any]] = field(default_factory=list)
    reads: Callable[[str], None] = lambda path: None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        said = json.loads(body) if body else None
        self.came.append((scope["path"], said))
        if said and "update_info" in said:
            self.reads(said["update_info"]["file"])
        found = {"results": [{"result": self.limit}]} if said and said.get("method") else {}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(found).encode()})


def ask(
    door: ServerDoor, path: str, body: object = None, *, claim: str = "", method: str = "POST",
    headers: Mapping[str, str] | None = None, pieces: list[bytes] | None = None, root: str = "",
    ends: bool = True,
) -> tuple[int, Any]:  # fmt: skip
    """Ask for something; return the status and the answer."""
    content = pieces if pieces is not None else [json.dumps(body).encode() if body is not None else b""]
    messages = [
        {"type": "http.request", "body": one, "more_body": at + 1 < len(content) or not ends}
        for at, one in enumerate(content)
    ] + [{"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    all_headers = dict(headers or {}) | ({CLAIM_HEADER: claim} if claim else {})
    scope = {
        "type": "http", "method": method, "path": root + path, "root_path": root,
        "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
    }  # fmt: skip
    asyncio.run(door(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"] or b"null")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def door(server: Server, monkeypatch: pytest.MonkeyPatch) -> ServerDoor:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return ServerDoor(server)


def claim(door: ServerDoor, token: str, name: str = "generator") -> tuple[int, Any]:
    return ask(door, "/streamrl/claim", {"claim": token, "name": name})


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("/metrics", "", 401), ("/metrics", "wrong", 401), ("/metrics", "right", 200), ("/health", "", 200)],
)
def test_the_key_is_asked_for_everywhere_but_at_health(
    path: str, key: str, status: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    assert ask(ServerDoor(server), path, method="GET", headers=headers)[0] == status
    assert ask(ServerDoor(server), "/streamrl/claim", {"claim": FIRST, "name": "x"})[0] == 401


@pytest.mark.parametrize("root", ["", "/vllm"])
@pytest.mark.parametrize("path", CHANGING)
def test_what_changes_a_server_needs_its_claim(
    path: str, root: str, door: ServerDoor, server: Server
) -> None:
    status, said = ask(door, path, {}, root=root)
    assert status == 409 and said["error"] == (
        f"it belongs to no generator, and POST {path} needs the claim of the one that it belongs to"
    )
    assert claim(door, FIRST, "the first")[0] == 200
    for wrong in ("", SECOND, FIRST[:-1], FIRST + "a"):
        status, said = ask(door, path, {}, claim=wrong, root=root)
        assert status == 409 and "it belongs to the first" in said["error"]
    assert not server.came
    assert ask(door, path, {}, claim=FIRST, root=root)[0] == 200
    assert server.came == [(root + path, {})]


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions", "/tokenize"])
def test_others_may_draw_and_read(path: str, door: ServerDoor) -> None:
    claim(door, FIRST)
    assert ask(door, path, {})[0] == 200 and ask(door, "/metrics", method="GET")[0] == 200


def test_facts_are_read_without_a_claim_and_no_other_method_is(door: ServerDoor, server: Server) -> None:
    status, said = ask(door, "/streamrl/facts", method="GET")
    assert status == 200 and said == {"results": [{"result": server.limit}]}
    assert server.came == [("/collective_rpc", {"method": "server_facts"})]


def test_when_facts_were_read_the_sockets_have_no_names(
    door: ServerDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes are connected then, and a server that is killed later leaves none behind."""
    with (
        tempfile.TemporaryDirectory() as folder,  # a socket's path has 107 bytes at most
        socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as others,
        socket.socket(socket.AF_UNIX) as here, socket.socket(socket.AF_UNIX) as closed,
    ):  # fmt: skip
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        named, other, left, older, file = (
            Path(folder) / name for name in (str(uuid4()), "other", str(uuid4()), str(uuid4()), str(uuid4()))
        )
        for listening, path in ((ours, named), (others, other), (closed, left)):
            listening.bind(str(path))
            listening.listen()
        closed.close()  # such as vLLM's, at which its processes found each other
        with socket.socket(socket.AF_UNIX) as before:
            before.bind(str(older))
        os.utime(older, (0, 0))
        file.touch()
        here.connect(str(named))
        there, _ = ours.accept()
        with there:
            ask(door, "/streamrl/facts", method="GET")
            assert set(Path(folder).iterdir()) == {other, older, file}
            here.sendall(b"x")
            assert there.recv(1) == b"x"


def test_ranks_that_met_by_a_file_need_its_name_no_more(tmp_path: Path) -> None:
    import torch.distributed as dist

    file = tmp_path / "vllm_dist_0"
    meet = meeting_without_name(dist.FileStore)
    first, second = meet(str(file), 2), meet(str(file), 2)
    assert file.exists()
    remove_meeting_names()
    first.set("a", "1")
    assert second.get("a") == b"1" and not file.exists()
    del first, second
    assert not list(tmp_path.iterdir())


BAD_CLAIMS: dict[str, Any] = {
    "short": {"claim": "abc", "name": "x"}, "long": {"claim": "a" * 129, "name": "x"},
    "no claim": {"name": "x"}, "more": {"claim": FIRST, "name": "x", "and": 1},
    "not ASCII": {"claim": "ä" * 32, "name": "x"}, "huge": {"claim": FIRST, "name": "x" * 100_000},
    "no JSON object": [[[]]],
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_CLAIMS)
def test_a_claim_that_is_none_is_refused(bad: str, door: ServerDoor) -> None:
    assert ask(door, "/streamrl/claim", BAD_CLAIMS[bad])[0] in (400, 413)
    assert claim(door, FIRST)[0] == 200


def test_a_claim_is_let_go_by_its_owner_alone(door: ServerDoor) -> None:
    start = claim(door, FIRST)[1]["start"]
    assert claim(door, SECOND)[0] == 409 and claim(door, FIRST)[1] == {"start": start}
    assert ask(door, "/streamrl/release", claim=SECOND)[0] == 409
    assert ask(door, "/streamrl/release", claim=FIRST)[0] == 200
    assert claim(door, SECOND)[0] == 200 and ask(door, "/pause", {}, claim=FIRST)[0] == 409
    assert ask(door, "/streamrl/release", claim=SECOND)[0] == 200
    assert claim(door, FIRST)[1] != {"start": start}, "another one had it: it holds other weights"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_generator_loses_its_server_to_the_next_one_alone() -> None:
    clock = Clock()
    book = ServerClaim(clock)
    book.take(FIRST, "the first")
    clock.now += CLAIM_S - 1
    with pytest.raises(NotClaimed, match="it belongs to the first"):
        book.take(SECOND, "the second")
    with book.during(FIRST, "a call"):  # it is heard by that
        clock.now += 10 * CLAIM_S
        with pytest.raises(NotClaimed):  # a call is under way, which may change the server still
            book.take(SECOND, "the second")
    clock.now += 10 * CLAIM_S
    with book.during(FIRST, "a late call"):  # nobody has claimed it in between
        pass
    clock.now += CLAIM_S
    book.take(SECOND, "the second")
    with pytest.raises(NotClaimed, match="it belongs to the second, and a call needs"), \
            book.during(FIRST, "a call"):  # fmt: skip
        raise AssertionError
    with pytest.raises(NotClaimed):
        book.release(FIRST)


def test_calls_under_way_count_for_their_own_claim_alone() -> None:
    clock = Clock()
    book = ServerClaim(clock)
    book.take(FIRST, "the first")
    with book.during(FIRST, "a call"):
        book.release(FIRST)
        book.take(SECOND, "the second")
    clock.now += CLAIM_S
    book.take(FIRST, "the first")


def packed(body: bytes) -> bytes:
    return body + blake3(body).digest()


def cut(content: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(content), *(one % (len(content) + 1) for one in cuts)})
    return [content[first:last] for first, last in itertools.pairwise(places)]


def give(door: ServerDoor, content: bytes, *, claim: str = FIRST, **more: Any) -> tuple[int, Any]:
    headers = {"Content-Length": str(more.pop("length", len(content)))}
    return ask(door, "/streamrl/patch", claim=claim, headers=headers,
               pieces=more.pop("pieces", [content]), **more)  # fmt: skip


def test_a_patch_is_read_by_workers_in_the_memory_of_the_door(door: ServerDoor, server: Server) -> None:
    read: list[bytes] = []
    server.reads = lambda path: read.append(Path(path).read_bytes())
    claim(door, FIRST)
    body = os.urandom(900)
    assert give(door, packed(body), pieces=cut(packed(body), [7, 100, 899, 905]))[0] == 200
    assert read == [body]
    assert [path for path, _ in server.came] == ["/collective_rpc", "/update_weights"]
    assert server.came[0][1] == {"method": "patch_limit"}
    file = server.came[1][1]["update_info"]["file"]
    gone = not Path(file).exists() or "memfd:received" not in str(Path(file).readlink())
    assert gone, "the memory is given back"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no claim": ({"claim": ""}, 409, "needs the claim"),
    "another's": ({"claim": SECOND}, 409, "it belongs to generator"),
    "too large": ({"length": 1000 + DIGEST_BYTES + 1}, 400, "the model allows from 1 to"),
    "empty": ({"length": DIGEST_BYTES}, 400, "the model allows from 1 to"),
    "no number": ({"length": "-5"}, 411, "Content-Length"),
    "a huge number": ({"length": "9" * 40}, 411, "Content-Length"),
    "more than said": ({"length": 500}, 400, "more bytes came than were said"),
    "less than said": ({"length": 990}, 400, "the patch broke off"),
    "broken off": ({"ends": False}, 400, "the request broke off"),
    "damaged": ({"pieces": [bytes(932)]}, 400, "its bytes have another hash"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_liar_sends_is_refused(what: str, door: ServerDoor, server: Server) -> None:
    claim(door, FIRST)
    more, status, why = REFUSED[what]
    found, said = give(door, packed(bytes(900)), **more)
    assert found == status and why in said["error"]
    assert "/update_weights" not in [path for path, _ in server.came]
    assert give(door, packed(bytes(900)))[0] == 200, "the next one comes in"


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 400), max_size=8))
def test_a_patch_comes_in_any_pieces_and_nobody_changes_it(body: bytes, cuts: list[int]) -> None:
    content = packed(body)
    with ReceivedPatch(len(content), 300) as patch:
        for piece in cut(content, cuts):
            patch.add(piece)
        place = Path(patch.finished())
        assert place.read_bytes() == body
        opened = os.open(place, os.O_RDWR)
        assert is_sealed(opened)
        with pytest.raises(PermissionError):
            os.write(opened, b"x")
        os.close(opened)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 131), st.integers(1, 255))
def test_one_byte_that_is_another_is_found(body: bytes, at: int, change: int) -> None:
    content = bytearray(packed(body))
    content[at % len(content)] ^= change
    with ReceivedPatch(len(content), 200) as patch:
        patch.add(bytes(content))
        with pytest.raises(PatchRefused, match="another hash"):
            patch.finished()
