"""The target protocol: what the engine asks of a model, and what drafters share with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddtree.tree import DraftTree


@dataclass
class Forward:
    """The result of one pass over R rows and n tokens.

    Attributes:
        logits: [R, k, V], of the last token only (k = 1) or of all (k = n); None when none were asked for.
        features: [R, n, F * H], the outputs of the F feature layers side by side; None without feature layers.
    """

    logits: Tensor | None
    features: Tensor | None


class TargetWeights(Protocol):
    """The sizes and weights of a target that drafters are checked against and share.

    Attributes:
        config: the text model's config.
        tokenizer: its tokenizer; None when only token ids are used.
        device: where the model runs.
        dtype: of weights, logits and features.
        vocab_size: V, the rows of the head.
        hidden_size: H, the width of the hidden states; 0 where the config does not say, and no drafter can be used.
        num_layers: decoder layers; 0 likewise.
        max_context: most tokens of a sequence, prompt and answer together.
        eos_ids: token ids that end a text.
        embed: the input embedding, weight [V, H].
        head: the language-model head, weight [V, H].
        packs: it runs on packed copies of its weights, as what drafts for it then does.
        compiles: it runs through `torch.compile`.
    """

    config: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_ids: frozenset[int]
    embed: nn.Module
    head: nn.Module
    packs: bool
    compiles: bool


class TargetModel(TargetWeights, Protocol):
    """A model whose output must not change, with the operations that decoding needs.

    Its caches hold R packed rows: rows are 0..R-1, and the last row takes the place of a dropped one. The engine uses
    what `KVCache` and `NativeCache` have in common: `rows`, `used_bytes`, `reserved_bytes`, `add_row`, `drop_row`,
    `take` and `commit`.

    Attributes:
        model: the transformers model.
        verifies_trees: `verify` takes any draft tree. Otherwise it takes roots only, no drafter can be used, and the
            model keeps caches of its own, which can be neither bounded nor read.
        feature_layers: decoder layers (0-based) whose outputs `Forward.features` holds, in this order.
    """

    model: Any
    verifies_trees: bool
    feature_layers: tuple[int, ...]

    def use_features(self, layers: tuple[int, ...]) -> None:
        """Gather the outputs of these decoder layers from now on, in place of those gathered before.

        Raises:
            ConfigError: there is no such layer.
            UnsupportedModelError: the target takes no drafter, and layers are named.
        """

    def close(self) -> None:
        """Leave the model as it was given."""

    def new_cache(self, tokens: int | None = None) -> Any:
        """Return an empty cache for rows of at most `tokens` tokens; by default the context and the largest tree."""

    def prefill(
        self, cache: Any, row: int, tokens: list[int], chunk: int = 512, every: bool = False
    ) -> Iterator[tuple[list[int], Forward]]:
        """Process and commit a prompt in chunks of at most `chunk` tokens; yield each chunk's tokens and `Forward`.

        Only the last chunk's `Forward` has logits: those of the prompt's last token, [1, 1, V]. With `every`, each
        has those of all its tokens, [1, n, V].

        Raises:
            CacheMemoryError: keys and values do not fit into memory.
        """

    def verify(self, cache: Any, tree: DraftTree) -> Forward:
        """Run all nodes of a batch of trees in one pass over rows 0..R-1; logits [R, N, V].

        The next call may overwrite the result. Nothing is kept until `cache.commit`.

        Raises:
            UnsupportedModelError: a tree has more than a root, and the target verifies no trees.
        """
