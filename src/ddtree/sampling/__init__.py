"""Choose the target's next token as a pure function of prefix, parameters, seed and position."""

from ddtree.sampling.params import SamplingParams
from ddtree.sampling.sampler import Sampler, TokenLogprobs

__all__ = ["Sampler", "SamplingParams", "TokenLogprobs"]
