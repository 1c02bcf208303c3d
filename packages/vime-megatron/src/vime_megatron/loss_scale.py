"""The loss scale of float16 training: the gradients' exponents moved to where float16 has room, and never a batch lost.

Float16 ends at 65504 and has nothing below ``2^-24``: a gradient of ``1e-8``, which a loss over a million tokens gives,
would be 0. So the loss is multiplied by a scale for the backward pass (Micikevicius et al., arXiv 1710.03740), the
float32 sums of gradients stay scaled, and the update divides by it as it reads them. A power of two only moves
exponents: where nothing overflows or underflows, every scale gives the same weights to the bit.

A gradient that overflows makes the norm infinite. The usual answer is to skip the step and halve the scale, which
loses the batch; in RL that is the work of all engines for one step, and learning on what is left is biased towards
batches with small gradients. Here the scale is halved and the gradients of the *same* batch are computed again, until
they are finite or the scale is at its smallest. Norm and loss are the same on every rank, so all ranks decide alike.
After ``window`` steps without an overflow the scale is doubled. One that was too high by a factor of two so costs one
more forward and backward pass in ``window`` steps.

Why float16 at all: with three more bits than bfloat16 trainer and engine disagree less about what was sampled (Qi et
al., "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vime_megatron.config import TrainerConfig

#: A token's gradient is about its weight, one over the tokens of the global batch: 1e-3 to 1e-6. Times this it is at
#: most 100 and at least 0.1, in the middle of what float16 holds. One step in ``window`` looks whether there is room.
INITIAL = 2.0**16
SMALLEST, LARGEST = 1.0, 2.0**24


@dataclass(frozen=True)
class LossScale:
    """A scale and what it has seen; each step makes the next one.

    Attributes:
        value: What the loss is multiplied by, a power of two.
        good_steps: Steps since it last changed.
        window: Good steps after which it is doubled; 0 for one that never changes.
    """

    value: float = 1.0
    good_steps: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: TrainerConfig) -> LossScale:
        """Return the scale that a trainer starts with: 1 for good, unless it trains in float16."""
        settings = config.optimizer
        if config.dtype != "float16":
            return cls()
        if settings.loss_scale == "dynamic":
            return cls(INITIAL, window=settings.loss_scale_window)
        return cls(float(settings.loss_scale))

    def too_high(self, *, loss: float, norm: float) -> bool:
        """Tell whether gradients of a loss that is finite overflowed, and a lower scale is left to try.

        Args:
            loss: The global loss; if it is not finite, no scale will help.
            norm: The norm of its gradients.
        """
        return self.window > 0 and self.value > SMALLEST and math.isfinite(loss) and not math.isfinite(norm)

    def halved(self) -> LossScale:
        """Return the scale to try after an overflow."""
        return replace(self, value=max(SMALLEST, self.value / 2), good_steps=0)

    def after_step(self) -> LossScale:
        """Return the scale for the step after one that went well."""
        if self.window == 0 or self.good_steps + 1 < self.window:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=min(LARGEST, self.value * 2), good_steps=0)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values; the window is a setting."""
        return {name: value for name, value in asdict(self).items() if name != "window"}

    def restored(self, saved: Mapping[str, Any] | None) -> LossScale:
        """Return the scale that a checkpoint continues with; one without any, or a fixed scale, keeps what is set."""
        if saved is None or self.window == 0:
            return self
        return replace(self, value=float(saved["value"]), good_steps=int(saved["good_steps"]))
