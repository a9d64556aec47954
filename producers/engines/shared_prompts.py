"""Lets samples share the keys and values of their prompt, where the same weights compute them.

first sample of a prompt ── computes ──► blocks of the KV cache ◄── finds, by the prompt's tokens ── next one

vLLM calls it prefix caching. It finds a block by a hash of all tokens up to its end, and of a salt. Here the
salt is the number of the installed weights, so later samples find nothing that older ones computed. Samples
that are open when new weights come look for nothing from then on. Blocks that nobody finds any more make room
for others, as any free block does.
"""

from __future__ import annotations

from typing import Any

from producers.engines.engine import lasting_error


def sharing_asked(wanted: bool | None, *, invariant: bool, routed: bool) -> bool | None:
    """Return whether vLLM shall keep what it computed; None: where it can.

    `wanted`: as the run file has it. `routed`: whether the engine records which experts tokens took.
    """
    if routed and wanted:
        raise lasting_error(
            "generator.prefix_caching: a sample would lack the routes of those tokens of its prompt that "
            "another sample computed. Leave it out, or set model.follow_routes: false"
        )
    if wanted is None and (routed or not invariant):
        return False
    return wanted


class _Found:
    """A count of tokens that vLLM found, in the place of its own PrefixCacheStats."""

    tokens, reset = 0, False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Note that a sample of so many tokens begins. vLLM names the arguments."""
        self.tokens += num_hits


class SharedPrompts:
    """The blocks of one engine's KV cache that several samples use."""

    def __init__(self, engine: Any, scheduler: Any, wanted: bool | None, keeps_bits: bool) -> None:
        """`engine`: vLLM's LLMEngine. `keeps_bits`: whether a sample keeps its bits if it shares."""
        can = engine.vllm_config.cache_config.enable_prefix_caching
        if wanted and not can:
            raise lasting_error(
                "generator.prefix_caching: vLLM has none for this model on this device. Leave it out"
            )
        self.on = bool(can) and (wanted is True or keeps_bits)
        self._scheduler, self._installs = scheduler, 0
        self._found = _Found()
        if self.on:  # by itself vLLM counts only if it makes statistics of every step
            scheduler.kv_cache_manager.log_stats = True
            scheduler.kv_cache_manager.prefix_cache_stats = self._found

    @property
    def salt(self) -> str:
        """The salt of samples that come now."""
        return str(self._installs)

    def renew(self) -> None:
        """Let nobody find what has been computed so far: new weights are there."""
        self._installs += 1
        for request in self._scheduler.requests.values():
            request.skip_reading_prefix_cache = True

    def tokens(self) -> int:
        """Return how many tokens were not computed so far, since another sample had computed them."""
        return self._found.tokens
