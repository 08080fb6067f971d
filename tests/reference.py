"""The plain reference of decoding: whole forwards of transformers, its own logits processors, the seeded rule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from ddtree.sampling.noise import Noise
from ddtree.sampling.params import SamplingParams


def processed(
    logits: Tensor, prefix: list[int], prompt_length: int, params: SamplingParams, eos: Iterable[int] = ()
) -> Tensor:
    """Scores [V] after every processor of `params`, full sorts and all."""
    ids = torch.tensor([prefix])
    scores = logits.float()[None].clone()
    if params.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(prefix[prompt_length:]):
        scores[0, token] -= params.presence_penalty
        scores[0, token] -= params.frequency_penalty * prefix[prompt_length:].count(token)
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    for word in params.bad_words:
        if tuple(prefix[len(prefix) + 1 - len(word) :]) == word[:-1]:
            scores[0, word[-1]] = -math.inf
    if len(prefix) - prompt_length < params.min_tokens:
        scores[0, [*eos, *params.stop_token_ids]] = -math.inf
    for processor in params.processors:
        scores = processor(prefix, scores[0])[None]
    if params.temperature < 1e-5:
        return scores[0]
    scores = scores / params.temperature
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


def decode(model: Any, prompt: list[int], params: SamplingParams, length: int) -> list[int]:
    """`length` tokens by one whole forward each, without any cache."""
    noise = Noise(params.seed or 0, model.config.vocab_size)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1]
            scores = processed(logits, tokens, len(prompt), params)
            if params.temperature >= 1e-5:
                scores = scores.log_softmax(-1) + noise.gumbel(len(tokens))
            tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def layer_outputs(model: Any, texts: list[list[int]], layer: int) -> list[Tensor]:
    """Hidden states [tokens, H] after a decoder layer, 0-based and not the last, of each text by one whole forward."""
    with torch.inference_mode():
        outputs = [
            model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
            for text in texts
        ]
    return [states[layer + 1][0] for states in outputs]
