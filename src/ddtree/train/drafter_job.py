"""Training the drafter itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from ddtree.drafters.dflash_net import DFlashNet
from ddtree.train.batches import Batch
from ddtree.train.blocks import Blocks
from ddtree.train.forward import block_states
from ddtree.train.objective import Objective, Sums, Vocabulary, head_loss

NAME = "dflash"


class Pass(nn.Module):
    """A pass of the drafter up to what enters the head: [C, A, b - 1, H], and the blocks it belongs to.

    Sharded weights come together when a module runs, and this one needs all.
    """

    def __init__(self, net: DFlashNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, embedding: Tensor, batch: Batch, features: Tensor) -> tuple[Tensor, Blocks]:
        states, blocks = block_states(self.net, embedding, batch, features[:, :, :-1])
        return self.net.norm(states), blocks


class DrafterJob:
    """A DFlash network learns to predict blocks; see `ddtree.train.fit.Job`.

    Args:
        net: the drafter, float32, on the target's device.
        vocabulary: tokens that it can propose.
        embedding: [V, H], the target's.
        objective: what is minimized.

    Attributes:
        run: a pass of the drafter.
    """

    def __init__(
        self, net: DFlashNet, vocabulary: Vocabulary, embedding: Tensor, objective: Objective
    ) -> None:
        self.modules: dict[str, nn.Module] = {NAME: net}
        self.block = net.config.block_size
        self.settings: dict[str, Any] = {"network": asdict(net.config), "draft_tokens": vocabulary.size}
        self.run = Pass(net)
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._objective = objective

    def train(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        normed, blocks = self.run(self._embedding, batch, features)
        hidden = features[:, :, -1]
        sums, derived = head_loss(normed.detach(), batch, blocks, hidden, self._vocabulary, self._objective)
        normed.backward(derived)
        return {NAME: sums}

    def measure(self, batch: Batch, features: Tensor) -> dict[str, Sums]:
        normed, blocks = self.run(self._embedding, batch, features)
        objective = Objective("ce", self._objective.gamma)
        return {NAME: head_loss(normed, batch, blocks, None, self._vocabulary, objective, gradient=False)[0]}
