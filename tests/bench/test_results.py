"""The file of raw figures: going on with it, and refusing what is not it."""

import errno
import json
import os

import pytest

import benchfakes as fakes
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.results import ResultsFile, read
from ddtree.errors import ConfigError

NAMES = ["off", "chain", "tree:8"]


def lines(path):
    return path.read_text().splitlines(keepends=True)


def test_the_first_line_is_the_header_and_every_cell_has_its_line(tmp_path):
    raw = fakes.measured(tmp_path / "raw.jsonl", NAMES)
    records = [json.loads(line) for line in lines(tmp_path / "raw.jsonl")]
    assert records[0]["kind"] == "header" and records[0]["settings"]["cells"] == NAMES
    assert [record["cell"] for record in records[1:4]] == NAMES
    assert len(raw.runs) == 6 * 2 * 3
    assert {"id", "task", "temperature", "seed", "cell", "tokens", "total_s", "decode_s", "ttft_s", "rounds", "nodes",
            "tau", "accepted_depth", "seconds", "arms", "verdict"} <= set(raw.runs[0])  # fmt: skip


@pytest.mark.parametrize("kept", [1, 2, 5, 7, 30, 37])
@pytest.mark.parametrize("torn", ["", '{"kind": "run", "id": "ch'])
def test_a_run_that_was_broken_off_goes_on_there(tmp_path, kept, torn):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    fakes.measured(whole, NAMES)
    broken.write_text("".join(lines(whole)[:kept]) + torn)
    made = fakes.methods(*NAMES)
    with ResultsFile(broken, fakes.header(NAMES)) as results:
        done = len(results.done)
        fakes.runner(results, made).run()
    assert done == (kept - 1) // 3
    warm_up = 2 if done < 12 else 0
    assert len(made[0].asked) == 12 - done + warm_up
    keys = [(run["id"], run["temperature"], run["cell"]) for run in read(broken).runs]
    assert keys == [(run["id"], run["temperature"], run["cell"]) for run in read(whole).runs]


def test_a_line_lost_in_the_middle_is_measured_again_and_the_others_stay(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    every = lines(path)
    path.write_text("".join(every[:5] + every[6:]))
    with ResultsFile(path, fakes.header(NAMES)) as results:
        assert len(results.done) == 11
        fakes.runner(results, fakes.methods(*NAMES)).run()
    again = lines(path)
    assert again[:34] == every[:4] + every[7:] and len(read(path).runs) == 36


def test_prompts_that_were_passed_over_stay_so(tmp_path):
    path = tmp_path / "raw.jsonl"
    for _ in range(2):
        with ResultsFile(path, fakes.header(NAMES)) as results:
            # Prompts have 1 to 4 tokens here, and answers 8.
            fakes.runner(results, fakes.methods(*NAMES), fakes.plan(max_context=11)).run()
    raw = read(path)
    assert {record["id"] for record in raw.skipped} == {"code-3"} and len(raw.skipped) == 2
    assert "code-3" not in {run["id"] for run in raw.runs}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"max_tokens": 9}}, "max_tokens"),
        ({"settings": {"turns": 2, "dtype": "bfloat16"}}, "dtype, turns"),
        ({"machine": {"threads": 4}}, "threads"),
        ({"versions": {"torch": "3"}}, "torch"),
    ],
)
def test_figures_of_another_run_are_not_mixed_in(tmp_path, changes, named):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    before = path.read_bytes()
    header = fakes.header(NAMES)
    for part, values in changes.items():
        header[part] |= values
    with pytest.raises(ConfigError, match=f"holds a run with other {named}: name another file"):
        ResultsFile(path, header)
    assert path.read_bytes() == before


def test_another_date_and_command_are_the_same_run(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    with ResultsFile(path, {**fakes.header(NAMES), "date": "later", "command": "again"}) as results:
        assert len(results.done) == 12
    assert read(path).header["date"] == "2026-11-29T12:00:00+00:00"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "line 1 is not of a file of figures"),
        ('{"kind": "run"}\n', "line 1 .* the first line is no header"),
        ('{"kind": "header", "format": 99}\n', "line 1 .* format 99 is not 1"),
        ('{"kind": "header", "format": 1, "settings": {}}\n', "line 1"),
        ("[" * 200_000 + "\n", "line 1 is not of a file of figures .RecursionError"),
    ],
    ids=["empty", "text", "no header", "format", "header", "brackets"],
)
def test_other_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "raw.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read or written"):
        ResultsFile(tmp_path, fakes.header(NAMES))
    with pytest.raises(ConfigError, match=r"cannot be read \(no such file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.symlink_to("/dev/full")
    full = os.strerror(errno.ENOSPC).lower()
    with pytest.raises(ConfigError, match=f"cannot be written .{full}") as caught:
        ResultsFile(path, fakes.header(NAMES))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["\u2028", "\x85"])
