"""How much memory a model takes to run, from the headers of its files: weights, drafter, caches, graphs, working space.

The rules follow what the loaders keep: models/linear.py, models/dense.py and models/dspark on the dense side,
models/deepseek_v4/load_plan.py for DeepSeek V4. Tests hold the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparkchat.headers import Headers, Tensor, UnreadableHeader

PREFILL_ROWS = 256
"""Rows of a prompt that run at once (engine/prefill.py)."""
KEPT_SESSIONS = 1
"""Caches of finished answers that are kept, so that the next turn need not read its prompt again."""
SPARE_ROWS = 1
"""Rows of a captured step that belong to nobody."""
BASE_BYTES = {"cpu": 500_000_000, "cuda": 1_300_000_000}
"""Taken before anything is loaded: torch and its libraries; on a GPU its context, kernels and workspaces. Estimates."""
GRAPH_BYTES = 5_000_000
"""A captured graph, with its part of the shared pool. An estimate."""
V4_WORKING_BYTES = 4 << 30
"""Activations, kernels, communication buffers, the room of expanded weights (0.13 GB) and the CUDA context of DeepSeek
V4 (load_plan.py). An estimate."""
SMALLEST_CONTEXT = 512
"""What is left below this is no chat."""
_MOST_BLOCK = 256

FP8_BLOCK = 128
"""Outputs and inputs that share a scale where float8 weights stay float8 on a GPU (models/linear.py)."""

_V4_SPLIT = re.compile(
    r"(embed|head|.*\.attn\.(wq_b|wo_a|wo_b)|.*\.ffn\.(shared_experts|experts\.\d+)\.w[123]|.*\.markov_w2)"
    r"\.(weight|scale)|.*\.attn_sink"
)
_V4_DRAFTER = "mtp."
_V4_DEVICE_COUNTS = (1, 2, 4, 8)
_CODED = ("Q4_0", "Q4_1", "Q8_0")
"""Formats of GGUF whose codes are kept; the others are unpacked when they are read."""
_TABLES = ("model.embed_tokens.weight", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Setting:
    """How it is to be run."""

    device: str
    """cpu or cuda."""
    dtype: str = "auto"
    num_devices: int = 1
    num_requests: int = 1
    """Decoded together."""
    has_graphs: bool = False
    has_bf16_product: bool = True
    """Of the CPU: without one, bfloat16 weights are held in float32."""
    has_cpu_kernels: bool = False
    """Our own (kernels/cpu) hold bfloat16 as it is, and codes with one scale (and shift) of 16 bits for each 32."""


@dataclass(frozen=True)
class Growth:
    """Cache that grows with the context, of one request."""

    bytes_per_token: float
    most_tokens: int | None = None
    """A window beyond which it grows no more."""

    def at(self, context: int) -> int:
        tokens = context if self.most_tokens is None else min(context, self.most_tokens)
        return int(self.bytes_per_token * tokens)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device, the fullest where they differ."""

    weights: int
    drafter: int
    graphs: int
    working: int
    cache_fixed: int
    """Of one request, whatever the context."""
    growths: tuple[Growth, ...]
    num_caches: int
    max_context: int
    num_devices: int = 1
    is_shared: bool = False
    """Layers without a window share one cache of so many tokens, of which one request may take all; else every request
    has a cache of its own."""

    def cache(self, context: int, tokens: int | None = None) -> int:
        """``tokens``: of a shared cache; None gives every request its whole context."""
        if tokens is None or not self.is_shared:
            return self.num_caches * (self.cache_fixed + sum(growth.at(context) for growth in self.growths))
        windows = sum(growth.at(context) for growth in self.growths if growth.most_tokens is not None)
        return self.num_caches * (self.cache_fixed + windows) + int(self._shared_bytes * tokens)

    @property
    def _shared_bytes(self) -> float:
        """Of a token of a shared cache."""
        return sum(growth.bytes_per_token for growth in self.growths if growth.most_tokens is None)

    def total(self, context: int, tokens: int | None = None) -> int:
        return self.weights + self.drafter + self.graphs + self.working + self.cache(context, tokens)

    def least(self, context: int) -> int:
        """What it takes for one request to have that context."""
        return self.total(context, context)

    def cache_tokens(self, context: int, available: int | None) -> int:
        """Tokens of all caches together that fit: at least one context, at most one for every request."""
        most = self.num_caches * context
        if not self.is_shared or not self._shared_bytes or available is None:
            return most
        return max(context, min(most, int((available - self.total(context, 0)) / self._shared_bytes)))

    def largest_context(self, available: int) -> int:
        """The most tokens of context, up to the model's own, that fit; 0 when nothing does."""
        low, high = 0, self.max_context
        if self.least(1) > available:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.least(middle) <= available else (low, middle - 1)
        return low

    def parts(self, context: int, tokens: int | None = None) -> dict[str, int]:
        return {
            "weights": self.weights,
            "drafter": self.drafter,
            "cache": self.cache(context, tokens),
            "graphs": self.graphs,
            "working": self.working,
        }


