"""How much to draft: measured latency, calibrated acceptance, and the choice of drafters and of the number of nodes."""

from ddtree.policy.controller import (
    OFF,
    UNMEASURED_BUDGET,
    Arm,
    AutoBudget,
    AutoMethod,
    Choice,
    Policy,
    Proposals,
    Request,
)

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
