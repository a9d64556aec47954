"""The run file's section about generators: the keys that all engines have."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from schemas.addresses import Word
from schemas.rank_layout import RankLayout
from schemas.seams import Seam, SeamSection


class GeneratorSection(SeamSection):
    """Settings of each generator."""

    on_gpu: ClassVar[bool] = True  # whether each engine takes a GPU, where there are some
    records_routes: ClassVar[bool] = False  # whether samples say which experts of a mixture made them
    computes_elsewhere: ClassVar[bool] = False  # whether it is on devices that are not the generator's
    ranks_elsewhere: ClassVar[bool] = False  # whether an engine may have ranks on other machines
    draws_again: ClassVar[bool] = True  # whether a sample that it drew can be drawn again, token by token

    engine: Word = Field(
        "vllm",
        description="The program that draws samples: vllm, served (a server of vLLM that runs already), or "
        "one of an installed package.",
    )
    slots: int = Field(
        64,
        gt=0,
        le=65_536,
        description="Samples that one generator draws at once. More give more tokens a second, each later.",
    )
    threads: int = Field(
        1, gt=0, le=1024, description="CPU threads of a generator. More than one rarely pays."
    )
    on_update: Literal["continue", "recompute", "wait"] = Field(
        "continue",
        description="The way in which new weights reach samples that are being drawn. continue: a sample "
        "goes on with the new weights, on the KV cache of the old ones. recompute: it goes on "
        "with them, and its KV cache is computed anew, so that each token is drawn as the new "
        "weights alone would. wait: the new weights are installed when all samples of the old "
        "ones are done, so each sample has one version. A sample says which weights drew it "
        "from which token on.",
    )

    @property
    def layout(self) -> RankLayout:
        """How the ranks of one engine divide a model."""
        return RankLayout()

    @property
    def devices(self) -> int:
        """How many devices one engine computes on: one for each rank."""
        return self.layout.ranks

    @property
    def eight_bits(self) -> str:
        """The way in which engines hold weights in eight bits, int8 or fp8; empty: as they come."""
        return ""

    @property
    def gpus(self) -> int:
        """How many GPUs of its machine a generator takes, where there are some."""
        return self.devices if self.on_gpu else 0


ENGINES = Seam(
    base=GeneratorSection, word="engine", key="engine", default="vllm", folder="producers.engines",
    ending="engine", first=("vllm",), on_resume="bits",
)  # fmt: skip
