"""The bars of the decode benchmark, and its table."""

from __future__ import annotations

from typing import Any

Judged = tuple[str, str, str, bool | None]
"""What was measured, its value, its bar, and whether it is met; None where there is no bar."""


def judged(report: dict[str, Any]) -> list[Judged]:
    """Every bar that the parts which were run say something about."""
    found: list[Judged] = []

    def add(what: str, value: float, bar: float | None, at_least: bool = False, form: str = "{:.2f}") -> None:
        if bar is None:
            found.append((what, form.format(value), "", None))
            return
        met = value >= bar if at_least else value <= bar
        found.append((what, form.format(value), f"{'>=' if at_least else '<='} {form.format(bar)}", met))

    rows = {row["row"]: row for row in report.get("alone", [])}
    for name, floor, bar in (("off, no drafter", "plain", 1.30), ("DSpark 5.52", "round", 1.40)):
        if name in rows:
            add(f"{name} / floor, batch 1", rows[name]["gpu_ms_per_step"] / report[f"{floor}_floor_ms"], bar)
            add(f"GPU idle between steps, {name}, %", 100 * rows[name]["idle_share"], 3.0)
    for row in report.get("memory", []):
        grown = float(row["allocated"] + row["reserved"])
        add(f"memory growth over {row['steps']} steps, bytes", grown, 0.0, form="{:.0f}")
    together = report.get("together", [])
    fixed, compact = (
        next((r for r in together if r["row"] == f"{mode}, chat" and r["batch"] == 32), None)
        for mode in ("static", "compact")
    )
    if fixed and compact:
        add("compact / our fixed 7, chat, batch 32", compact["tokens_per_second"] / fixed["tokens_per_second"], None)
    for row in report.get("contexts", []):
        if "added_kv_share_of_bandwidth" in row:
            add("32k: added KV bytes, share of bandwidth", row["added_kv_share_of_bandwidth"], 0.60, True)
    real = {row["row"]: row for row in report.get("smollm", [])}
    if {"SmolLM2 off", "SmolLM2 static"} <= real.keys():
        speed = real["SmolLM2 static"]["tokens_per_second"]
        add("SmolLM2 static / off, tokens/s", speed / real["SmolLM2 off"]["tokens_per_second"], 1.6, True)
        add("SmolLM2 static, tokens/s", speed, 2000.0, True, "{:.0f}")
    found += against_peers(report)
    return found


def against_peers(report: dict[str, Any]) -> list[Judged]:
    """Tokens per second against vLLM's DSpark at the same mean length, where both were run."""
    theirs = {(row["batch"], row["length"]): row["tokens_per_second"] for row in report.get("peers", [])}
    ours = {}
    for row in (*report.get("alone", []), *report.get("together", [])):
        if "length" in row and row["mode"] != "off":
            ours[row["batch"], row["length"], row["mode"]] = row["tokens_per_second"] * _evened(row)
    bars = {1: 1.15, 8: 1.10}
    found: list[Judged] = []
    for (batch, length, mode), speed in sorted(ours.items()):
        if (batch, length) not in theirs:
            continue
        ratio = speed / theirs[batch, length]
        bar = 1.25 if (batch, mode) == (32, "compact") else bars.get(batch) if mode == "static" else None
        is_met = None if bar is None else ratio >= bar
        what = f"{mode} at {length} a round / vLLM's fixed 7, batch {batch}, tokens/s"
        found.append((what, f"{ratio:.2f}", "" if bar is None else f">= {bar:.2f}", is_met))
    return found


def _evened(row: dict[str, Any]) -> float:
    """By what a row's speed is to be multiplied for the length it aimed at; compact commits less on purpose."""
    return row["length"] / row["tokens_per_step"] if row["mode"] == "static" else 1.0


def table(report: dict[str, Any]) -> str:
    """Everything that was run, in Markdown."""
    lines = [
        "| row | batch | ms/step (GPU) | ms/step (wall) | tokens/s | tokens/step | idle % | SM MHz | read TB/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (*report.get("alone", []), *report.get("together", [])):
        if "ms_per_step" in row:
            state = row.get("state", {})
            lines.append(
                f"| {row['row']} | {row['batch']} | {row['gpu_ms_per_step']:.3f} | {row['ms_per_step']:.3f} "
                f"| {row['tokens_per_second']:.0f} | {row['tokens_per_step']:.2f} | {100 * row['idle_share']:.1f} "
                f"| {state.get('sm_mhz', '')} | {state.get('read_tb_per_s', 0):.2f} |"
            )
    for row in report.get("generate", []):
        lines.append(
            f"| {row['row']} | 1 | | {row['ms_per_token']:.2f} | {row['tokens_per_second']:.1f} | 1.00 | | | |"
        )
    for row in report.get("peers", []):
        lines.append(
            f"| {row['row']} | {row['batch']} | | {row['ms_per_step']:.3f} | {row['tokens_per_second']:.0f} "
            f"| {row['length']:.2f} | | | |"
        )
    for part in report.get("breakdown", []):
        lines += [
            "",
            f"{part['row']}: {part['busy_us_a_step']:.0f} us in launches, {part['gap_us_a_step']:.0f} between",
        ]
        lines += ["", "| kernel | launches | us a step | us each | us before |", "|---|---|---|---|---|"]
        lines += [
            f"| {k['name'][:48]} | {k['launches_a_step']:.1f} | {k['us_a_step']:.1f} | {k['us_each']:.2f} "
            f"| {k['gap_us_a_step']:.1f} |"
            for k in part["kernels"][:30]
        ]
    lines += ["", "| measured | value | bar | met |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {value} | {bar} | {'' if met is None else 'yes' if met else 'NO'} |"
        for what, value, bar, met in judged(report)
    ]
    return "\n".join(lines)
