"""Compare our DFlash reader, network and writer with the published `dflash` package, and remake the test fixtures.

The package pins its own torch and transformers, so it needs an environment of its own:

    python3.11 -m venv /tmp/dflash && /tmp/dflash/bin/pip install torch==2.13.0 transformers==5.15.0
    /tmp/dflash/bin/pip install --no-deps dflash==0.1.0
    PYTHONPATH=src /tmp/dflash/bin/python scripts/crosscheck_dflash.py

For each case (all layers full; sliding and causal layers among full ones) a tiny checkpoint with random weights is
made with the package's own model, and

1. read with our reader: hidden states of two drafting rounds, the second on the cache of the first, agree within 1e-5;
2. written again with our writer and loaded with the package: the same hidden states, to the bit.

Inputs and outputs of the rounds go to tests/fixtures/dflash_<case>/, and what the package's own generation loop drafts
for a tiny target, round by round, to tests/fixtures/dflash_target/; the ordinary tests read both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache, dflash_generate
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ddtree.drafters.dflash import checkpoint
from ddtree.drafters.dflash.network import DFlashNet
from ddtree.model.kv_cache import KVCache

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
TOLERANCE = 1e-5
# Tokens of context in the first round, and those accepted before the second.
PROMPT, ACCEPTED = 11, 3
VOCAB, GENERATED = 12, 40
CASES: dict[str, dict[str, Any]] = {
    "full": {"layer_types": ["full_attention"] * 2},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
        "attention_bias": True,
    },
}


def published(changes: dict[str, Any], seed: int) -> Any:
    """The package's model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        rope_theta=5000.0,
        num_target_layers=4,
        block_size=5,
        dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]},
        **changes,
    )
    config.architectures = ["DFlashDraftModel"]
    return randomized(DFlashDraftModel(config))


@torch.no_grad()
def randomized(model: Any) -> Any:
    for parameter in model.parameters():
        spread = 0.6 if parameter.ndim > 1 else 0.5
        parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1))
    return model.float().eval()


@torch.no_grad()
def their_rounds(model: Any, features: Tensor, slots: Tensor) -> list[Tensor]:
    """Hidden states of both rounds, called as the package's own generation loop calls them."""
    cache, hidden, start = _make_cache(model.config), [], 0
    for stop, block in zip((PROMPT, PROMPT + ACCEPTED), slots, strict=True):
        hidden.append(
            model(
                target_hidden=features[None, start:stop],
                noise_embedding=block[None],
                position_ids=torch.arange(start, stop + len(block))[None],
                past_key_values=cache,
                use_cache=True,
            )[0]
        )
        _crop_to(cache, stop)
        start = stop
    return hidden


@torch.no_grad()
def our_rounds(network: DFlashNet, features: Tensor, slots: Tensor) -> list[Tensor]:
    cache, hidden, start = KVCache(64), [], 0
    cache.add_row()
    for stop, block in zip((PROMPT, PROMPT + ACCEPTED), slots, strict=True):
        cache.open(0, 1, stop - start)
        network.inject(network.context(features[None, start:stop]), torch.arange(start, stop)[None], cache)
        cache.commit([list(range(stop - start))])
        width = cache.open(0, 1, len(block))
        positions = torch.arange(stop, width)[None]
        states = network.block(block[None], positions, cache, torch.arange(width)[None], None)
        hidden.append(network.norm(states)[0])
        start = stop
    return hidden


def crosscheck(name: str, seed: int) -> float:
    """Run a case and write its fixture; returns the largest difference of our hidden states."""
    model = published(CASES[name], seed)
    folder = FIXTURES / f"dflash_{name}"
    model.save_pretrained(folder)
    features = torch.randn(PROMPT + ACCEPTED, model.fc.in_features)
    slots = torch.randn(2, model.block_size, model.config.hidden_size)
    theirs = their_rounds(model, features, slots)
    read = checkpoint.read(folder)
    network = read.network()
    ours = our_rounds(network, features, slots)
    with tempfile.TemporaryDirectory() as written:
        checkpoint.write(written, network)
        again, report = DFlashDraftModel.from_pretrained(
            written, output_loading_info=True, dtype=torch.float32
        )
        if any(report.values()):
            raise SystemExit(f"{name}: the package does not take what we write: {report}")
        for before, after in zip(theirs, their_rounds(again.eval(), features, slots), strict=True):
            if not torch.equal(before, after):
                raise SystemExit(f"{name}: what we write is not what the package reads")
    save_file(
        {"features": features, "slots": slots, "hidden": torch.stack(theirs)}, folder / "rounds.safetensors"
    )
    return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))


def record_generation(model: Any, seed: int) -> int:
    """Let the package generate greedily for a tiny target; stores the target, the text and each round's draft.

    Returns how many drafted tokens were accepted. Rounds near the end, whose block the package shortens, are left out.
    """
    torch.manual_seed(seed)
    target = randomized(
        Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=24,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                vocab_size=VOCAB,
                max_position_embeddings=128,
                bos_token_id=None,
                eos_token_id=None,
                tie_word_embeddings=True,
            )
        )
    )
    drafts: list[list[int]] = []
    compute = model.compute_logits

    def recorded(hidden: Tensor, head: Any) -> Tensor:
        logits = compute(hidden, head)
        if logits.shape[1] == model.block_size - 1:
            drafts.append(logits[0].argmax(-1).tolist())
        return logits

    model.compute_logits = recorded
    prompt = torch.randint(0, VOCAB - 1, (1, PROMPT))
    tokens = dflash_generate(model, target, prompt, GENERATED, None)[0].tolist()
    folder = FIXTURES / "dflash_target"
    target.save_pretrained(folder)
    record = {"prompt": prompt[0].tolist(), "output": tokens[PROMPT:], "drafts": drafts}
    (folder / "generation.json").write_text(json.dumps(record) + "\n")
    return accepted(record["output"], drafts)


def accepted(output: list[int], drafts: list[list[int]]) -> int:
    at = total = 0
    for draft in drafts:
        run = 0
        while run < len(draft) and draft[run] == output[at + 1 + run]:
            run += 1
        at, total = at + run + 1, total + run
    return total


def main() -> int:
    worst = 0.0
    for seed, name in enumerate(CASES):
        difference = crosscheck(name, seed)
        print(f"{name}: largest difference of hidden states {difference:.2e} (allowed {TOLERANCE:.0e})")
        worst = max(worst, difference)
    model = DFlashDraftModel.from_pretrained(FIXTURES / "dflash_full", dtype=torch.float32).eval()
    print(f"generation: {record_generation(model, seed=8)} drafted tokens accepted by the package's loop")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
