"""What ``run`` makes of its command line: the prompt, the config that a front end gets, and every refusal."""

from __future__ import annotations

import io
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Cli, child_environment, command
from sparkchat.config import RunConfig
from sparkchat.environment import shows_unicode
from sparkchat.params import CostTable

EVERY_FLAG = """
--mode compact --block-size 3 --temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.2
--presence-penalty 0.1 --frequency-penalty 0.2 --logit-bias 5=1.5 --logit-bias 6=-100 --min-tokens 2 --max-tokens 9
--stop END --stop ### --ignore-eos --seed 7 --device cpu --dtype float32 --context 512 --tp 1 --no-graphs --jsonl
--verbose --color always --ascii --no-think
"""


class Front:
    """Stands in for the front ends and keeps what it was given."""

    def __init__(self) -> None:
        self.kind = ""
        self.config: RunConfig | None = None
        self.prompt: Any = None

    def one_shot(self, config: RunConfig, prompt: Any, *_: Any) -> int:
        self.kind, self.config, self.prompt = "one-shot", config, prompt
        return 0

    def repl(self, config: RunConfig, *_: Any) -> int:
        self.kind, self.config = "repl", config
        return 0

    def tui(self, config: RunConfig, *_: Any) -> int:
        self.kind, self.config = "tui", config
        return 0


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, is_tty: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.is_tty = is_tty

    def isatty(self) -> bool:
        return self.is_tty


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    front = Front()
    monkeypatch.setattr("sparkchat.ui.plain.run_one_shot", front.one_shot)
    monkeypatch.setattr("sparkchat.ui.plain.run_repl", front.repl)
    monkeypatch.setattr("sparkchat.ui.app.run_tui", front.tui)
    return front


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(data: bytes = b"", *, is_tty: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", Stdin(data, is_tty))

    put(is_tty=True)
    return put


Put = Callable[..., None]


@pytest.mark.parametrize(
    ("piped", "words", "flags", "prompt"),
    [
        (None, ("Hello", "there"), (), "Hello there"),
        (b"some text\n", (), (), "some text"),
        (b"some text\n", ("sum", "up"), (), "some text\nsum up"),
        (b"", ("hi",), (), "hi"),
        (b"\xef\xbb\xbfsome text\r\n", (), (), "some text"),
        (b"exact \n", (), ("--raw",), "exact \n"),
        (b"\xef\xbb\xbfexact", (), ("--raw",), "\ufeffexact"),
        (b"exact ", ("end",), ("--raw",), "exact end"),
        (None, ("--", "--debug"), (), "--debug"),
    ],
)
def test_stdin_stands_before_the_prompt(
    main: Cli,
    front: Front,
    stdin: Put,
    model_folder: Path,
    piped: bytes | None,
    words: tuple[str, ...],
    flags: tuple[str, ...],
    prompt: str,
) -> None:
    if piped is not None:
        stdin(piped)
    done = main("run", *flags, model_folder, *words)
    assert (done.code, front.kind, front.prompt) == (0, "one-shot", prompt), done.err


def test_which_front_end(
    main: Cli, front: Front, stdin: Put, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.environment.is_interactive", lambda: True)
    main("run", model_folder)
    assert front.kind == "tui"
    main("run", model_folder, "--plain")
    assert front.kind == "repl"
    monkeypatch.setattr("sparkchat.environment.is_interactive", lambda: False)
    main("run", model_folder)
    assert front.kind == "repl"
    stdin(b"/quit\n")
    main("run", model_folder, "--plain")
    assert front.kind == "repl"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", True), ("ascii", False), ("latin-1", False)])
def test_a_terminal_without_the_characters_is_drawn_on_in_ascii(
    main: Cli, front: Front, stdin: Put, model_folder: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        shows = shows_unicode()
    assert shows is shown
    monkeypatch.setattr("sparkchat.environment.is_interactive", lambda: True)
    monkeypatch.setattr("sparkchat.environment.shows_unicode", lambda: shows)
    main("run", model_folder)
    assert front.config is not None and front.config.ascii is not shown


@pytest.mark.parametrize("piped", [b"", b" \n\n"])
def test_nothing_to_answer_is_refused(main: Cli, front: Front, stdin: Put, model_folder: Path, piped: bytes) -> None:
    stdin(piped)
    done = main("run", model_folder)
    assert (done.code, "nothing to answer" in done.error) == (2, True)


def test_a_question_in_the_place_of_the_model_is_told(main: Cli, front: Front, stdin: Put) -> None:
    stdin()
    done = main("run", "Name three rivers")
    assert (done.code, front.kind) == (2, "")
    assert "'Name three rivers' stands where MODEL does" in done.error


def test_a_profile_may_have_a_space_in_its_name(
    main: Cli, front: Front, stdin: Put, model_folder: Path, profiles: Path
) -> None:
    stdin()
    (profiles / "my mödel.toml").write_text(f'[model]\npath = "{model_folder}"\n')
    done = main("run", "my mödel", "hello")
    assert (done.code, front.prompt) == (0, "hello"), done.err


def test_piped_bytes_that_are_not_text_are_refused(main: Cli, front: Front, stdin: Put, model_folder: Path) -> None:
    stdin(b"ab\xff")
    assert "not UTF-8 (byte 2)" in main("run", model_folder).error


def test_token_ids_are_handed_over_exactly(main: Cli, front: Front, stdin: Put, model_folder: Path) -> None:
    main("run", model_folder, "--prompt-ids", "1, 2,3")
    assert front.prompt == (1, 2, 3) == front.config.prompt_ids


def test_every_option_reaches_the_front_end(
    main: Cli, front: Front, stdin: Put, model_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    done = main(
        "run",
        model_folder,
        *shlex.split(EVERY_FLAG, comments=False),
        "--system",
        "be kind",
        "--drafter",
        drafter_folder,
        "--trace",
        trace,
        "hi",
    )
    assert done.code == 0, done.err
    config = front.config
    assert config is not None
    spec, sampling = config.spec, config.sampling
    assert (spec.model_path, spec.drafter_path) == (str(model_folder), str(drafter_folder))
    assert (spec.mode, spec.block_size, spec.device, spec.dtype, spec.context) == ("compact", 3, "cpu", "float32", 512)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.1, 0.2)
    assert sampling.logit_bias == ((5, 1.5), (6, -100.0))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (2, 9, 7)
    assert (sampling.stop, sampling.ignore_eos) == (("END", "###"), True)
    assert (config.system, config.think, config.output, config.color) == ("be kind", False, "jsonl", "always")
    assert (config.ascii, config.verbose, config.trace_path, config.trace_force) == (True, True, trace, False)
    assert config.sources["temperature"] == "flag --temperature"
    assert config.argv[:2] == ("sparkchat", "run")


def test_the_profile_of_a_run(
    main: Cli,
    front: Front,
    stdin: Put,
    write_profile: Callable[[str, str], Path],
    model_folder: Path,
    drafter_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_profile(
        "mine",
        f"""
        [model]
        path = "{model_folder}"
        label = "My model"
        chat_template = "T"
        [drafter]
        path = "{drafter_folder}"
        block_size = 4
        [run]
        mode = "cap-accept"
        temperature = 0.3
        system = "short"
        [speculation]
        temperatures = [1.0, 1.2]
        [speculation.cost_table.cpu]
        rows = [1, 2]
        step_ms = [1.0, 2.0]
        """,
    )
    monkeypatch.setenv("SPARKCHAT_TEMPERATURE", "0.4")
    main("run", "mine", "--device", "cpu", "hi")
    config = front.config
    assert config is not None
    assert config.spec.cost_table == CostTable((1, 2), (1.0, 2.0))
    assert config.spec.temperatures == (1.0, 1.2)
    assert (config.spec.mode, config.spec.block_size, config.spec.chat_template) == ("cap-accept", 4, "T")
    assert (config.sampling.temperature, config.system, config.label) == (0.4, "short", "My model")
    assert config.fixed_by("temperature") == "environment SPARKCHAT_TEMPERATURE"
    assert config.fixed_by("system") is None
    main("run", "mine", "--temperature", "0.5", "hi")
    assert front.config.sampling.temperature == 0.5


def test_a_drafter_of_ones_own_does_not_get_the_profiles_block_size(
    main: Cli,
    front: Front,
    stdin: Put,
    write_profile: Callable[[str, str], Path],
    model_folder: Path,
    drafter_folder: Path,
) -> None:
    write_profile("mine", f"[model]\npath = '{model_folder}'\n[drafter]\npath = '{drafter_folder}'\nblock_size = 4\n")
    main("run", "mine", "--drafter", drafter_folder, "hi")
    assert front.config.spec.block_size is None


def test_without_a_drafter_the_reason_is_handed_over(main: Cli, front: Front, stdin: Put, model_folder: Path) -> None:
    main("run", model_folder, "hi")
    assert front.config.spec.drafter_path is None
    assert "no drafter" in (front.config.reason_off or "")
    main("run", model_folder, "--mode", "off", "hi")
    assert front.config.spec.mode == "off"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-tokens", "0"), ("--max-tokens 0", "1 or more")),
        (("--temperature", "-1"), ("--temperature", "0 (greedy)")),
        (("--temperature", "nan"), ("--temperature", "finite")),
        (("--top-p", "-0.1"), ("--top-p -0.1", "0 (the likeliest")),
        (("--seed", "-1"), ("--seed -1",)),
        (("--stop", ""), ("--stop",)),
        (("--min-tokens", "5", "--max-tokens", "3"), ("--min-tokens 5", "max_tokens (3)")),
        (("--logit-bias", "x=1"), ("--logit-bias", "42=-1.5")),
        (("--logit-bias", "5=inf"), ("--logit-bias", "finite")),
        (("--context", "0"), ("--context 0", "1 or more")),
        (("--mode", "fast"), ("--mode", "'fast'", "off, static, compact, cap-accept")),
        (("--mode", "static"), ("--mode static", "needs a drafter")),
        (("--mode", "compact", "--drafter", "none"), ("--mode compact", "none was asked for")),
        (("--block-size", "3"), ("--block-size 3", "needs a drafter")),
        (("--block-size", "0"), ("--block-size 0", "1 or more")),
        (("--block-size", "-1"), ("--block-size -1", "1 or more")),
        (("--tp", "2"), ("--tp 2", "DeepSeek V4")),
        (("--tp", "0"), ("--tp 0",)),
        (("--graphs",), ("--graphs", "need a GPU")),
        (("--think",), ("--think", "no thinking mode")),
        (("--device", "tpu"), ("--device tpu", "auto, cpu, cuda or cuda:N")),
        (("--dtype", "int4"), ("--dtype", "float32, bfloat16")),
        (("--color", "sometimes"), ("--color sometimes",)),
        (("--json", "--jsonl"), ("--json and --jsonl",)),
        (("--accept-cap", "2", "--drafter", "none"), ("--accept-cap 2", "--mode cap-accept")),
        (("--accept-cap", "0", "--mode", "cap-accept", "--drafter", "none"), ("needs a drafter",)),
        (("--draft-temperature", "hot"), ("--draft-temperature", "target, adaptive")),
        (("--draft-temperature", "adaptive", "--drafter", "none"), ("--draft-temperature adaptive needs a drafter",)),
        (("--force",), ("--force", "--trace")),
        (("--trace", "/"), ("is a folder",)),
        (("--trace", "/nowhere/t.jsonl"), ("does not exist",)),
        (("--raw", "--system", "x"), ("--system", "--raw")),
        (("--raw", "--think"), ("--think",)),
        (("--prompt-ids", "1,2"), ("PROMPT and --prompt-ids",)),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    main: Cli,
    front: Front,
    stdin: Put,
    model_folder: Path,
    flags: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkchat.environment.gpus", lambda: ())
    done = main("run", model_folder, "hi", *flags)
    assert (done.code, front.kind) == (2, ""), done.err
    for word in words:
        assert word in done.error


@pytest.mark.parametrize("ids", ["", "1,x", "-1", "1,,2", "1.5", "99999999999"])
def test_token_ids_must_be_ids(main: Cli, front: Front, stdin: Put, model_folder: Path, ids: str) -> None:
    done = main("run", model_folder, "--prompt-ids", ids)
    assert (done.code, "e.g. 1,2,3" in done.error) == (2, True)


@pytest.mark.parametrize("flag", ["--json", "--jsonl"])
def test_json_needs_something_to_answer(main: Cli, front: Front, stdin: Put, model_folder: Path, flag: str) -> None:
    done = main("run", model_folder, flag)
    assert (done.code, flag in done.error, front.kind) == (2, True, "")


@pytest.mark.parametrize("name", ["raw", "system", "think"])
def test_exact_ids_leave_no_place_for_a_template(
    main: Cli, front: Front, stdin: Put, model_folder: Path, name: str
) -> None:
    value = ["x"] if name == "system" else []
    done = main("run", model_folder, "--prompt-ids", "1", f"--{name}", *value)
    assert (done.code, f"--{name}" in done.error) == (2, True)


def test_an_existing_trace_is_kept_unless_forced(
    main: Cli, front: Front, stdin: Put, model_folder: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("precious")
    done = main("run", model_folder, "--trace", trace, "hi")
    assert (done.code, "--force" in done.error, trace.read_text()) == (2, True, "precious")
    assert main("run", model_folder, "--trace", trace, "--force", "hi").code == 0
    assert front.config.trace_force is True


@pytest.mark.parametrize(
    ("template", "code"), [("{% if enable_thinking %}<think>{% endif %}", 0), ("{{ messages }}", 2)]
)
def test_thinking_is_read_from_the_template(
    main: Cli, front: Front, stdin: Put, model_folder: Path, template: str, code: int
) -> None:
    (model_folder / "chat_template.jinja").write_text(template)
    assert main("run", model_folder, "--think", "hi").code == code


def test_a_gpu_that_is_not_there_is_refused(
    main: Cli, front: Front, stdin: Put, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.environment.gpus", lambda: ())
    monkeypatch.setattr("sparkchat.environment.torch_has_cuda", lambda: True)
    assert "shows 0 NVIDIA GPUs" in main("run", model_folder, "--device", "cuda", "hi").error
    monkeypatch.setattr("sparkchat.environment.torch_has_cuda", lambda: False)
    assert "has no CUDA" in main("run", model_folder, "--device", "cuda:1", "hi").error


def wait_for_handler(pid: int) -> None:
    """Until the program has taken SIGTERM, which it does first of all."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError("the program never took SIGTERM")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_waiting_for_input_ends_the_run(model_folder: Path, how: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        command("run", model_folder), stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()
    )
    wait_for_handler(process.pid)
    process.send_signal(how)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        # Python drops what is raised within a callback of its import lock; who is not heard asks again.
        process.send_signal(how)
    assert process.wait(15) == code
    assert b"Traceback" not in process.stderr.read()
