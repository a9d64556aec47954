"""The folders and files of the local stack.

.streamrl/           STREAMRL_HOME, or the .streamrl of the current folder or of one above it
├── kafka/lib        jars          ┐ fetched; STREAMRL_CACHE puts these two elsewhere,
├── bin              versitygw     ┘ so that several homes share one download
├── kafka/data       the log
├── s3/{objects,meta}
├── prefect          PREFECT_HOME
├── prometheus       RUN.json, the address of a run's figures
├── turns            RUN.wanted and RUN.working, the locks of a colocated run
├── gpus/BOOT        NAME.lock, for each GPU of a machine that a command has claimed
├── logs             NAME.log
└── run              NAME.json, NAME.port, credentials (0700)
"""

import os
from dataclasses import dataclass
from pathlib import Path

from infra.boot_id import boot_id
from infra.files.private import make_private

HOME_NAME = ".streamrl"


@dataclass(frozen=True, slots=True)
class StackPaths:
    home: Path
    cache: Path

    @classmethod
    def locate(cls, home: Path | None = None) -> "StackPaths":
        """Return the paths in the home that the argument names, else STREAMRL_HOME, else the nearest one.

        That is the .streamrl of the current folder or of one above it. Where there is none, it is made here.
        """
        root = home or Path(os.environ.get("STREAMRL_HOME") or _nearest(Path.cwd()))
        root = root.expanduser().absolute()
        cache = Path(os.environ.get("STREAMRL_CACHE") or root).expanduser().absolute()
        return cls(home=root, cache=cache)

    @property
    def kafka_lib(self) -> Path:
        return self.cache / "kafka" / "lib"

    @property
    def bin(self) -> Path:
        return self.cache / "bin"

    @property
    def kafka(self) -> Path:
        return self.home / "kafka"

    @property
    def kafka_data(self) -> Path:
        return self.kafka / "data"

    @property
    def s3(self) -> Path:
        return self.home / "s3"

    @property
    def prefect(self) -> Path:
        return self.home / "prefect"

    @property
    def targets(self) -> Path:
        """The folder that names the runs of this machine to Prometheus."""
        return self.home / "prometheus"

    @property
    def gpus(self) -> Path:
        return self.home / "gpus" / boot_id()  # machines may share a home, and each has a GPU 0

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def run(self) -> Path:
        return self.home / "run"

    def state_file(self, name: str) -> Path:
        return self.run / f"{name}.json"

    def port_file(self, name: str) -> Path:
        return self.run / f"{name}.port"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Create the folders that every service needs, for this user alone: samples and logs are in them.

        `run` holds credentials, so it is closed to other users even if it was open before.
        """
        for folder in (self.kafka, self.s3, self.prefect, self.logs, self.run):
            make_private(folder)
        self.run.chmod(0o700)


def _nearest(folder: Path) -> Path:
    above = (one / HOME_NAME for one in (folder, *folder.parents))
    return next((home for home in above if home.is_dir()), folder / HOME_NAME)
