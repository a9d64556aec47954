"""The run file's section about a tracker: the keys that all trackers have."""

from __future__ import annotations

from pydantic import Field

from schemas.addresses import Word
from schemas.seams import Seam, SeamSection


class TrackerSection(SeamSection):
    """A list of trackers. The metrics of each optimizer step go to each of them while the run goes on."""

    kind: Word = Field(
        "csv",
        description="csv: the file metrics.csv in the run's folder. tensorboard, wandb, mlflow or trackio: "
        "each needs a package, such as `pip install 'streamrl[wandb]'`. Or one of an installed package.",
    )


TRACKERS = Seam(
    base=TrackerSection, word="tracker", key="kind", default="csv", folder="flows.trackers", ending="tracker",
    on_resume="free", first=("csv", "tensorboard", "wandb", "mlflow", "trackio"),
)  # fmt: skip
