"""A machine without a GPU has no triton: the engine answers without it, in every mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
sys.modules["triton"] = None
from pathlib import Path
from cases.harness import MODES, open_runner
opened = open_runner(Path(sys.argv[1]), Path(sys.argv[2]), dtype=sys.argv[3])
lines = [{"prompt_ids": [301, 302], "mode": m, "max_tokens": 20, "temperature": t, "seed": 1}
         for m in ("off", *MODES) for t in (0.0, 1.0)]
print(json.dumps([(r["error"], len(r["token_ids"])) for r in opened.run(lines)]))
import sparkchat.engine.worker, sparkchat.train.run, sparkchat.bench.measuring
"""


def test_the_engine_answers_where_triton_is_not_installed(mix_folders: dict[str, Path]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    arguments = [str(mix_folders["target"]), str(mix_folders["oracle"]), "float32"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[None, 20]] * 8
