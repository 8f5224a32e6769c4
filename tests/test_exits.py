"""How a command ends: the code of each cause, one paragraph, no trace without --debug, no secret anywhere."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import train.exits
from smmd_jax.errors import TokenizerError, TokenRangeError
from train.exits import EXIT_CODES, StopSignals, exit_code_of, explain, run_guarded

SECRET = "hf_" + "aB3" * 10


def run(main, *flags):
    with pytest.raises(SystemExit) as caught:
        run_guarded(main, ["main", *flags])
    return caught.value.code


def raising(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    "error, code",
    [
        (train.exits.UsageError("x"), 2),
        (train.exits.DataError("x"), 3),
        (TokenizerError("x"), 3),
        (TokenRangeError("x"), 3),
        (train.exits.CheckpointCorruptError("x"), 4),
        (train.exits.CheckpointMismatchError("x"), 4),
        (train.exits.StorageError("x"), 5),
        (OSError(errno.ENOSPC, "No space left on device"), 5),
        (train.exits.NonFiniteError("x"), 6),
        (train.exits.DistributedError("x"), 7),
        (train.exits.WriterLockError("x"), 8),
        (train.exits.StoppedError("x"), 143),
        (ValueError("x"), 1),
        (FileNotFoundError(errno.ENOENT, "x"), 1),
    ],
)
def test_each_cause_has_its_documented_code_and_one_paragraph(error, code, capsys):
    assert run(raising(error)) == code
    assert code in EXIT_CODES
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.startswith("stopped: " if code == 143 else "error: ") and captured.err.count("\n") == 1


def test_an_unforeseen_error_names_its_type_and_the_way_to_its_trace(capsys):
    run(raising(KeyError("width")))
    assert capsys.readouterr().err == (
        "error: KeyError: 'width'. This error was not foreseen; --debug shows the trace.\n"
    )


@pytest.mark.parametrize("flag, shown", [("--debug", True), ("--debug=true", True), ("--nodebug", False),
                                         ("--debug=false", False), ("debug", False)])  # fmt: skip
def test_a_trace_is_shown_only_under_debug(flag, shown, capsys):
    assert run(raising(ValueError("x")), flag) == 1
    assert ("Traceback" in capsys.readouterr().err) == shown


def test_success_and_returned_codes_pass_through(capsys):
    assert run(lambda argv: None) == 0
    assert run(lambda argv: 3) == 3
    assert run(lambda argv: sys.exit(0)) == 0
    assert run(lambda argv: sys.exit("words")) == 1
    assert capsys.readouterr().err == "words\n"


def test_an_output_that_nobody_reads_ends_the_command_without_a_word():
    code = "import sys; from train.exits import run_guarded; run_guarded(lambda argv: print('a line'), sys.argv)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_paragraph_has_no_blank_line_and_no_secret(capsys):
    run(raising(train.exits.UsageError(f"two\n\n  lines {SECRET} https://me:pass@host/x")), "--debug")
    text = capsys.readouterr().err
    assert SECRET not in text and "me:pass" not in text
    assert text.endswith("error: two\n  lines [redacted] https://[redacted]@host/x\n")


def test_a_lost_peer_counts_only_where_there_are_peers():
    error = RuntimeError("UNAVAILABLE: the coordination service is gone")
    assert exit_code_of(error) == 1 and exit_code_of(error, process_count=2) == 7
    assert "Restart all processes" in explain(error, process_count=2)


def test_several_processes_end_hard_after_a_flush(monkeypatch):
    ended = []

    def end(code):
        ended.append(code)
        raise SystemExit(99)

    monkeypatch.setattr(train.exits, "_process_count", lambda: 2)
    monkeypatch.setattr(train.exits.os, "_exit", end)
    assert run(raising(train.exits.NonFiniteError("x"))) == 99 and ended == [6]
    assert run(lambda argv: None) == 0 and ended == [6]


def test_a_signal_becomes_a_flag_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert train.exits.StoppedError("x", signal.SIGINT).exit_code == 130


def test_the_second_signal_ends_the_process_at_once():
    code = """
        import os, signal, time
        from train.exits import StopSignals
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            print("saving", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "saving\n"), done.stderr
