"""What becomes of a round's mean: an outer step of SGD with momentum, or the mean itself.

DiLoCo (arXiv 2311.08105), algorithm 1: the mean of the learners' changes is the gradient of an outer optimizer, SGD
with Nesterov momentum 0.9 and rate 0.7.  Plain averaging of weights is rate 1 without momentum; their moving average is
rate 1 - decay.
"""

from dataclasses import dataclass

import numpy as np

from swarmsched.aggregation.blocks import Floats
from swarmsched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How a shard merges.

    `keeps_weights` False: each round's mean is published and nothing kept, as gradients are summed.  `is_quantised`:
    int8 on the wire, both ways.
    """

    rate: float = 0.7
    momentum: float = 0.9
    is_nesterov: bool = True
    keeps_weights: bool = True
    is_quantised: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 2.0:  # NaN is refused as well
            raise ConfigError("rate", f"is {self.rate!r}", "give one above 0 and up to 2; DiLoCo's is 0.7")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError("momentum", f"is {self.momentum!r}", "give one from 0 to below 1; DiLoCo's is 0.9")

    def step(self, mean: Floats, momentum: Floats | None) -> Floats:
        """The change of the weights for the mean of `shown - now`; `momentum`, of the same piece, is moved on."""
        if not self.keeps_weights:
            return mean
        rate, kept = np.float32(self.rate), np.float32(self.momentum)
        if momentum is None:
            return mean * -rate
        momentum *= kept
        momentum += mean
        return (mean + momentum * kept if self.is_nesterov else momentum) * -rate


OUTER = MergeRule()
AVERAGE = MergeRule(rate=1.0, momentum=0.0)
REDUCE = MergeRule(rate=1.0, momentum=0.0, keeps_weights=False)
