"""Figures, tables, pictures and documents made of raw figures."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

import benchfakes as fakes
from ddtree.bench import report
from ddtree.bench.prompt_sets import BenchPrompt
from ddtree.bench.report import markdown, terminal, write
from ddtree.bench.results import Results, ResultsFile, read
from ddtree.bench.tables import RunStats, Table, median, quartiles, speed, tables
from ddtree.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [
    "off",
    "chain",
    "chain@lookup",
    "tree:8",
    "tree:16",
    "tree:16+uncoupled",
    "tree:auto",
    "auto",
    "auto@lookup",
]


def record(
    cell, decode, task="chat", turn=0, prompt="p", tokens=11, verdict="equal", accepted=None, total=None
):
    return {
        "kind": "run", "id": prompt, "task": task, "temperature": 0.0, "turn": turn, "message": 0, "messages": 1,
        "cell": cell, "tokens": tokens, "decode_s": decode, "total_s": total or decode + 1.0, "ttft_s": 1.0,
        "rounds": 10, "nodes": 40, "accepted_depth": accepted or {"0": 10}, "verdict": {"kind": verdict},
        "seconds": {"prefill": 1.0, "draft": 0.1, "build": 0.0, "verify": decode / 2, "walk": 0.0, "commit": 0.0},
    }  # fmt: skip


def figures(*records, cells=("off", "chain")):
    return RunStats(Results(fakes.header(list(cells)), list(records)), 0.0)


def test_speeds_of_decoding_leave_the_first_token_out():
    run = record("off", 5.0, tokens=11, total=8.0)
    assert speed(run, "decode") == 2.0 and speed(run, "total") == 11 / 8
    assert math.isnan(speed(record("off", 0.0, tokens=1), "decode"))


def test_ratios_are_taken_within_a_turn_and_medians_over_turns_then_prompts():
    # The machine is half as fast in the second turn, for both; in the third only for one.
    found = figures(
        record("off", 4.0), record("chain", 2.0), record("off", 8.0, turn=1), record("chain", 4.0, turn=1),
        record("off", 4.0, turn=2), record("chain", 4.0, turn=2), record("off", 1.0, prompt="q"),
        record("chain", 0.2, prompt="q"), record("off", 1.0, prompt="r"), record("chain", 1.0, prompt="r"),
    )  # fmt: skip
    assert found.ratios("chain", "off") == [2.0, 5.0, 1.0]
    assert median(found.ratios("chain", "off")) == 2.0
    assert quartiles(found.ratios("chain", "off")) == (1.5, 3.5)
    assert found.speeds("off") == [2.5, 10.0, 10.0]
    assert found.noise("off") == pytest.approx(0.3464, abs=1e-4)


def test_tau_pools_rounds_and_the_geometric_mean_is_over_tasks():
    found = figures(
        record("off", 4.0), record("chain", 1.0, accepted={"0": 1, "2": 3}), record("off", 4.0, "code", prompt="q"),
        record("chain", 4.0, "code", prompt="q", accepted={"1": 12}), record("off", 4.0, "code", prompt="r"),
        record("chain", 4.0, "code", prompt="r", accepted={"1": 0}),
    )  # fmt: skip
    assert found.tau("chain", "chat") == 1 + 6 / 4
    assert found.tau("chain") == 1 + 18 / 16
    assert found.geometric("chain", "off") == pytest.approx(math.sqrt(4.0 * 1.0))
    assert math.isnan(found.tau("chain", "none")) and math.isnan(found.geometric("none", "off"))


def table(raw, title):
    return next(one for one in tables(raw) if one.title == title)


def test_a_deciding_cell_is_held_against_the_best_fixed_one_it_could_have_been():
    cells = ["off", "chain", "tree:8", "tree:16@lookup", "tree:auto", "auto", "auto@lookup"]
    pace = dict(zip(cells, (8.0, 2.0, 4.0, 1.0, 5.0, 2.0, 2.0), strict=True))
    raw = Results(fakes.header(cells), [record(cell, pace[cell]) for cell in cells])
    row = table(raw, "tree:auto against fixed choices, T=0").rows[0]
    assert row == ["chat", "1.600 (1 of 1)", "0.400 (0 of 1)", "tree:8", "0.800 (0 of 1)"]
    row = table(raw, "auto against fixed choices, T=0").rows[0]
    assert row == ["chat", "4.000 (1 of 1)", "1.000 (1 of 1)", "tree:16@lookup", "0.500 (0 of 1)"]
    assert table(raw, "auto@lookup against fixed choices, T=0").rows[0][3] == "tree:16@lookup"
    claims = {row[0]: row[1:] for row in table(raw, "Checks").rows}
    assert claims["speed(auto) >= 0.97 of the best fixed cell"] == ["0 of 1", "0.500", "chat, T=0"]
    assert claims["tau(tree:8) >= tau(chain)"] == ["1 of 1", "1.000", "chat, T=0"]


def test_differences_are_counted_and_told():
    records = [record("off", 2.0), record("chain", 1.0, verdict="different")]
    raw = Results(fakes.header(["off", "chain"]), records)
    raw.runs[1]["verdict"] |= {"at": 5, "gap": 0.5, "noise": 0.1}
    assert table(raw, "Speeds, medians over all prompts, T=0").rows[1][-3:] == ["0", "0", "1"]
    assert "Different from off: chain, p, T=0, at token 5 (gap 0.5, noise 0.1)." in terminal(raw)


def test_a_table_is_aligned_for_terminals_and_piped_for_markdown():
    one = Table("Title", ["task", "x"], [["a", "1.00"], ["longer", "-"]])
    assert one.text() == "Title\ntask       x\na       1.00\nlonger     -"
    assert one.markdown() == "**Title**\n\n| task | x |\n| --- | --: |\n| a | 1.00 |\n| longer | - |"


@pytest.fixture
def folder(tmp_path):
    fakes.measured(tmp_path / "raw" / "one.jsonl", NAMES, ("hf",), turns=2)
    return tmp_path


def test_titles_are_unique_and_titles_of_all_kinds_are_there(folder):
    titles = [one.title for one in tables(read(folder / "raw" / "one.jsonl"))]
    assert len(set(titles)) == len(titles) == 2 * (5 + 3) + 1 + 1
    assert "Drafting that looks at the noise, against drafting that does not, T=1" in titles


def test_a_document_keeps_its_prose_and_the_parts_of_other_files(folder):
    first, path = folder / "raw" / "one.jsonl", folder / "results.md"
    second = folder / "raw" / "two.jsonl"
    fakes.measured(second, ["off", "chain"])
    path.write_text("# Ours\n\nBefore.\n")
    for _ in range(2):
        write(path, first, read(first), [folder / "plots" / "tau-t0.png"])
        write(path, second, read(second), [])
    path.write_text(path.read_text() + "\nAfter.\n")
    write(path, first, read(first), [])
    parts = [markdown(read(file), f"raw/{file.name}", []) for file in (first, second)]
    assert path.read_text() == f"# Ours\n\nBefore.\n\n{parts[0]}\n\n{parts[1]}\n\nAfter.\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        write(folder, first, read(first), [])


@pytest.mark.parametrize("name", ["demo-cpu.jsonl", "present-cpu.jsonl"])
def test_the_published_tables_are_those_of_the_committed_results(name):
    document = (DOCS / "results.md").read_text()
    begin, end = f"<!-- figures of results/{name} -->", "<!-- end of figures -->"
    part = begin + document.partition(begin)[2].partition(end)[0] + end
    pictures = re.findall(r"!\[.*\]\((.*)\)", part)
    assert markdown(read(DOCS / "results" / name), f"results/{name}", pictures) == part


@pytest.mark.parametrize("name", ["a|b", "a\nb", "a\u2028b", "<!-- end of figures -->"])
def test_names_that_mean_something_in_markdown_keep_the_document_whole(tmp_path, name):
    path, raw_path = tmp_path / "results.md", tmp_path / "odd.jsonl"
    with ResultsFile(raw_path, fakes.header(["off", "chain"])) as results:
        chosen = [BenchPrompt(f"{name} 1", name, ("x",)), BenchPrompt(f"{name} 2", "long", ("x" * 99,))]
        fakes.runner(results, fakes.methods("off", "chain"), fakes.plan(chosen)).run()
    path.write_text("# Ours\n")
    for _ in range(2):
        write(path, raw_path, read(raw_path), [])
    text = path.read_text()
    assert text.count("<!--") == 2 and text.endswith("<!-- end of figures -->\n")
    table = text.partition("**Tokens a round (tau), T=0**\n\n")[2].partition("\n\n")[0]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()] == [3] * 4


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures_are_drawn(folder):
    raw = read(folder / "raw" / "one.jsonl")
    drawn = report.draw(raw, folder / "plots")
    assert {path.name for path in drawn} == {
        *(f"{name}-t{t}.png" for name in ("speedup", "tau", "accepted", "round") for t in (0, 1)), "verification.png",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in drawn)
    raw.latency = None
    raw.runs = [run for run in raw.runs if not run["cell"].startswith("tree")]
    raw.header["settings"]["cells"] = ["off", "chain"]
    assert [path.name for path in report.draw(raw, folder / "fewer")] == [
        "accepted-t0.png", "round-t0.png", "accepted-t1.png", "round-t1.png",
    ]  # fmt: skip


def test_without_matplotlib_pictures_are_refused_by_name(folder, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--plots needs matplotlib: pip install 'ddtree\[bench\]'"):
        report.draw(read(folder / "raw" / "one.jsonl"), folder / "plots")


def test_figures_of_a_run_that_was_broken_off_are_shown(folder):
    path = folder / "raw" / "one.jsonl"
    begun = path.read_text().splitlines()[:11]
    path.write_text("\n".join(begun) + "\n")
    assert json.loads(begun[-1])["temperature"] == 0
    assert tables(read(path))[0].title == "Speedup of decoding over off, T=0"
    path.write_text(begun[0] + "\n")
    assert tables(read(path)) == []
