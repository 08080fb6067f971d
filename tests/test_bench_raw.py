"""The file of raw figures: going on with it, and refusing what is not it."""

import errno
import json
import os

import pytest

import benchfakes as fakes
from ddtree.bench.raw import Log, read
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
    made = fakes.ways(*NAMES)
    with Log(broken, fakes.header(NAMES)) as log:
        done = len(log.done)
        fakes.runner(log, made).run()
    assert done == (kept - 1) // 3
    warm_up = 2 if done < 12 else 0
    assert len(made[0].asked) == 12 - done + warm_up
    keys = [(run["id"], run["temperature"], run["cell"]) for run in read(broken).runs]
    assert keys == [(run["id"], run["temperature"], run["cell"]) for run in read(whole).runs]


def test_prompts_that_were_passed_over_stay_so(tmp_path):
    path = tmp_path / "raw.jsonl"
    for _ in range(2):
        with Log(path, fakes.header(NAMES)) as log:
            # Prompts have 1 to 4 tokens here, and answers 8.
            fakes.runner(log, fakes.ways(*NAMES), fakes.plan(max_context=11)).run()
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
        Log(path, header)
    assert path.read_bytes() == before


def test_another_date_and_command_are_the_same_run(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    with Log(path, {**fakes.header(NAMES), "date": "later", "command": "again"}) as log:
        assert len(log.done) == 12
    assert read(path).header["date"] == "2026-11-29T12:00:00+00:00"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "line 1 is not of a file of figures"),
        ('{"kind": "run"}\n', "line 1 .* the first line is no header"),
        ('{"kind": "header", "format": 99}\n', "line 1 .* format 99 is not 1"),
        ('{"kind": "header", "format": 1, "settings": {}}\n', "line 1"),
    ],
)
def test_other_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "raw.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    fakes.measured(path, NAMES)
    every = lines(path)
    path.write_text("".join([*every[:3], '{"kind": "run", "id": 1}\n', *every[3:]]))
    with pytest.raises(ConfigError, match=r"line 4 is not of a file of figures \(KeyError"):
        read(path)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read or written"):
        Log(tmp_path, fakes.header(NAMES))
    with pytest.raises(ConfigError, match=r"cannot be read \(no such file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(
        ConfigError, match=f"cannot be written .{os.strerror(errno.ENOSPC).lower()}"
    ) as caught:
        Log(path, fakes.header(NAMES))
    assert "\n" not in str(caught.value)
