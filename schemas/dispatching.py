"""The run file's section about dispatch: the keys that all policies have."""

from __future__ import annotations

from pydantic import Field

from schemas.addresses import Word
from schemas.seams import Seam, SeamSection


class DispatchSection(SeamSection):
    """The choice of the generator that makes each sample."""

    policy: Word = Field(
        "deadline",
        description="The rule that gives samples to generators. deadline: by expected makespan under the "
        "predictions' measured errors; in async mode longest first. The others are to compare with: "
        "longest_first is one queue, round_robin deals in turn, algorithm2 is the paper's two pools, random "
        "shuffles. Or one of an installed package.",
    )
    silence_s: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="Seconds without a report after which a generator counts as gone, and others make its "
        "samples.",
    )


POLICIES = Seam(
    base=DispatchSection, word="dispatch policy", key="policy", default="deadline",
    folder="producers.dispatch.policies", ending="policy",
    first=("deadline", "longest_first", "round_robin", "algorithm2"), on_resume="free",
)  # fmt: skip
