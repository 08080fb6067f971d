"""`ddtree bench` as a command: what it prints, writes, refuses."""

import json

import pytest

import talker
from ddtree.cli import main

CELLS = ("--cells", "chain", "tree:8", "auto")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target")))


@pytest.fixture
def bench(target, tmp_path, capsys, monkeypatch):
    """Run the command on a tiny pair; gives exit code, standard output and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    records = [{"id": f"{k}-1", "task": k, "turns": [t]} for k, t in (("echo", "abc" * 4), ("chat", "hello"))]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def call(*more, drafter="lookup"):
        options = ["--target", target, "--drafter", drafter, "--device", "cpu", "-n", "12"]
        try:
            code = main(["bench", *options, "--prompts", str(prompts), *more])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def raw(bench, tmp_path):
    """Results of a short run."""
    path = tmp_path / "raw.jsonl"
    assert bench("--out", str(path), "--cells", "chain", "--baseline", "hf", "--temperatures", "0")[0] == 0
    return path


def test_it_measures_prints_and_goes_on(bench, tmp_path, capsys):
    raw = tmp_path / "raw.jsonl"
    arguments = ("--out", str(raw), *CELLS, "--baseline", "hf", "--turns", "2")
    code, out, err = bench(*arguments, "--markdown", str(tmp_path / "results.md"))
    assert code == 0, err
    for words in ("Speedup of decoding over off, T=0", "Tokens a round (tau), T=1", "geometric mean, over hf", "Checks",
                  "auto against fixed choices", f"raw figures: {raw}"):  # fmt: skip
        assert words in out
    assert "Each task and cell" not in out and "measuring: 100%" in err
    assert "**Each task and cell, T=0**" in (tmp_path / "results.md").read_text()
    records = [json.loads(line) for line in raw.read_text().splitlines()]
    runs = [record for record in records if record["kind"] == "run"]
    assert len(runs) == 2 * 2 * 2 * 5
    # Transformers' own sampling draws other noise.
    compared = [run for run in runs if run["cell"] != "hf" or not run["temperature"]]
    assert {run["verdict"]["kind"] for run in compared} == {"equal"}
    settings = records[0]["settings"]
    assert settings["cells"] == ["off", "chain", "tree:8", "auto"] and settings["baselines"] == ["hf"]
    assert settings["dtype"] == "float32" and records[0]["machine"]["threads"] >= 1
    before = raw.read_bytes()
    code, again, err = bench(*arguments)
    assert code == 0 and raw.read_bytes() == before and f"going on with {raw}" in err
    assert again == out
    code, out, err = bench(*arguments, "--seed", "1")
    assert (code, out) == (2, "") and "holds a run with other seed" in err
    assert main(["bench", "report", str(raw)]) == 0
    assert capsys.readouterr().out == again.partition("\n\nraw figures:")[0] + "\n"


@pytest.mark.parametrize(("cell", "code"), [("chain", 1), ("hf", 0)])
def test_a_text_that_differs_is_exit_code_1_unless_it_is_a_baselines(raw, capsys, cell, code):
    records = [json.loads(line) for line in raw.read_text().splitlines()]
    for record in records:
        if record.get("cell") == cell:
            record["verdict"] = {"kind": "different", "at": 3, "gap": 1.0, "noise": 0.0}
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["bench", "report", str(raw)]) == code
    assert f"Different from off: {cell}, echo-1, T=0, at token 3" in capsys.readouterr().out


def test_half_precision_is_checked_for_near_ties(bench, tmp_path):
    code, out, err = bench("--out", str(tmp_path / "raw.jsonl"), "--cells", "tree:8", "--dtype", "bfloat16")
    assert code == 0, out + err
    assert ", bfloat16;" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cells", "beam"), "unknown cell 'beam': write off, chain"),
        (("--cells", "tree:8@dflash"), "there is no drafter 'dflash'; choose from lookup"),
        (("--baseline", "assisted"), "needs a draft model"),
        (("--baseline", "vllm"), "unknown baseline 'vllm'"),
        (("--prompts", "nowhere"), "neither a file nor one of the sets"),
        (("--budgets", "x"), "'x' is neither a whole number nor auto"),
        (("--budgets", "0"), "a tree's budget"),
        (("--temperatures", "-1"), "--temperatures -1 is not a number from 0 up"),
        (("--temperatures", "1e30"), "temperature"),
        (("--out", "x.jsonl", "--markdown", "./x.jsonl"), "is the file of raw figures: name another file"),
        (("--temperatures", "nan"), "--temperatures nan"),
        (("--turns", "0"), "--turns 0 must be at least 1"),
        (("-n", "0"), "--max-tokens 0 must be at least 1"),
        (("--messages", "0"), "--messages 0 must be at least 1"),
        (("--per-task", "0"), "--per-task 0 selects no prompt"),
        (("--limit", "-1"), "--limit -1 selects no prompt"),
        (("-n", "600"), "no prompt leaves room for 600 tokens"),
        (("--threads", "0"), "--threads 0"),
        (("--out", "/"), "cannot be read or written"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(bench, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if "error: " in line]
    assert len(said) == 1 and message in said[0]
    if "1e30" in arguments:
        assert not list(tmp_path.glob("bench-*"))  # refused before anything is written


def test_a_report_of_another_file_is_refused(tmp_path, capsys):
    path = tmp_path / "other.jsonl"
    path.write_text('{"id": 1}\n')
    assert main(["bench", "report", str(path)]) == 2
    assert "line 1 is not of a file of figures" in capsys.readouterr().err


def test_without_a_drafter_plain_decoding_is_measured(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = bench("--temperatures", "0", "--baseline", "hf", drafter="none")
    assert code == 0, err
    assert "Speedup of decoding over off, T=0" in out and "chain" not in out
    assert len(list(tmp_path.glob("bench-*.jsonl"))) == 1
    code, _, err = bench("--cells", "auto", drafter="none")
    assert code == 2 and "cell 'auto' needs a drafter, and there is none" in err


def test_a_report_does_not_write_over_the_raw_figures(raw, capsys):
    before = raw.read_bytes()
    assert main(["bench", "report", str(raw), "--markdown", str(raw)]) == 2
    assert "is the file of raw figures: name another file" in capsys.readouterr().err
    assert raw.read_bytes() == before


def test_options_before_report_hold(raw, tmp_path):
    assert main(["bench", "--markdown", str(tmp_path / "a.md"), "report", str(raw)]) == 0
    assert main(["bench", "report", str(raw), "--markdown", str(tmp_path / "b.md")]) == 0
    assert (tmp_path / "a.md").read_text() == (tmp_path / "b.md").read_text()


def test_a_busy_machine_is_said_to_spoil_the_times(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0), raising=False)
    code, out, err = bench("--out", str(tmp_path / "raw.jsonl"), "--cells", "off", "--temperatures", "0")
    assert code == 0 and "this machine is busy (load 99.0" in err and "is busy" not in out
