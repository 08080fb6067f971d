"""What may be asked of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from ddtree.errors import ConfigError, PromptError
from ddtree.policy import AutoBudget, AutoMethod
from ddtree.tree import MAX_BUDGET, MAX_DEPTH


def suggestion(name: object, known: Sequence[str], also: Sequence[str] = ()) -> str:
    """What to write in place of an unknown name: the nearest one of `known` and `also`, else the list of `known`."""
    near = get_close_matches(str(name), [*known, *also], 1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def check_drafting(method: AutoMethod, budget: AutoBudget, depth: int) -> None:
    """Raise ConfigError for what is unknown or out of range."""
    if method not in ("auto", "off", "chain", "tree"):
        raise ConfigError(f"unknown method {method!r}: choose auto, off, chain or tree")
    if isinstance(budget, str):
        if budget != "auto":
            raise ConfigError(f"budget={budget!r} is neither a number nor auto")
    elif not 0 <= budget <= MAX_BUDGET:
        raise ConfigError(f"budget={budget} is outside 0..{MAX_BUDGET}")
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"depth={depth} is outside 1..{MAX_DEPTH}")


def check_members(members: tuple[str, ...] | None, known: tuple[str, ...]) -> None:
    """Raise ConfigError for the name of a drafter that is not there."""
    for name in members or ():
        if name not in known:
            raise ConfigError(
                f"unknown drafter {name!r} in members: this engine's are {', '.join(known) or 'none'}"
            )


def check_prompt(prompt: list[int], vocab_size: int, max_context: int) -> None:
    """Raise PromptError for a prompt that is empty, holds unknown ids, or leaves no room in the context."""
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if len(prompt) >= max_context:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the context holds {max_context}: shorten it to "
            f"{max_context - 1} or less"
        )
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise PromptError(f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}")
