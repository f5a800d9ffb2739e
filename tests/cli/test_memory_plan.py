"""The memory plan agrees with what the loaders hold, and commands obey it and say so."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cli.conftest import ROOT, Cli, child_environment
from cli.mock_hub import Hub, Repo
from fixtures.deepseek_v4 import FULL_SIZES, parsed, v4_config, write_json
from models.deepseek_v4.test_load_plan import write_headers
from models.gguf_files import write_gguf
from models.pairs import CPU, make_theirs
from models.test_gemma4 import make_theirs as make_gemma4
from sparkchat import environment, inventory
from sparkchat.catalog import load_profile
from sparkchat.config import RunConfig
from sparkchat.environment import Gpu, Memory
from sparkchat.errors import NotEnoughMemory
from sparkchat.fit import Machine, describe_plan, fitting_context
from sparkchat.headers import Headers, Tensor, UnreadableHeader, bytes_reader, folder_headers, local_headers
from sparkchat.kernels import cpu
from sparkchat.memory_plan import Growth, MemoryPlan, Setting, plan_memory
from sparkchat.models import load_drafter, load_target
from sparkchat.models.deepseek_v4.headers import read_headers
from sparkchat.models.deepseek_v4.load_plan import cache_bytes, plan_all
from sparkchat.paths import user_paths

HERE = Setting("cpu", has_bf16_product=environment.has_bf16_product(), has_cpu_kernels=cpu.is_supported())
PLAN = MemoryPlan(
    weights=1_000_000_000,
    drafter=400_000_000,
    graphs=0,
    working=100_000_000,
    cache_fixed=0,
    growths=(Growth(1000), Growth(500, 100)),
    num_caches=2,
    max_context=100_000,
)


@pytest.mark.parametrize("name", ["target", "window"])
def test_the_cache_of_the_plan_is_that_of_the_engine(name: str, mix_folders: dict[str, Path]) -> None:
    folder = mix_folders[name]
    target = load_target(folder, device=CPU)
    context = target.config.max_context // 512 * 512
    cache = target.new_cache(2, context, 256)
    cache.fill()
    # Rings are rounded up to whole blocks of 512 slots.
    planned = plan_memory(local_headers(folder), None, HERE).cache(context)
    assert planned == pytest.approx(cache.num_bytes, rel=0.02 if name == "target" else 0.06)


def test_the_drafters_cache_is_counted(tiny_pair: Any) -> None:
    target = load_target(tiny_pair.target, device=CPU)
    drafter = load_drafter(tiny_pair.drafter, target, device=CPU)
    context = target.config.max_context // 512 * 512
    caches = target.new_cache(2, context, 256), drafter.new_cache(2, context - 512)
    for cache in caches:
        cache.fill()
    plan = plan_memory(local_headers(tiny_pair.target), local_headers(tiny_pair.drafter), HERE)
    assert plan.cache(context) == pytest.approx(sum(cache.num_bytes for cache in caches), rel=0.3)
    assert plan.drafter > 0
    alone = plan_memory(local_headers(tiny_pair.target), None, HERE)
    assert (alone.drafter, alone.weights) == (0, plan.weights) and alone.cache(context) < plan.cache(context)


def test_deepseek_v4_is_planned_as_its_own_loader_plans_it(tmp_path: Path) -> None:
    config = replace(parsed(v4_config()), kv_dtype=torch.bfloat16)
    write_headers(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(v4_config()))
    headers = local_headers(tmp_path)
    for theirs in plan_all(read_headers(tmp_path), config, (1, 2)):
        setting = Setting("cuda", num_devices=theirs.num_ranks)
        ours = plan_memory(headers, None, setting, inner_drafter=True)
        assert ours.weights + ours.drafter == pytest.approx(theirs.rank_bytes, rel=1e-4)
        assert ours.cache(131072) == pytest.approx(2 * cache_bytes(config, 131072), rel=1e-4)
        assert plan_memory(headers, None, setting).drafter == 0


def full_folder(folder: Path) -> Path:
    """DeepSeek V4's headers as published, without data."""
    folder.mkdir()
    write_headers(folder, parsed(v4_config(FULL_SIZES)))
    write_json(folder / "config.json", v4_config(FULL_SIZES))
    return folder


