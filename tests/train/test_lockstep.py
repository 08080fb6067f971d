"""Rows in lockstep against plain forwards."""

import pytest
import torch

import tiny
from ddtree.errors import CacheMemoryError
from ddtree.model.target import Target
from ddtree.train import synthesize as lockstep
from ddtree.train.synthesize import Lockstep

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_whole_texts_while_rows_leave(family):
    model = tiny.model(family)
    target = Target(model)
    beginning = tiny.prompt(5)
    rows = [tiny.prompt(tiny.WINDOW + 4, seed) for seed in range(1, 6)]
    runner = Lockstep(target, len(rows), 32)
    logits = runner.begin(beginning)
    assert logits.shape == (5, tiny.VOCAB)
    fed = list(beginning)
    texts = [list(fed) for _ in rows]
    for step in range(tiny.WINDOW + 4):
        if step == 3:  # rows 0 and 3 leave
            runner.move_rows(torch.tensor([4]), torch.tensor([0]), 4)
            runner.move_rows(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), 3)
            rows, texts = [rows[4], *rows[1:3]], [texts[4], *texts[1:3]]
        logits = runner.step(torch.tensor([row[step] for row in rows]))
        for row, text in zip(rows, texts, strict=True):
            text.append(row[step])
        with torch.inference_mode():
            plain = model(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1]
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_fit_are_refused_with_how_many_would(monkeypatch):
    monkeypatch.setattr(lockstep, "available_bytes", lambda device: 10_000)
    with pytest.raises(
        CacheMemoryError, match=r"64 conversations of up to 100 tokens .* lower --rows to \d+"
    ):
        Lockstep(Target(tiny.model()), 64, 100).begin([1, 2])
