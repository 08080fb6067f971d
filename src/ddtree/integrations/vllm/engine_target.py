"""vLLM's model as drafters see a target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.errors import UnsupportedModelError
from ddtree.model import TargetWeights
from ddtree.model.architectures import eos_ids


class EngineTarget(TargetWeights):
    """Sizes, embedding and head of vLLM's model, for drafters. vLLM itself runs the forward passes.

    Args:
        model: as vLLM loaded it, whole on this device.
        model_config: vLLM's `ModelConfig`.

    Raises:
        UnsupportedModelError: the model's embedding is at no known place.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model = model
        self.config = model_config.hf_text_config
        self.vocab_size: int = model_config.get_vocab_size()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context: int = model_config.max_model_len
        embedding, head = _embedding(model), getattr(model, "lm_head", None)
        # With tied weights some models keep no head of their own.
        if getattr(head, "weight", None) is None:
            head = embedding
        self.embed = VocabularyWeights(embedding, self.vocab_size)
        self.head = VocabularyWeights(head, self.vocab_size)
        self.device: torch.device = self.embed.weight.device
        self.dtype: torch.dtype = self.embed.weight.dtype
        self.tokenizer = _tokenizer(model_config)
        generation = SimpleNamespace(**model_config.try_get_generation_config())
        self.eos_ids = eos_ids(
            SimpleNamespace(config=self.config, generation_config=generation), self.tokenizer
        )


class VocabularyWeights(nn.Module):
    """The rows of an embedding or head that belong to tokens, without vLLM's padding; shares memory with vLLM's.

    Args:
        module: has `weight`, [padded V, H], and perhaps `bias`.
        vocab_size: V, e.g. 49152.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, module: Any, vocab_size: int) -> None:
        super().__init__()
        bias = getattr(module, "bias", None)
        self.register_buffer("weight", module.weight.data[:vocab_size])
        self.register_buffer("bias", None if bias is None else bias.data[:vocab_size])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        return nn.functional.linear(hidden, self.weight, self.bias)


def _embedding(model: nn.Module) -> Any:
    for owner in (model, getattr(model, "model", None)):
        found = getattr(owner, "embed_tokens", None)
        if found is not None:
            return found
    raise UnsupportedModelError(
        f"{type(model).__name__} keeps its embedding where it is not found, so nothing can be drafted for it: serve it "
        "with --drafting off"
    )


def _tokenizer(model_config: Any) -> Any:
    """Return the tokenizer, or None where the engine runs on token ids alone."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)
