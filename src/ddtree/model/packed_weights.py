"""Weights of linear layers, laid out once for the CPU's matrix kernels.

PyTorch brings a 16-bit weight into oneDNN's own layout at every product, which takes about as long as the product of a
few tokens. `PackedProduct` keeps a copy in that layout beside the model, with results of the same bits. Cores without
arithmetic in 16 bits get float32 copies: results round once, at the end, and differ in their last bits from those of
the plain product, which such cores compute several times as slowly for a few tokens.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.model.kv_cache import available_bytes

_log = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16)
_MACHINES = ("x86_64", "amd64")
"""Where packing was measured: other processors have other kernels, with arithmetic that `computes` does not know."""
_MOST_ROWS = 256
"""From so many rows on the layout is a small part of a product, and PyTorch's own kernels have other bits."""
_TRIED_ROWS = (1, 2, 5, 16, 31, 64)
_MOST_MEMORY = 0.5
"""Share of the free memory that the copies of one model may take."""


class PackedProduct:
    """The product of an input [..., K] with linear layers side by side: [..., N1 + N2 + ...].

    Args:
        layers: of one input width; all or none have a bias.
        dtype: of the copy, the layers' own or float32.

    Attributes:
        layers: as given.
        weights: the layers' weights as they were packed.
        widths: N1, N2, ...
        bytes: memory of the copy.

    Raises:
        RuntimeError: oneDNN has no such kernel here.
    """

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        self.weights = _Weights(layers)
        self.widths = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers]).to(dtype)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases).to(dtype) if biases else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self._dtype = dtype
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self.bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_long(x):
            parts = self.plain(x)
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if x.dtype == self._dtype:
            return self._product(x, self._weight, self._bias, "none", [], "")
        return self._product(x.to(self._dtype), self._weight, self._bias, "none", [], "").to(x.dtype)

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return the layers' products one by one."""
        return self.plain(x) if self._is_long(x) else self(x).split_with_sizes(self.widths, dim=-1)

    def part(self, place: int, x: Tensor) -> Tensor:
        """Return one layer's product."""
        return self.parts(x)[place]

    def plain(self, x: Tensor) -> list[Tensor]:
        """Return the layers' products as they themselves compute them."""
        return [functional.linear(x, layer.weight, layer.bias) for layer in self.layers]

    def is_exact(self) -> bool:
        """Return whether the result has the bits of the plain product.

        Of a float32 copy, which rounds otherwise: whether a token's result has the same bits beside other tokens.
        """
        weight = self.layers[0].weight
        noise = torch.Generator().manual_seed(0)
        x = torch.randn((1, max(_TRIED_ROWS), weight.shape[1]), generator=noise).to(weight.dtype)
        own, whole = self._dtype == weight.dtype, self(x)
        return all(
            torch.equal(self(part), torch.cat(self.plain(part), dim=-1) if own else whole[:, : part.shape[1]])
            for part in (x[:, :rows] for rows in _TRIED_ROWS)
        )

    def _is_long(self, x: Tensor) -> bool:
        return x.numel() >= _MOST_ROWS * x.shape[-1]


class _Weights:
    """The weights and biases of layers as they are now.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self._known = [
            (layer._parameters, name, own, own.data_ptr(), _version(own))
            for layer in layers
            for name, own in layer._parameters.items()
            if own is not None
        ]

    def unchanged(self) -> bool:
        """Return whether no weight or bias was replaced or written since."""
        return all(
            parameters[name] is own and own.data_ptr() == place and _version(own) == version
            for parameters, name, own, place, version in self._known
        )


def _version(weight: Tensor) -> int:
    """Return how often a tensor was written; those made in inference mode do not tell."""
    return -1 if weight.is_inference() else weight._version


_products: WeakKeyDictionary[nn.Linear, ReferenceType[PackedProduct]] = WeakKeyDictionary()
"""Of single layers, while they are in use: a target's head has one copy, whoever uses it."""
_exact: dict[tuple[Any, ...], bool] = {}


