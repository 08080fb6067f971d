"""Compose user turns for `ddtree train synthesize --prompts`: tasks that a chat model seldom asks of itself.

Left alone, a model writes requests for advice. Those who use it also translate, summarize, calculate, write code and
ask about texts that they paste. Each turn here is a task out of a few lists; pasted texts are answers that the target
gave before. Nothing else is read:

    ddtree train synthesize --target demo --work first --tokens 1000000
    python scripts/compose_turns.py first/answers --count 6000 --seed 5 --out turns.jsonl
    ddtree train synthesize --target demo --work second --prompts turns.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree.model.pretrained import load_causal_lm
from ddtree.train.data import read_shard, shard_indices, shard_path

WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class Texts:
    """Answers of a folder's shards, as pasted texts and sentences."""

    def __init__(self, folder: Path, tokenizer: Any, shards: int) -> None:
        self.passages: list[str] = []
        for index in shard_indices(folder)[:shards]:
            for conversation in read_shard(shard_path(folder, index))[1]:
                text = tokenizer.decode(conversation.answer, skip_special_tokens=True).strip()
                if len(text) > 150 and text.isascii():
                    self.passages.append(text)

    def passage(self, draw: random.Random, longest: int) -> str:
        """Whole sentences out of one answer."""
        text = draw.choice(self.passages)
        end = max(text.rfind(mark, 0, longest) for mark in (". ", ".\n", "! ", "? "))
        return text[: end + 1] if end > 60 else text[:longest]

    def sentence(self, draw: random.Random) -> str:
        while True:
            found = re.split(r"(?<=[.!?])\s+", draw.choice(self.passages))
            long_enough = [s for s in found if 30 < len(s) < 220 and s[-1] in ".!?" and "\n" not in s]
            if long_enough:
                return draw.choice(long_enough)


Make = Callable[[random.Random, Texts], str]


def translation(draw: random.Random, texts: Texts) -> str:
    language, text = draw.choice(WORDS["languages"]), texts.sentence(draw)
    return draw.choice(
        [
            f"Translate to {language}: {text}",
            f"Translate English to {language}: {text}",
            f'How do you say "{text}" in {language}?',
            f"Please translate this sentence into {language}.\n\n{text}",
            f"Give me a {language} version of the following text:\n{text}",
        ]
    )


def summary(draw: random.Random, texts: Texts) -> str:
    text = texts.passage(draw, draw.randrange(300, 1500))
    how = draw.choice(
        [
            "in one sentence",
            "in two or three sentences",
            "in a short paragraph",
            "briefly",
            "in bullet points",
        ]
    )
    return draw.choice(
        [
            f"Summarize: {text}",
            f"Summarize the following text {how}.\n\n{text}",
            f"{text}\n\nSummarize the text above {how}.",
            f"Here is an article:\n\n{text}\n\nWhat are its main points?",
            f"TL;DR of this, {how}:\n{text}",
        ]
    )


