"""Figures that look the same on every machine, and files of them that are the same bytes."""

import os
from typing import Any


def make_figure(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Make a figure with a grid of axes, whatever style the user has set.

    Args:
      size: width and height in inches.
      rows, columns: of the grid.

    Returns:
      (the figure, its axes as an array [rows, columns]).
    """
    # Not pyplot: it picks a window system, keeps every figure alive and reads the user's style.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG; the same figure gives the same bytes."""
    # Without this the file would hold the version of matplotlib.
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
