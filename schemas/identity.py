"""Who a sample is, before it exists: ids and seeds that follow from what is asked, never from timing."""

from __future__ import annotations

import hashlib
import re

# A group that was drawn in place of group g has the number g + ROUND; one in place of that, g + 2 * ROUND.
ROUND = 1 << 40

SampleKey = tuple[int, int]  # group and index


_ID = re.compile(r"-?[0-9]{1,13}(\+[0-9]{1,4})?-[0-9]{1,5}")  # of a first attempt


def is_sample_id(name: str) -> bool:
    """Whether it may be the id of a sample's first attempt: `sample_key` understands it."""
    return bool(_ID.fullmatch(name))


def round_of(group: int) -> int:
    """How many groups were drawn before in the place of this one. Evaluation's are below 0, and stay."""
    return max(group, 0) // ROUND


def sample_id(group: int, index: int, attempt: int = 0) -> str:
    """The id of one sample: the number of its group in the run, its index in the group, the attempt."""
    tail = f".{attempt}" if attempt else ""
    again = round_of(group)
    return f"{group - again * ROUND:07d}{f'+{again}' if again else ''}-{index:02d}{tail}"


def sample_key(name: str) -> SampleKey:
    """Group and index of a first attempt's id. A group may be below 0: evaluation's are."""
    group, index = name.rsplit("-", 1)
    first, _, again = group.partition("+")
    return int(first) + int(again or 0) * ROUND, int(index)


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on every part: the same parts give the same seed on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = str(part).encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return int.from_bytes(digest.digest(), "little") >> 1


def sampling_seed(
    run_seed: int, run: str, problem: str, group: int, index: int, attempt: int, version: int
) -> int:
    """The seed of one sample's tokens. It depends on the weights version: new weights draw anew.

    `run` is the name in the run file, not the number of a start: the same file gives the same samples again.
    """
    return derive_seed("sample", run_seed, run, problem, group, index, attempt, version)