@torch.inference_mode()
def pack(*layers: nn.Module) -> PackedProduct | None:
    """Return the packed product of linear layers side by side; None where there can be none.

    Each distinct shape is tried once: it is left out where its results are not exact (see `PackedProduct.is_exact`).
    """
    if not all(packable(layer) for layer in layers):
        return None
    linears: list[nn.Linear] = list(layers)  # type: ignore[arg-type]
    if len({(layer.bias is None, layer.in_features, layer.weight.dtype) for layer in linears}) > 1:
        return None
    known = _products[linears[0]]() if len(linears) == 1 and linears[0] in _products else None
    if known is not None and known.weights.unchanged():
        return known
    own = linears[0].weight.dtype
    shape = (*(layer.out_features for layer in linears), linears[0].in_features, own, linears[0].bias is None)
    for dtype in [own, torch.float32] if computes(own) else [torch.float32]:
        try:
            product = PackedProduct(linears, dtype)
            if (*shape, dtype) not in _exact:
                _exact[*shape, dtype] = product.is_exact()
        except (RuntimeError, AttributeError, NotImplementedError):
            # A build without oneDNN, or a core on which it has no such kernel.
            continue
        if _exact[*shape, dtype]:
            if len(linears) == 1:
                _products[linears[0]] = ReferenceType(product)
            return product
    return None


def pack_own(module: nn.Module) -> None:
    """Let a module that nobody else runs or trains, such as a drafter's network, run on packed weights from now on."""
    if fits(module):
        PackedWeights(products_of(module)).install()


def products_of(module: nn.Module) -> list[PackedProduct]:
    """Return the packed products of a module's linear layers, each by itself; without those that cannot be packed."""
    products = [pack(layer) for layer in module.modules() if packable(layer)]
    return [product for product in products if product is not None]


def packable(layer: nn.Module) -> bool:
    """Return whether a layer is a plain `nn.Linear` in 16 bits on a CPU, run by no wrapper."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and suits(layer.weight.device, layer.weight.dtype)
    )


def suits(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights are packed there and of that kind: in 16 bits on a CPU of x86."""
    return device.type == "cpu" and dtype in _DTYPES and platform.machine().lower() in _MACHINES


def computes(dtype: torch.dtype) -> bool:
    """Return whether this core has arithmetic for a 16-bit dtype, and does not go through float32 each time."""
    if dtype == torch.float16:
        return bool(torch.cpu._is_amx_fp16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def packed_bytes(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the memory that packed copies of a module's layers take here, for weights in 16 bits."""
    weights = (layer.weight for layer in module.modules() if type(layer) is nn.Linear)
    return sum(weight.numel() for weight in weights) * (2 if computes(dtype) else 4)


def fits(module: nn.Module) -> bool:
    """Return whether there is memory for packed copies of a module's layers; say so where there is not."""
    need, free = packed_bytes(module, next(module.parameters()).dtype), available_bytes(torch.device("cpu"))
    if free is None or need <= _MOST_MEMORY * free:
        return True
    _log.warning(
        "%s runs on its weights as they are: packed copies would take %.1f of %.1f GiB free memory",
        type(module).__name__, need / 2**30, free / 2**30,
    )  # fmt: skip
    return False


class SwappedForwards(AbstractContextManager[None]):
    """Lets modules run by other functions than their `forward` inside a `with` block; outside it they are as before.

    Args:
        modules: the modules.
        forwards: what runs in place of each `forward`.
    """

    def __init__(self, modules: Iterable[nn.Module], forwards: Iterable[Callable[..., Any]]) -> None:
        self._swaps = [(vars(module), forward) for module, forward in zip(modules, forwards, strict=True)]

    def install(self) -> None:
        """Let the modules run so from now on."""
        for attributes, forward in self._swaps:
            attributes["forward"] = forward

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: object) -> None:
        for attributes, _forward in self._swaps:
            attributes.pop("forward", None)


class PackedWeights(SwappedForwards):
    """Lets linear layers run on packed products.

    Args:
        products: of the layers.

    Attributes:
        bytes: memory of the copies.
    """

    def __init__(self, products: Sequence[PackedProduct]) -> None:
        layers = [layer for product in products for layer in product.layers]
        self._weights = [product.weights for product in products]
        self.bytes = sum(product.bytes for product in products)
        super().__init__(
            layers,
            (
                product if len(product.layers) == 1 else partial(product.part, place)
                for product in products
                for place in range(len(product.layers))
            ),
        )

    @property
    def current(self) -> bool:
        """Whether the layers' weights are those that were packed."""
        return all(weights.unchanged() for weights in self._weights)
