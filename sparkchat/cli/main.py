"""The program's entry, and the one place where errors become exit codes.

Signals are taken before anything large is imported, so that the first half second ends as quietly as any later one.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from sparkchat.errors import Interrupted, NotEnoughDisk, SparkchatError, Terminated

_SIGNALLED = (129, Interrupted.exit_code, Terminated.exit_code)
"""Exit codes after SIGHUP, ctrl+c and SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    debug = False
    try:
        signal.signal(signal.SIGTERM, _terminate)
        _open_closed_streams()
        typed = list(sys.argv[1:] if argv is None else argv)
        arguments, debug = _without_debug(typed)
        debug = debug or _debug_from_environment()
        _prepare_streams()
        if os.environ.get("NO_COLOR") == "":
            # It asks for nothing (no-color.org), but libraries look only whether it is there.
            del os.environ["NO_COLOR"]
        from sparkchat.cli.app import run_line

        code = run_line(arguments, typed, debug=debug)
        sys.stdout.flush()
        if debug:
            _show_crash_log()
        return code
    except BrokenPipeError:
        return _reader_went_away()
    except SparkchatError as error:
        return _report(error, error.message, error.exit_code, debug)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _report(error, _unusable(error) if error.filename else _internal(error), 1, debug)
        where = f"{error.filename} cannot be written" if error.filename else "the output cannot be written"
        message = f"{where}: no space is left; free some, or write somewhere else"
        return _report(error, message, NotEnoughDisk.exit_code, debug)
    except KeyboardInterrupt as error:
        return _report(error, None, Interrupted.exit_code, debug)
    except Exception as error:
        return _report(error, _internal(error), 1, debug)


def _unusable(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}; check it, or run again with --debug"


def _internal(error: Exception) -> str:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"internal error, {what}; run it again with --debug for the details"


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """``--debug`` may stand anywhere before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [word for word in arguments[:end] if word != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _debug_from_environment() -> bool:
    text = os.environ.get("SPARKCHAT_DEBUG", "")
    if not text.strip():
        return False
    from sparkchat.options import Option, parse

    return bool(parse(Option("debug", "switch"), text, "SPARKCHAT_DEBUG"))


def _open_closed_streams() -> None:
    """Give 0, 1 and 2 back where the caller closed them, or a pipe of ours would get the number and be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # stdin stays None: that nothing can come from it is said in words.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _prepare_streams() -> None:
    """A terminal that cannot show a character gets a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated("ended by SIGTERM")


def _report(error: BaseException, message: str | None, code: int, debug: bool) -> int:
    """Say it in one line on stderr; ctrl+c needs no words, since the one who pressed it knows."""
    from sparkchat.cli.output import note

    try:
        if debug:
            import traceback

            _show_crash_log()
            traceback.print_exception(error)
        if message is not None:
            note(message)
        if code in _SIGNALLED:
            _drop_unread_output()
        sys.stdout.flush()
    except OSError:
        _reader_went_away()
    return code


def _show_crash_log() -> None:
    """What an engine that crashed has written: its traceback is in another process than ours."""
    client = sys.modules.get("sparkchat.client")
    log = client.take_crash_log().rstrip() if client is not None else ""
    if log:
        print(f"what the engine wrote at its end:\n{log}", file=sys.stderr)


def _drop_unread_output() -> None:
    """What nobody reads would hold a program that was asked to end."""
    _, writable, _ = select.select([], [sys.stdout.fileno()], [], 0)
    if not writable:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_went_away() -> int:
    """What is written goes nowhere (a reader that ended, a full disk): keep Python from complaining about it at its
    exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    return 1