def reading(draw: random.Random, texts: Texts) -> str:
    count = draw.randrange(1, 4)
    parts = [texts.passage(draw, 1300 // count) for _ in range(count)]
    shown = "\n\n".join(f"[{place}] {part}" for place, part in enumerate(parts, 1)) if count > 1 else parts[0]
    about = draw.choice(parts)
    start = " ".join(about.split()[:6])
    ask = draw.choice(
        [
            f'What is said about the part that begins with "{start}"?',
            "What is the main topic?",
            "Which advice is given?",
            "Who is it written for?",
            f"What should one know about {draw.choice(about.split())}?",
            "Which steps are named, and in which order?",
        ]
    )
    return draw.choice(
        [
            f"Answer the question with the help of the text.\n\n{shown}\n\nQuestion: {ask}\nAnswer:",
            f"{shown}\n\n{ask}",
            f"Use these notes to answer: {ask}\n\n{shown}",
            f"Context:\n{shown}\n\nQuestion: {ask}",
        ]
    )


def rewriting(draw: random.Random, texts: Texts) -> str:
    text = texts.passage(draw, draw.randrange(150, 600))
    return draw.choice(
        [
            f"Rewrite this text in a {draw.choice(['formal', 'friendly', 'simpler', 'more lively'])} style:\n\n{text}",
            f"Correct the grammar of the following text.\n\n{text}",
            f"Which keywords describe this text? {text}",
            f"Is the tone of the following text positive, negative or neutral? Explain why.\n\n{text}",
            f"Turn this into a list:\n{text}",
            f"Write a title for this text:\n\n{text}",
            f"Continue this text:\n\n{text}",
        ]
    )


def sums(draw: random.Random, texts: Texts) -> str:
    one, two = draw.sample(WORDS["names"], 2)
    a, b, c = draw.randrange(3, 60), draw.randrange(2, 12), draw.randrange(2, 30)
    thing, place = draw.choice(WORDS["goods"]), draw.choice(WORDS["places"])
    return draw.choice(
        [
            f"{one} has {a} {thing} and buys {b} more every day for {c} days. How many {thing} does {one} have then?",
            f"At {place}, {thing} cost ${b} each. {one} buys {c} and pays with ${b * c + a}. How much change is there?",
            f"{one} and {two} share {b * c} {thing} equally with {max(1, b - 2)} friends. How many does each get?",
            f"{place.capitalize()} sells {a} {thing} on Monday and {b} times as many on Tuesday. "
            "How many are sold in all?",
            f"A train travels {a} km in {b} hours. How far does it travel in {c} hours at the same speed?",
            f"{one} is {a} years old. {two} is {b} years older than half of that. How old is {two} in {c} years?",
            f"What is {a} * {b} + {c}? Show the steps.",
            f"Solve for x: {b}x + {c} = {b * a + c}",
            f"{one} read {b} pages on the first day and {c} pages more on each of the next days. "
            "How many pages in 5 days?",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"{a}% of the {c * 100} visitors of {place} are children. How many adults are there?",
        ]
    )


def code(draw: random.Random, texts: Texts) -> str:
    value, deed, language = (
        draw.choice(WORDS["values"]),
        draw.choice(WORDS["deeds"]),
        draw.choice(WORDS["code_languages"]),
    )
    words = re.findall(r"[a-z]+", deed)
    name, argument = "_".join(words[:3]), draw.choice(["values", "text", "items", "n", "data", "xs"])
    return draw.choice(
        [
            f"Write a {language} function that takes {value} and {deed}.",
            f"Write a {language} function `{name}({argument})`. It takes {value} and {deed}. Add a test.",
            f'Complete this function:\n\ndef {name}({argument}):\n    """Take {value}; {deed}."""\n',
            f"from typing import List\n\n\ndef {name}({argument}):\n"
            f'    """ Given {value}, this function {deed}.\n    """\n',
            f"How do I write {language} code that takes {value} and {deed}? Explain the code.",
            f"Write a class in {language} for {draw.choice(WORDS['places'])} with methods to add, remove and list "
            + draw.choice(WORDS["goods"])
            + ".",
            f"Write unit tests in Python for a function that {deed}.",
            f"What is the time complexity of a function that {deed}? Give the code in {language}.",
        ]
    )


def questions(draw: random.Random, texts: Texts) -> str:
    subject, country = draw.choice(WORDS["subjects"]), draw.choice(WORDS["countries"])
    other = draw.choice(WORDS["subjects"])
    return draw.choice(
        [
            f"What is the capital of {country}, and what is it known for?",
            f"Who were the most important rulers of {country}?",
            f"When did {country} become independent?",
            f"What are the largest rivers of {country}?",
            f"What is {subject}?",
            f"How does {subject} work?",
            f"Why is {subject} important?",
            f"Who first described {subject}?",
            f"What is the difference between {subject} and {other}?",
            f"Explain {subject} to a child.",
            f"Name {draw.randrange(3, 8)} facts about {subject}.",
            f"What do people in {country} eat for breakfast?",
            f"What are common mistakes about {subject}?",
        ]
    )


def writing(draw: random.Random, texts: Texts) -> str:
    subject, name, place = (
        draw.choice(WORDS["subjects"]),
        draw.choice(WORDS["names"]),
        draw.choice(WORDS["places"]),
    )
    return draw.choice(
        [
            f"Write a short story about {name} and {subject}.",
            f"Write a poem about {subject}.",
            f"Write an email to {name} to invite {draw.choice(['them', 'the team'])} to {place}.",
            f"Write a product description for {draw.choice(WORDS['goods'])} sold at {place}.",
            f"Compose a blog post about {subject} for beginners.",
            f"Write a dialogue between {name} and a teacher about {subject}.",
            f"Give me {draw.randrange(3, 11)} ideas for an event about {subject}.",
            f"Write a speech of one minute about {subject}.",
            f"Imagine you work at {place}. How would you explain {subject} to a visitor?",
            f"Create a quiz with {draw.randrange(3, 6)} questions about {subject}, with answers.",
            f"Make a plan for a day in {draw.choice(WORDS['countries'])} for someone who likes {subject}.",
            f"Describe {subject} in {draw.randrange(2, 6)} sentences.",
            f"Write a job advertisement for {place}.",
            f"Plan a lesson on {subject} for a class of ten-year-olds.",
        ]
    )


TASKS: list[Make] = [translation, summary, reading, rewriting, sums, code, questions, writing]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path, help="folder of shards, for texts to paste")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--shards", type=int, default=20, help="shards read (default: %(default)s)")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    texts = Texts(args.answers, load_causal_lm(args.target)[1], args.shards)
    draw = random.Random(args.seed)
    turns: dict[str, None] = {}
    while len(turns) < args.count:
        turns[TASKS[len(turns) % len(TASKS)](draw, texts)] = None
    lines = (json.dumps({"prompt": turn}, ensure_ascii=False) + "\n" for turn in turns)
    args.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
