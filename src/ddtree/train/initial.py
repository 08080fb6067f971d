"""The first weights of a drafter: the target's own last layers, on the output of the layer before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddtree.drafters.dflash.network import DFlashConfig, DFlashNet
from ddtree.errors import ConfigError
from ddtree.model.target import Target
from ddtree.train.data import Corpus, Example

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def feature_layers(target: Target, draft_layers: int) -> tuple[int, ...]:
    """Choose an early layer, a middle one and the one before the last `draft_layers`.

    The last of them feeds layers copied from the target.

    Raises:
        ConfigError: the target has too few layers.
    """
    last = target.num_layers - draft_layers - 1
    if draft_layers < 1 or last < 0:
        raise ConfigError(
            f"draft_layers={draft_layers} must be within 1..{target.num_layers - 1}, the target's layers but one"
        )
    return tuple(sorted({min(1, last), (last + 1) // 2, last}))


def mask_token(target: Target, corpus: Corpus) -> int:
    """Choose the token whose embedding fills masked slots: an unused special one, else the one that occurs least.

    It may occur in texts, since drafts are told from masks by their place; it only must not end a text.
    """
    counts = corpus.counts(target.vocab_size)
    counts[corpus.prefix] += 1
    special = set(getattr(target.tokenizer, "all_special_ids", ())) | target.eos_ids
    added = set(getattr(target.tokenizer, "added_tokens_decoder", ()))
    candidates = [token for token in range(target.vocab_size) if token not in special]
    return min(candidates, key=lambda token: (int(counts[token]), token not in added, token))


def draft_vocabulary(corpus: Corpus, size: int, always: frozenset[int]) -> Tensor:
    """Choose the `size` most frequent answer tokens, as in 8192, those of `always` included.

    Returns:
        int64 [size] or fewer, ascending; of equally frequent tokens the lower id is taken.

    Raises:
        ConfigError: fewer than two tokens are asked for.
    """
    if size < 2:
        raise ConfigError(
            f"draft_vocabulary={size} is too small; use at least 2, or 0 for the target's own vocabulary"
        )
    counts = corpus.counts(max(always, default=0) + 1, answers=True)
    seen = set(np.flatnonzero(counts).tolist()) | always
    ranked = sorted(seen, key=lambda token: (token not in always, -int(counts[token]), token))
    return torch.tensor(sorted(ranked[:size]))


def draft_config(
    target: Target, layers: tuple[int, ...], draft_layers: int, block: int, mask_id: int
) -> DFlashConfig:
    """Return the shape of a drafter with the target's own widths, as in 2 layers and blocks of 8."""
    config = target.config
    heads = config.num_attention_heads
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return DFlashConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        vocab_size=target.vocab_size,
        block_size=block,
        mask_token_id=mask_id,
        target_layer_ids=layers,
        num_target_layers=target.num_layers,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 1e4)),
        max_position_embeddings=target.max_context,
    )


@torch.no_grad()
def initial_net(target: Target, config: DFlashConfig, example: Example, seed: int = 0) -> DFlashNet:
    """Make a float32 drafter on the CPU that begins as a shortened target.

    Layers are copied where the target has parameters of the same names and shapes (Llama, Mistral, Qwen, ...), and
    random elsewhere. The drafter normalizes queries and keys, which most targets do not: those norms start with the
    scale that the copied projections have on an example, so that attention begins about as sharp as the target's.
    """
    torch.manual_seed(seed)
    net = DFlashNet(config)
    size = config.hidden_size
    net.fc.weight.zero_()
    net.fc.weight[:, -size:] = torch.eye(size)
    sources = target.model.get_decoder().layers[-config.num_hidden_layers :]
    _copy(net.norm, getattr(target.model.get_decoder(), "norm", None))
    _copy(net.hidden_norm, getattr(sources[0], "input_layernorm", None))
    for layer, source in zip(net.layers, sources, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            _copy(getattr(layer, name), getattr(source, name, None))
        for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            for name in names:
                _copy(getattr(getattr(layer, part), name), getattr(getattr(source, part, None), name, None))
        context = net.context(example.features.flatten(1).float())
        for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
            own = getattr(getattr(source, "self_attn", None), norm, None)
            if not _copy(getattr(layer.self_attn, norm), own):
                heads: Tensor = getattr(layer.self_attn, projection)(context).unflatten(
                    -1, (-1, config.head_dim)
                )
                getattr(layer.self_attn, norm).weight.fill_(float(heads.square().mean(-1).sqrt().mean()))
    return net


def _copy(into: nn.Module, source: nn.Module | None) -> bool:
    """Copy the weight if there is one of the same shape; return whether there was."""
    weight = getattr(source, "weight", None)
    if weight is None or weight.shape != into.weight.shape:
        return False
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    into.weight.copy_(weight.detach().float().cpu())  # type: ignore[operator]
    return True
