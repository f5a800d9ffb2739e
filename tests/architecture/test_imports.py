"""Which process may import what: once by the static graph, once by what a fresh interpreter really loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE_LIBRARIES = ("torch", "transformers", "triton", "safetensors", "tokenizers", "gguf")
SCREEN_LIBRARIES = ("textual", "typer", "rich")


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter that ran this."""
    script = f"import sys\n{code}\nsys.stderr.write(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def ran(*args: str) -> str:
    return f"from sparkchat.cli.main import main\nassert main({list(args)!r}) == 0"


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("list",), ("paths",), ("show", "--resolved")])
def test_commands_that_only_print_start_light(args: tuple[str, ...]) -> None:
    loaded = loaded_after(ran(*args))
    # Where weights lie in the hub's cache is the hub client's knowledge; printing help or folders needs none of it.
    unwanted = (*ENGINE_LIBRARIES, "textual", "rich") + (() if args[0] in ("list", "show") else ("huggingface_hub",))
    assert not loaded & set(unwanted)


@pytest.mark.parametrize(
    "module",
    [
        "sparkchat.cli.app",
        "sparkchat.client",
        "sparkchat.ui.plain",
        "sparkchat.ui.app",
        "sparkchat.hub",
        "sparkchat.trace",
        "sparkchat.serve.server",
        "sparkchat.remote.engine",
    ],
)
def test_the_process_with_the_terminal_never_loads_the_engines_libraries(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert not loaded & set(ENGINE_LIBRARIES)


def test_only_serving_loads_the_http_server() -> None:
    assert "uvicorn" not in loaded_after(ran("serve", "--help"))
    assert "uvicorn" not in loaded_after("import sparkchat.ui.plain, sparkchat.remote.engine")


def test_the_line_front_end_needs_no_full_screen_library() -> None:
    assert "textual" not in loaded_after("import sparkchat.ui.plain")


@pytest.mark.parametrize("module", ["sparkchat.engine.worker", "sparkchat.engine.engine"])
def test_the_engine_process_never_loads_a_front_end(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert not loaded & set(SCREEN_LIBRARIES)


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
