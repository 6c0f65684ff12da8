"""Mixtures of experts with fewer experts: ``l0prune.shrink_experts`` and ``l0prune experts``."""

from l0prune.doors import Feature
from l0prune.plan.budget_text import COUNTED

FEATURE = Feature(
    __name__,
    names={"FewerExperts": "result", "shrink_experts": "cut"},
    commands={"experts": "command"},
    most_used={"experts": ("data", "experts", "out")},
    measures={"active_params": "active"},
    units={"active_params": COUNTED},
    options={"Machine": ("samples",)},
)
