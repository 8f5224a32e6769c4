"""Progress: the remaining time leaves out compiling and other pauses."""

import io

import pytest

from train.progress import Progress, format_seconds


class Clock:
    """A clock that moves only when told to."""

    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_rate_and_remaining_time_leave_compiling_and_evaluating_out():
    clock = Clock()
    progress = Progress(12, initial=2, stream=io.StringIO(), clock=clock)
    with progress.pause("compile"):
        clock.now += 60.0
    progress.advance(3, tokens=1000, timed=False)
    assert progress.remaining_seconds is None and progress.tokens_per_second is None
    for step in (4, 5):
        clock.now += 2.0
        progress.advance(step, tokens=100)
    with progress.pause("evaluate"):
        clock.now += 30.0
        assert progress.seconds == 4.0
        with progress.pause("save"):
            clock.now += 1.0
    assert progress.seconds == 4.0
    assert progress.remaining_seconds == pytest.approx(7 * 2.0)
    assert progress.tokens_per_second == pytest.approx(50.0)
    assert progress.paused_seconds == {"compile": 60.0, "evaluate": 31.0, "save": 1.0}


def test_plain_lines_where_there_is_no_terminal():
    clock, stream = Clock(), io.StringIO()
    with Progress(100, stream=stream, clock=clock) as progress:
        clock.now += 1.0
        progress.advance(10, tokens=5000)
        progress.show({"loss": 1.23456, "numeric": None})
        progress.say("saved step 10")
    assert stream.getvalue() == "step  10/100  loss 1.235  numeric None  5,000 tokens/s  ETA 9s\nsaved step 10\n"


def test_a_bar_on_a_terminal_starts_at_the_resumed_step():
    clock, stream = Clock(), Terminal()
    with Progress(100, initial=40, stream=stream, clock=clock) as progress:
        clock.now += 3.0
        progress.advance(43, tokens=30)
        progress.show({"loss": 0.5})
    assert "43/100 steps" in stream.getvalue() and "loss 0.5" in stream.getvalue() and "ETA 57s" in stream.getvalue()


@pytest.mark.parametrize(
    "seconds, text",
    [(None, "?"), (float("inf"), "?"), (0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")],
)
def test_times_read_well(seconds, text):
    assert format_seconds(seconds) == text
