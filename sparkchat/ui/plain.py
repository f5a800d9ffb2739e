"""One answer on stdout, for scripts and pipes. stdout carries data only; nothing here needs Textual."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from sparkchat import strict_json
from sparkchat.client import EngineClient
from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, error_from_name
from sparkchat.params import GenerateRequest
from sparkchat.ui.answering import Answerer, Signals
from sparkchat.ui.bridge import Engine, Event
from sparkchat.ui.progress import LoadingLine, use_color
from sparkchat.ui.repl import run_repl
from sparkchat.ui.reported_view import count
from sparkchat.ui.safe_text import TerminalFilter, one_line
from sparkchat.ui.stats import number
from sparkchat.ui.trace_sink import TraceSink

__all__ = ["run_one_shot", "run_repl"]

_EVENTS = ("start", "delta", "step", "end")


def run_one_shot(
    config: RunConfig,
    prompt: str | Sequence[int] | None,
    make_engine: Callable[[], Engine] | None = None,
) -> int:
    """Answer one prompt (a text, or token ids; None takes ``config.prompt_ids``) and return the exit code.

    ctrl+c keeps the partial answer and returns 130, SIGTERM 143, SIGHUP 129. Raises SparkchatError for what the engine
    refuses, and EngineCrash when it dies; the partial result is printed first when JSON was asked for.
    """
    trace = TraceSink(config.argv)
    if config.trace_path is not None:
        trace.open(config.trace_path, config.trace_force)
    engine = make_engine() if make_engine is not None else EngineClient(config.spec)
    printer = _PRINTERS[config.output](config)
    loading = LoadingLine(config)
    with Signals() as signals:
        answerer = Answerer(engine, trace, signals, loading.note)
        try:
            for sentence in config.notices:
                loading.note(sentence)
            answerer.load(loading.show)
            loading.clear()
            for sentence in answerer.info.get("notices") or ():
                loading.note(sentence)
            end = answerer.answer(_request(config, prompt), printer.take)
        except EngineCrash as crash:
            printer.close(getattr(crash, "result", None))
            raise
        finally:
            loading.clear()
            trace.close()
            engine.close()
    result = end["result"]
    printer.close(result)
    if config.verbose:
        _print_numbers(result)
    if signals.exit_code is not None:
        return signals.exit_code
    if result["finish_reason"] == "error":
        raise error_from_name(end.get("error", ""), result.get("error") or "the engine refused the request")
    return 0


def _request(config: RunConfig, prompt: str | Sequence[int] | None) -> GenerateRequest:
    common = {"id": "1", "sampling": config.sampling}
    ids = config.prompt_ids if prompt is None else None if isinstance(prompt, str) else tuple(prompt)
    if ids is not None:
        return GenerateRequest(prompt_ids=tuple(ids), **common)
    text = prompt if isinstance(prompt, str) else ""
    if config.raw:
        return GenerateRequest(prompt=text, raw=True, **common)
    chosen = {"system": config.system, "think": config.think, "reasoning_effort": config.reasoning_effort}
    return GenerateRequest(prompt=text, **chosen, **common)


class TextPrinter:
    """The answer as it comes. A pipe gets the exact bytes; a terminal gets control characters spelt out."""

    def __init__(self, config: RunConfig) -> None:
        self._filter = TerminalFilter(config.ascii) if sys.stdout.isatty() else None
        self._thinking = _ThinkingPrinter(config)

    def take(self, event: Event) -> None:
        if event["event"] != "delta":
            return
        if event.get("channel") == "thinking":
            self._thinking.write(event["text"])
            return
        self._thinking.end()
        self._write(self._filter.feed(event["text"]) if self._filter else event["text"])

    def close(self, _result: dict[str, Any] | None) -> None:
        self._thinking.end()
        if self._filter:
            self._write(self._filter.flush() + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()


class _ThinkingPrinter:
    """Thinking is no part of the answer: it is shown, dim, when stderr is a terminal."""

    def __init__(self, config: RunConfig) -> None:
        self._is_shown = sys.stderr.isatty()
        self._dim = ("\x1b[2m", "\x1b[0m") if use_color(config, sys.stderr) else ("", "")
        self._filter = TerminalFilter(config.ascii)
        self._is_open = False

    def write(self, text: str) -> None:
        if self._is_shown:
            self._is_open = True
            sys.stderr.write(f"{self._dim[0]}{self._filter.feed(text)}{self._dim[1]}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            sys.stderr.write(self._filter.flush() + "\n\n")
            sys.stderr.flush()


class JsonPrinter:
    """One object at the end."""

    def __init__(self, _config: RunConfig) -> None:
        pass

    def take(self, event: Event) -> None:
        pass

    def close(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            _print_json(result)


class JsonLinesPrinter:
    """Events as they happen: start, delta, step, end. The last one is the result, with ``event`` before it."""

    def __init__(self, _config: RunConfig) -> None:
        self._has_ended = False

    def take(self, event: Event) -> None:
        if event["event"] not in _EVENTS:
            return
        if event["event"] == "end":
            self._end(event["result"], event["id"], event.get("thinking", ""))
        else:
            _print_json(event)

    def close(self, result: dict[str, Any] | None) -> None:
        if result is not None and not self._has_ended:
            self._end(result, "1", "")

    def _end(self, result: dict[str, Any], request_id: str, thinking: str) -> None:
        self._has_ended = True
        _print_json({"event": "end", "id": request_id, **result, "thinking": thinking})


_PRINTERS = {"text": TextPrinter, "json": JsonPrinter, "jsonl": JsonLinesPrinter}


def _print_json(value: dict[str, Any]) -> None:
    text = strict_json.dumps(value)
    if sys.stdout.isatty():
        text = one_line(text)
    sys.stdout.buffer.write(text.encode("utf-8") + b"\n")
    sys.stdout.buffer.flush()


def _print_numbers(result: dict[str, Any], file: TextIO | None = None) -> None:
    """The numbers of ``--verbose``, on stderr."""
    timing, usage, speculation = result["timing"], result["usage"], result["speculation"]
    rows = [
        ("load duration", f"{number(timing['load_ms'])} ms"),
        ("time to first token", f"{number(timing['ttft_ms'])} ms"),
        ("prompt tokens", f"{count(usage['prompt_tokens'])} ({count(usage['cached_tokens'])} cached)"),
        ("answer tokens", count(usage["completion_tokens"])),
        ("decode duration", f"{number(timing['decode_ms'])} ms"),
        ("decode rate", f"{number(timing['tokens_per_second'], 2)} tokens/s"),
        ("mode", f"{result['mode']}"),
    ]
    if speculation["reason_off"]:
        rows.append(("no speculation", one_line(speculation["reason_off"])))
    else:
        accepted, verified = speculation["num_accepted_draft_tokens"], speculation["num_verified_draft_tokens"]
        rows += [
            ("steps", count(speculation["num_steps"])),
            (
                "drafts accepted",
                f"{count(accepted)} of {count(verified)} verified, "
                f"{count(speculation['num_proposed_draft_tokens'])} proposed",
            ),
            ("acceptance length", number(speculation["mean_acceptance_length"], 2)),
        ]
    rows.append(("finish reason", f"{result['finish_reason']}"))
    out = file or sys.stderr
    out.write("\n" + "".join(f"{name + ':':<21}{value}\n" for name, value in rows))
    out.flush()
