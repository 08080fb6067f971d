"""`ddtree calibrate`: what it prints, and where its measurements go."""

import json
import re
from pathlib import Path

import pytest

import talker
from ddtree.cli import main
from ddtree.policy.latency import LatencyModel

GRID = [
    "--rows",
    "1",
    "2",
    "--contexts",
    "8",
    "24",
    "64",
    "--widths",
    "1",
    "2",
    "4",
    "8",
    "16",
    "--turns",
    "1",
]


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


def test_it_prints_the_curve_and_its_error_and_keeps_the_measurements(run, tmp_path):
    code, out, err = run(*GRID)
    assert code == 0
    assert "measuring" in err
    assert "1 sequence, by tokens" in out and "2 sequences, by tokens" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d+\s+\d+\.\d", line)]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16] * 2
    assert all(len(row) == 6 for row in rows)
    assert re.search(r"without node counts 4 and without contexts 24, .* median error of \d+\.\d%", out)
    saved = re.search(r"number of threads: (.*\.json)", out)
    assert saved and saved[1].startswith(str(tmp_path / "cache"))
    model = LatencyModel.from_dict(json.loads(Path(saved[1]).read_text())["model"])
    assert {point.rows for point in model.points} == {1, 2}
    assert set(model.draft_points) == {"lookup"}


def test_it_can_write_to_a_file_too(run, tmp_path):
    code, out, _ = run(*GRID, "--drafter", "none", "--out", str(tmp_path / "here" / "curve.json"))
    assert code == 0
    assert out.endswith(f"written to {tmp_path / 'here' / 'curve.json'}\n")
    values = json.loads((tmp_path / "here" / "curve.json").read_text())
    assert LatencyModel.from_dict(values["model"]).draft_points == {}


def test_too_few_points_for_the_error_are_said_to_be(run):
    code, out, _ = run("--rows", "1", "--contexts", "8", "--widths", "1", "2", "--turns", "1")
    assert code == 0
    assert "Too few node counts and contexts" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows holds 0"),
        (["--widths", "4000"], "widths holds 4000"),
        (["--contexts", "1"], "contexts holds 1"),
        (["--turns", "0"], "turns holds 0"),
        (["--rows", "two"], "invalid int value"),
    ],
)
def test_mistakes_are_one_line(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1
