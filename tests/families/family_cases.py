"""The cases that one family goes through, and what came of each."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tiny_families import LENGTH, VOCAB, last_logits

import ddtree
from scripted import Scripted

PROMPTS = tuple(
    torch.randint(2, VOCAB - 4, (length,), generator=torch.Generator().manual_seed(1000 + length)).tolist()
    for length in (66, 6, 41)
)
"""The first one's text fills the whole length; the first rounds of the second see no window."""
NEW = LENGTH - len(PROMPTS[0])
PENALTY = 1.3
"""Keeps greedy texts of random models from running in circles; higher, and the penalty alone would choose."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": PENALTY}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
_NEAR_TIE = 1e-3


class Cases:
    """Runs a family's cases and gathers what came of them.

    Attributes:
        found: by case "ok", or "wrong: ...", "refused: ...", "raw: ...", "near tie: ...", "n/a: ...".
        notes: what transformers itself does oddly.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.found: dict[str, str] = {}
        self.notes: list[str] = []
        self.trees = ""

    def run(self) -> str:
        """Run all cases; return "not runnable: ..." where transformers has no text to compare with, else nothing."""
        try:
            self.expected = [self._generate(prompt) for prompt in PROMPTS]
        except Exception as error:
            return f"not runnable: generate fails ({said(error)})"
        self.whole: list[list[int]] | None = None
        try:
            self.whole = [self._whole_forwards(prompt) for prompt in PROMPTS]
            at = next(
                (
                    i
                    for a, b in zip(self.expected, self.whole, strict=False)
                    if (i := parted(a, b)) is not None
                ),
                None,
            )
            if at is not None:
                self.notes.append(f"transformers' generate and whole forwards part at token {at}")
        except Exception as error:
            self.notes.append(f"no whole forward: {said(error)}")
        self._case("plain", lambda: self._compare(self.model, PROMPTS, self.expected, None))
        self.trees = self._why_no_trees()
        self._case("batched plain", lambda: self._batched(None))
        if not self.trees:
            texts = [p + a for p, a in zip(PROMPTS, self.expected, strict=True)]
            self._case("drafted", lambda: self._compare(self.model, PROMPTS, self.expected, texts))
            self._case("batched", lambda: self._batched(texts))
            self._case("sampled", self._sampled)
        self._case("folder", self._folder)
        self._case("custom_generate", self._custom_generate)
        return ""

    def _case(self, name: str, run: Callable[[], str]) -> None:
        try:
            self.found[name] = run()
        except ddtree.DDTreeError as error:
            self.found[name] = f"refused: {said(error)}"
        except Exception as error:
            self.found[name] = f"raw: {said(error)} {place(error)}"

    def _generate(self, prompt: list[int], **options: Any) -> list[int]:
        out = self.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, repetition_penalty=PENALTY,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **options,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def _choice(self, tokens: list[int]) -> torch.Tensor:
        logits = last_logits(self.model, torch.tensor([tokens]))[None]
        return hf.RepetitionPenaltyLogitsProcessor(PENALTY)(torch.tensor([tokens]), logits)[0]

    def _whole_forwards(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self._choice(tokens).argmax()))
        return tokens[len(prompt) :]

    def _why_no_trees(self) -> str:
        try:
            with ddtree.load(self.model, drafter=Scripted([], vocab=VOCAB)):  # type: ignore[arg-type]
                return ""
        except ddtree.DDTreeError as error:
            return said(error)
        except Exception as error:
            self.found["load"] = f"raw: {said(error)} {place(error)}"
            return said(error)

    def _answers(self, target: Any, prompts: Any, texts: Any, options: dict[str, Any], together: bool) -> Any:
        drafter: Any = "none" if texts is None else Scripted(texts, reach=14, vocab=VOCAB)
        with ddtree.load(target, drafter=drafter) as model:
            drafting: dict[str, Any] = {} if texts is None else {"method": "tree", "budget": 28}
            asked = {"max_tokens": NEW, "ignore_eos": True, **options, **drafting}
            if together:
                results = model.generate(list(prompts), **asked)
            else:
                results = [model.generate(prompt, **asked) for prompt in prompts]
        if texts is not None and min(r.stats.tau for r in results) < 2:
            self.notes.append(f"low acceptance {min(r.stats.tau for r in results):.2f}")
        return [list(r.token_ids) for r in results]

    def _compare(self, target: Any, prompts: Any, expected: Any, texts: Any, together: bool = False) -> str:
        return self._judged(prompts, self._answers(target, prompts, texts, GREEDY, together), expected)

    def _judged(self, prompts: Any, answers: Any, expected: Any, strict: bool = False) -> str:
        """Compare answers with those of `generate`, or, unless strict, of whole forwards where the two differ."""
        verdict = "ok"
        for prompt, answer, true in zip(prompts, answers, expected, strict=True):
            at = parted(answer, true)
            if at is None:
                continue
            whole = self.whole[PROMPTS.index(prompt)] if self.whole else None
            if not strict and whole is not None and parted(answer, whole) is None:
                verdict = "ok (as whole forwards; generate differs)"
                continue
            if at < min(len(answer), len(true)) and self._tied(prompt + true[:at], answer[at], true[at]):
                verdict = f"near tie at token {at} of a prompt of {len(prompt)}"
                continue
            return f"wrong: prompt of {len(prompt)} parts at token {at} of {len(true)}"
        return verdict

    def _tied(self, tokens: list[int], one: int, two: int) -> bool:
        scores = self._choice(tokens)
        return bool((scores[one] - scores[two]).abs() < _NEAR_TIE * scores.std())

    def _batched(self, texts: Any) -> str:
        return self._compare(self.model, PROMPTS, self.expected, texts, together=True)

    def _sampled(self) -> str:
        plain = self._answers(self.model, PROMPTS, None, SAMPLED, together=False)
        texts = [p + a for p, a in zip(PROMPTS, plain, strict=True)]
        drafted = self._answers(self.model, PROMPTS, texts, SAMPLED, together=True)
        at = next((i for a, b in zip(plain, drafted, strict=True) if (i := parted(a, b)) is not None), None)
        return "ok" if at is None else f"wrong: sampled parts from plain at token {at}"

    def _folder(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            try:
                again = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
                ids = torch.tensor([PROMPTS[2]])
                gap = (last_logits(again, ids) - last_logits(self.model, ids)).abs().max()
                if not gap < 1e-3:
                    return f"n/a: transformers loads other logits (gap {gap:.3g})"
                del again
            except Exception as error:
                return f"n/a: transformers cannot load it ({said(error)})"
            texts = None if self.trees else [p + a for p, a in zip(PROMPTS, self.expected, strict=True)]
            return self._compare(folder, PROMPTS[1:], self.expected[1:], texts)

    def _custom_generate(self) -> str:
        texts = [p + a for p, a in zip(PROMPTS, self.expected, strict=True)]
        drafter: Any = "auto" if self.trees else Scripted(texts, reach=14, vocab=VOCAB)
        answers = [
            self._generate(prompt, custom_generate=ddtree.custom_generate, drafter=drafter, budget=28)
            for prompt in PROMPTS
        ]
        return self._judged(PROMPTS, answers, self.expected, strict=True)


def parted(one: list[int], two: list[int]) -> int | None:
    """Return the index of the first token in which two answers differ; None where they are equal."""
    if one == two:
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )


def said(error: BaseException) -> str:
    """Return an exception's type and message in one line; of ours the message alone."""
    text = " ".join(str(error).split())[:260]
    return text if isinstance(error, ddtree.DDTreeError) else f"{type(error).__name__}: {text}"


def place(error: BaseException) -> str:
    """Return where an exception was raised, and the last line of ours that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/ddtree/" in f.filename]
    shown = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in (*ours[-1:], frames[-1])]
    return "@ " + " > ".join(dict.fromkeys(shown))
