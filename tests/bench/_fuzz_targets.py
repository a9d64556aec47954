"""Every reader of foreign bytes: good inputs to begin with, and how they are read.

A reader may refuse with an error that explains itself, and with nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import zstandard

from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.learners.state_pieces import pieces
from consumers.steps.checkpoint import Checkpoints, RunPosition
from consumers.steps.state_parts import folder_of, other_parts, write_part
from infra import runs
from infra.bus import Record
from infra.errors import Explained
from infra.gate import Gate
from infra.keys import KeyRing
from infra.stores.store import Exists, Missing, whole
from infra.weights import limits
from infra.weights.bits import Bits, blank_file, file_model, model_of
from infra.weights.codec import wide
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.digest import model_digests, root_digest
from infra.weights.folder import index_in, inside
from infra.weights.leases import leased
from infra.weights.manifest import Chunk, Keyframe, Path, Tensor, VersionManifest, parsed, read_signed
from infra.weights.notes import StoreNotes
from producers.ranker import states
from producers.ranker.ranker import NoBackbone, Ranker
from schemas import messages
from schemas.wire import Message, Unreadable, decode, encode
from tests.factories import make_sample, make_spec
from tests.fakes.fill import fill

RUN, WHERE = "r-1", "it"
_WIDE, _COUNT = np.dtype(np.uint32), 300


@dataclass(frozen=True)
class Target:
    """A reader. `explained`: what it may raise."""

    name: str
    make_valid: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    explained: tuple[type[Exception], ...] = (Explained,)


class Held:
    """A store of one object, or of several, in memory."""

    url = "memory://fuzz"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = objects if objects is not None else {}

    def get(self, key: str, size: int | None = None) -> bytes:
        if key not in self.objects:
            raise Missing(f"{self.url}/{key} is not there")
        return self.objects[key]

    def get_part(self, key: str, at: int, size: int) -> bytes:
        return whole(self.get(key)[at : at + size], size, f"{self.url}/{key}")

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data)

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        self.put(key, b"".join(bytes(part) for part in parts))

    def size(self, key: str) -> int:
        return len(self.get(key))

    def put_new(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise Exists(f"{self.url}/{key} is there already")
        self.put(key, data)

    def exists(self, key: str) -> bool:
        return key in self.objects

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(f"{prefix}/"))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


@cache
def _models() -> tuple[dict[str, Bits], dict[str, Bits]]:
    draw = torch.Generator().manual_seed(0)
    old = {
        "a": torch.randn(700, generator=draw).bfloat16(), "b": torch.randn(9, 7, generator=draw),
        "c": torch.arange(40),
    }  # fmt: skip
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"].view(torch.int16)[::9] += 1
    return model_of(old), model_of(new)


def _manifest() -> VersionManifest:
    model = _models()[1]
    digests, chunk = model_digests(model), Chunk(hash="0" * 64, size=1000)
    tensors = {
        name: Tensor(dtype=bits.dtype, shape=bits.shape, digest=digests[name]) for name, bits in model.items()
    }
    return VersionManifest(
        run=RUN, version=3, root=root_digest(digests), created_at=1.5, tensors=tensors, trainer_epoch=1,
        paths=(Path(since=2, root="00", chunks=(chunk,)), Path(since=None, chunks=(chunk, chunk))),
        files={"config.json": chunk}, previous="00", signature="c2lnbmVk",
    )  # fmt: skip


def _keyframe() -> bytes:
    chunk = Chunk(hash="0" * 64, size=1000)
    return Keyframe(run=RUN, version=3, root="00", created_at=1.0, chunks=(chunk,)).model_dump_json().encode()


def _unpack(raw: bytes) -> object:
    return parsed(limits.unpacked_within_limits(raw, WHERE), WHERE)


def _packed() -> list[bytes]:
    plain = zstandard.ZstdCompressor(write_content_size=False)
    return [_manifest().packed, plain.compress(_manifest().raw), zstandard.compress(bytes(1 << 20))]


def _chunks() -> list[bytes]:
    old, new = _models()
    return [data for before in (old, None) for data in encode_model(before, new)]


def _chunk(raw: bytes) -> object:
    held = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in _models()[0].items()}
    return decode_chunk(raw, held, WHERE)


def _wide() -> list[bytes]:
    draw = np.random.default_rng(0)
    return [
        wide.pack_wide(np.minimum(draw.pareto(1.0, _COUNT) * 10**size, 2**32 - 1).astype(_WIDE))
        for size in range(5)
    ]


def _file() -> list[bytes]:
    return [bytes(blank_file({name: (bits.dtype, bits.shape) for name, bits in _models()[0].items()}))]


def _index() -> list[bytes]:
    files = {f"layer.{number}": f"model-{number % 3}.safetensors" for number in range(9)}
    return [json.dumps({"metadata": {"total_size": 99}, "weight_map": files}).encode()]


def _named(raw: bytes) -> object:
    from pathlib import Path as Folder

    return [inside(Folder("/nowhere"), name) for name in index_in(raw, WHERE)]


def _ranker() -> list[bytes]:
    return [states.packed_ranker(Ranker.fresh(1, NoBackbone(), typical=20.0))]


def _record() -> list[bytes]:
    store = Held()
    runs.create(store, make_spec(), bootstrap_servers="b:9092", model="/models/m", run_id=RUN)
    return [store.objects[f"runs/{RUN}/run.json"]]


def _run(raw: bytes) -> object:
    return runs.find(Held({f"runs/{RUN}/run.json": raw}), RUN)


_AT = RunPosition(iteration=4, trainer_epoch=1, step=4, root="00", positions={0: 5, 1: 6}, ledger=4)
_MANIFEST = "/manifest.json"


@cache
def _checkpoint(ranks: int) -> dict[str, bytes]:
    """The objects of a checkpoint that so many ranks wrote."""
    store = Held()
    checkpoints = Checkpoints(store, RUN)
    if ranks == 1:
        checkpoints.save({"w": torch.ones(3)}, _AT, keep=2)
        return store.objects
    place = checkpoints.place(4, 1)
    for rank in range(1, ranks):
        write_part(store, place, rank, _part(rank, ranks), KeyRing())
    checkpoints.save(checkpoints.begin(_part(0, ranks), place), _AT, keep=2, deadline_s=60)
    return store.objects


def _part(rank: int, ranks: int) -> StateSnapshot:
    return StateSnapshot(pieces("w", 2 * rank, torch.ones(2)), shapes={"w": (ranks, 2)}, ranks=ranks)


def _checkpoint_with(ranks: int, ending: str, raw: bytes) -> object:
    """The newest checkpoint, with all of its tensors, if the object whose key ends so has other bytes."""
    objects = _checkpoint(ranks)
    (key,) = (key for key in objects if key.endswith(ending))
    found = Checkpoints(Held({**objects, key: raw}), RUN).latest(lambda text: None)
    return found and dict(found[1])


def _said_of_part() -> list[bytes]:
    store, place = Held(), PartPlace("memory://fuzz", RUN, 4, 1)
    write_part(store, place, 1, _part(1, 2), KeyRing())
    return [data for key, data in store.objects.items() if key.endswith(".json")]


def _heard_of_part(raw: bytes) -> object:
    place = PartPlace("memory://fuzz", RUN, 4, 1)
    store = Held({f"{folder_of(place)}/state-00001.json": raw})
    nothing = lambda: None  # noqa: E731
    return other_parts(
        store, place, 2, KeyRing(), took_s=0, deadline_s=60, moved=nothing, check=nothing
    )  # fmt: skip


def _checkpoint_of(ranks: int, ending: str) -> list[bytes]:
    return [data for key, data in _checkpoint(ranks).items() if key.endswith(ending)]


def _lease() -> list[bytes]:
    return [json.dumps({"version": 3, "at": time.time(), "puts": False, "beats": 7}).encode()]


def _leased(raw: bytes) -> object:
    return leased(Held({"w/leases/x.json": raw}), "w")


def _notes() -> list[bytes]:
    store = Held()
    notes = StoreNotes(store, "notes")
    notes.age_s("x", "y")
    notes.save(["x"])
    return [store.objects["notes"]]


def _noted(raw: bytes) -> object:
    store = Held({"notes": raw})
    notes = StoreNotes(store, "notes")
    notes.age_s("x", "y")
    notes.save(["x"])
    return StoreNotes(store, "notes").age_s("x", "y")


_FIELDS: dict[str, dict[str, Any]] = {
    "prompt": {"purpose": messages.TRAIN, "size": 2, "bundle_groups": 1, "edges": [1.0, 2.0]},
    "part": {"versions": np.zeros(1), "version_starts": np.zeros(1), "roots": ["r"]},
    "report": {"slots": 4, "groups": np.arange(3), "indexes": np.arange(3), "tokens": np.arange(3)},
    "site": {"rates": {"origin": 1.0}, "passed_over": (4, 5)},
    "weights": {"content": b"packed"},
    "step": {
        "microbatches": np.array([2, 1]), "problem_ids": ["a", "b", "c"], "predicted": np.ones(3),
        **{name: np.arange(3) for name in ("partitions", "offsets", "groups", "indexes", "lengths", "rewards",
                                           "versions")},
    },
    "evaluation": {
        "problem_ids": ["a"], **{name: np.ones(1) for name in ("rewards", "lengths", "predicted")},
    },
    "heartbeat": {"counters": {"idle_s": 1.0}},
}  # fmt: skip


def _message(kind: type[Message]) -> list[bytes]:
    if kind.KIND == "sample":
        return [encode(make_sample(make_spec(), group, 0, run=RUN)) for group in range(3)]
    message = fill(kind, **{"run": RUN, **_FIELDS.get(kind.KIND, {})})
    return [encode(message), encode(message, packs=False)]  # changes of packed bytes stop at the packing


def _through_the_gate(kind: type[Message], raw: bytes) -> None:
    """Nothing passes but messages; what is refused would have been refused by `decode` or by its run."""
    refused: list[str] = []
    found = Gate(kind, RUN, lambda record, reason: refused.append(reason)).take_one(
        Record("t", 0, 0, b"", raw)
    )
    if (found is None) != bool(refused):
        raise AssertionError("neither a message nor a reason")
    decode(raw, kind)


def _kinds() -> Iterator[type[Message]]:
    for kind in vars(messages).values():
        if isinstance(kind, type) and issubclass(kind, Message) and kind.KIND:
            yield kind


def targets() -> list[Target]:
    """All of them."""
    return [
        Target("manifest", lambda: [_manifest().raw], lambda raw: parsed(raw, WHERE)),
        Target("packed manifest", _packed, _unpack),
        Target("keyframe", lambda: [_keyframe()], lambda raw: read_signed(raw, Keyframe, WHERE)),
        Target("chunk", _chunks, _chunk),
        Target("wide numbers", _wide, lambda raw: wide.unpack(memoryview(raw), _WIDE, _COUNT, WHERE)),
        Target("safetensors", _file, file_model, (ValueError,)),
        Target("safetensors index", _index, _named),
        Target("lease", _lease, _leased),
        Target("notes", _notes, _noted),
        Target("ranker state", _ranker, lambda raw: states.unpacked_ranker(raw, NoBackbone(), WHERE)),
        Target("run record", _record, _run),
        *(
            Target(name, partial(_checkpoint_of, ranks, ending), partial(_checkpoint_with, ranks, ending))
            for name, ranks, ending in (
                ("checkpoint manifest", 1, _MANIFEST),
                ("checkpoint state", 1, ".safetensors"),
                ("manifest of parts", 2, _MANIFEST),
                ("state in parts", 2, "1.safetensors"),
            )
        ),
        Target("part of a checkpoint", _said_of_part, _heard_of_part),
        *(
            Target(
                f"{kind.KIND} record",
                partial(_message, kind),
                partial(_through_the_gate, kind),
                (Unreadable,),
            )
            for kind in _kinds()
        ),
    ]
