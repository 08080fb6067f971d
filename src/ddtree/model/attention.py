"""Who sees whom, and the attention function that obeys it, registered with transformers as "ddtree".

`visible_keys` is the one rule of visibility: targets, recorded passes and drafters use it. transformers forwards
unknown keyword arguments of a model call to its attention function, and lets a 4-D mask through untouched. A forward's
visibility therefore travels as one object (`Visibility`), shared by all layers; each layer asks it for the additive
bias of its own sliding window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ddtree.errors import UnsupportedModelError

NAME = "ddtree"
KWARG = "ddtree_visibility"
_FOLD_ROWS = 1024
_SETTING = "_attn_implementation_internal"


def uncommitted_columns(lengths: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Return the key columns of each row's first `count` uncommitted tokens: int64 [R, count].

    Key columns are tokens in the order of the cache. Row r's committed tokens are columns 0..lengths[r]-1, and its
    uncommitted ones follow: after 5 committed tokens the nodes of a tree of 3 are columns 5, 6 and 7.
    """
    return torch.tensor(lengths, device=device)[:, None] + torch.arange(count, device=device)


def visible_keys(columns: Tensor, uncommitted: Tensor, keys: int) -> Tensor:
    """Return which keys each query sees: bool [R, n, L]. The one rule for prompts, trees and blocks.

    A query sees all committed tokens of its row, of the uncommitted ones those that `uncommitted` names, and nothing
    beyond them.

    Args:
        columns: int64 [R, w], key columns of all w uncommitted tokens of each row (see `uncommitted_columns`).
        uncommitted: bool [R, n, w] or [n, w], which of them each query sees: `ancestor_mask` for a draft tree,
            `chain_mask` for a prompt. Queries that pad a row must see something: themselves, for example.
        keys: L, more than the largest column.
    """
    shape = (len(columns), *uncommitted.shape[-2:])
    committed = torch.arange(keys, device=columns.device) < columns[:, :1]
    visible = committed[:, None].repeat(1, shape[1], 1)
    return visible.scatter_(2, columns[:, None].expand(shape), uncommitted.expand(shape))


def key_positions(columns: Tensor, positions: Tensor, keys: int) -> Tensor:
    """Return the position of each key's token: int64 [R, L]. Sliding windows count in positions, not in columns.

    A committed token's position is its column. A draft node's is its depth after the committed text: siblings share
    one.

    Args:
        columns: int64 [R, n], key columns of uncommitted tokens.
        positions: int64 [R, n], their positions.
        keys: L, more than the largest column.
    """
    every = torch.arange(keys, device=columns.device).repeat(len(columns), 1)
    return every.scatter_(1, columns, positions)


def chain_mask(tokens: int, device: torch.device, pending: int = 0) -> Tensor:
    """Return the mask of a chain: bool [n, pending + n], where each of n tokens sees itself and all before it."""
    return torch.ones(tokens, pending + tokens, dtype=torch.bool, device=device).tril_(pending)


