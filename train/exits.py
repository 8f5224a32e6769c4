"""How a command ends: one exit code per cause, one paragraph on stderr, and a clean stop on a signal."""

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from absl import logging as absl_logging

from smmd_jax.errors import CheckpointError, TokenizerError, TokenRangeError
from train.environment import redact


class RunError(Exception):
    """A foreseen end of a run; the message is one paragraph that says what to do next."""

    exit_code = 1


class UsageError(RunError, ValueError):
    """A flag, a config value or the choice of a run folder is wrong."""

    exit_code = 2


class DataError(RunError, ValueError):
    """The data are refused: malformed, empty, or not the data this run was started with."""

    exit_code = 3


class CheckpointCorruptError(RunError):
    """There are checkpoints, and none of them can be used."""

    exit_code = 4


class CheckpointMismatchError(RunError):
    """The newest checkpoint is sound and holds another tree than this run's state."""

    exit_code = 4


class ExportError(RunError):
    """An exported model does not compute what the run's does."""

    exit_code = 4


class StorageError(RunError):
    """A save failed: no space, no permission, or a broken disk."""

    exit_code = 5


class NonFiniteError(RunError):
    """A loss, a gradient or a parameter is NaN or infinite; nothing was updated or saved with it."""

    exit_code = 6


class DistributedError(RunError):
    """Another process of the run failed or disagrees."""

    exit_code = 7


class WriterLockError(RunError):
    """Another process writes to this run folder."""

    exit_code = 8


class StoppedError(RunError):
    """The run obeyed a signal after a verified save; the code is 128 + the signal's number (143 for SIGTERM)."""

    def __init__(self, message: str, signal_number: int = signal.SIGTERM):
        super().__init__(message)
        self.exit_code = 128 + signal_number


EXIT_CODES = {
    0: "done",
    1: "an error that was not foreseen",
    2: "usage: a flag or config value is wrong",
    3: "the data were refused",
    4: "no checkpoint can be used",
    5: "storage: no space, or a save failed",
    6: "a loss or gradient was not finite",
    7: "another process of the run failed",
    8: "another process writes to the run folder",
    141: "nobody reads the output any more",
    143: "stopped by SIGTERM after a verified save",
}

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# How jax words the loss of a peer; it raises no class of its own for it.
_PEER_WORDS = (
    "coordination service", "heartbeat", "DEADLINE_EXCEEDED", "UNAVAILABLE", "Connection reset by peer",
    "Connection closed by peer", "Gloo", "NCCL",
)  # fmt: skip


class StopSignals:
    """Turn the first SIGTERM or SIGINT into a flag that the loop reads; the second one ends the process at once.

    Python runs a signal's handler between two instructions of the main thread, which may be minutes away while XLA
    compiles. Its wake-up descriptor is written by the system's handler itself; a thread that reads it counts.

    Example:
        >>> with StopSignals() as stop:
        ...     stop.received is None
        True
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._handle)
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)  # a condition of set_wakeup_fd
        self._former_descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_descriptor)
        self._write.close()
        self._watcher.join()
        self._read.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _watch(self) -> None:
        seen = 0
        while numbers := self._read.recv(64):
            for number in numbers:
                if number not in self._former:
                    continue
                seen += 1
                if seen > 1:
                    os._exit(128 + number)
                self.received = self.received or number


def exit_code_of(error: BaseException, *, process_count: int = 1) -> int:
    """Return the exit code that belongs to `error`."""
    if isinstance(error, RunError):
        return error.exit_code
    if isinstance(error, TokenizerError | TokenRangeError):
        return DataError.exit_code
    if isinstance(error, CheckpointError):
        return CheckpointCorruptError.exit_code
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        return StorageError.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if process_count > 1 and any(word in str(error) for word in _PEER_WORDS):
        return DistributedError.exit_code
    return 1


def explain(error: BaseException, *, process_count: int = 1) -> str:
    """Return the paragraph a user reads for `error`: what happened and what to do next, without secrets."""
    code = exit_code_of(error, process_count=process_count)
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted. Run the same command again to go on from the newest checkpoint."
    elif isinstance(error, RunError | TokenizerError | TokenRangeError | CheckpointError):
        text = str(error)
    elif code == StorageError.exit_code:
        text = f"{error}. The newest finished checkpoint is intact: free some space and run the same command again."
    elif code == DistributedError.exit_code:
        text = f"another process was lost ({type(error).__name__}: {error}). Restart all processes to resume."
    else:
        text = f"{type(error).__name__}: {error}. This error was not foreseen; --debug shows the trace."
    label = "stopped" if isinstance(error, StoppedError | KeyboardInterrupt) else "error"
    text = "\n".join(line for line in text.splitlines() if line.strip())
    return redact(f"{label}: " + "".join(map(_printable, text)))


def _printable(letter: str) -> str:
    """A name in a file may hold what moves a terminal's cursor or hides what stands before it."""
    return letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode("ascii")


def run_guarded(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> NoReturn:
    """Call `main(argv)` and end the process with the code and the one paragraph that belong to what happened.

    A trace appears only under `--debug`. With several jax processes a failure ends hard after a flush: an orderly
    shutdown would wait for the other processes, which wait in a collective for this one.

    Args:
        main: takes the command line, program first; returns None or an exit code.
        argv: the command line.

    Raises:
        SystemExit: always, but for the hard exit.
    """
    debug = _debug_asked(argv)
    # A terminal that cannot show a sign of a prompt must not end a run.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not debug:
        _quiet_libraries()
    together = False
    try:
        code = main(argv) or 0
    except BrokenPipeError:
        code = _unread()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(redact(stop.code), file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        processes = _process_count()
        if debug:
            sys.stderr.write(redact(traceback.format_exc()))
        print(_speaker(processes) + explain(error, process_count=processes), file=sys.stderr)
        code, together = exit_code_of(error, process_count=processes), isinstance(error, StoppedError)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _unread()
    if code and _process_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        if together:
            _leave_together()
        os._exit(code)
    sys.exit(code)


def _leave_together() -> None:
    """Wait for the other processes: the first one to go would take their coordinator away in the middle of a save."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def _speaker(processes: int) -> str:
    if processes == 1:
        return ""
    import jax

    return f"process {jax.process_index()} of {processes}: "


def _unread() -> int:
    """Give up an output that nobody reads any more, as `| head` leaves it, and return the shell's code for that."""
    # Its buffer would fail once more at the exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _quiet_libraries() -> None:
    """Keep library chatter off stderr, and Orbax off it altogether.

    Orbax prints the trace of every thread of a failed save, hundreds of lines; `train.checkpoint` raises each of these
    failures itself, as one sentence.
    """
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


def _debug_asked(argv: Sequence[str]) -> bool:
    """Read --debug without the flag parser, which may be what failed."""
    asked = False
    for argument in argv[1:]:
        name, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in ("debug", "nodebug"):
            asked = name == "debug" and value.lower() not in ("false", "f", "0", "no", "n")
    return asked


def _process_count() -> int:
    """Count jax processes without starting a backend where none is running."""
    if "jax" not in sys.modules:
        return 1
    import jax

    return jax.process_count() if jax.distributed.is_initialized() else 1
