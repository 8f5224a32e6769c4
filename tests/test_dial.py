"""Dials: where the hands stand, what a family holds, and that pictures are smooth, turned and repeated exactly."""

import dataclasses
import math
import random

import numpy as np
import pytest

from train.tasks.dial import Dial, Hand, draw_dial, hand_angles, paint_dial

HAND = dict(tail=0.0, tapered=False, colour=(0, 0, 0))
BARE = Dial(
    hour=3, minute=0, ticks=0, ring=0.0, hour_hand=Hand(length=0.5, width=0.1, **HAND),
    minute_hand=Hand(length=0.9, width=0.06, **HAND),
)  # fmt: skip


def pixels(dial, size=96, **options):
    return np.asarray(paint_dial(dial, size, **options).convert("RGB"), np.float64)


def darkness_at(dial, angle, along, size=96):
    """How dark the picture is at a place of the dial, from 0 to 1."""
    half, turned = size / 2, math.radians(angle)
    reach = along * dial.radius * half
    row, column = half - reach * math.cos(turned), half + reach * math.sin(turned)
    return 1 - pixels(dial, size)[int(row), int(column)].mean() / 255


@pytest.mark.parametrize(
    ("hour", "minute", "hour_angle", "minute_angle"),
    [(12, 0, 0, 0), (3, 0, 90, 0), (1, 30, 45, 180), (6, 0, 180, 0), (11, 59, 359.5, 354), (12, 55, 27.5, 330)],
)
def test_the_hour_hand_moves_on_with_the_minutes(hour, minute, hour_angle, minute_angle):
    assert hand_angles(hour, minute) == (hour_angle, minute_angle)
    dial = dataclasses.replace(BARE, hour=hour, minute=minute)
    assert darkness_at(dial, hour_angle, 0.4) > 0.6
    assert darkness_at(dial, minute_angle, 0.8) > 0.5
    assert darkness_at(dial, minute_angle + 90, 0.8) < 0.1


def test_quarter_turns_turn_the_whole_picture():
    dial = dataclasses.replace(
        BARE, hour=4, minute=20, ticks=60, mark=True, numerals="quarters", second=7, printed=(100.0, 200.0), ring=0.05
    )
    upright = pixels(dial)
    for turns in (1, 2, 3):
        found = pixels(dataclasses.replace(dial, turns=turns, upright=True))
        # Numerals turn with the dial; their grid of pixels is another one, so edges may differ.
        assert np.abs(found - np.rot90(upright, -turns)).mean() < 4
        assert np.abs(found - upright).mean() > 8


@pytest.mark.parametrize("numerals", ["arabic", "roman", "quarters"])
@pytest.mark.parametrize("upright", [True, False])
def test_numerals_stand_around_the_rim(numerals, upright):
    bare = pixels(BARE)
    dial = dataclasses.replace(BARE, numerals=numerals, upright=upright)
    inked = np.abs(pixels(dial) - bare).mean(-1) > 60
    rows, columns = np.nonzero(inked)
    angles = np.degrees(np.arctan2(columns - 47.5, 47.5 - rows)) % 360
    around = {int(angle) for angle in (angles + 15) // 30 % 12}
    assert around == (set(range(0, 12, 3)) if numerals == "quarters" else set(range(12)))
    assert np.hypot(rows - 47.5, columns - 47.5).min() > 0.5 * 48


def test_a_tapered_hand_ends_in_a_point():
    thick = dataclasses.replace(BARE, minute_hand=dataclasses.replace(BARE.minute_hand, width=0.2))
    tapered = dataclasses.replace(thick, minute_hand=dataclasses.replace(thick.minute_hand, tapered=True))
    ink = lambda dial, rows: (255 - pixels(dial)[rows, 30:66]).sum()
    top, middle = slice(6, 14), slice(38, 44)
    assert ink(tapered, top) < 0.5 * ink(thick, top) and ink(tapered, middle) > 0.7 * ink(thick, middle)


def test_edges_are_smooth():
    levels = np.unique(pixels(dataclasses.replace(BARE, hour=1, minute=10))[..., 0])
    assert len(levels) > 8


def test_the_same_arguments_give_the_same_pixels_and_noise_needs_a_generator():
    dial = dataclasses.replace(BARE, noise=9.0)
    with pytest.raises(ValueError, match="needs rng"):
        paint_dial(dial, 48)
    with pytest.raises(ValueError, match="size=4"):
        paint_dial(BARE, 4)
    draws = [pixels(dial, rng=np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])
    flat = draws[0][:10, :10]
    assert flat.max() <= 255 and 2 < (255 - flat).mean() < 6  # half of it is cut off at white
    for family in ("plain", "any"):
        first, second = (draw_dial(random.Random(7), 5, 25, family) for _ in range(2))
        assert first == second


def test_the_plain_family_is_plain_and_any_other_has_every_part():
    plain = [draw_dial(random.Random(seed), 5, 25, "plain") for seed in range(200)]
    assert all(dial.is_grey and dial.turns == 0 and dial.second is None and not dial.noise for dial in plain)
    assert {dial.numerals for dial in plain} == {"none", "arabic"}
    assert len({paint_dial(dial, 48).tobytes() for dial in plain}) == len(plain)
    anything = [draw_dial(random.Random(seed), 5, 25, "any") for seed in range(400)]
    for name, values in {
        "turns": {0, 1, 2, 3}, "numerals": {"none", "arabic", "roman", "quarters"}, "upright": {True, False},
        "ticks": {0, 12, 60}, "mark": {True, False},
    }.items():  # fmt: skip
        assert {getattr(dial, name) for dial in anything} == values
    for name in ("second", "printed"):
        assert {getattr(dial, name) is None for dial in anything} == {True, False}
    assert {dial.minute_hand.tapered for dial in anything} == {dial.noise > 0 for dial in anything} == {True, False}
    assert any(sum(dial.face) < 180 for dial in anything), "some faces are dark"


def test_every_dial_can_be_told_which_way_up():
    """Turned by a quarter, a face without numerals and marks would show another time but for a few degrees."""
    for seed in range(400):
        dial = draw_dial(random.Random(seed), 5, 25, "any")
        assert not dial.turns or dial.numerals != "none" or dial.mark


def test_hands_stand_out_from_the_face():
    for seed in range(300):
        dial = draw_dial(random.Random(seed), 1, 25, random.Random(seed).choice(("plain", "any")))
        light = lambda colour: 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2]
        assert abs(light(dial.hour_hand.colour) - light(dial.face)) > 60
