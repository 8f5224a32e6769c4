"""Times on the dial: what is one, and the gap between two."""

import pytest

from train.clock_time import dial_gap, parse_time


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("9:05", 545), ("09:05", 545), ("0:05", 725), ("12:05", 725), ("00:02", 722), ("15:10", 190), ("3:10", 190),
        ("3:10 PM", 190), ("3:10pm.", 190), ("3:10:59", 190), ("The time is 3:10", 190), ("not 6:15 but 3:10", 190),
        ("23:59", 719), ("1:00", 60),
        ("1:5", None), ("1:60", None), ("24:00", None), ("112:30", None), ("12:345", None), ("3:10:60", None),
        ("1:23:45:67", None), ("3.10", None), ("ten past three", None), ("", None), ("５:00", None),
    ],
)  # fmt: skip
def test_times(text, minutes):
    assert parse_time(text) == minutes


@pytest.mark.parametrize(
    ("time", "gold", "gap", "unwrapped"),
    [
        ("11:58", "12:02", 4, 4),
        ("12:02", "11:58", 4, 4),
        ("11:58", "00:02", 4, 4),
        ("12:55", "1:00", 5, 715),
        ("3:00", "9:00", 360, 360),
        ("6:30", "12:00", 330, 330),
        ("1:00", "12:59", 1, 719),
        ("4:20", "4:20", 0, 0),
    ],
)
def test_gaps(time, gold, gap, unwrapped):
    minutes, gold_minutes = parse_time(time), parse_time(gold)
    assert dial_gap(minutes, gold_minutes) == gap
    assert abs(minutes - gold_minutes) == unwrapped
