"""The target: any Hugging Face causal LM whose output must not change.

`Target` runs the model over prompts and draft trees with our own cache and attention. It knows trees only as tokens,
depths and visibility, and drafters only by the layers whose outputs they ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.errors import ConfigError, UnsupportedModelError
from ddtree.model import attention
from ddtree.model.attention import Visibility, chain_mask, key_positions, uncommitted_columns, visible_keys
from ddtree.model.compat import cache_argument
from ddtree.model.cuda_graphs import Graphs
from ddtree.model.kv_cache import KVCache
from ddtree.tree import MAX_BUDGET, DraftTree, ancestor_mask

TREE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
# Families whose trees are checked against plain decoding by the test suite; others are probed when loaded.
TESTED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo",
    "gpt_oss",
}


@dataclass
class Forward:
    """What one pass over R rows and n tokens gives.

    Attributes:
        logits: [R, k, V], of the last token only (k = 1) or of all (k = n); None when none were asked for.
        features: [R, n, F * H], the outputs of the F feature layers side by side; None without feature layers.
    """

    logits: Tensor | None
    features: Tensor | None


def why_no_tree(model: Any) -> str | None:
    """Why draft trees cannot be verified on `model`, naming the layer type; None when they can."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{name} shares key/value caches between layers"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - TREE_LAYERS:
        return f"{name} has {', '.join(sorted(kinds - TREE_LAYERS))} layers, whose state cannot be cut back"
    if getattr(model, "_is_stateful", False):
        return f"{name} keeps a recurrent state, which cannot be cut back"
    if getattr(config, "use_bidirectional_attention", None):
        return f"{name} attends bidirectionally"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface, so it cannot take a tree mask"
    if not decoder_layers(model):
        return f"{name} keeps its decoder layers where they are not found"
    return None


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a causal LM, first to last; empty where they are under none of the usual names."""
    decoder = model.get_decoder()
    found = (getattr(decoder, name, None) for name in ("layers", "h"))
    return next((layers for layers in found if isinstance(layers, nn.ModuleList)), [])


class Target:
    """A causal LM with the operations that decoding needs.

    Args:
        model: a loaded `PreTrainedModel` with a language-model head.
        tokenizer: its tokenizer, or None when only token ids are used.
        feature_layers: decoder layers (0-based) whose *outputs* `Forward.features` shall hold, in this order.
        max_context: most tokens of a sequence; the model's own limit by default.
        graphs: verify in recorded passes (CUDA graphs) where the device has them.

    Raises:
        UnsupportedModelError: draft trees cannot be verified on this model; `AutoregressiveTarget` still runs it.
        ConfigError: a feature layer or `max_context` is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        feature_layers: tuple[int, ...] = (),
        max_context: int | None = None,
        graphs: bool = True,
    ) -> None:
        reason = why_no_tree(model)
        if reason:
            raise UnsupportedModelError(
                f'{reason}: draft trees cannot be verified on it; use drafter="none" for autoregressive decoding'
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self._layers = decoder_layers(model)
        self.num_layers = len(self._layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.embed: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        self.device: torch.device = self.embed.weight.device
        self.dtype: torch.dtype = self.embed.weight.dtype
        self.max_context = context_limit(self.config, max_context)
        self.eos_ids = eos_ids(model, tokenizer)
        self._windowed = bool(getattr(self.config, "sliding_window", None))
        self._cache_name = cache_argument(model)
        self._configs = list(
            {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        )
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._graphs = None
        if graphs and self.device.type == "cuda":
            self._graphs = Graphs(self.run, self.dtype)
        self.feature_layers: tuple[int, ...] = ()
        self.use_features(feature_layers)
        if self.config.model_type not in TESTED:
            self._probe()

    def use_features(self, layers: tuple[int, ...]) -> None:
        """Gather the outputs of these decoder layers from now on (replacing those gathered before)."""
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(
                    f"feature layer {layer} is outside the target's layers 0..{self.num_layers - 1}"
                )
        for hook in self._hooks:
            hook.remove()
        self.feature_layers = tuple(layers)
        self._hooks = [self._layers[i].register_forward_hook(self._capture(i)) for i in sorted(set(layers))]
        if self._graphs is not None:
            self._graphs.forget()

    def close(self) -> None:
        """Take our hooks off the model again."""
        self.use_features(())

    def new_cache(self, tokens: int | None = None) -> KVCache:
        """An empty cache, for rows of at most so many tokens; by default whatever the context and a tree may need."""
        return KVCache(tokens or self.max_context + MAX_BUDGET + 1, self.num_layers)

    def prefill(
        self, cache: KVCache, row: int, tokens: list[int], chunk: int = 512, every: bool = False
    ) -> Iterator[tuple[list[int], Forward]]:
        """Process a prompt in chunks and commit it; yields each chunk's tokens with its `Forward`.

        Only the last chunk's `Forward` has logits: those of the prompt's last token, [1, 1, V]. With `every`, each
        has those of all its tokens, [1, n, V].
        """
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            ids = torch.tensor([part], device=self.device)
            depths = torch.arange(len(part), device=self.device)[None]
            forward = self.extend(cache, ids, depths, None, rows=(row, row + 1), keep=0 if every else 1)
            cache.commit([list(range(len(part)))])
            if at + chunk < len(tokens) and not every:
                forward.logits = None
            yield part, forward

    def verify(self, cache: KVCache, tree: DraftTree) -> Forward:
        """One pass over all nodes of a batch of trees, rows 0..R-1 of the cache; logits [R, N, V].

        What it returns may be overwritten by the next call.
        """
        if self._graphs is not None and self._graphs.fits(cache, tree):
            return Forward(*self._graphs.verify(cache, tree))
        if tree.tokens.numel() == 1 and attention.needs_steadying(self.device, self.dtype):
            return self._verify_single(cache, tree)
        visible = None if tree.tokens.shape[1] == 1 else ancestor_mask(tree)
        return self.extend(cache, tree.tokens, tree.depths, visible)

    def _verify_single(self, cache: KVCache, tree: DraftTree) -> Forward:
        """A root alone, run twice side by side: CPU kernels add up a single row in another order than several."""
        own = torch.eye(2, dtype=torch.bool, device=self.device)[None]
        forward = self.extend(cache, tree.tokens.expand(1, 2), tree.depths.expand(1, 2), own)
        assert forward.logits is not None
        features = None if forward.features is None else forward.features[:, :1]
        return Forward(forward.logits[:, :1], features)

    @torch.inference_mode()
    def extend(
        self,
        cache: KVCache,
        tokens: Tensor,
        depths: Tensor,
        visible: Tensor | None,
        rows: tuple[int, int] | None = None,
        keep: int = 0,
    ) -> Forward:
        """Append uncommitted tokens to each row and run them.

        Args:
            tokens: int64 [R, n].
            depths: int64 [R, n], position of each token after the row's committed length.
            visible: bool [R, n, pending + n], which uncommitted columns each token sees (all committed ones are
                visible); None for a chain, each token seeing those before it.
            rows: first and last + 1 row of the cache; all rows by default.
            keep: logits of the last `keep` tokens only; 0 for all.
        """
        start, stop = rows or (0, cache.rows)
        n = tokens.shape[1]
        before = cache.pending
        width = cache.open(start, stop, n)
        lengths = cache.lengths[start:stop]
        positions = depths + torch.tensor(lengths, device=self.device)[:, None]
        seen = self._visibility(lengths, before, width, positions, visible)
        forward = Forward(*self.run(cache, tokens, positions, seen, keep))
        cache.advance()
        return forward

    @torch.inference_mode()
    def run(
        self, cache: Any, tokens: Tensor, positions: Tensor, seen: Visibility, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, of the last `keep` tokens or of all, and features of tokens [R, n] at positions [R, n] or [1, n].

        What they see is `seen`; their keys and values go where the cache, any that transformers takes, puts them.
        """
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            # Any 4-D mask keeps transformers from building its own; what counts is the visibility beside it.
            "attention_mask": torch.empty((1, 1, 1, 1), dtype=self.dtype, device=self.device),
            "use_cache": True,
            "logits_to_keep": keep,
            self._cache_name: cache,
            attention.KWARG: seen,
        }
        features = None
        with attention.using(self._configs):
            logits = self.model(**arguments).logits
            # Gathered before another thread may run the model, and its hooks, again.
            if self.feature_layers:
                features = torch.cat([self._captured[layer] for layer in self.feature_layers], dim=-1)
                self._captured.clear()
        return logits, features

    def _visibility(
        self, lengths: list[int], pending: int, keys: int, positions: Tensor, visible: Tensor | None
    ) -> Visibility:
        """Return who sees whom in one forward of `extend`, by the rule of `visible_keys`."""
        rows, n = positions.shape
        every = torch.arange(keys, device=self.device).expand(rows, keys)
        if visible is None and keys == n:
            causal = chain_mask(n, self.device).expand(rows, n, n)
            return Visibility(causal, positions, every, self.dtype, causal=True)
        if n == rows == 1 and not pending:
            return Visibility(None, positions, every, self.dtype)
        columns = uncommitted_columns(lengths, pending + n, self.device)
        seen = visible_keys(
            columns, chain_mask(n, self.device, pending) if visible is None else visible, keys
        )
        if not self._windowed:
            return Visibility(seen, positions, every, self.dtype)
        # Pending tokens count at their columns, which is right but for windows shorter than a draft is deep.
        return Visibility(seen, positions, key_positions(columns[:, pending:], positions, keys), self.dtype)

    def _capture(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _probe(self) -> None:
        """Compare a small tree's logits with plain forwards of its paths, for families not in the test suite."""
        ids = [t % self.vocab_size for t in (11, 7, 5, 3, 2, 13)]
        cache = self.new_cache()
        cache.add_row()
        for _ in self.prefill(cache, 0, ids[:3]):
            pass
        device = self.device
        tree = DraftTree(
            torch.tensor([[*ids[3:], 17 % self.vocab_size]], device=device),
            torch.tensor([[0, 0, 0, 2]], device=device),
            torch.tensor([[0, 1, 1, 2]], device=device),
            torch.zeros((1, 4), device=device),
            [4],
        )
        ours = self.verify(cache, tree).logits
        path = torch.tensor([[*ids[:4], ids[5], 17 % self.vocab_size]], device=device)
        with torch.inference_mode():
            plain = self.model(input_ids=path, use_cache=False).logits[0, -3:].float()
        assert ours is not None
        gap = (ours[0, [0, 2, 3]].float() - plain).abs().max()
        spread = plain.std()
        if not gap <= spread * (1e-3 if self.dtype == torch.float32 else 0.2):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives other logits for a draft tree than for plain text (difference "
                f'{gap:.3g}); use drafter="none" for autoregressive decoding'
            )


def context_limit(config: Any, wanted: int | None) -> int:
    """Most tokens of a sequence: the model's own limit, or a smaller one asked for.

    With "longrope" that is the length of the short factors: beyond it transformers turns every position of a forward
    by others, also those whose keys are cached, so that a token's logits depend on what stands beside it.
    """
    own = getattr(config, "max_position_embeddings", None) or 2**31 - 1
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        short = rope.get("original_max_position_embeddings")
        own = min(own, short or getattr(config, "original_max_position_embeddings", None) or own)
    if wanted is None:
        return own
    if not 2 <= wanted <= own:
        raise ConfigError(f"max_context={wanted} is outside 2..{own}, the model's own limit")
    return wanted


def extends(config: Any) -> bool:
    """Whether positions beyond the model's limit can be had, and change nothing before them: rotary, of fixed angles.

    Learned positions end with their table; "dynamic" and "longrope" angles depend on how long the text is.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each.
    kinds = [rope] if "rope_type" in rope else list(rope.values())
    return bool(kinds) and all(isinstance(k, dict) and k.get("rope_type") in _FIXED_ANGLES for k in kinds)


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a text: the generation config's, and the tokenizer's own."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found |= {value} if isinstance(value, int) else set(value)
    return frozenset(found)
