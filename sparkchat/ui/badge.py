"""Why speculation is off, capped, or trims nothing: it never fails silently, so there is always a sentence."""

from __future__ import annotations

from typing import Any

from sparkchat.ui.stats import Snapshot

TRIM_STEPS = 32
"""Steps of ``compact`` that must all have verified the whole block before the badge says so."""


def badge_text(info: dict[str, Any], snapshot: Snapshot, mode: str, reason_off: str | None = None) -> str | None:
    """The sentence of the badge, or None when drafts are verified as asked.

    ``info`` is the engine's newest INFO (empty while it loads), ``mode`` what the user asked for, ``reason_off`` why
    there is no drafter when that was decided before the engine started.
    """
    if not info:
        return None
    if info.get("mode_fixed"):
        return str(info["mode_fixed"])
    if not info.get("drafter"):
        return f"no speculation: {reason_off or info.get('reason_off') or 'no drafter is loaded'}"
    if mode != "off" and info.get("simulated"):
        profile = info["simulated"].get("profile")
        return f"acceptance is simulated ({profile}): drafts pass by chance, and the text means nothing"
    if mode == "off":
        return "speculation is off: mode off was chosen (shift+tab changes it)"
    if info.get("reason_off"):
        return f"no speculation: {info['reason_off']}"
    plans = mode in ("compact", "cap-accept")
    if plans and (info.get("heads") or {}).get("confidence") is False:
        return f"{mode}: the drafter has no confidence head, so the whole block is verified and nothing is trimmed"
    return _from_step(info, snapshot, mode) or _from_table(info, snapshot, mode)


def _from_step(info: dict[str, Any], snapshot: Snapshot, mode: str) -> str | None:
    """What the newest step says, when it ran under what is asked for now."""
    step = snapshot.step
    if step is None or step.get("mode_requested") != mode:
        return None
    fallback = step.get("fallback")
    if info.get("cost_table") and step.get("predicted_step_ms") is None and step.get("mode") == mode:
        fallback = None  # the table came after this step
    if step.get("mode") not in (None, mode):
        return f"asked for {mode}, running {step['mode']}: {fallback or 'the engine gave no reason'}"
    if step.get("simulated"):
        return f"acceptance is simulated ({step['simulated']}): the text is no answer of the model"
    return f"{mode}: {fallback}" if fallback else None


def _from_table(info: dict[str, Any], snapshot: Snapshot, mode: str) -> str | None:
    if mode in ("compact", "cap-accept") and not info.get("cost_table"):
        return f"{mode}: no cost table, nothing is trimmed; 'sparkchat tune' measures one"
    if mode == "cap-accept":
        return "cap-accept: the whole block is verified and acceptance is capped; it measures, it does not speed up"
    newest = snapshot.strip[-TRIM_STEPS:]
    if mode == "compact" and len(newest) == TRIM_STEPS and all(mark.is_whole for mark in newest):
        return f"compact: nothing was trimmed in the last {TRIM_STEPS} steps: by the cost table the whole block pays"
    return None
