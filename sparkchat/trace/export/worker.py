"""Makes one export in a process of its own: a screen goes on meanwhile, and ending the process ends the export.

``main`` writes JSON lines to stdout: ``{"done", "total"}`` (bytes of the trace read so far) now and then, and at the
end ``{"notes"}`` or ``{"error", "message"}``. SIGTERM ends it with nothing left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sparkchat.errors import SparkchatError
from sparkchat.strict_json import dumps
from sparkchat.trace.export import export
from sparkchat.trace.reader import Damage

_TELL_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    """TRACE OUT [FORMAT]; returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    with suppress(OSError):
        os.nice(10)  # nobody waits for it but the one who asked
    trace, out, name = Path(arguments[0]), Path(arguments[1]), arguments[2] if len(arguments) > 2 else None
    damage, over = Damage(), threading.Event()
    teller = threading.Thread(target=_tell_progress, args=(trace, damage, over), daemon=True)
    teller.start()
    try:
        last: dict[str, Any] = {"notes": export(trace, out, name, damage)}
    except SparkchatError as error:
        last = {"error": type(error).__name__, "message": error.message}
    over.set()
    teller.join()
    _tell(last)
    return 0


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def _tell_progress(trace: Path, damage: Damage, over: threading.Event) -> None:
    with suppress(OSError):
        total = trace.stat().st_size
        while not over.wait(_TELL_SECONDS):
            _tell({"done": min(damage.num_bytes, total), "total": total})


def _tell(message: dict[str, Any]) -> None:
    # One write a line: both threads speak.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{dumps(message)}\n".encode())
