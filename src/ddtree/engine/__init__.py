"""Decode sequences in rounds: draft, verify, walk, commit."""

from ddtree.engine.engine import Engine, Round
from ddtree.engine.sequence import FinishReason, Piece, Result, Sequence

__all__ = ["Engine", "FinishReason", "Piece", "Result", "Round", "Sequence"]
