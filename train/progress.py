"""Progress on the terminal: a bar or plain lines, with a remaining time that leaves compiling out."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO


class Progress:
    """Show how far a run is: a bar on a terminal, plain lines elsewhere.

    Rate and remaining time count only the time spent in steps: compiling, evaluating and saving are wrapped in
    `pause`, which also adds up their seconds.

    Args:
        total: steps of the whole run.
        initial: steps done before this start.
        stream: where to write; the bar is used where it is a terminal.
        clock: seconds, monotonic.

    Example:
        >>> import io
        >>> progress = Progress(10, stream=io.StringIO())
        >>> with progress.pause("compile"):
        ...     pass  # the first step
        >>> progress.advance(1, timed=False)
        >>> progress.remaining_seconds is None
        True
    """

    def __init__(
        self,
        total: int,
        *,
        initial: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.initial, self.step = total, initial, initial
        self.paused_seconds: dict[str, float] = {}
        self._paused = 0.0
        self._pause_began: float | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = clock()
        self._timed_from = initial
        self._tokens = 0
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}"
            self._bar = tqdm(total=total, initial=initial, file=self._stream, bar_format=form, dynamic_ncols=True)

    @contextlib.contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Leave the time inside the block out of rate and remaining time, and add it to `paused_seconds[reason]`."""
        begin = self._clock()
        outermost = self._pause_began is None
        if outermost:
            self._pause_began = begin
        try:
            yield
        finally:
            seconds = self._clock() - begin
            self.paused_seconds[reason] = self.paused_seconds.get(reason, 0.0) + seconds
            if outermost:
                self._paused += seconds
                self._pause_began = None

    def advance(self, step: int, *, tokens: int = 0, timed: bool = True) -> None:
        """Say that `step` is done, with the tokens it took; `timed=False` for a step inside `pause` (it compiled)."""
        if not timed:
            self._timed_from += step - self.step
        else:
            self._tokens += tokens
        self.step = step
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(self._rate_text(), refresh=False)
            self._bar.update(0)

    def show(self, values: Mapping[str, Any]) -> None:
        """Show the values of a logged step."""
        text = "  ".join(f"{name} {_short_number(value)}" for name, value in values.items())
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate_text()}  {text}")
        else:
            width = len(str(self.total))
            self.say(f"step {self.step:>{width}}/{self.total}  {text}  {self._rate_text()}")

    def say(self, text: str) -> None:
        """Write a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds spent in timed steps since this start."""
        now = self._clock() if self._pause_began is None else self._pause_began
        return now - self._start - self._paused

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over the timed steps; None before the first."""
        return self._tokens / self.seconds if self._tokens and self.seconds > 0 else None

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds that the remaining steps will take at the present mean; None before the first timed step."""
        timed = self.step - self._timed_from
        return self.seconds / timed * (self.total - self.step) if timed > 0 else None

    def close(self) -> None:
        """Leave the bar as it stands; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _rate_text(self) -> str:
        rate, left = self.tokens_per_second, self.remaining_seconds
        parts = [] if rate is None else [f"{rate:,.0f} tokens/s"]
        return "  ".join([*parts, f"ETA {format_seconds(left)}"])


def format_seconds(seconds: float | None) -> str:
    """Format a time as 42s, 3m05s or 2h07m; `?` where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _short_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
