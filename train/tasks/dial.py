"""Analogue dials: what one looks like, how its look is drawn from a random generator, and how it is painted."""

import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from train.tasks.painted import paste_text, text_mask

# Raised whenever the same seed would give other dials, so that data prepared earlier are never reused.
DIAL_VERSION = 1

Colour = tuple[int, int, int]
Family = Literal["plain", "any"]

_OVERSAMPLED = 4  # each pixel is the mean of so many squared
_ROMAN = ("XII", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI")
_HAND_COLOURS: tuple[Colour, ...] = (
    (0, 0, 0), (200, 30, 30), (30, 60, 200), (20, 130, 40), (150, 30, 140), (120, 70, 20),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hand:
    """One hand: lengths and widths are shares of the dial's radius.

    Args:
      length: from the centre to the tip.
      tail: beyond the centre, on the other side.
      width: at the centre; a tapered hand ends in a point.
      tapered: whether it does.
      colour: of all of it.
    """

    length: float
    tail: float
    width: float
    tapered: bool
    colour: Colour


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dial:
    """Everything that a picture of a dial depends on; angles follow from the time alone.

    Args:
      hour: 1 to 12.
      minute: 0 to 59; the minute hand jumps, so it stands on a whole minute whatever the second.
      second: where a second hand stands; None: there is none.
      turns: quarter turns clockwise of the whole dial, numerals included.
      numerals: "none", "arabic", "roman", or "quarters" (12, 3, 6 and 9 alone).
      upright: whether numerals stand upright (with the dial), and not along the rim.
      ticks: marks around the rim: 0, 12 or 60.
      mark: whether a triangle marks twelve.
      hour_hand, minute_hand: the hands.
      printed: angles in degrees of two thin hands that are printed on the dial and tell nothing; None: there are none.
      background, face, ink: colours around the dial, of it, and of numerals and marks.
      ring: width of the rim as a share of the radius.
      radius: as a share of half the picture.
      centre: (x, y) of the dial's centre off the picture's, in shares of half the picture.
      noise: standard deviation of the noise of every pixel and channel, in grey levels.
    """

    hour: int
    minute: int
    second: int | None = None
    turns: int = 0
    numerals: Literal["none", "arabic", "roman", "quarters"] = "none"
    upright: bool = True
    ticks: Literal[0, 12, 60] = 12
    mark: bool = False
    hour_hand: Hand
    minute_hand: Hand
    printed: tuple[float, float] | None = None
    background: Colour = (255, 255, 255)
    face: Colour = (255, 255, 255)
    ink: Colour = (0, 0, 0)
    ring: float = 0.03
    radius: float = 0.94
    centre: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.0

    @property
    def is_grey(self) -> bool:
        """Whether no part of it has a colour, a second hand's red included."""
        colours = (self.background, self.face, self.ink, self.hour_hand.colour, self.minute_hand.colour)
        return self.second is None and all(len(set(colour)) == 1 for colour in colours)


def hand_angles(hour: int, minute: int) -> tuple[float, float]:
    """Give the angles of the hour and the minute hand, in degrees clockwise from twelve.

        hour hand = 30 (hour mod 12) + minute / 2,    minute hand = 6 minute

    Example:
      >>> hand_angles(1, 30), hand_angles(12, 0)
      ((45.0, 180.0), (0.0, 0.0))
    """
    return 30.0 * (hour % 12) + minute / 2, 6.0 * minute


def draw_dial(rng: random.Random, hour: int, minute: int, family: Family) -> Dial:
    """Choose how a dial that shows a time looks.

    Args:
      rng: decides all but the time.
      hour, minute: the time.
      family: "plain" is upright, with straight dark hands on a light face, twelve ticks and Arabic numerals or none;
        "any" has every numeral, tapered hands, second hands, printed hands, colours, quarter turns and noise.

    Example:
      >>> draw_dial(random.Random(0), 3, 10, "plain").turns
      0
    """
    return _plain_dial(rng, hour, minute) if family == "plain" else _any_dial(rng, hour, minute)


def paint_dial(dial: Dial, size: int, *, rng: np.random.Generator | None = None) -> Image.Image:
    """Paint a dial, with smooth edges.

    Args:
      dial: what is painted.
      size: pixels along each side.
      rng: of the noise; needed where the dial has noise.

    Returns:
      A picture in RGB, or in greys where the dial has no colour; the same arguments give the same pixels.

    Raises:
      ValueError: noise without a generator, or a size below 8.

    Example:
      >>> dial = draw_dial(random.Random(0), 3, 10, "plain")
      >>> paint_dial(dial, 48).size
      (48, 48)
    """
    if size < 8:
        raise ValueError(f"paint_dial: size={size} pixels hold no dial; wanted at least 8.")
    if dial.noise and rng is None:
        raise ValueError(f"paint_dial: a dial with noise={dial.noise:g} needs rng.")
    mode = "L" if dial.is_grey else "RGB"
    canvas = Image.new(mode, (_OVERSAMPLED * size,) * 2, dial.background[0] if dial.is_grey else dial.background)
    _Painter(dial, canvas).paint()
    image = canvas.reduce(_OVERSAMPLED)
    if not dial.noise:
        return image
    pixels = np.asarray(image)
    noise = rng.standard_normal(pixels.shape, np.float32) * dial.noise
    return Image.fromarray(np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8))


def _plain_dial(rng: random.Random, hour: int, minute: int) -> Dial:
    hand = functools.partial(Hand, tapered=False, colour=_grey(rng, 0, 60))
    return Dial(
        hour=hour,
        minute=minute,
        numerals=rng.choice(("none", "arabic")),
        hour_hand=hand(length=rng.uniform(0.45, 0.55), tail=0.0, width=rng.uniform(0.10, 0.14)),
        minute_hand=hand(length=rng.uniform(0.78, 0.88), tail=0.0, width=rng.uniform(0.06, 0.09)),
        background=_grey(rng, 200, 256),
        face=_grey(rng, 225, 256),
        ink=_grey(rng, 0, 120),
        ring=rng.uniform(0.02, 0.06),
        radius=rng.uniform(0.88, 0.96),
        centre=(rng.uniform(-0.03, 0.03), rng.uniform(-0.03, 0.03)),
    )


def _any_dial(rng: random.Random, hour: int, minute: int) -> Dial:
    is_dark = rng.random() < 0.25
    face = tuple(rng.randrange(0, 60) if is_dark else rng.randrange(190, 256) for _ in range(3))
    ink = tuple(rng.randrange(170, 256) if is_dark else rng.randrange(0, 110) for _ in range(3))
    colour = ink if is_dark or rng.random() < 0.5 else rng.choice(_HAND_COLOURS)
    hand = functools.partial(
        Hand, tapered=rng.random() < 0.5, colour=colour, tail=rng.choice((0.0, rng.uniform(0.08, 0.2)))
    )
    turns = rng.randrange(4)
    numerals = rng.choice(("none", "arabic", "roman", "quarters"))
    return Dial(
        hour=hour,
        minute=minute,
        second=rng.randrange(60) if rng.random() < 0.5 else None,
        turns=turns,
        numerals=numerals,
        upright=rng.random() < 0.5,
        ticks=rng.choice((12, 60)) if numerals == "none" else rng.choice((0, 12, 60)),
        # Without it a turned face could only be told by how far the hour hand stands from a mark.
        mark=numerals == "none" and (turns > 0 or rng.random() < 0.5),
        hour_hand=hand(length=rng.uniform(0.42, 0.56), width=rng.uniform(0.09, 0.15)),
        minute_hand=hand(length=rng.uniform(0.76, 0.92), width=rng.uniform(0.05, 0.10)),
        printed=(rng.uniform(0, 360), rng.uniform(0, 360)) if rng.random() < 0.25 else None,
        background=tuple(rng.randrange(256) for _ in range(3)),
        face=face,
        ink=ink,
        ring=rng.choice((0.0, rng.uniform(0.02, 0.1))),
        radius=rng.uniform(0.84, 0.98),
        centre=(rng.uniform(-0.06, 0.06), rng.uniform(-0.06, 0.06)),
        noise=rng.choice((0.0, rng.uniform(2, 12))),
    )


def _grey(rng: random.Random, low: int, high: int) -> Colour:
    return (rng.randrange(low, high),) * 3


class _Painter:
    """A dial on its canvas; places are given by an angle from twelve and a share of the radius."""

    def __init__(self, dial: Dial, canvas: Image.Image) -> None:
        self._dial, self._canvas, self._draw = dial, canvas, ImageDraw.Draw(canvas)
        half = canvas.width / 2
        self._radius = dial.radius * half
        self._x, self._y = half * (1 + dial.centre[0]), half * (1 + dial.centre[1])

    def paint(self) -> None:
        dial = self._dial
        self._disc(1.0, dial.ink if dial.ring else dial.face)
        self._disc(1.0 - dial.ring, dial.face)
        rim = 1.0 - dial.ring - 0.02
        for place in range(dial.ticks):
            is_hour = place * 12 % dial.ticks == 0
            length, width = (0.09, 0.035) if is_hour else (0.05, 0.015)
            self._bar(360.0 * place / dial.ticks, rim - length, rim, width, width, dial.ink)
        for angle, text in _numerals(dial.numerals):
            self._text(text, angle, rim - 0.2 if dial.ticks else rim - 0.13)
        if dial.mark:
            self._bar(0.0, rim - 0.22, rim, 0.0, 0.2, dial.ink)
        faint = tuple((2 * face + ink) // 3 for face, ink in zip(dial.face, dial.ink, strict=True))
        for angle, length in zip(dial.printed or (), (0.4, 0.6), strict=False):
            self._bar(angle, 0.0, length, 0.03, 0.03, faint)
        for angle, hand in zip(hand_angles(dial.hour, dial.minute), (dial.hour_hand, dial.minute_hand), strict=True):
            self._bar(angle, -hand.tail, hand.length, hand.width, 0.0 if hand.tapered else hand.width, hand.colour)
        if dial.second is not None:
            self._bar(6.0 * dial.second, -0.15, 0.85, 0.02, 0.02, (200, 30, 30))
        self._disc(0.06, dial.hour_hand.colour)

    def _disc(self, radius: float, colour: Colour) -> None:
        reach = radius * self._radius
        self._draw.ellipse((self._x - reach, self._y - reach, self._x + reach, self._y + reach), fill=self._ink(colour))

    def _ink(self, colour: Colour) -> Colour | int:
        return colour[0] if self._canvas.mode == "L" else colour

    def _direction(self, angle: float) -> tuple[float, float]:
        """The step (x, y) of a whole radius at an angle; y grows downwards."""
        turned = math.radians(angle + 90.0 * self._dial.turns)
        return self._radius * math.sin(turned), -self._radius * math.cos(turned)

    def _bar(self, angle: float, start: float, end: float, width: float, end_width: float, colour: Colour) -> None:
        x, y = self._direction(angle)
        sides = ((start, -width / 2), (start, width / 2), (end, end_width / 2), (end, -end_width / 2))
        corners = [(self._x + along * x - across * y, self._y + along * y + across * x) for along, across in sides]
        self._draw.polygon(corners, fill=self._ink(colour))

    def _text(self, text: str, angle: float, along: float) -> None:
        turn = self._dial.turns * 90.0 + (0.0 if self._dial.upright else angle)
        mask = text_mask(text, max(6, round(0.3 * self._radius / (1.4 if len(text) > 2 else 1.0))), turn % 360.0)
        x, y = self._direction(angle)
        place = (self._x + along * x, self._y + along * y)
        paste_text(self._canvas, mask, place, self._ink(self._dial.ink))


def _numerals(kind: str) -> Iterator[tuple[float, str]]:
    for place in range(12):
        if kind == "none" or (kind == "quarters" and place % 3):
            continue
        yield 30.0 * place, _ROMAN[place] if kind == "roman" else str(place or 12)
