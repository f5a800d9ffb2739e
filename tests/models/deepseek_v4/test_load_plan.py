"""What each GPU must hold, from headers without data, agrees with the published totals to the byte."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fixtures.deepseek_v4 import FULL_SIZES, full_layout, parsed, shard_of, v4_config, write_json, write_tiny_v4
from sparkchat.catalog import load_profile
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.formats import num_bytes
from sparkchat.models.deepseek_v4.headers import Headers, StoredTensor, read_headers
from sparkchat.models.deepseek_v4.load_plan import LoadPlan, cache_bytes, plan_all, plan_load, unpacked_bytes
from sparkchat.models.deepseek_v4.weights import CheckpointSource, stored_form
from sparkchat.paths import user_paths

# Of DeepSeek-V4-Flash-0731 and -DSpark, and of the April preview, as their indexes say.
DSPARK_BYTES, DSPARK_TENSORS, DRAFTER_BYTES = 166_878_536_440, 72_317, 10_862_838_300
PREVIEW_BYTES, PREVIEW_TENSORS = 159_609_485_896, 69_187


def write_headers(folder: Path, config: DeepseekV4Config) -> None:
    """Write shards whose data is a hole in the file."""
    shards: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, dtype, shape in stored_form(full_layout(config)):
        shards.setdefault(shard_of(name, config), {})[name] = (dtype, shape)
    weight_map, total = {}, 0
    for number, tensors in shards.items():
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            size = num_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(data).to_bytes(8, "little") + data)
            stream.truncate(8 + len(data) + end)
        weight_map |= dict.fromkeys(tensors, file)
        total += end
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


@pytest.fixture(scope="module")
def config() -> DeepseekV4Config:
    return replace(parsed(v4_config(FULL_SIZES)), kv_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def headers(config: DeepseekV4Config, tmp_path_factory: pytest.TempPathFactory) -> Headers:
    folder = tmp_path_factory.mktemp("full")
    write_headers(folder, config)
    return read_headers(folder)


@pytest.fixture(scope="module")
def plans(headers: Headers, config: DeepseekV4Config) -> dict[int, LoadPlan]:
    return {plan.num_ranks: plan for plan in plan_all(headers, config)}


def test_the_totals_are_those_of_the_release(headers: Headers, plans: dict[int, LoadPlan]) -> None:
    assert len(headers.files) == 48
    for plan in plans.values():
        assert (plan.num_tensors, plan.total_bytes) == (DSPARK_TENSORS, DSPARK_BYTES)
        assert plan.drafter_bytes == DRAFTER_BYTES


def test_the_totals_of_the_preview_are_those_of_its_release(tmp_path: Path) -> None:
    config = parsed(v4_config(FULL_SIZES, drafter="mtp"))
    write_headers(tmp_path, config)
    headers = read_headers(tmp_path)
    plan = plan_load(headers, config, 2)
    assert (len(headers.files), plan.num_tensors, plan.total_bytes) == (46, PREVIEW_TENSORS, PREVIEW_BYTES)


def test_ranks_hold_what_is_shared_once_and_the_rest_each(plans: dict[int, LoadPlan]) -> None:
    assert plans[1].rank_bytes == DSPARK_BYTES
    for count, plan in plans.items():
        shared = plan.total_bytes - plan.replicated_bytes
        assert plan.replicated_bytes == 1_468_322_040
        assert shared % count == 0
        assert plan.rank_bytes == plan.replicated_bytes + shared // count
    assert [plans[n].rank_bytes for n in (2, 4, 8)] == [84_173_429_240, 42_820_875_640, 22_144_598_840]


def test_the_cache_grows_by_the_published_bytes_a_token(config: DeepseekV4Config) -> None:
    assert cache_bytes(config, 131072) - cache_bytes(config, 0) == 131072 * 6880
    # 46 rings of 128 latents, and 12.2 MB of open compressor windows.
    assert cache_bytes(config, 0) == pytest.approx(46 * 131072 + 12.2e6, rel=0.01)


def test_the_need_of_a_gpu_adds_caches_and_working_space(plans: dict[int, LoadPlan], config: DeepseekV4Config) -> None:
    one, two = (plans[4].memory_need(config, 131072, num_requests=n) for n in (1, 2))
    assert two - one == cache_bytes(config, 131072)
    assert plans[4].rank_bytes + cache_bytes(config, 131072) < one < 52e9


def test_a_number_of_gpus_that_does_not_divide_is_refused(headers: Headers, config: DeepseekV4Config) -> None:
    with pytest.raises(UsageError, match="3 devices cannot share the model's 64 attention heads"):
        plan_load(headers, config, 3)
    with pytest.raises(UsageError, match="16 devices cannot share the model's 8 output groups"):
        plan_load(headers, config, 16)


def test_headers_of_another_model_are_refused(headers: Headers, config: DeepseekV4Config) -> None:
    with pytest.raises(DamagedFile, match=r"layers\.0\.ffn\.gate\.weight has shape \[256, 4096\]"):
        plan_load(headers, replace(config, num_experts=257), 2)
    with pytest.raises(DamagedFile, match=r"lack layers\.43\.attn_norm\.weight"):
        plan_load(headers, replace(config, compress_ratios=(*config.compress_ratios, 0), num_layers=44), 2)


@pytest.mark.parametrize("drafter", ["dspark", "mtp", "none"])
def test_a_plan_counts_the_bytes_that_a_rank_reads(drafter: str, tmp_path: Path) -> None:
    config = parsed(v4_config(drafter=drafter))
    folder = write_tiny_v4(tmp_path / "v4", drafter=drafter)
    for plan in plan_all(read_headers(folder), config, (1, 2, 4)):
        read = []
        for rank in range(plan.num_ranks):
            layout = full_layout(config)
            source = CheckpointSource(folder, config, layout, rank=rank, num_ranks=plan.num_ranks)
            read.append(sum(source.take(name).nbytes for name in layout))
        assert plan.rank_bytes == max(read)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("deepseek-v4-flash", "dspark"), ("deepseek-v4-flash-dspark", "dspark"), ("deepseek-v4-flash-preview", "mtp")],
)
def test_the_profiles_state_the_need_by_number_of_gpus(name: str, drafter: str) -> None:
    profile = load_profile(name, user_paths())
    assert profile is not None
    config = replace(parsed(v4_config(FULL_SIZES, drafter=drafter)), kv_dtype=torch.bfloat16)
    stored = {
        name: StoredTensor(dtype, shape, Path("x"), num_bytes(dtype, shape))
        for name, dtype, shape in stored_form(full_layout(config))
    }
    (source,) = profile.get("model.sources")
    assert source.size == sum(tensor.num_bytes for tensor in stored.values())
    # A running chat, and one that is kept for its next turn.
    context = profile.get("run.context")
    needs = {
        plan.num_ranks: math.ceil(plan.memory_need(config, context, num_requests=2) / 1e9)
        for plan in plan_all(Headers(Path("x"), stored, ()), config)
    }
    assert profile.get("model.min_memory_gb") == needs


def test_unpacked_weights_are_counted_by_their_numbers(config: DeepseekV4Config) -> None:
    layout = full_layout(config)
    numbers = sum(math.prod(spec.shape) for spec in layout.values() if spec.storage in ("fp4", "fp8"))
    in_bf16, in_fp32 = (unpacked_bytes(layout, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert in_fp32 - in_bf16 == 2 * numbers
    assert numbers > 290e9
    assert in_bf16 > 3.4 * DSPARK_BYTES
