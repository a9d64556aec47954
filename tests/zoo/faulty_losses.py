"""Losses of the zoo that are wrong, each as somebody's own file had it. A run names them by `loss.import`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamrl.losses import ClippedLoss, ClippedSettings, GroupSettings


class MaskedSettings(GroupSettings, ClippedSettings):
    """Settings of Masked."""

    def make(self, spec):
        return Masked(self, spec)


class Masked(ClippedLoss):
    """Masks tokens by a factor of 0: where the masked value is infinite, 0 times it is no number."""

    def of_tokens(self, tokens):
        found = self.clipped(tokens)
        unlikely = tokens.anchor < -30.0  # what sampling would hardly have drawn shall not count
        barred = tokens.logprobs.masked_fill(unlikely, float("-inf"))
        return found * ~unlikely - 0.0 * barred


class BatchwideSettings(GroupSettings, ClippedSettings):
    """Settings of Batchwide."""

    def make(self, spec):
        return Batchwide(self, spec)


class Batchwide(ClippedLoss):
    """Normalises advantages over whatever samples are there together, not over each group."""

    def advantages(self, rows):
        rewards = np.array([self.reward(row) for row in rows])
        over = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        return [np.array([value]) for value in over]


class WrongClipSettings(GroupSettings, ClippedSettings):
    """Settings of WrongClip."""

    def make(self, spec):
        return WrongClip(self, spec)


class WrongClip(ClippedLoss):
    """Takes the larger of both gains in place of the smaller one: what is clipped goes on to be pushed."""

    def of_tokens(self, tokens):
        ratio = self.ratio(replace(tokens))
        bounded = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        return -(ratio * tokens.advantage).maximum(bounded * tokens.advantage)