def device_counts(target: Headers) -> tuple[int, ...]:
    """Numbers of devices that can share a model: 1 alone for all families but DeepSeek V4. Raises UnreadableHeader."""
    config = target.config
    if config.get("model_type") != "deepseek_v4":
        return (1,)
    sizes = [_whole(config, key) for key in ("num_attention_heads", "o_groups", "vocab_size", "moe_intermediate_size")]
    sizes[-1] //= 2  # codes to a byte
    return tuple(count for count in _V4_DEVICE_COUNTS if all(size % count == 0 for size in sizes))


def plan_memory(
    target: Headers, drafter: Headers | None, setting: Setting, *, inner_drafter: bool = False
) -> MemoryPlan:
    """The plan for a target and its drafter. ``inner_drafter``: it lies in the target's own checkpoint.

    Raises UnreadableHeader for what is not planned for.
    """
    if target.config.get("model_type") == "deepseek_v4":
        return _plan_v4(target, setting, inner_drafter)
    target = _text_part(target)
    if _is_gemma4(target.config):
        setting = replace(setting, has_graphs=False, has_cpu_kernels=False)
    is_shared = not _is_gemma4(target.config)
    growths = _growths(target.config, _cache_bytes(target, setting))
    drafter_bytes, block = 0, 0
    if drafter is not None:
        drafter_bytes = _drafter_bytes(drafter, setting)
        growths += _growths(drafter.config, _cache_bytes(drafter, setting))
        block = _whole(drafter.config, "block_size", drafter.config.get("dspark_block_size"))
        if block > _MOST_BLOCK:
            # Refused for what it is when it is loaded, not for the memory it would take.
            raise UnreadableHeader(f"block_size is {block}")
    return MemoryPlan(
        weights=_dense_bytes(target, setting),
        drafter=drafter_bytes,
        graphs=_graph_bytes(block, setting),
        working=_working_bytes(target, block, setting),
        cache_fixed=0,
        growths=growths,
        num_caches=setting.num_requests + KEPT_SESSIONS + (SPARE_ROWS if setting.has_graphs and not is_shared else 0),
        max_context=_whole(target.config, "max_position_embeddings", 2048),
        num_devices=setting.num_devices,
        is_shared=is_shared,
    )


def _text_part(headers: Headers) -> Headers:
    """The text model of a checkpoint that has images or sound beside it, under the names of one without."""
    prefix, nested = "model.language_model.", headers.config.get("text_config")
    if not isinstance(nested, dict):
        return headers
    tensors = tuple(
        replace(tensor, name="model." + tensor.name.removeprefix(prefix))
        for tensor in headers.tensors
        if tensor.name.startswith(prefix)
    )
    return Headers({"architectures": headers.config.get("architectures")} | nested, tensors or headers.tensors)


def _is_gemma4(config: dict[str, Any]) -> bool:
    return "Gemma4" in str(config.get("architectures"))


def _is_tied(headers: Headers) -> bool:
    tied = headers.config.get("tie_word_embeddings")
    return _is_gemma4(headers.config) if tied is None else bool(tied)


