"""An export of the trace that is on its way, in a process of its own, so that the screen and the answer go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkchat.client import child_environment
from sparkchat.errors import SparkchatError, error_from_name
from sparkchat.strict_json import loads

_PROGRAM = "import sys; from sparkchat.trace.export.worker import main; sys.exit(main(sys.argv[1:]))"
_STOP_SECONDS = 2.0


class ExportJob:
    """``told`` is called from a thread, with the job, whenever something about it has changed."""

    def __init__(self, trace: Path, out: Path, name: str | None, told: Callable[[ExportJob], None]) -> None:
        """Raises SparkchatError when no process can be started."""
        self.out = out
        self.share = 0.0
        """Of the trace, as far as it has been read."""
        self.notes: list[str] = []
        self.error: SparkchatError | None = None
        self.is_over = False
        self.was_stopped = False
        self._told = told
        arguments = [str(trace), str(out), *([name] if name is not None else [])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=child_environment(),
            )
        except OSError as error:
            raise SparkchatError(f"/export {out}: no process can be started ({error.strerror}); try again") from None
        self._thread = threading.Thread(target=self._listen, name="export", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """What is to be said about it now."""
        if not self.is_over:
            return f"writing {self.out.name}: {100 * self.share:.0f} %"
        if self.was_stopped:
            return f"{self.out} was not written: stopped"
        return self.error.message if self.error is not None else "\n".join(self.notes)

    def stop(self) -> None:
        """End it; nothing of the file stays."""
        if not self.is_over:
            self.was_stopped = True
            with suppress(OSError):
                self._process.terminate()

    def close(self) -> None:
        """End it and wait until it has gone."""
        self.stop()
        self.wait(_STOP_SECONDS)
        if not self.is_over:
            with suppress(OSError):
                self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it was over within that time."""
        self._thread.join(seconds)
        return self.is_over

    def _listen(self) -> None:
        last: dict[str, Any] = {}
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    last = loads(line)
                if "total" in last:
                    self.share = last["done"] / last["total"] if last["total"] else 0.0
                    self._told(self)
        code = self._process.wait()
        if "error" in last:
            self.error = error_from_name(last["error"], last["message"])
        elif "notes" in last:
            # It was done before it heard that it should stop.
            self.notes, self.was_stopped = last["notes"], False
        else:
            self.error = SparkchatError(f"/export {self.out} failed: the process that wrote it ended with code {code}")
        self.is_over = True
        self._told(self)
