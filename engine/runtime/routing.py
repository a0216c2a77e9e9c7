"""How a mixture of experts chooses: what models' configs define and their routers follow. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Scoring(Enum):
    """How a router turns its logits into scores of experts."""

    SOFTMAX = auto()
    SIGMOID = auto()


class GroupScoring(Enum):
    """The score of a group of experts: its best choice, or the sum of its two best."""

    MAX = auto()
    TOP2 = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The choice of a token's experts, and their weights. layers/mixture.py defines the arithmetic.

    A softmax over the chosen experts alone equals one over all experts that is normalised.
    """

    num_experts: int
    num_chosen: int  # experts a token
    scoring: Scoring = Scoring.SOFTMAX
    is_normalised: bool = False  # the weights of a token are divided by their sum
    scale: float = 1.0  # multiplies the weights after normalisation
    has_bias: bool = False  # added to the logits
    has_expert_scale: bool = False  # a number of each expert multiplies its weights at last
    has_correction: bool = False  # a bias that is added to the scores for the choice only
    num_groups: int = 1
    num_chosen_groups: int = 1  # groups whose experts can be chosen
    group_scoring: GroupScoring = GroupScoring.MAX