def _whole(config: dict[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 48:
        raise UnreadableHeader(f"{key} is {value!r}")
    return value


def _dense_bytes(headers: Headers, setting: Setting) -> int:
    """Weights of a dense target, as models/dense.py holds them."""
    table_bytes, head_bytes = _table_bytes(headers, setting)
    total, num_tables = 0, 0
    for tensor in headers.tensors:
        if tensor.name in _TABLES:
            is_head = tensor.name == "lm_head.weight"
            if is_head and _is_tied(headers):
                continue
            num_tables += 1
            total += head_bytes(tensor) if is_head else table_bytes(tensor)
            if not is_head and _is_tied(headers):
                total += head_bytes(tensor)
        elif len(tensor.shape) < 2:
            total += 4 * tensor.count
        elif not tensor.name.endswith("_scale_inv"):
            total += int(tensor.count * _linear_bytes(tensor, headers, setting))
    if not num_tables:
        raise UnreadableHeader("no embedding")
    return total


def _linear_bytes(tensor: Tensor, headers: Headers, setting: Setting) -> float:
    """Bytes for each number of a matrix in memory."""
    if setting.device != "cpu":
        is_kept = tensor.dtype == "F8_E4M3" and setting.dtype == "auto" and tensor.shape[0] % FP8_BLOCK == 0
        return 4 if setting.dtype == "float32" else 1 if is_kept else 2
    half = 2 if setting.has_bf16_product or setting.has_cpu_kernels else 4
    if setting.dtype != "auto":
        return 4 if setting.dtype == "float32" else half
    if headers.is_gguf:
        if setting.has_cpu_kernels:
            return _coded_bytes(tensor)
        # 4 bit codes with a pair of bfloat16 for each 32, and a copy for long spans.
        is_4bit = tensor.dtype in ("Q4_0", "Q4_1") and tensor.shape[0] % 16 == 0
        return (0.5 + 4 / 32 if is_4bit else 0) + half
    return 4 if _is_float32(headers) else half


def _coded_bytes(tensor: Tensor) -> float:
    """Bytes for each number of a matrix from a GGUF file, in lane blocks (kernels/cpu/tiles.py)."""
    return {"Q4_0": 0.5 + 4 / 32, "Q4_1": 0.5 + 4 / 32, "Q8_0": 1 + 2 / 32}.get(tensor.dtype, 2)


def _is_float32(headers: Headers) -> bool:
    """The format of the embedding table decides (models/__init__.py)."""
    return any(tensor.dtype == "F32" for tensor in headers.tensors if tensor.name in _TABLES[:2])


def _table_bytes(headers: Headers, setting: Setting) -> tuple[Callable[[Tensor], int], Callable[[Tensor], int]]:
    """Bytes of the embedding table, and of the output head beside it."""
    is_gguf = headers.is_gguf and setting.device == "cpu"
    is_full = setting.dtype == "float32" or (
        setting.dtype == "auto" and setting.device == "cpu" and _is_float32(headers) and not headers.is_gguf
    )
    item = 4 if is_full else 2
    has_half = setting.has_bf16_product or setting.has_cpu_kernels or setting.device != "cpu"
    packed = item if has_half else 4
    is_tied = _is_tied(headers)

    def table(tensor: Tensor) -> int:
        if is_gguf and tensor.dtype in _CODED:
            # Codes of 8 bits, and scale (and shift) in float32.
            return tensor.count * (32 + 4 + 4 * (tensor.dtype == "Q4_1")) // 32
        return tensor.count * item

    def head(tensor: Tensor) -> int:
        kept = 0 if is_tied or setting.device != "cpu" else table(tensor)
        if is_gguf and tensor.dtype not in _CODED:
            # As it was read, or unpacked to float32, beside the table that is made of it.
            is_one = is_tied and tensor.dtype == "BF16" and item == 2
            kept = 0 if is_one else tensor.count * (2 if tensor.dtype in ("F16", "BF16") else 4)
        if is_gguf and setting.has_cpu_kernels and setting.dtype == "auto":
            return kept + int(tensor.count * _coded_bytes(tensor))
        return kept + tensor.count * packed

    return table, head


def _drafter_bytes(headers: Headers, setting: Setting) -> int:
    """Weights of a DSpark drafter, as models/dspark holds them: 8 bits on the CPU, unless they are float32."""
    stored = next((tensor.dtype for tensor in headers.tensors if tensor.name == "fc.weight"), "BF16")
    linear: float = 2
    table = 2
    if setting.dtype == "float32":
        linear, table = 4, 4
    elif setting.device == "cpu" and setting.dtype == "auto":
        linear, table = (4, 4) if stored == "F32" else (1 + 2 / 32, 2)
    elif setting.device == "cpu" and not (setting.has_bf16_product or setting.has_cpu_kernels):
        linear = 4
    sizes = {"embed_tokens.weight": table, "markov_head.markov_w1.weight": table}
    return sum(
        int(tensor.count * (4 if len(tensor.shape) < 2 else sizes.get(tensor.name, linear)))
        for tensor in headers.tensors
        if tensor.name not in ("d2t", "t2d")
    )


def _cache_bytes(headers: Headers, setting: Setting) -> int:
    """Bytes of a cached number."""
    if setting.dtype == "float32":
        return 4
    stored = next((t.dtype for t in headers.tensors if t.name in (*_TABLES[:2], "fc.weight")), "")
    return 4 if setting.device == "cpu" and setting.dtype == "auto" and stored == "F32" else 2


def _growths(config: dict[str, Any], item: int) -> tuple[Growth, ...]:
    """Keys and values of all layers, those with a sliding window apart."""
    if _is_gemma4(config):
        return _gemma4_growths(config, item)
    layers, heads = _whole(config, "num_hidden_layers"), _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    default = 128 if "Qwen3" in str(config.get("architectures")) else _whole(config, "hidden_size") // max(1, heads)
    one_layer = 2 * kv_heads * _whole(config, "head_dim", default) * item
    num_windowed = _num_windowed(config, layers)
    if not num_windowed:
        return (Growth(layers * one_layer),)
    window = _whole(config, "sliding_window") + PREFILL_ROWS
    return Growth((layers - num_windowed) * one_layer), Growth(num_windowed * one_layer, window)


def _gemma4_growths(config: dict[str, Any], item: int) -> tuple[Growth, ...]:
    """Full layers have heads of another size and number (models/gemma4/config.py)."""
    layers, kinds = _whole(config, "num_hidden_layers"), config.get("layer_types")
    if not isinstance(kinds, list):
        kinds = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    own = next(iter((config.get("per_layer_config") or {}).values()), {})
    shares = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None
    kv_heads = _whole(config, "num_key_value_heads")
    full_heads = _whole(own, "num_key_value_heads", config.get("num_global_key_value_heads") if shares else kv_heads)
    full_dim = _whole(own, "head_dim", config.get("global_head_dim", 512))
    num_full = kinds.count("full_attention")
    full = Growth(num_full * 2 * full_heads * full_dim * item)
    if num_full == len(kinds):
        return (full,)
    one_layer = 2 * kv_heads * _whole(config, "head_dim", 256) * item
    window = _whole(config, "sliding_window") + PREFILL_ROWS
    return full, Growth((len(kinds) - num_full) * one_layer, window)


def _num_windowed(config: dict[str, Any], layers: int) -> int:
    """Layers with a sliding window (models/hf_config.py)."""
    is_qwen = "Qwen" in str(config.get("architectures"))
    if config.get("sliding_window") is None or (is_qwen and not config.get("use_sliding_window")):
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    if is_qwen:
        return max(0, layers - _whole(config, "max_window_layers", 28))
    return layers if "Mistral" in str(config.get("architectures")) else 0


def _graph_bytes(block: int, setting: Setting) -> int:
    """Graphs of every row count up to four windows, and of every request count a draft has, for two kinds of draw."""
    if not setting.has_graphs:
        return 0
    return 2 * GRAPH_BYTES * (min(4, setting.num_requests) * (block + 1) + min(8, setting.num_requests))


def _working_bytes(headers: Headers, block: int, setting: Setting) -> int:
    """What is there before loading, the rows of a prompt in one layer, and laws over the vocabulary."""
    config = headers.config
    table = next(tensor for tensor in headers.tensors if tensor.name in _TABLES)
    width = 6 * _whole(config, "hidden_size") + 3 * _whole(config, "intermediate_size")
    laws = 8 * 4 * table.shape[0] * (block + 1) * setting.num_requests
    return BASE_BYTES[setting.device] + 4 * PREFILL_ROWS * width + laws


def _plan_v4(headers: Headers, setting: Setting, with_drafter: bool) -> MemoryPlan:
    """DeepSeek V4 stays as it is stored; ranks share experts, heads and vocabulary, and hold the rest whole."""
    config = headers.config

    def of_rank(tensor: Tensor) -> int:
        is_shared = _V4_SPLIT.fullmatch(tensor.name) is not None
        return tensor.num_bytes // setting.num_devices if is_shared else tensor.num_bytes

    drafter = [tensor for tensor in headers.tensors if tensor.name.startswith(_V4_DRAFTER)]
    trunk = [tensor for tensor in headers.tensors if not tensor.name.startswith(_V4_DRAFTER)]
    item = 4 if setting.device == "cpu" else 2
    fixed, growth = _v4_cache(config, item)
    return MemoryPlan(
        weights=sum(of_rank(tensor) for tensor in trunk),
        drafter=sum(of_rank(tensor) for tensor in drafter) if with_drafter else 0,
        graphs=0,
        working=V4_WORKING_BYTES,
        cache_fixed=fixed,
        growths=(Growth(growth),),
        num_caches=setting.num_requests + KEPT_SESSIONS,
        max_context=_whole(config, "max_position_embeddings", 2048),
        num_devices=setting.num_devices,
    )


def _v4_cache(config: dict[str, Any], item: int) -> tuple[int, float]:
    """Bytes of one request's rings and open windows, and for each position: compressed entries and index keys."""
    ratios, layers = config.get("compress_ratios"), _whole(config, "num_hidden_layers")
    if not isinstance(ratios, list) or not all(isinstance(ratio, int) for ratio in ratios):
        raise UnreadableHeader("compress_ratios")
    width, index = _whole(config, "head_dim"), _whole(config, "index_head_dim")
    fixed = len(ratios) * _whole(config, "sliding_window") * width * item
    growth = 0.0
    for ratio in ratios[:layers]:
        if ratio:
            entry = width + (index if ratio == 4 else 0)
            growth += entry / ratio * item
            fixed += 2 * 4 * ratio * entry * (4 if ratio == 4 else 1)
    return fixed, growth
