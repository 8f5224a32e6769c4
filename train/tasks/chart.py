"""Charts: what one shows and looks like, how both are drawn from a random generator, and how it is painted."""

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Literal

from PIL import Image, ImageDraw

from train.tasks.painted import paste_text, text_mask

# Raised whenever the same seed would give other charts, so that data prepared earlier are never reused.
CHART_VERSION = 1

Colour = tuple[int, int, int]
Kind = Literal["bar", "line", "pie"]

LABELS = "ABCDEFGH"
_OVERSAMPLED = 3  # each pixel is the mean of so many squared
_PALETTE: tuple[Colour, ...] = (
    (204, 60, 60), (52, 101, 196), (58, 148, 74), (232, 152, 40), (132, 84, 176), (32, 158, 170), (150, 100, 60),
    (214, 100, 168),
)  # fmt: skip
_INK, _GRID = (40, 40, 40), (205, 205, 205)
_SCALES = (10, 20, 50, 100)
_TICKS = 5
# In shares of the side: where the plot lies, and sizes of text.
_LEFT, _RIGHT, _TOP, _BOTTOM, _TEXT, _SMALL = 0.17, 0.97, 0.09, 0.88, 0.09, 0.08


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything that a picture of a chart depends on.

    Args:
      kind: bars, points joined by a line, or slices of a pie.
      labels: one letter for each value, in order.
      values: whole numbers, no two alike; those of a pie are per cent and add up to 100.
      scale: where the axis of a bar or line chart ends.
      printed: whether each value is written beside its bar, point or slice.
      colours: of bars and slices; the first is a line's.
      background: of all.
      grid: whether lines cross the plot at the ticks of the axis.
    """

    kind: Kind
    labels: tuple[str, ...]
    values: tuple[int, ...]
    scale: int
    printed: bool
    colours: tuple[Colour, ...]
    background: Colour
    grid: bool

    def table(self) -> str:
        """Give the data of the chart as CSV, a head first.

        Example:
          >>> draw_chart(random.Random(0)).table().splitlines()[0]
          'label,value'
        """
        rows = (f"{label},{value}" for label, value in zip(self.labels, self.values, strict=True))
        return "\n".join(["label,value", *rows]) + "\n"


def draw_chart(rng: random.Random) -> Chart:
    """Choose what a chart shows and how it looks."""
    kind = rng.choice(("bar", "line", "pie"))
    count = rng.randint(4, 7) if kind == "line" else rng.randint(3, 6) if kind == "bar" else rng.randint(3, 5)
    scale = 100 if kind == "pie" else rng.choice(_SCALES)
    first = rng.randrange(len(LABELS) - count + 1)
    colours = rng.sample(_PALETTE, count)
    return Chart(
        kind=kind,
        labels=tuple(LABELS[first : first + count]),
        values=_shares(rng, count) if kind == "pie" else tuple(rng.sample(range(1, scale + 1), count)),
        scale=scale,
        printed=rng.random() < 0.5,
        colours=tuple(colours if kind == "pie" or rng.random() < 0.5 else colours[:1] * count),
        background=(rng.randrange(235, 256),) * 3,
        grid=rng.random() < 0.5,
    )


def paint_chart(chart: Chart, size: int) -> Image.Image:
    """Paint a chart, with smooth edges.

    Args:
      chart: what is painted.
      size: pixels along each side.

    Returns:
      A picture in RGB; the same arguments give the same pixels.

    Raises:
      ValueError: a size below 64, at which its numbers could not be read.

    Example:
      >>> paint_chart(draw_chart(random.Random(0)), 96).size
      (96, 96)
    """
    if size < 64:
        raise ValueError(f"paint_chart: size={size} pixels are too few to read a chart; wanted at least 64.")
    canvas = Image.new("RGB", (_OVERSAMPLED * size,) * 2, chart.background)
    painter = _Painter(chart, canvas)
    {"bar": painter.bars, "line": painter.line, "pie": painter.pie}[chart.kind]()
    return canvas.reduce(_OVERSAMPLED)


def _shares(rng: random.Random, count: int) -> tuple[int, ...]:
    """Whole per cents, at least 6 each and no two alike, that add up to 100."""
    while True:
        cuts = sorted(rng.sample(range(1, 100), count - 1))
        shares = tuple(high - low for low, high in zip((0, *cuts), (*cuts, 100), strict=True))
        if min(shares) >= 6 and len(set(shares)) == count:
            return shares


class _Painter:
    """A chart on its canvas; places are given in shares of the side, from the left and from the top."""

    def __init__(self, chart: Chart, canvas: Image.Image) -> None:
        self._chart, self._canvas, self._draw, self._side = chart, canvas, ImageDraw.Draw(canvas), canvas.width

    def bars(self) -> None:
        self._axes()
        for x, value, colour in self._columns():
            half = 0.3 * (_RIGHT - _LEFT) / len(self._chart.values)
            self._draw.rectangle(self._scaled(x - half, self._height(value), x + half, _BOTTOM), fill=colour)
            self._print(value, x, self._height(value) - 0.045)

    def line(self) -> None:
        self._axes()
        points = [self._scaled(x, self._height(value)) for x, value, _ in self._columns()]
        colour, width = self._chart.colours[0], round(0.018 * self._side)
        self._draw.line(points, fill=colour, width=width, joint="curve")
        for (x, value, _), (across, down) in zip(self._columns(), points, strict=True):
            self._draw.ellipse((across - width, down - width, across + width, down + width), fill=colour)
            self._print(value, x, self._height(value) - 0.055)

    def pie(self) -> None:
        middle, radius, angle = 0.5, 0.44, -90.0
        box = self._scaled(middle - radius, middle - radius, middle + radius, middle + radius)
        for label, value, colour in zip(self._chart.labels, self._chart.values, self._chart.colours, strict=True):
            end = angle + 3.6 * value
            self._draw.pieslice(box, angle, end, fill=colour, outline=self._chart.background)
            turn = math.radians((angle + end) / 2)
            x, y = math.cos(turn), math.sin(turn)
            self._text(label, middle + 0.33 * x, middle + 0.33 * y, _TEXT, (255, 255, 255))
            if self._chart.printed:
                self._text(str(value), middle + 0.18 * x, middle + 0.18 * y, _SMALL, (255, 255, 255))
            angle = end

    def _axes(self) -> None:
        for tick in range(_TICKS + 1):
            value = self._chart.scale * tick // _TICKS
            down = self._height(value)
            if self._chart.grid or tick == 0:
                box = self._scaled(_LEFT, down - 0.004, _RIGHT, down + 0.004)
                self._draw.rectangle(box, fill=_GRID if tick else _INK)
            self._text(str(value), _LEFT / 2, down, _SMALL, _INK)
        for label, (x, _, _) in zip(self._chart.labels, self._columns(), strict=True):
            self._text(label, x, (1 + _BOTTOM) / 2, _TEXT, _INK)

    def _columns(self) -> Iterator[tuple[float, int, Colour]]:
        step = (_RIGHT - _LEFT) / len(self._chart.values)
        for place, (value, colour) in enumerate(zip(self._chart.values, self._chart.colours, strict=True)):
            yield _LEFT + (place + 0.5) * step, value, colour

    def _height(self, value: int) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / self._chart.scale

    def _print(self, value: int, x: float, y: float) -> None:
        if self._chart.printed:
            self._text(str(value), x, y, _SMALL, _INK)

    def _text(self, text: str, x: float, y: float, height: float, colour: Colour) -> None:
        paste_text(self._canvas, text_mask(text, round(height * self._side)), self._scaled(x, y), colour)

    def _scaled(self, *shares: float) -> tuple[float, ...]:
        return tuple(share * self._side for share in shares)
