"""What a new version of bf16 weights takes: our code against others on the same bits, and the entropy.

    ours, int32_bf16, xor_zstd, u16gap_xor_zstd …   bytes per element that changed
    entropy        the least that positions and steps need, given the exponents of the old weights
    entropy_rows   the same, if it is also known which rows of each tensor change, and that is said first
    enc_over_xor   speed of encoding over that of XOR and zstd-1, on one core, in turn; dec_… of decoding

Encoding is from two models in memory to bytes, decoding from bytes to the old model made new in place. Ours
hashes every tile as it was and as it becomes, and verifies it when it is decoded; XOR verifies nothing.

simulated: AdamW in its steady state, fp32 masters rounded to bf16. random: a Qwen2 of 100M parameters with
random weights, moved likewise. embedding: a twentieth of its rows moves, and each has a scale of its own.
demo: the demo's model and one step of its RL.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from infra.weights.bits import Bits, Model, file_model, kind_of, model_of, ordered
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.weights_error import WeightsError
from tests.bench._formats import FORMATS
from tests.bench._updates import Pair, demo, simulated

_MIB = 1 << 20


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench delta")
    parser.add_argument("--old", type=Path, help="a safetensors file, to be compared with --new")
    parser.add_argument("--new", type=Path)
    parser.add_argument("--rounds", type=int, default=11 if quick else 15, help="of encoding and decoding")
    given = parser.parse_args(argv)
    if bool(given.old) != bool(given.new):
        parser.error("--old and --new go together")
    torch.set_num_threads(1)
    rows, console = [], Console(stderr=True)
    for name, make in _files(given.old, given.new) if given.old else _made(quick):
        console.print(f"{name} …")
        rows.append({"data": name} | _row(*make(), given.rounds))
    console.print(_table(rows))
    return {"rows": rows, "keyframe_over_bf16": max(row["keyframe"] for row in rows)}


Data = list[tuple[str, Callable[[], Pair]]]


def _files(old: Path, new: Path) -> Data:
    def read() -> Pair:
        models = []
        for path in (old, new):
            try:
                models.append(file_model(path.read_bytes()))
            except (OSError, ValueError) as error:
                raise SystemExit(f"{path} can't be read as a safetensors file: {error}") from error
        return models[0], models[1]

    return [(f"{old.name} → {new.name}", read)]


def _made(quick: bool) -> Data:
    size = (8 if quick else 24) * _MIB
    found: Data = [
        (f"simulated {rate:.0e}", partial(simulated, rate, elements=size)) for rate in (1e-6, 3e-6, 1e-5)
    ]
    if not quick:
        found += [(f"random 100M {rate:.0e}", partial(random_model, rate)) for rate in (1e-6, 3e-6, 1e-5)]
    return [*found, ("embedding", lambda: embedding(size)), ("demo", demo)]


def embedding(elements: int) -> Pair:
    """Few of its tokens are in a batch."""
    draw, row = np.random.default_rng(2), 896
    shape = elements // row, row
    old = draw.normal(0, 0.02, shape) * np.exp(draw.normal(0, 1, (shape[0], 1)))
    new = old + np.where(draw.random((shape[0], 1)) < 0.05, draw.normal(0, 3e-6, shape), 0)
    before, after = (model_of({"embedding": torch.from_numpy(some).bfloat16()}) for some in (old, new))
    return dict(before), dict(after)


def random_model(rate: float) -> Pair:
    """As transformers begins with it; its weights are of several sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32000, hidden_size=640, intermediate_size=1792, num_hidden_layers=16,
        num_attention_heads=10, num_key_value_heads=2,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    old = Qwen2ForCausalLM(config).state_dict()
    # Of a long run of AdamW an update is about noise of the size of the rate.
    new = {
        name: weight + rate * torch.randn(weight.shape, generator=draw) * 0.55 for name, weight in old.items()
    }
    before, after = (
        model_of({name: weight.bfloat16() for name, weight in weights.items()}) for weights in (old, new)
    )
    return before, after


