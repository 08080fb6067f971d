"""Tiny random models of every supported family, shared by the tests."""

import copy
from typing import Any

import torch
import transformers as hf

VOCAB = 48
WINDOW = 9

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"]
_MOE = {"num_experts_per_tok": 2, "head_dim": 8}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": WINDOW}),
    "qwen2": (
        hf.Qwen2Config,
        hf.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 8}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        hf.Qwen3MoeForCausalLM,
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 32},
    ),
    "gemma2": (
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            # The plain forward of transformers 5.17 would pick sdpa, which leaves the capping out.
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        hf.Gemma3ForCausalLM,
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
    ),
    "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, {"sliding_window": WINDOW}),
    "olmo": (hf.OlmoConfig, hf.OlmoForCausalLM, {}),
    "gpt_oss": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {
            **_MOE,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A float32 model of a family with random weights that make confident, varied logits."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    built = model_class(config_class(**{**_SHAPE, **extra, **changes})).eval()
    built.generation_config.eos_token_id = changes.get("eos_token_id")
    return built


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def network(target_model: Any, block_size: int = 8, seed: int = 0) -> Any:
    """A random DFlash network that fits a tiny model."""
    from ddtree.drafters.dflash.network import DFlashConfig, DFlashNet

    torch.manual_seed(seed)
    vocab = target_model.config.vocab_size
    return DFlashNet(
        DFlashConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=vocab,
            block_size=block_size,
            mask_token_id=vocab - 1,
            target_layer_ids=(0, 1),
            num_target_layers=2,
        )
    )


def drafter(kind: str, target_model: Any, coupled: bool = False) -> Any:
    """A drafter for a tiny model: "chain" or "tree" (DFlash, random), "lookup", "draft" (the model itself, with its
    weights shaken), "markov", "treeflash" or "domino" (random heads on DFlash), "d2sd" (DFlash twice), "continuity"
    (DFlash mixed with lookup), or "merged" (DFlash, lookup and the draft model)."""
    from ddtree.drafters.dflash import DFlash
    from ddtree.drafters.dflash.backbone import Backbone
    from ddtree.drafters.dflash.d2sd import D2SD
    from ddtree.drafters.draft_model import DraftModel
    from ddtree.drafters.merged import Merged, Mixed
    from ddtree.drafters.ngram import Lookup
    from ddtree.model.target import Target

    coupling = (0.8, 1.2) if coupled else (0.0, 1.0)
    target = Target(target_model)
    if kind == "lookup":
        return Lookup(vocab_size=target.vocab_size, coupling=coupling)
    if kind == "draft":
        shaken = copy.deepcopy(target_model)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in shaken.parameters():
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
        return DraftModel(Target(shaken), target, coupling=coupling)
    if kind == "domino":
        return domino(target_model, coupling)
    if kind in ("markov", "treeflash"):
        return first_order(kind, target_model, coupling)
    if kind == "d2sd":
        return D2SD(Backbone(network(target_model), target), branches=3, coupling=coupling)
    if kind == "continuity":
        return Mixed(*(drafter(part, target_model, coupled) for part in ("tree", "lookup")))
    if kind == "merged":
        return Merged([drafter(part, target_model, coupled) for part in ("tree", "lookup", "draft")])
    return DFlash(Backbone(network(target_model), target), coupling=coupling)


def domino(target_model: Any, coupling: tuple[float, float] = (0.0, 1.0)) -> Any:
    """A Domino drafter of random weights, whose head turns the marginals' order over."""
    from ddtree.drafters.dflash.backbone import Backbone
    from ddtree.drafters.dflash.domino import Domino
    from ddtree.drafters.dflash.heads import DominoHead
    from ddtree.model.target import Target

    backbone = Backbone(network(target_model), Target(target_model))
    torch.manual_seed(2)
    head = DominoHead(32, backbone.size, gru_hidden=12, rank=8)
    torch.nn.init.normal_(head.outer)
    return Domino(backbone, head, coupling=coupling)


def first_order(kind: str, target_model: Any, coupling: tuple[float, float] = (0.0, 1.0)) -> Any:
    """A Markov or TreeFlash drafter of random weights, whose head turns the marginals' order over."""
    from ddtree.drafters.dflash.backbone import Backbone
    from ddtree.drafters.dflash.first_order import FirstOrder
    from ddtree.drafters.dflash.heads import create
    from ddtree.model.target import Target

    backbone = Backbone(network(target_model), Target(target_model))
    torch.manual_seed(2)
    head = (
        create("markov", size=backbone.size, rank=8)
        if kind == "markov"
        else create("treeflash", hidden_size=32)
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return FirstOrder(backbone, head, coupling=coupling)
