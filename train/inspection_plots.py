"""Figures of an inspection: the lengths of the examples, and the matrices of the numeric loss."""

from typing import Any

import numpy as np

from smmd_jax import NumericKernel
from train.figures import make_figure

_BINS = 12
_BAR = 40


def bar_chart(lengths: np.ndarray) -> str:
    """Draw a histogram as text: one line for each of at most twelve equally wide ranges.

    Example:
      >>> print(bar_chart(np.array([3, 3, 4, 9])))
      3 - 3  2 ########################################
      4 - 4  1 ####################
      5 - 5  0
      6 - 6  0
      7 - 7  0
      8 - 8  0
      9 - 9  1 ####################
    """
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = np.bincount((lengths - low) // width)
    spans = [f"{low + width * i} - {low + width * (i + 1) - 1}" for i in range(len(counts))]
    label, number = max(map(len, spans)), len(f"{counts.max():,}")
    bars = [f"{'#' * -(-int(count) * _BAR // int(counts.max()))}" for count in counts]
    rows = zip(spans, counts, bars, strict=True)
    return "\n".join(f"{span:>{label}}  {count:>{number},} {bar}".rstrip() for span, count, bar in rows)


def draw_lengths(lengths: np.ndarray, max_length: int) -> Any:
    """Return a histogram of the examples' lengths, with a line where a row ends."""
    figure, ((axes,),) = make_figure((6.4, 4.0))
    axes.hist(lengths, bins=min(50, int(lengths.max() - lengths.min()) + 1))
    axes.axvline(max_length, color="C3", label=f"max_length {max_length}")
    axes.set_xlabel("positions of an example")
    axes.set_ylabel("examples")
    axes.set_yscale("symlog", linthresh=1)
    axes.legend()
    return figure


def draw_kernel(kernel: NumericKernel) -> Any:
    """Return heat maps of K and M over the numeric tokens, ordered by value."""
    figure, (both,) = make_figure((10.0, 4.4), 1, 2)
    values = np.asarray(kernel.values)
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), 10)).round().astype(int))
    for axes, (name, matrix) in zip(both, {"K": kernel.gram, "M": kernel.form}.items(), strict=True):
        image = axes.imshow(np.asarray(matrix), cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes)
        axes.set_title(f"{name}, {len(values)} numeric tokens")
        axes.set_xticks(places, [f"{value:g}" for value in values[places]])
        axes.set_yticks(places, [f"{value:g}" for value in values[places]])
        axes.set_xlabel("value of the token")
    return figure
