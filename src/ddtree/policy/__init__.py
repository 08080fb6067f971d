"""How much to draft: latency model, budget choice, calibrated acceptance, auto-A/B. Knows no method and no model."""

from ddtree.policy.arms import OFF, UNMEASURED_BUDGET, Arm, AutoBudget, AutoMethod
from ddtree.policy.policy import Choice, Policy, Proposals, Request

__all__ = [
    "OFF",
    "UNMEASURED_BUDGET",
    "Arm",
    "AutoBudget",
    "AutoMethod",
    "Choice",
    "Policy",
    "Proposals",
    "Request",
]
