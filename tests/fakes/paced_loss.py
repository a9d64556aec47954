"""GRPO whose groups take a given time to train, whatever their lengths."""

import time

from streamrl.losses import GroupLoss, LossSettings


class PacedLossSettings(LossSettings):
    """Settings of the loss."""

    group_s: float = 0.0

    def make(self, spec):
        return PacedLoss(self, spec)


class PacedLoss(GroupLoss):
    def advantages(self, rows):
        time.sleep(self.settings.group_s * len({row.sample.group for row in rows}))
        return super().advantages(rows)

    def of_tokens(self, tokens):
        return -tokens.ratio * tokens.advantage
