"""The drafter as vLLM's speculative decoding knows it: a class of the user's, named in the engine's config."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn


class TreeProposer:
    """Stands where vLLM wants a proposer; `TreeRunner` drafts by itself: a tree needs more than is passed here."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def load_model(self, model: nn.Module) -> None:
        """Nothing to load: the runner loads the drafter once it has the model."""

    def propose(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only reached when the engine runs with another worker than `ddtree.vllm.worker.TreeWorker`."""
        raise NotImplementedError("draft trees need worker_cls='ddtree.integrations.vllm.worker.TreeWorker'")