class Visibility:
    """Give each layer of one forward the additive bias of its own window, for R rows, n queries and L key columns.

    Args:
        visible: bool [R, n, L], which keys each query sees (see `visible_keys`); None when it sees every key.
        query_positions: int64 [R, n], absolute positions of the queries.
        key_positions: int64 [R, L], absolute positions of the keys; only read by sliding-window layers.
        dtype: dtype of the additive bias (the model's).
        causal: the queries are all the keys there are, in order (a prompt's first chunk), so that kernels with
            a causal mode of their own need no bias at all.
        seen_by_all: so many first key columns are visible to every query, but for sliding windows.
    """

    def __init__(
        self,
        visible: Tensor | None,
        query_positions: Tensor,
        key_positions: Tensor,
        dtype: torch.dtype,
        causal: bool = False,
        seen_by_all: int = 0,
    ) -> None:
        self._visible = visible
        self._query_positions = query_positions
        self._key_positions = key_positions
        self._dtype = dtype
        self._causal = causal
        # Our own kernel adds the bias in each layer, where its columns cost; PyTorch's wants all of them.
        self._first = seen_by_all if needs_steadying(query_positions.device, dtype) else 0
        self._biases: dict[tuple[int | None, int], Tensor | None] = {}

    def is_causal(self, window: int | None) -> bool:
        """Return whether plain causal attention is exactly what a layer of this window needs."""
        return self._causal and (window is None or window >= self._key_positions.shape[1])

    def bias(self, window: int | None, fold: int = 1) -> Tensor | None:
        """Return the additive bias [R, 1, fold * n, l]: 0 where visible, -inf elsewhere; None when nothing is hidden.

        It is that of the last l <= L key columns; all queries see those before.

        Args:
            window: keys within this many positions are visible (4096, for example); None for all.
            fold: times the queries are repeated, query-head-major, for grouped heads folded into rows.
        """
        if (window, fold) not in self._biases:
            self._biases[window, fold] = self._build(window, fold)
        return self._biases[window, fold]

    def _build(self, window: int | None, fold: int) -> Tensor | None:
        if fold > 1:
            single = self.bias(window)
            return None if single is None else single.repeat(1, 1, fold, 1)
        visible = self._visible
        if window is not None and window < self._key_positions.shape[1]:
            near = self._query_positions[:, :, None] - self._key_positions[:, None, :] < window
            visible = near if visible is None else visible & near
        elif visible is not None:
            visible = visible[:, :, self._first :]
        if visible is None:
            return None
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        return bias.masked_fill_(~visible, float("-inf"))[:, None]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of queries [R, Hq, n, D] over keys [R, Hkv, L, D]; returns [R, n, Hq, Dv].

    Soft-capping (Gemma 2) and attention sinks (gpt-oss) are computed from the scores; the rest goes through
    PyTorch's fused kernel, or, in half precision on the CPU, through our steady one.

    Raises:
        UnsupportedModelError: the model hands no visibility on, or runs in another thread than ours.
    """
    visibility: Visibility | None = kwargs.get(KWARG)
    if _masks is not None:
        _masks.given[module] = attention_mask
        return _repeat(value, query.shape[1] // key.shape[1]).transpose(1, 2).contiguous(), None
    if visibility is None:
        _check_thread()
        raise UnsupportedModelError(
            f"{type(module).__name__} does not forward keyword arguments to its attention function, so no draft "
            'tree can be verified; use drafter="none" for plain decoding'
        )
    if attention_mask is not None and attention_mask.numel() > 1:
        raise UnsupportedModelError(
            f"{type(module).__name__} makes an attention mask of its own, which a draft tree's cannot replace"
        )
    window = window_of(module, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        return attend(query, key, value, visibility, window, scale), None
    groups = query.shape[1] // key.shape[1]
    key, value, bias = _repeat(key, groups), _repeat(value, groups), visibility.bias(window)
    out = _scored(query, key, value, _widened(bias, key.shape[2]), scale, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def window_of(module: nn.Module, own: int | None = None) -> int | None:
    """Return the window of an attention module: that of its model's mask, or its own where none was recorded."""
    return _windows.get(module, own)


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Visibility, window: int | None, scale: float
) -> Tensor:
    """Attention of queries [R, Hq, n, D] over keys [R, Hkv, L, D] by their visibility; returns [R, n, Hq, Dv]."""
    if seen.is_causal(window):
        groups = query.shape[1] // key.shape[1]
        key, value = _repeat(key, groups), _repeat(value, groups)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        kernel = _steady if needs_steadying(query.device, query.dtype) else fused
        out = grouped(query, key, value, lambda fold: seen.bias(window, fold), scale, kernel)
    return out.transpose(1, 2).contiguous()


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return PyTorch's own attention of queries [R, H, n, D] over keys [R, H, L, D]."""
    bias = _widened(bias, key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


def _widened(bias: Tensor | None, keys: int) -> Tensor | None:
    """Return a bias of the last key columns as one of all `keys` columns."""
    if bias is None or bias.shape[-1] == keys:
        return bias
    return functional.pad(bias, (keys - bias.shape[-1], 0))


def grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Callable[[int], Tensor | None],
    scale: float,
    kernel: Kernel = fused,
) -> Tensor:
    """Attention of queries [R, Hq, n, D] over keys [R, Hkv, L, D] in groups of Hq / Hkv heads; returns [R, Hq, n, Dv].

    Query heads that share a key head are folded into rows for the kernel: with a mask, PyTorch's own grouped mode is
    several times slower on CPUs. Beyond `_FOLD_ROWS` rows the repeated mask costs more than repeated keys.

    Args:
        query, key, value: of one layer.
        bias: gives the additive bias [R, 1, fold * n, l] of the last l <= L keys, for queries repeated `fold` times;
            None where all is visible.
        scale: factor of the scores.
        kernel: computes the attention of the folded heads.
    """
    rows, heads, n, size = query.shape
    groups = heads // key.shape[1]
    if n * groups > _FOLD_ROWS:
        return fused(query, _repeat(key, groups), _repeat(value, groups), bias(1), scale)
    folded = query.reshape(rows, key.shape[1], groups * n, size)
    return kernel(folded, key, value, bias(groups), scale).reshape(rows, heads, n, value.shape[-1])


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def needs_steadying(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether fused attention rounds so coarsely that trees and plain decoding would differ at many ties."""
    return device.type == "cpu" and dtype != torch.float32


def _steady(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention whose result for a query hardly ever depends on the queries and hidden keys beside it.

    A node of a tree must score as the same token does in plain decoding, although hidden siblings lie between its
    ancestors. PyTorch's CPU kernel rounds the weights of each block of keys to the input's 16 bits, so its result
    depends on the column of a key, and near-ties flip. Here sums run in float32 and in the order of the keys, and
    hidden keys add exact zeros; the weights' total is one more column of the values, so that it is summed in the same
    order.
    """
    rows, heads, keys, size = value.shape
    # One batch of all heads: `bmm` is what `@` calls, after as much work again for a few queries.
    scores = torch.bmm(
        query.float().mul_(scale).flatten(0, 1)
        if query.dtype != torch.float32
        else (query * scale).flatten(0, 1),
        key.float().flatten(0, 1).transpose(1, 2),
    )
    if bias is not None:
        scores.view(rows, heads, -1, keys)[..., -bias.shape[-1] :] += bias
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    columns = torch.empty((rows * heads, keys, size + 1), dtype=torch.float32, device=value.device)
    columns[:, :, :-1] = value.flatten(0, 1)
    columns[:, :, -1:] = 1.0
    sums = torch.bmm(weights, columns)
    return (sums[..., :-1] / sums[..., -1:]).to(value.dtype).unflatten(0, (rows, heads))


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by its definition, with soft-capped scores and with sinks [H] that take weight but have no value."""
    scores = (query @ key.transpose(2, 3) * scale).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value


class _RecordedMasks:
    """The masks that a model asks transformers for in one forward, and which of them each attention module is given.

    A mask is handed on as a tensor of one number, its place in `asked`.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.given: dict[nn.Module, Tensor | None] = {}

    def ask(self, arguments: dict[str, Any]) -> Tensor:
        """Note a mask's arguments; return what stands for it."""
        self.asked.append(arguments)
        return torch.full((1, 1, 1, 1), float(len(self.asked) - 1))


_masks: _RecordedMasks | None = None
"""The masks of the forward that `record_windows` runs."""
_windows: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()
"""The window of each attention module, as its model's own mask has it; None for full attention."""


@torch.inference_mode()
def record_windows(model: Any, configs: list[Any], device: torch.device) -> dict[nn.Module, int | None]:
    """Run a model on four tokens; return the window of the mask that each of its attention modules is given.

    From then on `attention` obeys these. Configs and arguments do not tell: some models have a window in their mask
    alone. None is full attention.

    Raises:
        UnsupportedModelError: a mask is another one than a full or sliding causal one.
    """
    global _masks
    ids = torch.tensor([[1, 2, 3, 4]], device=device)
    with using(configs):
        _masks = _RecordedMasks()
        try:
            model(input_ids=ids, use_cache=False)
            recorded = _masks
        finally:
            _masks = None
    for module, mask in recorded.given.items():
        if mask is not None and mask.numel() > 1:
            raise UnsupportedModelError(f"{type(module).__name__} makes an attention mask of its own")
        if mask is not None:
            _windows[module] = _window(module, recorded.asked[int(mask)])
    return {module: _windows.get(module) for module in recorded.given}


def _window(module: nn.Module, mask: dict[str, Any]) -> int | None:
    """Return the sliding window of a mask that transformers is asked for; None for full causal attention."""
    size = mask.get("local_size")
    far = 10_000 + 3 * (size or 0)

    def sees(query: int, key: int) -> bool:
        return bool(mask["mask_function"](*(torch.tensor(index) for index in (0, 0, query, key))))

    if sees(5, 6):
        raise UnsupportedModelError(f"{type(module).__name__} attends bidirectionally")
    if size is None and all(sees(far, key) for key in (0, 1, far // 2, far)):
        return None
    # A chunk sees less than a window of its size from some positions, a window as much from all.
    if size and all(sees(q, q - size + 1) and not sees(q, q - size) for q in (far, far + 1, far + size // 2)):
        return int(size)
    raise UnsupportedModelError(
        f"{type(module).__name__} has a mask that is neither full nor a sliding window"
    )


def _no_mask(*_: Any, **arguments: Any) -> Tensor | None:
    """Return no mask for a forward of ours, which needs none; refuse those of others, which must not run with none."""
    _check_thread()
    return None if _masks is None else _masks.ask(arguments)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)


# Two forwards that overlap in threads, of one model, would restore each other's setting.
_switching = threading.RLock()
_runner: int | None = None
"""The thread within `using`."""


def _check_thread() -> None:
    """Raise UnsupportedModelError in other code that runs a model while its attention is ours."""
    if _runner != threading.get_ident():
        raise UnsupportedModelError(
            "ddtree is running this model object in another thread: load the model twice, and run one beside ddtree"
        )


@contextmanager
def using(configs: list[Any]) -> Iterator[None]:
    """Run models of these configs with our attention inside the block, and with their own again afterwards.

    Blocks of several threads run one after the other. Other code that runs the same model in another thread meanwhile
    gets an UnsupportedModelError.
    """
    global _runner
    # Past the configs' own attribute access, which takes longer than anything else that a forward waits for here.
    settings = [vars(config) for config in configs]
    with _switching:
        before, outer = [own[_SETTING] for own in settings], _runner
        _runner = threading.get_ident()
        try:
            for own in settings:
                own[_SETTING] = NAME
            yield
        finally:
            _runner = outer
            for own, name in zip(settings, before, strict=True):
                own[_SETTING] = name
