"""An engine process whose second version is not what it was given.

It says what it holds when a sample has ended that was made with it.
"""

from __future__ import annotations

import threading

from producers.engines import engine_process, vllm_in_process
from producers.engines.engine import DrawnAnswer


class Tampering(vllm_in_process.VllmEngine):
    _installs = 0
    _ended = threading.Event()

    def install(self, *, recompute: bool) -> dict[str, int]:
        tokens = super().install(recompute=recompute)
        self._installs += 1
        if self._installs == 2:
            self.weights.tensor("model.layers.0.self_attn.k_proj.weight")[0, 0] += 1
        return tokens

    def step(self, wait_s: float = 0.0) -> list[DrawnAnswer]:
        finished = super().step(wait_s)
        if finished and self._installs == 2:
            self._ended.set()
        return finished

    def digests(self) -> dict[str, str]:
        if self._installs == 2:
            assert self._ended.wait(300)
        return super().digests()


if __name__ == "__main__":
    vllm_in_process.VllmEngine = Tampering  # type: ignore[misc]
    engine_process.main()
