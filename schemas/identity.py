"""Ids and seeds of samples. Both are known before a sample exists, and never depend on timing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

# A group that was drawn in place of group g has the number g + ROUND; one in place of that, g + 2 * ROUND.
ROUND = 1 << 40

SampleKey = tuple[int, int]  # group and index


_ID = re.compile(r"-?[0-9]{1,13}(\+[0-9]{1,4})?-[0-9]{1,5}")  # of a first attempt


def is_sample_id(name: str) -> bool:
    """Whether a text is the id of a sample's first attempt, which `sample_key` understands."""
    return bool(_ID.fullmatch(name))


def round_of(group: int) -> int:
    """Return how many groups were drawn before in the place of this one; 0 for those of evaluations."""
    return max(group, 0) // ROUND


def sample_id(group: int, index: int, attempt: int = 0) -> str:
    """Return a sample's id, such as 0000012-03: its group, its index in the group, and a later attempt."""
    tail = f".{attempt}" if attempt else ""
    again = round_of(group)
    return f"{group - again * ROUND:07d}{f'+{again}' if again else ''}-{index:02d}{tail}"


def sample_key(name: str) -> SampleKey:
    """Return group and index of a first attempt's id. The group is below 0 for evaluations."""
    group, index = name.rsplit("-", 1)
    first, _, again = group.partition("+")
    return int(first) + int(again or 0) * ROUND, int(index)


def derive_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part, and is the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = str(part).encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return int.from_bytes(digest.digest(), "little") >> 1


def sampling_seed(
    run_seed: int, run: str, problem: str, group: int, index: int, attempt: int, version: int
) -> int:
    """Return the seed of one sample's tokens. It depends on the weights version: new weights draw anew.

    `run` is the name in the run file, not the number of a start: the same file gives the same samples again.
    """
    return derive_seed("sample", run_seed, run, problem, group, index, attempt, version)


def digest_of_seeds(seeds: Iterable[int]) -> str:
    """Return a digest of the seeds of samples, which stands for all of them in whichever order."""
    return hashlib.blake2b(" ".join(map(str, sorted(seeds))).encode(), digest_size=8).hexdigest()
