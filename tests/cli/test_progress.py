"""Progress lines."""

import io
import time

from ddtree.progress import ProgressLine


def test_a_line_tells_share_speed_time_left_and_note(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    line = ProgressLine("fit", 1000, "steps", stream, every=10)
    line.update(200)  # taken up again at 200
    now[0] += 20
    line.update(400, "loss 1.5")
    assert stream.getvalue().splitlines() == [
        "fit: 200 of 1,000 steps (20%)",
        "fit: 400 of 1,000 steps (40%), 10/s, 1 min left, loss 1.5",
    ]


def test_lines_come_no_more_often_than_asked_but_always_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    line = ProgressLine("x", 10, "steps", stream, every=100)
    for done in range(11):
        line.update(done)
        now[0] += 1
    assert [text.split(",")[0] for text in stream.getvalue().splitlines()] == [
        "x: 0 of 10 steps (0%)",
        "x: 10 of 10 steps (100%)",
    ]