def test_a_v4_folder_says_its_need_by_number_of_devices(
    tmp_path: Path, main: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 141_000_000_000
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(environment, "gpus", lambda: tuple(Gpu(n, "x", size, size, "1") for n in range(4)))
    folder = full_folder(tmp_path / "v4")
    plan = main("show", folder, "--context", "131072", "--json").json["memory_plan"]
    profile = load_profile("deepseek-v4-flash", user_paths())
    assert profile is not None
    needs = {int(count): math.ceil(total / 1e9) for count, total in plan["total_bytes_by_devices"].items()}
    assert needs == profile.get("model.min_memory_gb")
    rest = plan["total_bytes"] - plan["parts"]["weights"] - plan["parts"]["drafter"]
    weights = [total - rest for total in plan["total_bytes_by_devices"].values()]
    assert weights == [166_878_536_440, 84_173_429_240, 42_820_875_640, 22_144_598_840]
    assert plan["lines"][-1].startswith("by number of devices: 1 x 173.")
    done = main("run", folder, "--prompt-ids", "1")
    assert done.code == 4
    assert "171.2 GB (weights 156.0 GB, drafter 10.9 GB" in done.error and "give --tp 2 or" in done.error


def write_dense(folder: Path, dtype: torch.dtype) -> None:
    """A Qwen3 of 17 million weights."""
    hidden, inner, vocab = 512, 1024, 8000
    tensors = {f"{name}.weight": torch.zeros(vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(3):
        sizes = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
        sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
        tensors |= {f"model.layers.{layer}.self_attn.{n}_norm.weight": torch.ones(64) for n in "qk"}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir()
    save_file({k: v.to(dtype) for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))


MEASURE = """
import gc, sys, torch
from pathlib import Path
from sparkchat.models import load_target

def held():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

def load():
    model = load_target(Path(sys.argv[1]), device=torch.device("cpu"))
    gc.collect()
    return model, held()

first, before = load()  # what is taken once: libraries, and room that the allocator keeps
second, after = load()
print(after - before)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_weights_of_the_plan_are_those_that_loading_takes(dtype: str, tmp_path: Path) -> None:
    """Table and raw head lie in the mapped file; everything else is memory of the process."""
    folder = tmp_path / "dense"
    write_dense(folder, getattr(torch, dtype))
    command = [sys.executable, "-c", MEASURE, str(folder)]
    # Freed memory goes back at once, so that only what is held counts.
    env = child_environment(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    mapped = 2 * 8000 * 512 * (2 if dtype == "bfloat16" else 4)
    plan = plan_memory(local_headers(folder), None, HERE)
    assert plan.weights - mapped == pytest.approx(int(done.stdout), rel=0.1)


def test_a_gguf_header_is_read_without_its_library(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader

    theirs, file = make_theirs("llama", hidden_size=192, intermediate_size=96, head_dim=32), tmp_path / "model.gguf"
    write_gguf(file, theirs, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
    headers = local_headers(file)
    stored = {str(t.name): t for t in GGUFReader(file).tensors}
    assert len(headers.tensors) == len(stored)
    names = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    for tensor in headers.tensors:
        theirs_ = stored[names.get(tensor.name, tensor.name)]
        assert (tensor.num_bytes, tensor.shape) == (theirs_.n_bytes, tuple(int(n) for n in theirs_.shape[::-1]))
    assert headers.config["num_hidden_layers"] == 3 and headers.config["tie_word_embeddings"] is False
    cache = load_target(file, device=CPU).new_cache(2, 512, 256)
    cache.fill()
    assert plan_memory(headers, None, HERE).cache(512) == pytest.approx(cache.num_bytes, rel=0.02)


def test_float8_weights_are_planned_as_what_they_become() -> None:
    def headers(dtype: str) -> Headers:
        tensors = (
            Tensor("model.embed_tokens.weight", "BF16", (1000, 64)),
            Tensor("lm_head.weight", "BF16", (1000, 64)),
            Tensor("model.layers.0.mlp.up_proj.weight", dtype, (256, 64)),
            *([Tensor("model.layers.0.mlp.up_proj.weight_scale_inv", "BF16", (2, 1))] if dtype == "F8_E4M3" else []),
        )
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
        return Headers(sizes, tensors)

    for setting, saved in ((HERE, 0), (Setting("cuda", "bfloat16"), 0), (Setting("cuda"), 256 * 64)):
        plans = [plan_memory(headers(dtype), None, setting) for dtype in ("F8_E4M3", "BF16")]
        assert plans[0].weights == plans[1].weights - saved


def test_gemma_4_is_planned_with_both_kinds_of_layers(tmp_path: Path) -> None:
    theirs = make_gemma4("gemma4_unified_text")
    theirs.save_pretrained(tmp_path)
    cache = load_target(tmp_path, device=CPU).new_cache(2, 512, 256)
    cache.fill()
    alone = plan_memory(local_headers(tmp_path), None, HERE)
    assert alone.cache(512) == pytest.approx(cache.num_bytes, rel=0.3)
    assert alone.growths[0].bytes_per_token == 2 * 2 * 1 * 16 * 4
    headers = local_headers(tmp_path)
    nested = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": headers.config}
    tensors = [replace(t, name=t.name.replace("model.", "model.language_model.", 1)) for t in headers.tensors]
    beside = plan_memory(Headers(nested, (*tensors, Tensor("model.vision.weight", "F32", (10**6, 10)))), None, HERE)
    assert beside == alone


def header_bytes(length: int, text: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        header_bytes(1 << 50),
        header_bytes(4, b"[1]}"),
        header_bytes(9, b'{"a": {}}'),
        header_bytes(2, b"[]"),
    ],
)
def test_what_is_no_header_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(UnreadableHeader):
        folder_headers({"hidden_size": 8}, [bytes_reader(data)])


@pytest.mark.parametrize("data", [b"GGUF", b"GGUF" + bytes(100), b"GGUF\x03\0\0\0" + b"\xff" * 60, b"PK"])
def test_a_damaged_gguf_header_is_said_to_be_none(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(UnreadableHeader):
        plan_memory(local_headers(file), None, HERE)


def test_a_block_of_a_size_that_no_drafter_has_is_not_planned_for() -> None:
    target = Headers({"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 1}, ())
    drafter = Headers({**target.config, "block_size": 10**9}, ())
    with pytest.raises(UnreadableHeader, match="block_size is 1000000000"):
        plan_memory(target, drafter, HERE)


def test_the_largest_context_is_the_last_that_fits() -> None:
    assert PLAN.largest_context(PLAN.total(12_345)) == 12_345
    assert PLAN.largest_context(PLAN.total(12_345) - 1) == 12_344
    assert PLAN.largest_context(PLAN.total(0)) == 0
    assert PLAN.largest_context(10**15) == PLAN.max_context


def machine_with(free: int) -> Machine:
    return Machine((10**12,), has_gpus=False, free=(free,))


def test_the_context_gives_way_unless_it_was_asked_for() -> None:
    assert fitting_context(PLAN, machine_with(10**12), None, "it") is None
    assert fitting_context(PLAN, machine_with(PLAN.total(5000)), None, "it") == 5000
    assert fitting_context(PLAN, Machine((10**12,), False), 100_000, "it") is None
    with pytest.raises(NotEnoughMemory) as caught:
        fitting_context(PLAN, machine_with(PLAN.total(5000)), 9000, "it")
    for words in ("it needs 1.5 GB", "weights 1.0 GB", "drafter 400.0 MB", "cache of 9,000 tokens", "is free"):
        assert words in str(caught.value)
    assert "--context 5000 or --drafter none or a smaller model" in str(caught.value)
    with pytest.raises(NotEnoughMemory, match="give a smaller model"):
        fitting_context(PLAN, machine_with(900_000_000), None, "it")


def test_the_lines_say_the_parts_and_the_largest_context() -> None:
    first, second = describe_plan(PLAN, machine_with(PLAN.total(5000)), 2000)
    assert first.startswith("1.5 GB: weights 1.0 GB, drafter 400.0 MB, cache of 2,000 tokens 4.1 MB, working space")
    assert "5,000 of 100,000 tokens" in second
    assert "DOES NOT FIT" in describe_plan(PLAN, machine_with(10**9), None)[1]
    assert "on each of 4 devices" in describe_plan(replace(PLAN, num_devices=4), machine_with(10**12), None)[0]


def test_a_shared_cache_takes_what_there_is_and_never_less_than_one_context() -> None:
    plan = replace(PLAN, is_shared=True, num_caches=9)
    assert plan.cache(1000) == 9 * (1000 * 1000 + 100 * 500)
    assert plan.cache(1000, 2500) == 2500 * 1000 + 9 * 100 * 500
    free = plan.total(1000, 4321)
    assert plan.cache_tokens(1000, free) == 4321
    assert plan.cache_tokens(1000, 10**12) == plan.cache_tokens(1000, None) == 9000
    assert plan.cache_tokens(1000, 0) == 1000
    # More requests do not shorten the context of one.
    assert plan.largest_context(plan.least(4321)) == 4321
    lines = describe_plan(plan, machine_with(free), 1000)
    assert "cache of 4,321 tokens" in lines[0] and "4,321 of 100,000" in lines[1]
    assert "cache of 2,000 tokens" in describe_plan(plan, machine_with(free), 1000, limit=2000)[0]


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let this machine have so many bytes of main memory left, of plenty."""

    def give(free: int) -> None:
        monkeypatch.setattr(environment, "memory", lambda: Memory(10**15, free))
        monkeypatch.setattr(environment, "torch_has_cuda", lambda: False)

    return give


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """What ``run`` would start with."""
    kept: list[RunConfig] = []

    def keep(config: RunConfig, *_: object) -> int:
        kept.append(config)
        return 0

    monkeypatch.setattr("sparkchat.ui.plain.run_one_shot", keep)
    return kept


def tiny_plan(tiny_pair: Any) -> MemoryPlan:
    return plan_memory(local_headers(tiny_pair.target), local_headers(tiny_pair.drafter), HERE)


def test_run_takes_a_smaller_context_and_says_so(
    main: Cli, tiny_pair: Any, free_memory: Callable[[int], None], started: list[RunConfig]
) -> None:
    plan = tiny_plan(tiny_pair)
    context = min(700, plan.max_context - 100)
    free_memory(plan.least(context))
    assert main("run", tiny_pair.target, "--drafter", tiny_pair.drafter, "hi").code == 0
    (config,) = started
    # One request has all of it, and a kept chat what that leaves.
    assert (config.spec.context, config.spec.cache_tokens) == (context, context)
    assert f"the context is {context:,} tokens instead of {plan.max_context:,}" in config.notices[0]
    free_memory(10**14)
    assert main("run", tiny_pair.target, "--drafter", tiny_pair.drafter, "hi").code == 0
    assert (started[1].spec.context, started[1].notices) == (None, ())


def test_run_refuses_with_numbers_before_loading(
    main: Cli, tiny_pair: Any, free_memory: Callable[[int], None], started: list[RunConfig]
) -> None:
    plan = tiny_plan(tiny_pair)
    free_memory(plan.least(0) - 1000)
    done = main("run", tiny_pair.target, "--drafter", tiny_pair.drafter, "hi")
    assert done.code == 4
    assert "weights" in done.error and "drafter" in done.error and "working space" in done.error
    free_memory(plan.least(600))
    done = main("run", tiny_pair.target, "--drafter", tiny_pair.drafter, "--context", str(plan.max_context), "hi")
    assert (done.code, "--context 600" in done.error) == (4, True)
    assert started == []


def test_a_limit_of_the_cache_reaches_the_engine_or_is_refused(
    main: Cli, tiny_pair: Any, free_memory: Callable[[int], None], started: list[RunConfig], tmp_path: Path
) -> None:
    free_memory(10**14)
    assert main("run", tiny_pair.target, "--cache-tokens", "200", "hi").code == 0
    assert (started[0].spec.cache_tokens, started[0].spec.context) == (200, None)
    for flags, words in (
        (("--cache-tokens", "0"), "--cache-tokens 0 is not possible"),
        (("--cache-tokens", "100", "--context", "200"), "--cache-tokens 100 does not hold --context 200"),
    ):
        done = main("run", tiny_pair.target, *flags, "hi")
        assert (done.code, words in done.error) == (2, True), done.error
    done = main("run", full_folder(tmp_path / "v4"), "--cache-tokens", "5000", "--prompt-ids", "1")
    assert (done.code, "every request of" in done.error) == (2, True), done.error


def test_show_prints_the_plan_of_what_is_on_disk(main: Cli, tiny_pair: Any, free_memory: Callable[[int], None]) -> None:
    free_memory(10**12)
    report = main("show", tiny_pair.target, "--context", "100", "--json").json["memory_plan"]
    plan = plan_memory(local_headers(tiny_pair.target), None, HERE)
    assert report["total_bytes"] == sum(report["parts"].values()) == plan.total(100)
    assert report["cache_tokens"] == plan.num_caches * 100
    assert (report["context"], report["largest_context"], report["fits"]) == (100, plan.max_context, True)
    lines = main("show", tiny_pair.target).out
    assert "memory plan" in lines and "the largest context that fits" in lines


def hub_model(tiny_pair: Any) -> dict[str, bytes]:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return {name: (tiny_pair.target / name).read_bytes() for name in names}


def giant(files: dict[str, bytes]) -> dict[str, bytes]:
    """A header that promises 1,000 times the layers' weights, and no more data than before."""
    data = files["model.safetensors"]
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if "mlp" in name:
            entry["shape"][0] *= 10_000_000
    text = json.dumps(header).encode()
    return files | {"model.safetensors": struct.pack("<Q", len(text)) + text + data[8 + length :]}


def test_a_dry_run_plans_from_the_headers_on_the_hub(
    main: Cli, hub: Hub, tiny_pair: Any, free_memory: Callable[[int], None], own_folders: Path
) -> None:
    free_memory(10**12)
    files = hub_model(tiny_pair)
    hub.repos["org/tiny"] = Repo(files)
    report = main("pull", "hf:org/tiny", "--dry-run", "--context", "64", "--json").json
    plan = plan_memory(local_headers(tiny_pair.target), None, HERE)
    assert report["memory_plan"]["total_bytes"] == report["memory_bytes"] == plan.total(64)
    assert report["memory_fits"] is True
    assert all(asked is not None for asked in hub.ranges("model.safetensors"))
    assert not list((own_folders / "hf").rglob("*.safetensors"))
    hub.repos["org/tiny"].ignores_range = True
    assert "largest context" in main("pull", "hf:org/tiny", "--dry-run").out


def test_what_cannot_fit_is_refused_before_it_is_fetched(
    main: Cli, hub: Hub, tiny_pair: Any, free_memory: Callable[[int], None]
) -> None:
    free_memory(10**9)
    hub.repos["org/tiny"] = Repo(giant(hub_model(tiny_pair)))
    done = main("run", "hf:org/tiny", "hi")
    assert (done.code, "hf:org/tiny needs" in done.error, "a smaller model" in done.error) == (4, True, True)
    assert all(asked is not None for asked in hub.ranges("model.safetensors"))
    dry = main("pull", "hf:org/tiny", "--dry-run")
    assert (dry.code, "DOES NOT FIT" in dry.out) == (0, True)


def test_a_pair_that_fits_only_part_by_part_is_refused_before_the_first_byte(
    main: Cli, hub: Hub, write_profile: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/drafter"] = Repo(hub.repos["org/model"].files)
    write_profile(
        "pair",
        """
        [[model.sources]]
        kind = 'hub'
        repo = 'org/model'
        [[drafter.sources]]
        kind = 'hub'
        repo = 'org/drafter'
        """,
    )
    size = sum(part["bytes"] for part in main("pull", "pair", "--dry-run", "--json").json["parts"])
    hub.requests.clear()
    monkeypatch.setattr("sparkchat.store.free_bytes", lambda _: (16 << 20) + size - 1)
    done = main("pull", "pair")
    assert (done.code, "org/model" in done.error and "org/drafter" in done.error) == (5, True)
    assert hub.ranges("config.json") == []


def test_memory_of_a_gpu_is_what_is_free_on_it(
    main: Cli, tiny_pair: Any, monkeypatch: pytest.MonkeyPatch, started: list[RunConfig]
) -> None:
    gpus = (Gpu(0, "NVIDIA H200", 141 * 10**9, 10**9, "1"), Gpu(1, "NVIDIA H200", 141 * 10**9, 140 * 10**9, "1"))
    monkeypatch.setattr(environment, "gpus", lambda: gpus)
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: True)
    done = main("run", tiny_pair.target, "hi")
    assert (done.code, "1.0 GB is free" in done.error) == (4, True)
    assert main("run", tiny_pair.target, "--device", "cuda:1", "hi").code == 0
    assert main("run", tiny_pair.target, "--device", "cpu", "hi").code == 0
    assert len(started) == 2


def test_unreadable_headers_leave_the_word_to_the_loader(
    main: Cli, model_folder: Path, started: list[RunConfig]
) -> None:
    assert main("run", model_folder, "hi").code == 0
    assert started[0].notices == ()
    assert main("show", model_folder, "--json").json["memory_plan"] is None
    assert inventory.headers(None, (), user_paths(), ask_hub=True) is None
