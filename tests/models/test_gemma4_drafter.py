"""The DSpark drafter for Gemma 4 against DeepSpec's formulas, and with its target in the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from cases.harness import open_runner
from fixtures.tokenizer import CHATML, TokenizerSpec, write_tokenizer
from models.pairs import CPU, Pair, assert_close, batch_of, random_ids, run
from models.test_gemma4 import SIZES, make_theirs
from sparkchat.errors import UsageError
from sparkchat.models import load_drafter, load_target
from sparkchat.models.dspark.drafter import Drafter

D, INNER, HEADS, SIZE, LAYERS, RANK, BLOCK, MASK, CAP = 48, 80, 6, 16, 2, 12, 4, 4, 5.0
TAPS = (0, 2)
EPS = 1e-6


@dataclass(frozen=True)
class Draft:
    weights: dict[str, Tensor]
    ours: Drafter
    folder: Path
    num_kv_heads: int


def random_weights(num_kv_heads: int, *, has_values: bool, vocab: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def normal(*size: int, std: float = 0.2) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    def scale(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    weights = {
        "embed_tokens.weight": normal(vocab, D, std=0.5),
        "lm_head.weight": normal(vocab, D),
        "fc.weight": normal(D, len(TAPS) * D),
        "hidden_norm.weight": scale(D),
        "norm.weight": scale(D),
        "markov_head.markov_w1.weight": normal(vocab, RANK, std=1.0),
        "markov_head.markov_w2.weight": normal(vocab, RANK, std=1.0),
        "confidence_head.proj.weight": normal(1, D + RANK),
        "confidence_head.proj.bias": normal(1),
    }
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        kv = num_kv_heads * SIZE
        shapes = {"q": (HEADS * SIZE, D), "k": (kv, D), "o": (D, HEADS * SIZE)} | ({"v": (kv, D)} if has_values else {})
        weights |= {f"{at}self_attn.{name}_proj.weight": normal(*size) for name, size in shapes.items()}
        weights |= {f"{at}self_attn.{name}_norm.weight": scale(SIZE) for name in "qk"}
        weights |= {f"{at}mlp.{name}_proj.weight": normal(INNER, D) for name in ("gate", "up")}
        weights[f"{at}mlp.down_proj.weight"] = normal(D, INNER)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{at}{name}_layernorm.weight"] = scale(D)
        weights[f"{at}layer_scalar"] = scale(1)
    return weights


def write_draft(folder: Path, target: Any, *, shares: bool = True, vocab: int = 97) -> Draft:
    """``shares``: keys are values, as published."""
    num_kv_heads = 1 if shares else 2
    weights = random_weights(num_kv_heads, has_values=not shares, vocab=vocab)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = SIZES | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_unified_text",
        "vocab_size": vocab,
        "attention_k_eq_v": shares,
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": list(TAPS),
        "num_anchors": 8,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Draft(weights, load_drafter(folder, target, device=CPU), folder, num_kv_heads)


@pytest.fixture
def pair(build_once: Callable[..., Any]) -> Pair:
    def build(folder: Path) -> Pair:
        theirs = make_theirs("gemma4_unified_text")
        theirs.save_pretrained(folder)
        return Pair(theirs, load_target(folder, device=CPU), folder)

    return build_once("gemma4-drafted", build)


@pytest.fixture(params=[True, False], ids=["keys are values", "values of their own"])
def draft(request: pytest.FixtureRequest, pair: Pair, build_once: Callable[..., Any]) -> Draft:
    name = f"gemma4-drafter-{request.param}"
    return build_once(name, lambda folder: write_draft(folder, pair.ours, shares=request.param))


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    norm = Gemma4RMSNorm(x.shape[-1], eps=EPS, with_scale=weight is not None)
    if weight is not None:
        norm.weight.data.copy_(weight)
    with torch.no_grad():
        return norm(x)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, D]: a quarter of the pairs turn, at the speeds of the whole head."""
    pairs = SIZE // 2
    frequency = 1e6 ** -(torch.arange(0, SIZE, 2).float() / SIZE) * (torch.arange(pairs) < int(0.25 * SIZE // 2))
    angle = (positions[:, None] * frequency).repeat(1, 2)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


def recompute_block(draft: Draft, features: Tensor, block: Tensor) -> Tensor:
    """Hidden rows [g, d] of a block after ``features`` [s, m*d], from scratch."""
    w, kv_heads = draft.weights, draft.num_kv_heads
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    start, count = features.shape[0], block.shape[0]
    everywhere, own = torch.arange(start + count), torch.arange(start, start + count)
    x = w["embed_tokens.weight"][block] * D**0.5
    for layer in range(LAYERS):
        at, attn = f"layers.{layer}.", f"layers.{layer}.self_attn."
        normed = rms(x, w[f"{at}input_layernorm.weight"])
        source = torch.cat([context, normed])
        raw_k = (source @ w[f"{attn}k_proj.weight"].T).view(-1, kv_heads, SIZE)
        has_values = f"{attn}v_proj.weight" in w
        raw_v = (source @ w[f"{attn}v_proj.weight"].T).view(-1, kv_heads, SIZE) if has_values else raw_k
        q = rms((normed @ w[f"{attn}q_proj.weight"].T).view(-1, HEADS, SIZE), w[f"{attn}q_norm.weight"])
        k, v = rotate(rms(raw_k, w[f"{attn}k_norm.weight"]), everywhere), rms(raw_v)
        q = rotate(q, own)
        k, v = (t.repeat_interleave(HEADS // kv_heads, dim=1).transpose(0, 1) for t in (k, v))
        mixed = ((q.transpose(0, 1) @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = x + rms(mixed @ w[f"{attn}o_proj.weight"].T, w[f"{at}post_attention_layernorm.weight"])
        normed = rms(x, w[f"{at}pre_feedforward_layernorm.weight"])
        gated = F.gelu(normed @ w[f"{at}mlp.gate_proj.weight"].T, approximate="tanh")
        inner = (gated * (normed @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T
        x = (x + rms(inner, w[f"{at}post_feedforward_layernorm.weight"])) * w[f"{at}layer_scalar"]
    return rms(x, w["norm.weight"])


def random_features(count: int) -> Tensor:
    return torch.randn(count, len(TAPS) * D, generator=torch.Generator().manual_seed(5))


def extend(draft: Draft, cache: Any, row: int, features: Tensor) -> None:
    batch = batch_of(cache, [(row, torch.zeros(len(features), dtype=torch.int64))])
    draft.ours.extend_context(features, batch, cache)


@pytest.mark.parametrize("length", [1, 7, 60])
def test_block_equals_the_formulas(draft: Draft, length: int) -> None:
    cache = draft.ours.new_cache(1, 100)
    row, features = cache.allocate(), random_features(length)
    for start in range(0, length, 9):
        extend(draft, cache, row, features[start : start + 9])
    block = torch.tensor([3] + [MASK] * (BLOCK - 1))
    hidden = draft.ours.backbone(batch_of(cache, [(row, block)]), cache)
    assert_close(hidden, recompute_block(draft, features, block))
    assert cache.length(row) == length


def test_base_logits_are_capped_and_the_markov_bias_is_not(draft: Draft) -> None:
    hidden = torch.randn(3, D, generator=torch.Generator().manual_seed(1)) * 5
    raw = hidden @ draft.weights["lm_head.weight"].T
    assert_close(draft.ours.base_logits(hidden), CAP * torch.tanh(raw / CAP))
    ids = torch.tensor([5, 9, 11])
    bias, _ = draft.ours.markov_step(ids, hidden, draft.ours.initial_state(3))
    w1, w2 = (draft.weights[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
    assert_close(bias, w1[ids] @ w2.T)


def test_features_of_the_target_fit(pair: Pair, draft: Draft) -> None:
    cache, ids = pair.ours.new_cache(1, 64, 64), random_ids(12)
    _, features = run(pair.ours, cache, [(cache.allocate(), ids)], TAPS)
    assert features is not None
    context = draft.ours.new_cache(1, 64)
    row, block = context.allocate(), torch.tensor([3, MASK])
    extend(draft, context, row, features)
    hidden = draft.ours.backbone(batch_of(context, [(row, block)]), context)
    assert_close(hidden, recompute_block(draft, features, block))


def test_a_drafter_of_another_size_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_draft(tmp_path / "draft", pair.ours, vocab=98)


def test_the_pair_decodes_in_the_engine_as_the_target_alone(tmp_path: Path) -> None:
    """Greedy tokens of every mode are those of plain decoding; rings turn more than once."""
    theirs = make_theirs("gemma4_unified_text", vocab_size=512, eos_token_id=511)
    theirs.save_pretrained(tmp_path / "target")
    write_tokenizer(tmp_path / "target", TokenizerSpec(chat_template=CHATML))
    draft = write_draft(tmp_path / "draft", load_target(tmp_path / "target", device=CPU), vocab=512)
    runner = open_runner(tmp_path / "target", draft.folder, context=256)
    prompts = [[int(i) for i in random_ids(n, seed=n)] for n in (5, 20, 33)]
    lines = [
        {"prompt_ids": ids, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "mode": mode}
        for mode in ("off", "static", "compact")
        for ids in prompts
    ]
    together = runner.ids(lines)
    assert {len(ids) for ids in together} == {40}
    assert together[:3] == together[3:6] == together[6:]
    alone = [runner.ids([line])[0] for line in lines[:1] + lines[3:4]]
    assert alone == [together[0], together[0]]
