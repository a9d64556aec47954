"""The run file's section about balance: how many generators a run may have, and when their number changes."""

from __future__ import annotations

from pydantic import Field, model_validator

from schemas.addresses import Word
from schemas.section import Section


class BalanceSection(Section):
    """The run changes the number of its generators while it goes on, so that neither side waits for long."""

    least: int = Field(1, ge=1, le=4096, description="The fewest generators that the run shrinks to.")
    most: int = Field(ge=1, le=4096, description="The most generators that the run grows to.")
    dry: bool = Field(
        False,
        description="Only recommend: each decision is recorded and shown, as is the number of generators "
        "that it asks for (`streamrl_run_wanted_generators` for Prometheus), and nothing is started or "
        "stopped.",
    )
    deployment: Word | None = Field(
        None,
        description="A Prefect deployment that adds one generator to the run, such as `join-run/NAME`: it is "
        "called to grow, and its flow run is cancelled to shrink. By default generators are processes on "
        "the run's own machine.",
    )
    smoothed: int = Field(
        3, ge=1, le=1000, description="The newest iterations over which both sides' times are averaged."
    )
    lasting: int = Field(
        2, ge=1, le=1000, description="Iterations in a row that have to call for a change before it is made."
    )
    settle: int = Field(
        1,
        ge=0,
        le=1000,
        description="Iterations that are not judged once a change can be seen: in the first one the new "
        "generator came late.",
    )
    worth: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="The least share of the generation time that one generator more has to save. A generator "
        "that saves less is taken back.",
    )
    margin: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="A generator is given up if the others would still take this share less time than the "
        "trainer. More of it shrinks later, and changes less often.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> BalanceSection:
        if self.least > self.most:
            raise ValueError(f"least is {self.least} and most is {self.most}: least may not be above most")
        return self
