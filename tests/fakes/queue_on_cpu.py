"""A pytest plugin: vLLM schedules asynchronously on a CPU, with stand-ins for a GPU's streams and events.

Logprobs come as late as from a GPU: with their batch's tokens. It fails the session if one was waited for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from producers.engines import open_requests
from tests.fakes.queued_vllm import LateCopy


class NoEvent:
    """Of a CPU all has happened."""

    def __init__(self, **kinds: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, other: NoStream) -> None: ...


class QueueOnCpu:
    def __init__(self) -> None:
        self.copies: list[LateCopy] = []
        self.batches = 0

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, LateCopy]:
        self.copies.append(LateCopy(values.clone()))
        return self.copies[-1].copy, self.copies[-1]

    def patch(self, patches: pytest.MonkeyPatch) -> None:
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput as Output

        patches.setattr(torch.cuda, "Event", NoEvent)
        patches.setattr(torch.cuda, "Stream", NoStream)
        patches.setattr(torch.cuda, "current_stream", NoStream)
        patches.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patches.setattr(open_requests.OpenRequests.__init__, "__defaults__", (self.fetch,))
        configure, begin, end = CpuPlatform.check_and_update_config, Output.__init__, Output.get_output

        def queued(config: Any) -> None:
            configure(config)
            config.scheduler_config.async_scheduling = True

        def begun(output: Any, *args: Any, **options: Any) -> None:
            begin(output, *args, **options)
            output.logprobs_of_it = self.copies[-1]

        def ended(output: Any) -> Any:
            self.batches += 1
            with torch.inference_mode():
                output.logprobs_of_it.come()
            return end(output)

        patches.setattr(CpuPlatform, "check_and_update_config", staticmethod(queued))
        patches.setattr(Output, "__init__", begun)
        patches.setattr(Output, "get_output", ended)


_queue, _patches = QueueOnCpu(), pytest.MonkeyPatch()


def pytest_sessionstart(session: pytest.Session) -> None:
    _queue.patch(_patches)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _patches.undo()
    waited = sum(copy.waited_for for copy in _queue.copies)
    print(f"\n{_queue.batches} batches were under way; {waited} were waited for")
    if not _queue.batches or waited:
        session.exitstatus = 1