def test_line_ends_of_unicode_inside_texts_do_not_end_a_line_of_figures(tmp_path, end):
    path = tmp_path / "raw.jsonl"
    chosen = [BenchPrompt(f"a{end}b", f"t{end}u", ("x",))]
    with ResultsFile(path, fakes.header(NAMES)) as results:
        fakes.runner(results, fakes.methods(*NAMES), fakes.plan(chosen)).run()
    records = [json.loads(line) for line in path.open(newline="\n")]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    assert {run["id"] for run in read(path).runs} == {f"a{end}b"}
    with ResultsFile(path, fakes.header(NAMES)) as results:
        assert len(results.done) == 2


@pytest.mark.skipif(os.name == "nt", reason="files are not locked there")
def test_a_second_run_on_one_file_is_refused_while_the_first_writes(tmp_path):
    path = tmp_path / "raw.jsonl"
    with ResultsFile(path, fakes.header(NAMES)) as results:
        with pytest.raises(ConfigError, match=r"another run is writing .*raw.jsonl: wait for its end, or"):
            ResultsFile(path, fakes.header(NAMES))
        fakes.runner(results, fakes.methods(*NAMES)).run()
    with ResultsFile(path, fakes.header(NAMES)) as results:
        assert len(results.done) == 12


def test_what_is_gone_on_with_stays_in_the_file_that_others_have_open(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    path.write_text("".join(lines(path)[:6]))
    before = path.stat().st_ino
    fakes.measured(path, NAMES)
    assert path.stat().st_ino == before and len(read(path).runs) == 36


def test_figures_of_one_answer_that_stand_twice_are_refused(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    path.write_text("".join([*lines(path), lines(path)[2]]))
    with pytest.raises(ConfigError, match=r"line 38 .* chain answers 'chat-1' a second time"):
        read(path)


@pytest.mark.parametrize("size", [0, 1, 20, 200, None])
def test_a_run_that_ended_before_it_measured_anything_does_not_bind_the_next(tmp_path, size):
    path = tmp_path / "raw.jsonl"
    with ResultsFile(path, fakes.header(NAMES, max_tokens=9)):
        pass
    path.write_bytes(path.read_bytes()[:size])
    assert fakes.measured(path, NAMES).settings["max_tokens"] == 8
    assert len(read(path).runs) == 36


def test_a_file_of_something_else_without_a_line_end_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("a note")
    with pytest.raises(ConfigError, match="is empty: name a file that ddtree bench has written"):
        ResultsFile(path, fakes.header(NAMES))
    assert path.read_text() == "a note"


MISSING = object()


@pytest.mark.parametrize(
    ("line", "changes", "named"),
    [
        (2, {"tokens": "eight"}, "tokens is 'eight'"),
        (2, {"verdict": {}}, "KeyError: 'kind'"),
        (2, {"verdict": {"kind": []}}, "verdict .* is none of equal"),
        (2, {"verdict": {"kind": "different"}}, "KeyError: 'at'"),
        (2, {"decode_s": None}, "decode_s is None"),
        (2, {"id": ["a"]}, r"id is \['a'\]"),
        (2, {"seconds": {"draft": "long"}}, "seconds holds 'long'"),
        (2, {"accepted_depth": {"deep": 1}}, "deep"),
        (2, {"kind": "skipped", "turn": None}, "turn is None"),
        (2, {"kind": "policy", "cell": []}, "unhashable"),
        *((2, {name: MISSING}, f"KeyError: '{name}'") for name in ("rounds", "nodes", "seconds", "task")),
        (0, {"settings": {"cells": "off"}}, "cells is 'off'"),
        (0, {"settings": {"cells": ["off", 1]}}, "cells holds 1"),
        (0, {"settings": {"temperatures": ["hot"]}}, "temperatures holds 'hot'"),
        (0, {"machine": {"processor": None}}, "processor is None"),
    ],
)
def test_a_line_with_missing_fields_or_other_types_is_named(tmp_path, line, changes, named):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    every = lines(path)
    record = {"state": {}, **json.loads(every[line])}
    for name, value in changes.items():
        record[name] = record[name] | value if line == 0 else value
    every[line] = json.dumps({name: value for name, value in record.items() if value is not MISSING}) + "\n"
    path.write_text("".join(every))
    with pytest.raises(ConfigError, match=f"line {line + 1} is not of a file of figures .*{named}"):
        read(path)
