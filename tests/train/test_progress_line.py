"""Progress bars."""

from ddtree.train.arguments import TrainConfig
from ddtree.train.training_log import HeldOutScore, TrainLog, TrainProgress, progress_bar


def last(capsys):
    return capsys.readouterr().err.splitlines()[-1]


def test_a_bar_tells_label_share_unit_and_figures(tmp_path, capsys):
    (tmp_path / "fit").mkdir()
    log = TrainLog(tmp_path / "fit" / "log.jsonl", TrainConfig(steps=1000), 200, 3.0)
    log.add(TrainProgress(300, 4.0, {"dflash": 2.0}, {"dflash": HeldOutScore(1.75, 1.25)}), 0.1)
    log.add(TrainProgress(400, 5.0, {"dflash": 1.5}, None), 0.1)
    log.close()
    shown = last(capsys)
    assert shown.startswith("fit:  40%")
    assert " 400/1000 [" in shown
    assert " steps/s, loss=1.5, held_out=1.75, tau=1.25]" in shown


def test_a_run_by_the_clock_shows_its_time_and_its_steps(tmp_path, capsys):
    log = TrainLog(tmp_path / "log.jsonl", TrainConfig(minutes=2.0), 0, 0.0)
    log.add(TrainProgress(7, 30.2, {"markov": 2.0, "domino": 1.0}, None), 0.1)
    log.close()
    shown = last(capsys)
    assert " 30/120 [" in shown
    assert ", step=7, loss.markov=2, loss.domino=1]" in shown


def test_the_rate_leaves_out_what_an_earlier_run_did(capsys):
    progress_bar("fit", 1000, "steps", 600).close()
    assert "600/1000 [00:00<?, ? steps/s" in last(capsys)


def test_a_file_gets_few_lines_however_many_updates(capsys):
    with progress_bar("x", 1000, "steps") as bar:
        for _ in range(1000):
            bar.update()
    written = capsys.readouterr().err
    assert written.count("\r") <= 3
    assert "1000/1000" in written
