"""Prompt sets: the one that ships, files, and the hub's by name."""

import json
from collections import Counter

import pytest

from ddtree.bench import prompt_sets
from ddtree.errors import ConfigError

TASKS = {"chat", "code", "maths", "translation", "summary", "retrieval"}


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def one(name, task="chat", turns=("hello",)):
    return {"id": name, "task": task, "turns": list(turns)}


def test_the_set_that_ships_has_forty_prompts_of_six_tasks():
    found = prompt_sets.read(["small"])
    counts = Counter(prompt.task for prompt in found)
    assert len(found) == 40 and set(counts) == TASKS
    assert all(5 <= count <= 8 for count in counts.values())
    assert any(len(prompt.turns) > 1 for prompt in found)


def test_prompts_are_taken_from_the_tasks_in_turn():
    found = prompt_sets.read(["small"], per_task=2, limit=9)
    assert [prompt.task for prompt in found[:6]] == [prompt.task for prompt in found[6:]] + [
        prompt.task for prompt in found[3:6]
    ]
    assert max(Counter(prompt.task for prompt in found).values()) == 2


def test_a_file_of_json_lines_is_a_set(tmp_path):
    path = write(tmp_path / "own.jsonl", one("a", turns=("é", "then")), "", {**one(7), "more": 1})
    assert prompt_sets.read([path]) == [
        prompt_sets.BenchPrompt("a", "chat", ("é", "then")),
        prompt_sets.BenchPrompt("7", "chat", ("hello",)),
    ]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_unicode_inside_a_text_do_not_end_its_line(tmp_path, end):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(one("a", turns=(f"one{end}two",)), ensure_ascii=False), encoding="utf-8")
    assert prompt_sets.read([str(path)])[0].turns == (f"one{end}two",)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(one("a")), encoding="utf-8-sig")
    assert prompt_sets.read([str(path)]) == [prompt_sets.BenchPrompt("a", "chat", ("hello",))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 200_000, "line 2 is not JSON"),
        (one("b", turns=("x\ud800y",)), "line 2 holds half of a character"),
        (one("b\udc00"), "line 2 holds half of a character"),
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no object"),
        ({"id": "b", "task": "t"}, 'line 2: "turns" must be'),
        ({"id": "b", "task": "t", "turns": []}, 'line 2: "turns" must be'),
        ({"id": "b", "task": "t", "turns": [""]}, 'line 2: "turns" must be'),
        ({"id": "b", "task": "t", "turns": "text"}, 'line 2: "turns" must be'),
        ({"id": True, "task": "t", "turns": ["x"]}, 'line 2: "id" must be'),
        ({"id": "b", "turns": ["x"]}, 'line 2: "task" must be'),
        (one("a"), "two prompts have the id 'a'"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, line, message):
    path = write(tmp_path / "own.jsonl", one("a"), line)
    with pytest.raises(ConfigError, match=message):
        prompt_sets.read([path])


def test_what_cannot_be_read_or_holds_nothing_is_named(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name, message in (
        ("nowhere", "neither a file nor one of the sets small, gsm8k"),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "bytes.jsonl"), "not UTF-8"),
        (write(tmp_path / "empty.jsonl"), "holds no prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            prompt_sets.read([name])
    for counts in ({"per_task": 0}, {"limit": 0}):
        with pytest.raises(ConfigError, match="selects no prompt"):
            prompt_sets.read(["small"], **counts)


def test_the_digest_tells_sets_and_orders_apart():
    found = prompt_sets.read(["small"], per_task=1)
    assert prompt_sets.digest(found) == prompt_sets.digest(list(found))
    assert prompt_sets.digest(found) != prompt_sets.digest(found[::-1]) != prompt_sets.digest(found[:-1])


def test_hub_sets_become_prompts_of_their_task(monkeypatch):
    rows = {
        "openai/gsm8k": [{"question": "1+1?"}, {"question": "{}"}],
        "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"]}],
        "tatsu-lab/alpaca": [
            {"instruction": "Sum up.", "input": "Text."},
            {"instruction": "Sing.", "input": ""},
        ],
    }
    monkeypatch.setattr(prompt_sets, "_load", lambda part: rows[part.source])
    monkeypatch.setattr(prompt_sets.importlib.util, "find_spec", lambda name: True)
    found = {prompt.id: prompt for prompt in prompt_sets.read(["gsm8k", "mtbench", "alpaca"])}
    assert found["gsm8k-1"].turns[0].startswith("1+1?\n") and "\\boxed{}" in found["gsm8k-1"].turns[0]
    assert found["gsm8k-2"].turns[0].startswith("{}\n")
    assert found["mtbench-1"] == prompt_sets.BenchPrompt("mtbench-1", "mtbench", ("first", "second"))
    assert [found[f"alpaca-{n}"].turns for n in (1, 2)] == [("Sum up.\n\nText.",), ("Sing.",)]
    assert len(prompt_sets.read(["gsm8k"], per_task=1)) == 1


def test_hub_sets_without_the_package_or_the_network_are_named(monkeypatch):
    monkeypatch.setattr(prompt_sets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package datasets: pip install 'ddtree\[bench\]'"):
        prompt_sets.read(["gsm8k"])

    def offline(part):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(prompt_sets.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(prompt_sets, "_load", offline)
    with pytest.raises(
        ConfigError, match=r"'mbpp' \(google-research-datasets/mbpp\) cannot be loaded \(no route\)"
    ):
        prompt_sets.read(["mbpp"])
