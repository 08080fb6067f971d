"""The target: any Hugging Face causal LM whose output must not change.

`Target` runs the model over prompts and draft trees with our own cache and attention. It knows trees only as tokens,
depths and visibility, and drafters only by the layers whose outputs they ask for.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ddtree.errors import ConfigError, DDTreeError, UnsupportedModelError, first_line
from ddtree.model import Forward, TargetModel, TargetWeights, attention, packed_weights
from ddtree.model.architectures import (
    cache_argument,
    context_limit,
    decoder_layers,
    eos_ids,
    input_device,
    why_no_tree,
)
from ddtree.model.attention import Visibility, chain_mask, key_positions, uncommitted_columns, visible_keys
from ddtree.model.cpu_decoder import CpuDecoder
from ddtree.model.cuda_graphs import CudaGraphs
from ddtree.model.kv_cache import KVCache
from ddtree.model.packed_weights import PackedWeights, SwappedForwards
from ddtree.tree import MAX_BUDGET, DraftTree, ancestor_mask

_log = logging.getLogger(__name__)
# The most by which logits may differ, in shares of their spread, where one kernel runs in one shape, or in float32.
_SAME = 1e-3
# Root of the mean square of the difference likewise, where two kernels add in orders of their own in 16 bits: real
# models come to a few per cent.
_SAME_IN_16_BITS = 0.1
_tried: WeakKeyDictionary[nn.Module, tuple[Any, bool, float]] = WeakKeyDictionary()
"""Of models in which trees can be verified, the state in which they were tried, `_windowed` and `noise`."""


class HuggingFaceTarget(TargetWeights):
    """The attributes of `TargetWeights`, read from a loaded `PreTrainedModel` with a language-model head."""

    def __init__(self, model: Any, tokenizer: Any, max_context: int | None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.embed: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        weight = getattr(self.head, "weight", None)
        # Quantized heads may hold their weight behind a function.
        self.vocab_size: int = weight.shape[0] if isinstance(weight, Tensor) else self.config.vocab_size
        # The configs of a few models that take no drafter (BLT) do not say.
        self.hidden_size: int = getattr(self.config, "hidden_size", 0)
        self.num_layers: int = getattr(self.config, "num_hidden_layers", 0)
        self.device: torch.device = input_device(model)
        self.dtype: torch.dtype = model.dtype
        self.packs = self.compiles = False
        self.max_context = context_limit(model, max_context)
        self.eos_ids = eos_ids(model, tokenizer)


class _Capture:
    """A hook that keeps the output of a decoder layer."""

    def __init__(self, captured: dict[int, Tensor], layer: int) -> None:
        self._captured = captured
        self._layer = layer

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._captured[self._layer] = output if isinstance(output, Tensor) else output[0]


class Target(HuggingFaceTarget, TargetModel):
    """A causal LM that verifies draft trees. See `TargetModel` for what each method does.

    Args:
        model: a loaded `PreTrainedModel` with a language-model head.
        tokenizer: its tokenizer, or None when only token ids are used.
        feature_layers: decoder layers (0-based) whose *outputs* `Forward.features` shall hold, in this order.
        max_context: most tokens of a sequence; the model's own limit by default.
        graphs: verify in recorded passes (CUDA graphs) where the device has them.
        pack: run on packed copies of the weights, kept beside them, in 16 bits on CPUs (see `packed_weights`).
        compile: run the decoder layers through `torch.compile`; nothing is packed then. It takes minutes to start.
        remember: do not try a model again that an earlier target has tried with these very modules, for callers that
            make a target for each text.

    Attributes:
        noise: by how much logits move with the tokens beside theirs, where the model quantizes its activations; else 0.

    Raises:
        UnsupportedModelError: draft trees cannot be verified on this model; `AutoregressiveTarget` may still run it.
        ConfigError: a feature layer or `max_context` is out of range.
    """

    verifies_trees = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        feature_layers: tuple[int, ...] = (),
        max_context: int | None = None,
        graphs: bool = True,
        pack: bool = False,
        compile: bool = False,
        remember: bool = False,
    ) -> None:
        reason = why_no_tree(model)
        if reason:
            raise UnsupportedModelError(
                f'{reason}: draft trees cannot be verified on it; use drafter="none" for autoregressive decoding'
            )
        super().__init__(model, tokenizer, max_context)
        self._cache_name = cache_argument(model)
        self._layers = decoder_layers(model)
        self.num_layers = len(self._layers)
        self._configs = list(
            {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        )
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._graphs = CudaGraphs(self.run, self.dtype) if graphs and self.device.type == "cuda" else None
        self.feature_layers: tuple[int, ...] = ()
        self.noise = 0.0
        self._packed: PackedWeights | None = None
        self._decoder: CpuDecoder | None = None
        self._compiled: SwappedForwards | None = None
        # PEFT merges adapters into weights and out again.
        suits = packed_weights.suits(self.device, self.dtype) and not hasattr(model, "peft_config")
        self.packs, self.compiles = pack and suits and not compile, compile
        self.use_features(feature_layers)
        modules = [(id(part), id(vars(part).get("forward"))) for part in model.modules()]
        state = (self.dtype, self.device, modules)
        known = _tried.get(model)
        if remember and known is not None and known[0] == state:
            _, self._windowed, self.noise = known
            self._prepare()
            return
        try:
            self._find_windows()
            self._probe()
            _tried[model] = state, self._windowed, self.noise
            # After the comparison with the model's own forward, which is that of its weights as they are.
            self._prepare()
        except BaseException as error:
            self.close()
            if isinstance(error, DDTreeError) or not isinstance(error, Exception):
                raise
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot take a draft tree ({first_line(error)}); "
                'use drafter="none" for autoregressive decoding'
            ) from error

    def use_features(self, layers: tuple[int, ...]) -> None:
        """Gather the outputs of these decoder layers from now on, in place of those gathered before.

        Raises:
            ConfigError: there is no such layer.
        """
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise ConfigError(
                    f"feature layer {layer} is outside the target's layers 0..{self.num_layers - 1}"
                )
        for hook in self._hooks:
            hook.remove()
        self.feature_layers = tuple(layers)
        self._hooks = [
            self._layers[layer].register_forward_hook(_Capture(self._captured, layer))
            for layer in set(layers)
        ]
        if self._graphs is not None:
            self._graphs.clear()

    def close(self) -> None:
        """Take our hooks off the model again."""
        self.use_features(())

    def new_cache(self, tokens: int | None = None) -> KVCache:
        """Return an empty cache for rows of at most `tokens` tokens; by default the context and the largest tree."""
        return KVCache(tokens or self.max_context + MAX_BUDGET + 1, self.num_layers)

    def prefill(
        self, cache: KVCache, row: int, tokens: list[int], chunk: int = 512, every: bool = False
    ) -> Iterator[tuple[list[int], Forward]]:
        """Process and commit a prompt in chunks; yield each chunk's tokens and `Forward` (see `TargetModel`)."""
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
        """Run all nodes of a batch of trees in one pass, rows 0..R-1 of the cache; logits [R, N, V].

        The next call may overwrite the result.
        """
        if self._graphs is not None and self._graphs.fits(cache, tree):
            return Forward(*self._graphs.verify(cache, tree))
        if tree.tokens.numel() == 1 and attention.needs_steadying(self.device, self.dtype):
            return self._verify_single(cache, tree)
        visible = None if tree.tokens.shape[1] == 1 else ancestor_mask(tree)
        return self.extend(cache, tree.tokens, tree.depths, visible)

    def _verify_single(self, cache: KVCache, tree: DraftTree) -> Forward:
        """Run a root alone twice, side by side, and return the first; in half precision on CPUs.

        CPU kernels multiply a single row (a matrix-vector product) in another order of sums than several rows. In
        16 bits that flips near-ties, so that plain decoding would give other texts than decoding with trees. Two rows
        take the kernel that trees take.
        """
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
            cache: holds the rows.
            tokens: int64 [R, n].
            depths: int64 [R, n], position of each token after the row's committed length.
            visible: bool [R, n, p + n], which uncommitted tokens each token sees: p pending ones, which earlier calls
                appended since the last commit, then these. None for a chain after the committed tokens (p = 0).
            rows: first and last + 1 row of the cache; all rows by default.
            keep: logits of the last `keep` tokens only; 0 for all.

        Raises:
            CacheMemoryError: keys and values do not fit into memory.
        """
        start, stop = rows or (0, cache.rows)
        n = tokens.shape[1]
        pending = 0 if visible is None else visible.shape[2] - n
        keys = cache.open(start, stop, n, pending)
        lengths = cache.lengths[start:stop]
        positions = depths + torch.tensor(lengths, device=self.device)[:, None]
        seen = self._visibility(lengths, pending, keys, positions, visible)
        return Forward(*self.run(cache, tokens, positions, seen, keep))

    @torch.inference_mode()
    def run(
        self, cache: Any, tokens: Tensor, positions: Tensor, seen: Visibility, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits, of the last `keep` tokens or of all, and features of one forward.

        Args:
            cache: any that transformers takes; it decides where keys and values go.
            tokens: int64 [R, n].
            positions: int64 [R, n] or [1, n].
            seen: which keys each token sees.
            keep: logits of the last `keep` tokens only; 0 for all.
        """
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            # Any 4-D mask keeps transformers from building its own. Our attention reads the visibility beside it.
            "attention_mask": torch.empty((1, 1, 1, 1), dtype=self.dtype, device=self.device),
            "use_cache": True,
            "logits_to_keep": keep,
            self._cache_name: cache,
            attention.KWARG: seen,
        }
        if self._packed is not None and not self._packed.current:
            self._pack()
        if self._decoder is not None and not self._decoder.current:
            self._pack()
        if self._decoder is not None and not self._decoder.hooked(_Capture):
            return self._decoder(cache, tokens, positions, seen, keep, self.feature_layers)
        features = None
        with attention.using(self._configs), self._compiled or self._packed or nullcontext():
            logits = self.model(**arguments).logits
            # Gathered before another thread may run the model, and its hooks, again.
            if self.feature_layers:
                features = torch.cat([self._captured[layer] for layer in self.feature_layers], dim=-1)
                self._captured.clear()
        return logits, features

    def _prepare(self) -> None:
        if self.compiles:
            forwards = [torch.compile(layer.forward, dynamic=True) for layer in self._layers]
            self._compiled = SwappedForwards(self._layers, forwards)
        self._pack()

    @property
    def packed_bytes(self) -> int:
        """The memory of packed copies of the weights."""
        return 0 if self._packed is None else self._packed.bytes

    def _pack(self) -> None:
        """Pack the weights; and run without the model's own code where that makes no difference but in time."""
        self._decoder = self._packed = None
        if not self.packs or not packed_weights.fits(self.model):
            return
        with suppress(ValueError, RuntimeError, AttributeError):
            decoder = CpuDecoder(self.model, self._layers)
            self._packed = decoder.packed
            theirs = self._probe_layers()
            self._decoder = decoder
            if all(map(torch.equal, theirs, self._probe_layers())):
                return
        self._decoder, self._packed = None, PackedWeights(packed_weights.products_of(self.model))

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
        if self._windowed:
            # Pending tokens count at their columns, which is right but for windows shorter than a draft is deep.
            every = key_positions(columns[:, pending:], positions, keys)
        return Visibility(seen, positions, every, self.dtype, seen_by_all=min(lengths))

    def _find_windows(self) -> None:
        """Find out which window each layer's mask has, and that all layers take their mask from us."""
        name = type(self.model).__name__
        windows = attention.record_windows(self.model, self._configs, self.device)
        if not all(any(part in windows for part in layer.modules()) for layer in self._layers):
            raise UnsupportedModelError(
                f"{name} does not use transformers' attention interface, so it cannot take a tree mask"
            )
        self._windowed = any(window is not None for window in windows.values())
        kept = DynamicCache(config=self.model.config).layers
        for module, window in windows.items():
            place = getattr(module, "layer_idx", None) or 0
            if window is None and place < len(kept) and getattr(kept[place], "is_sliding", False):
                raise UnsupportedModelError(f"{name} has a window in its cache alone, which ours lacks")

    def _probe(self) -> None:
        """Compare a small tree's logits with those of plain text, and with the same tree's beside other tokens.

        Neither a family's name nor its flags tell: the attention may come from elsewhere.
        """
        name = type(self.model).__name__
        # Tokens from all over the vocabulary: the first ones are special in most, and make rounding errors grow.
        *text, one, two = (part * self.vocab_size // 23 for part in (11, 7, 5, 3, 13, 17, 2, 19))
        cache = self.new_cache()
        cache.add_row()
        for _ in self.prefill(cache, 0, text[:3]):
            pass
        ours, beside = (self._probe_tree(cache, text[3:], other) for other in (one, two))
        plain, again = (self._probe_plain([text, [other] * 6]) for other in (one, two))
        spread = float(plain.std())
        noise = float((again - plain).abs().max())
        if noise > _SAME * spread:
            self.noise = noise
            _log.warning(
                "%s quantizes its activations: logits move by up to %.2g with the tokens beside them, so that a text "
                "may depend on how it is drafted", name, noise,
            )  # fmt: skip
        leak, gap, share = float((ours - beside).abs().max()), float((ours - plain).abs().max()), _SAME
        if self.dtype != torch.float32:
            gap, share = float((ours - plain).square().mean(dim=1).sqrt().median()), _SAME_IN_16_BITS
        known = 4 * self.noise
        if not (leak <= max(_SAME * spread, known) and gap <= max(share * spread, known)):
            raise UnsupportedModelError(
                f"{name} gives other logits for a draft tree than for plain text (difference {max(gap, leak):.3g}); "
                'use drafter="none" for autoregressive decoding'
            )

    def _probe_tree(self, cache: KVCache, path: list[int], sibling: int) -> Tensor:
        """Return logits float32 [3, V] of a path of 3 tokens, in a tree with a sibling of the second."""
        tree = DraftTree(
            torch.tensor([[path[0], sibling, *path[1:]]], device=self.device),
            torch.tensor([[0, 0, 0, 2]], device=self.device),
            torch.tensor([[0, 1, 1, 2]], device=self.device),
            torch.zeros((1, 4), device=self.device),
            [4],
        )
        logits = self.verify(cache, tree).logits
        assert logits is not None
        return logits[0, [0, 2, 3]].float()

    def _probe_layers(self) -> tuple[Tensor, Tensor]:
        """Return the logits of a small tree after a short prompt, and the outputs of all layers."""
        wanted = self.feature_layers
        self.use_features(tuple(range(self.num_layers)))
        cache = self.new_cache()
        *prompt, token = (part * self.vocab_size // 23 for part in (11, 7, 5, 3, 13, 17))
        for _ in self.prefill(cache, cache.add_row(), prompt):
            pass
        tokens, parents, depths = torch.tensor([[[token, 1, 2, 3]], [[0, 0, 0, 2]], [[0, 1, 1, 2]]])
        forward = self.verify(cache, DraftTree(tokens, parents, depths, torch.zeros((1, 4)), [4]))
        self.use_features(wanted)
        assert forward.logits is not None and forward.features is not None
        return forward.logits, forward.features

    @torch.inference_mode()
    def _probe_plain(self, texts: list[list[int]]) -> Tensor:
        """Return logits float32 [3, V] of the last half of the first text, as the model itself computes them."""
        ids = torch.tensor(texts, device=self.device)
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            arguments["position_ids"] = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        logits: Tensor = self.model(**arguments).logits[0, -3:]
        return logits.float()
