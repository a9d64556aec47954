"""Digests by which the ranks of an engine see that they have drawn the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3

from producers.engines.engine import DrawnAnswer, EngineError

_BYTES = 16

DISAGREE = (
    "the ranks of the engine don't agree, so nothing that they draw can be used. That happens where their "
    "devices compute otherwise than each other; set generator.tensor_parallel and pipeline_parallel to 1"
)


class DrawnSoFar:
    """All answers that a rank has drawn, as a digest."""

    def __init__(self) -> None:
        self._hash = blake3()

    @property
    def digest(self) -> bytes:
        """The digest of all tokens and logprobs so far."""
        return self._hash.digest(_BYTES)

    def add(self, answers: Iterable[DrawnAnswer]) -> None:
        """Count the answers of a step; their order does not matter."""
        for one in sorted(answers, key=lambda answer: answer.id):
            self._hash.update(f"{one.id} {one.tokens.size} {one.finish}\n".encode())
            self._hash.update(one.tokens.tobytes())
            self._hash.update(one.logprobs.tobytes())

    def check(self, expected: bytes, rank: int) -> None:
        """Raise EngineError if rank 0 has drawn other answers."""
        if expected != self.digest:
            raise EngineError(f"rank {rank} has drawn other tokens or logprobs than rank 0: {DISAGREE}")


def tokens_digest(tokens: Mapping[str, int]) -> bytes:
    """Return the digest of the numbers of tokens of unfinished samples."""
    return blake3("".join(f"{name} {tokens[name]}\n" for name in sorted(tokens)).encode()).digest(_BYTES)
