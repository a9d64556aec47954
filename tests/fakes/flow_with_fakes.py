"""The flow `train`, with processes that only pretend, for tests of flow runs: an entrypoint for a worker."""

from flows.flow_runs import watching
from flows.run import commands
from flows.train import train

__all__ = ["train"]

commands.MODULES.update({role: f"tests.fakes.{role}" for role in commands.MODULES})
watching.ALIVE_EVERY_S = 3.0
