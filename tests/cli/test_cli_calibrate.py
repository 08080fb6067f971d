"""`ddtree calibrate`: what it prints, and where its measurements go."""

import json
import re
from pathlib import Path

import pytest

import talker
from ddtree.cli import main
from ddtree.engine.engine import Engine
from ddtree.policy import calibration
from ddtree.policy.latency import LatencyTable, Sample

SHORT = ["--rows", "1", "--contexts", "8", "--widths", "1", "2", "--turns", "1"]
GRID = [
    "--rows", "1", "2", "--contexts", "8", "24", "64", "--widths", "1", "2", "4", "8", "16", "--turns", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target")))


@pytest.fixture
def run(target, capsys, monkeypatch, tmp_path):
    """Run the command on the tiny target; gives exit code, standard output and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*more):
        try:
            code = main(["calibrate", "--target", target, "--device", "cpu", *more])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


def test_it_prints_the_curve_and_keeps_the_measurements(run, tmp_path):
    code, out, err = run(*GRID)
    assert code == 0
    assert "measuring" in err
    assert "1 sequence, by tokens" in out and "2 sequences, by tokens" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d+\s+\d+\.\d", line)]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16] * 2
    assert all(len(row) == 6 for row in rows)
    saved = re.search(r"number of threads: (.*\.json)", out)
    assert saved and saved[1].startswith(str(tmp_path / "cache"))
    model = LatencyTable.from_dict(json.loads(Path(saved[1]).read_text())["model"])
    assert {point.rows for point in model.points} == {1, 2}
    assert set(model.draft_points) == {"lookup"}


def test_it_can_write_to_a_file_too(run, tmp_path):
    code, out, _ = run(*GRID, "--drafter", "none", "--out", str(tmp_path / "here" / "curve.json"))
    assert code == 0
    assert f"\nwritten to {tmp_path / 'here' / 'curve.json'}\n" in out
    values = json.loads((tmp_path / "here" / "curve.json").read_text())
    assert LatencyTable.from_dict(values["model"]).draft_points == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows holds 0"),
        (["--widths", "4000"], "widths holds 4000"),
        (["--contexts", "1"], "contexts holds 1"),
        (["--turns", "0"], "turns holds 0"),
        (["--rows", "two"], "invalid int value"),
        (["--widths", "1"], "widths holds 1 alone"),
        (["--learn", "--prompts", "nowhere"], "neither a file nor one of the sets"),
        (["--learn", "--per-task", "0"], "--per-task 0 selects no prompt"),
        (["--learn", "--max-context", "70"], "no prompt of small leaves room for 64 tokens"),
        (["--learn", "--into", "/"], "--into / holds no drafter: name the folder of one"),
    ],
)
def test_mistakes_are_one_line(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_measurements_are_written_to_the_named_file_though_the_cache_cannot_be_written(run, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    code, _, err = run(*SHORT, "--out", str(tmp_path / "curve.json"))
    assert code == 2 and "cannot be written" in err.splitlines()[-1]
    assert LatencyTable.from_dict(json.loads((tmp_path / "curve.json").read_text())["model"]).points


def prompts(folder, *texts):
    path = folder / "prompts.jsonl"
    records = [{"id": n, "task": "t", "turns": [text]} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def kept(out):
    return json.loads(Path(re.search(r"acceptance kept in (.*)", out)[1]).read_text())["arms"]


@pytest.fixture
def cheap(monkeypatch):
    """A machine on which nodes cost nothing, so that there is always something to learn."""
    points = [Sample(width, 1, 8, 1.0) for width in (1, 2, 9, 17)]
    drafts = {"lookup": [Sample(width, 1, 8, 1e-6) for width in (2, 9, 17)]}
    monkeypatch.setattr(
        calibration, "thorough", lambda *_, **__: LatencyTable(points, drafts, machine={"device": "a dream"})
    )


@pytest.mark.usefixtures("cheap")
def test_prompts_too_long_to_learn_from_are_passed_over(run, tmp_path):
    code, out, err = run(*SHORT, "--learn", "--prompts", prompts(tmp_path, "abcabc" * 2000, "abcabcabc"))
    assert code == 0, err
    assert kept(out)


@pytest.mark.usefixtures("cheap")
def test_what_was_learnt_before_an_interruption_is_kept(run, tmp_path, monkeypatch):
    plain, asked = Engine.add, []

    def add(*given, **named):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return plain(*given, **named)

    monkeypatch.setattr(Engine, "add", add)
    code, out, _ = run(*SHORT, "--learn", "--prompts", prompts(tmp_path, "abcabcabc", "abcabc"))
    assert code == 130
    assert kept(out)
