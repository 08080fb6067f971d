"""Progress lines."""

import io

from ddtree.train.training_log import ProgressLine


def test_a_line_tells_label_share_unit_and_note():
    stream = io.StringIO()
    line = ProgressLine("fit", 1000, "steps", stream)
    line.update(200, "loss 2.0")
    line.update(400, "loss 1.5")
    line.close()
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("fit:  40%")
    assert " 400/1000 [" in last
    assert " steps/s, loss 1.5]" in last


def test_the_rate_leaves_out_what_an_earlier_run_did():
    stream = io.StringIO()
    line = ProgressLine("fit", 1000, "steps", stream)
    line.update(600)
    line.close()
    assert "600/1000 [00:00<?, ? steps/s" in stream.getvalue().splitlines()[-1]


def test_a_file_gets_few_lines_however_many_updates():
    stream = io.StringIO()
    line = ProgressLine("x", 1000, "steps", stream)
    for done in range(1001):
        line.update(done)
    line.close()
    assert stream.getvalue().count("\r") <= 3
    assert "1000/1000" in stream.getvalue()


def test_a_line_that_was_never_updated_writes_nothing():
    stream = io.StringIO()
    ProgressLine("x", 10, "steps", stream).close()
    assert stream.getvalue() == ""
