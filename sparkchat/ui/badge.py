"""Why speculation is off, capped, or trims nothing: it never fails silently, so there is always a sentence."""

from __future__ import annotations

from typing import Any


def badge_text(
    info: dict[str, Any], step: dict[str, Any] | None, mode: str, reason_off: str | None = None
) -> str | None:
    """The sentence of the badge, or None when drafts are verified as asked.

    ``info`` is the engine's INFO (empty while it loads), ``mode`` what the user asked for, ``reason_off`` why there is
    no drafter when that was decided before the engine started.
    """
    if not info:
        return None
    if not info.get("drafter"):
        return f"no speculation: {reason_off or info.get('reason_off') or 'no drafter is loaded'}"
    if mode == "off":
        return "speculation is off: mode off was chosen (shift+tab changes it)"
    if info.get("reason_off"):
        return f"no speculation: {info['reason_off']}"
    if step is not None and step.get("mode_requested") == mode:
        fallback = step.get("fallback")
        if step.get("mode") not in (None, mode):
            return f"asked for {mode}, running {step['mode']}: {fallback or 'the engine gave no reason'}"
        if fallback:
            return f"{mode}: {fallback}"
    if mode in ("compact", "cap-accept") and not info.get("cost_table"):
        return f"{mode}: no cost table, nothing is trimmed; 'sparkchat tune' measures one"
    if mode == "cap-accept":
        return "cap-accept: the whole block is verified and acceptance is capped; it measures, it does not speed up"
    return None
