"""A detector, and a fault that it has found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from flows.explain.run_evidence import RunEvidence


@dataclass(frozen=True)
class FaultFound:
    """Something that is wrong with a run."""

    step: int  # the first step that has it
    stage: str  # `prompt`, `generation`, `evaluation`, or a stage of a step
    cause: str  # in one sentence
    evidence: Sequence[str]  # what was seen and computed, in sentences
    samples: Sequence[str] = ()  # ids of those to blame, the worst first
    tokens: Sequence[int] = ()  # places in the first sample's answer
    command: str = ""  # to look at next
    certainty: float = 0.5  # 1: proven by computing it; .5: a trend that may have another cause


class Detector(ABC):
    """Looks for one kind of failure."""

    name: ClassVar[str]
    failure: ClassVar[str]  # the failure that it is for, for the documents
    how: ClassVar[str]  # what it compares

    @abstractmethod
    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        """Yield what is wrong."""
