"""Reads what the peers' logs say and puts it beside ours: ``python3 benchmarks/peers.py REPORT.json FOLDER``.

FOLDER holds plain.log and dspark.log (vLLM, lines "@{...}") and torch.jsonl (compiled torch), as the peers' script
leaves them; REPORT.json is what gpu_decode.py wrote, and gets them under "peers".
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from gpu_report import table


def peers_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of the logs that are there."""
    rows = []
    for name in ("plain.log", "dspark.log"):
        for line in _lines(folder / name, "@"):
            if "tok_s" not in line or (line.get("tag") == "standard" and line["mode"] == "dspark"):
                continue
            is_round = line["mode"] == "dspark"
            length = float(re.findall(r"[\d.]+", line["tag"])[0]) if is_round else 1.0
            rows.append(
                {
                    "row": f"vLLM {'DSpark' if is_round else 'plain'}" + (f" {length}" if is_round else ""),
                    "batch": line["batch"],
                    "length": length,
                    "drawn_length": line.get("tokens_per_round", 1.0),
                    "ms_per_step": line.get("ms_per_round", line["ms_per_token"]),
                    # As ours: by the length that was aimed at.
                    "tokens_per_second": line["tok_s"] * length / line.get("tokens_per_round", 1.0),
                }
            )
    for line in _lines(folder / "torch.jsonl", ""):
        if "variant" in line:
            row = {"row": f"compiled torch, {line['T']} rows", "batch": 1, "length": 1.0, "ms_per_step": line["ms"]}
            rows.append({**row, "tokens_per_second": 1e3 / line["ms"]})
    return rows


def _lines(path: Path, mark: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(mark + "{"):
            try:
                found.append(json.loads(line[len(mark) :]))
            except ValueError:  # a line cut short where the run was
                continue
    return found


def main() -> None:
    report_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    report = json.loads(report_path.read_text(encoding="utf-8")) if report_path.exists() else {}
    report["peers"] = peers_of(folder)
    report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
