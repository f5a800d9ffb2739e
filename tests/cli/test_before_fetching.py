"""What headers tell before weights are fetched: memory of formats that are unpacked, models that cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFWriter

from cli.conftest import Cli
from cli.mock_hub import Hub, Repo
from cli.test_memory_plan import HERE, hub_model
from sparkchat.headers import GGUF_BLOCKS, Headers, Tensor
from sparkchat.memory_plan import plan_memory


def test_formats_of_gguf_that_are_unpacked_are_planned_as_what_they_become() -> None:
    assert {name: size for name, (size, _) in GGUF_BLOCKS.items()} == {
        kind.name: size for kind, (_, size) in GGML_QUANT_SIZES.items() if kind.name in GGUF_BLOCKS
    }

    def weights(dtype: str, tied: bool) -> int:
        names = ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",)))
        tensors = (
            *(Tensor(name, dtype, (1000, 256)) for name in names),
            Tensor("blk.0.attn_q.weight", dtype, (256, 256)),
        )
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
        return plan_memory(
            Headers({"gguf": "llama", "tie_word_embeddings": tied, **sizes}, tensors), None, HERE
        ).weights

    half = 2 if HERE.has_bf16_product or HERE.has_cpu_kernels else 4
    for tied in (True, False):
        # The table in bfloat16, the head as it was unpacked, and as it is multiplied.
        assert weights("Q4_K", tied) == 256 * 256 * half + 1000 * 256 * (2 + 4 + half)
        assert weights("F16", tied) == 256 * 256 * half + 1000 * 256 * (2 + 2 + half)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_what_cannot_be_run_is_refused_before_it_is_fetched(
    main: Cli, hub: Hub, tiny_pair: Any, tmp_path: Path, is_gguf: bool
) -> None:
    if is_gguf:
        file = tmp_path / "model.gguf"
        writer = GGUFWriter(file, "gemma3")
        writer.add_tensor("token_embd.weight", np.zeros((1000, 64), np.float32))
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        hub.repos["org/tiny"] = Repo({"model.gguf": file.read_bytes()})
        name, known = "hf:org/tiny/model.gguf", "GGUF architecture 'gemma3' is not supported; known: llama"
    else:
        files = hub_model(tiny_pair)
        config = json.loads(files["config.json"]) | {"architectures": ["MixtralForCausalLM"]}
        hub.repos["org/tiny"] = Repo(files | {"config.json": json.dumps(config).encode()})
        name, known = "hf:org/tiny", "MixtralForCausalLM is not supported; known: Llama"
    for line in (("run", name, "hi"), ("pull", name, "--dry-run")):
        done = main(*line)
        assert (done.code, known in done.error) == (2, True), done.err
    assert all(asked is not None for _, path, asked in hub.requests if path.endswith((".safetensors", ".gguf")))