def _row(old: Model, new: Model, rounds: int) -> dict[str, float]:
    """One comparison. Other formats see all bf16 tensors as one."""
    floats = [name for name in sorted(new) if new[name].dtype == "BF16" and name in old]
    if not floats:
        raise SystemExit("there is no bf16 tensor of the same name in both")
    old, new = ({name: model[name] for name in floats} for model in (old, new))
    before, after = (np.concatenate([model[name].data for name in floats]) for model in (old, new))
    changed = int(np.sum(before != after))
    if not changed:
        raise SystemExit("nothing changed")
    ours = list(encode_model(old, new))
    found = {"changed": changed / before.size, "ours": sum(map(len, ours)) / changed}
    for name, form in FORMATS.items():
        data, held = form.encode(before, after), before.copy()
        form.decode(held, data)
        if not np.array_equal(held, after):
            raise AssertionError(f"{name} does not lead back")
        found[name] = len(data) / changed
    found["entropy"] = entropy(before, after)
    found["entropy_rows"] = entropy_rows(old, new)
    xor = FORMATS["xor_zstd"]
    times: dict[str, tuple[list[float], list[float]]] = {"enc": ([], []), "dec": ([], [])}
    sent = xor.encode(before, after)
    for _ in range(rounds):
        times["enc"][0].append(_took(lambda: list(encode_model(old, new))))
        times["enc"][1].append(_took(lambda: xor.encode(before, after)))
        mine = {name: Bits(bits.dtype, bits.shape, bits.data.copy()) for name, bits in old.items()}
        times["dec"][0].append(_took(partial(_decoded, ours, mine)))
        times["dec"][1].append(_took(partial(xor.decode, before.copy(), sent)))
        if any(not np.array_equal(mine[name].data, new[name].data) for name in floats):
            raise WeightsError("our own code does not lead back")
    for name, (own, theirs) in times.items():
        found[f"{name}_gb_s"] = before.nbytes / 1e9 / float(np.median(own))
        found[f"{name}_over_xor"] = float(np.median(np.divide(theirs, own)))
    found["keyframe"] = sum(len(chunk) for chunk in encode_model(None, new)) / after.nbytes
    return found


def _decoded(chunks: Sequence[bytes], model: Model) -> None:
    for chunk in chunks:
        decode_chunk(chunk, model, "it")


def _took(do: Callable[[], object]) -> float:
    """Seconds of the one thread that does it: what else a shared machine runs does not count."""
    began = time.thread_time()
    do()
    return time.thread_time() - began


def entropy(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes per changed element of an ideal code of steps that knows how likely each is at each exponent.

    What such a code would say of itself counts as half a logarithm for each likelihood.
    """
    kind = kind_of("BF16")
    step, exponent = ordered(new, kind) - ordered(old, kind), (old >> 7) & 255
    joint = exponent.astype(np.uint32) << 16 | step
    pairs, counts = np.unique(joint, return_counts=True)
    per_exponent = np.bincount(exponent, minlength=256)
    total = -float(np.sum(counts * np.log2(counts / per_exponent[pairs >> 16])))
    free = len(pairs) - np.count_nonzero(per_exponent)
    return (total + 0.5 * np.log2(old.size) * free) / 8 / float(np.sum(old != new))


def entropy_rows(old: Model, new: Model) -> float:
    """The same, where it is said first which rows change."""
    said, before, after = 0.0, [], []
    for name in new:
        was, now = (model[name].data.reshape(-1, new[name].shape[-1]) for model in (old, new))
        moves = (was != now).any(axis=1)
        share = float(moves.mean())
        said -= moves.size * sum(p * np.log2(p) for p in (share, 1 - share) if p) / 8
        before.append(was[moves].reshape(-1))
        after.append(now[moves].reshape(-1))
    ones, others = np.concatenate(before), np.concatenate(after)
    return entropy(ones, others) + said / float(np.sum(ones != others))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("", *(row["data"] for row in rows)):  # a column each: there are more figures than data
        table.add_column(name, justify="right" if name else "left")
    for figure in list(rows[0])[1:]:
        table.add_row(figure, *(f"{row[figure]:.3f}" for row in rows))
    return table
