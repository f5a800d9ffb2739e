"""A front end over a scripted engine, as a program of its own: for tests that need a real process and a real terminal.

Takes one JSON object: ``front`` (tui, repl, one_shot), ``config`` and ``options`` (fields of RunConfig and
ScriptedOptions), ``prompt``, and ``fault``: what goes wrong (explode, hang, crash), once an answer has begun.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError
from sparkchat.params import LoadSpec, SamplingParams
from sparkchat.ui.scripted import ScriptedEngine, ScriptedOptions


class CrashingEngine(ScriptedEngine):
    """Dies after some events of an answer."""

    def poll(self, timeout: float | None = 0.0) -> list[dict[str, Any]]:
        found = super().poll(timeout)
        if self._running is not None and len(self._running.delivered) > 12:
            self.crash()
        return found


def explode(kind: str) -> None:
    from sparkchat.ui.live_chat import LiveChat

    def broken(self: LiveChat, update: Any) -> None:
        while kind == "hang":
            time.sleep(60)
        raise RuntimeError("forced by the test [/]")

    LiveChat._take_text = broken


def run(wish: dict[str, Any]) -> int:
    options = ScriptedOptions(**wish.get("options", {}))
    config = dict(wish.get("config", {}))
    sampling = SamplingParams(max_tokens=config.pop("max_tokens", None))
    if "trace_path" in config:
        config["trace_path"] = Path(config["trace_path"])
    made = RunConfig(LoadSpec("scripted", "/nowhere", mode=options.mode), sampling=sampling, **config)
    fault = wish.get("fault")
    if fault in ("explode", "hang"):
        explode(fault)
    engine_class = CrashingEngine if fault == "crash" else ScriptedEngine

    def make_engine() -> ScriptedEngine:
        return engine_class(options)

    if wish["front"] == "tui":
        from sparkchat.ui.app import run_tui

        return run_tui(made, make_engine)
    from sparkchat.ui.plain import run_one_shot, run_repl

    if wish["front"] == "repl":
        return run_repl(made, make_engine)
    return run_one_shot(made, wish.get("prompt", "short"), make_engine)


def main() -> int:
    try:
        return run(json.loads(sys.argv[1]))
    except SparkchatError as error:
        print(f"sparkchat: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
