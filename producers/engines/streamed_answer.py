"""An answer that a server of vLLM streams: each line is checked before anything is taken from it.

A server is somebody else's program. A token that is none, a logprob that is no number, another request's
tokens, or more of them than were asked for end the engine with an error, and never reach the trainer.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from producers.engines.engine import DrawnAnswer, EngineError
from producers.engines.server_facts import ID_PREFIX
from producers.stopping import Stopping

_DATA = b"data:"
_NO_LOGPROB = -9_999.0  # what vLLM says where it has none, or where it is no number
_ROUNDED = 1e-3  # a logprob may be so much above 0
_QUOTED = 200
_AT_ONCE_S = 1.0  # requests that are sent within such a time may arrive in another order


_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Logprob(msgspec.Struct):
    token_id: _Token
    logprob: float


class _Drawn(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_Drawn]


class VersionSpan(msgspec.Struct):
    """Tokens that one version of the weights drew, as the server says it."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[_Token] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Line(msgspec.Struct):
    request_id: str
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Line).decode


@dataclass
class StreamedAnswer:
    """The tokens of one request so far. The link's thread adds to it, the engine's thread reads it."""

    name: str  # of the sample
    request: str  # its id at the server
    most: int  # tokens
    vocabulary: int
    ends: Collection[int] = ()  # the tokens that end it
    stopping: Stopping | None = None
    made: Sequence[int] = ()  # by other engines
    starts: list[tuple[str, int]] = field(default_factory=list)  # roots of weights, and their first token
    likeliest: list[dict[int, float]] | None = None  # of each place, the highest logprobs; where asked for
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    finish: str = ""
    priority: int = 0  # of those that wait, the server takes the lowest, and of equal ones the oldest
    opened_at: float = field(default_factory=time.perf_counter)
    passed_at: float | None = None  # when a later one was begun before this one went on
    first_at: float = 0.0
    last_at: float = 0.0

    def take(self, line: bytes) -> bool:
        """Take a line of the stream. Return whether the answer is finished.

        Raises EngineError if the line is not what a server of vLLM sends for this request.
        """
        if not line.startswith(_DATA):
            if line.strip() and not line.startswith(b":"):  # a comment keeps the connection alive
                raise self._wrong(f"sends the line {line[:_QUOTED]!r}")
            return False
        content = line[len(_DATA) :].strip()
        try:
            found = _decode(content)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._wrong(f"sends {content[:_QUOTED]!r}: {error}") from None
        if found.request_id != ID_PREFIX + self.request:
            raise self._wrong(f"sends tokens of another request, {found.request_id[:_QUOTED]!r}")
        if len(found.choices) != 1 or found.choices[0].index != 0:
            raise self._wrong(f"sends {len(found.choices)} choices; one is asked for")
        return self._choice(found.choices[0])

    def _choice(self, choice: _Choice) -> bool:
        tokens = choice.token_ids or []
        drawn = choice.logprobs.content if choice.logprobs else []
        if len(tokens) != len(drawn):
            raise self._wrong(f"sends {len(tokens)} tokens with {len(drawn)} logprobs")
        for token, one in zip(tokens, drawn, strict=True):
            if self._add(token, one):
                return True
        if choice.finish_reason is None:
            return False
        self._finish(choice.finish_reason)
        self._check_versions(choice.weight_versions)
        return True

    def _add(self, token: int, one: _Drawn) -> bool:
        """Add a token. Return whether it completes a stop string: what comes behind it does not count."""
        if one.token_id != token or token >= self.vocabulary:
            raise self._wrong(f"sends token {token} with the logprob of token {one.token_id}; there are "
                              f"{self.vocabulary} tokens")  # fmt: skip
        if not _NO_LOGPROB < one.logprob <= _ROUNDED or not math.isfinite(one.logprob):
            raise self._wrong(f"sends the logprob {one.logprob} for token {token}")
        if len(self.tokens) >= self.most:
            raise self._wrong(f"sends more than {self.most} tokens")
        if self.tokens and self.tokens[-1] in self.ends:
            raise self._wrong(f"goes on behind the end token {self.tokens[-1]}")
        self.last_at, self.passed_at = time.perf_counter(), None
        self.first_at = self.first_at or self.last_at
        self.logprobs.append(one.logprob)
        if self.likeliest is not None:
            self.likeliest.append({top.token_id: top.logprob for top in one.top_logprobs})
        self.tokens.append(token)
        if self.stopping is not None and self.stopping.looks and self.stopping.ends(self.tokens, self.made):
            self.finish = "stop"
            return True
        return False

    def _finish(self, reason: str) -> None:
        last = self.tokens[-1] if self.tokens else None
        fits = {"stop": last in self.ends, "length": len(self.tokens) == self.most}
        if not fits.get(reason, False):
            raise self._wrong(
                f"ends it with {reason[:_QUOTED]!r} after {len(self.tokens)} of {self.most} tokens, the last "
                f"of which is {last}"
            )
        self.finish = reason

    def _check_versions(self, said: list[VersionSpan] | None) -> None:
        """Compare the weights that drew each token with what the server says about them."""
        if not self.starts:
            return
        found = [(one.version, one.start) for one in said or []]
        expected = [one for one in self.starts if one[1] < len(self.tokens)]
        if found != expected:
            raise self._wrong(f"says that weights drew its tokens from {found} on; they were {expected}")

    def goes_on_with(self, root: str, tokens: int) -> None:
        """Note that other weights draw its tokens from number `tokens` on."""
        if self.starts and self.starts[-1][1] == tokens:
            self.starts.pop()
        if not self.starts or self.starts[-1][0] != root:
            self.starts.append((root, tokens))

    def may_be_passed_by(self, later: StreamedAnswer) -> None:
        """Note that another answer was begun, if a server would have gone on with this one before.

        A request that waits for room in the cache may be silent for as long as others draw. It can't be
        passed, for those that wait are taken in their order.
        """
        heard_at = self.last_at or self.opened_at
        behind = later.opened_at > heard_at + _AT_ONCE_S and later.priority >= self.priority
        if behind and not self.finish and self.passed_at is None:
            self.passed_at = time.perf_counter()

    def drawn(self) -> DrawnAnswer:
        """Return what there is of the answer."""
        count = len(self.tokens)  # a token is added behind its logprob
        return DrawnAnswer(
            self.name, np.array(self.tokens[:count], np.int32), np.array(self.logprobs[:count], np.float32),
            self.finish,
        )  # fmt: skip

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"the server {what} (sample {self.name})")
