"""One answer of each engine, "Hello world!", in the form that its published schema gives it."""

from __future__ import annotations

from remote.played import DONE, Part, chunk, usage

SPEC = {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.5, "acceptance_histogram": [0, 1, 1, 0]}
SPEC |= {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 3}
EMPTY = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "the-model", "choices": []}


def vllm_page(drafts: int, tokens: int, accepted: int) -> str:
    labels = '{model_name="the-model",engine="0"}'
    return (
        f"# HELP vllm:spec_decode_num_drafts_total x\n# TYPE vllm:spec_decode_num_drafts_total counter\n"
        f"vllm:spec_decode_num_drafts_total{labels} {drafts}.0\n"
        f"vllm:spec_decode_num_drafts_created{labels} 1.7e+09\n"
        f"vllm:spec_decode_num_draft_tokens_total{labels} {tokens}.0\n"
        f"vllm:spec_decode_num_accepted_tokens_total{labels} {accepted}.0\n"
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="the-model",position="0"}} 9.0\n'
        f"vllm:num_requests_running{labels} 1.0\n"
    )


VLLM_CHUNKS = (
    chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3], usage=usage(3, 0)),
    chunk({"content": "Hello"}, choice={"token_ids": [10]}, usage=usage(3, 1)),
    chunk({"content": " world"}, choice={"token_ids": [11, 12]}, usage=usage(3, 3)),
    chunk({"content": "!"}, "stop", choice={"token_ids": [13, 2], "stop_reason": None}, usage=usage(3, 5)),
    {**EMPTY, "usage": usage(3, 5, 0), "metrics": {"speculative_decoding": SPEC}},
    DONE,
)
VLLM = Part("vllm", VLLM_CHUNKS, card={"max_model_len": 4096}, metrics=(vllm_page(5, 15, 4),))
VLLM_OLD = Part(
    # Before 0.28: no record of its own, so the counters tell.
    "vllm",
    (*VLLM_CHUNKS[:4], {**EMPTY, "usage": usage(3, 5)}, DONE),
    metrics=(vllm_page(5, 15, 4), vllm_page(5, 15, 4), vllm_page(9, 27, 10)),
)
VLLM_PLAIN = Part("vllm", VLLM_OLD.chunks, metrics=("vllm:num_requests_running 0.0\n",))

SGLANG = Part(
    "sglang",
    (
        chunk({"role": "assistant", "content": ""}, usage=usage(3, 0)),
        chunk({"reasoning_content": "Hm."}, usage=usage(3, 2)),
        chunk({"content": "Hello"}, usage=usage(3, 3)),
        chunk({"content": " world!"}, usage=usage(3, 6)),
        chunk({}, "stop", choice={"matched_stop": "STOP"}),
        {
            **EMPTY,
            "sglext": {
                "output_ids": [[20, 21, 10, 11, 12, 13]],
                "spec_tokens_details": {
                    "spec_accept_rate": 0.25,
                    "spec_accept_length": 3.0,
                    "spec_cap_length": 0.0,
                    "spec_block_accept_length": 0.0,
                    "spec_num_correct_drafts": 2,
                    "spec_num_proposed_drafts": 8,
                    "spec_verify_ct": 2,
                    "spec_correct_drafts_histogram": [1, 0, 1],
                    "spec_cap_lens_histogram": [],
                },
            },
        },
        {**EMPTY, "usage": usage(3, 6)},
        DONE,
    ),
)
SGLANG_GAUGES = Part(
    "sglang",
    (*SGLANG.chunks[:5], {**EMPTY, "usage": usage(3, 6)}, DONE),
    metrics=(
        'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.75\nsglang:num_running_reqs{model_name="m"} 1.0\n',
    ),
)


def timings(tokens: int, drafted: int | None = None, accepted: int = 0) -> dict[str, float]:
    found = {"cache_n": 0, "prompt_n": 3, "prompt_ms": 9.0, "predicted_n": tokens, "predicted_ms": 50.0}
    found |= {"predicted_per_token_ms": 50.0 / tokens, "predicted_per_second": tokens * 20.0}
    return found if drafted is None else found | {"draft_n": drafted, "draft_n_accepted": accepted}


LLAMA_CPP = Part(
    "llamacpp",
    (
        chunk({"role": "assistant", "content": None}),
        chunk({"content": "Hello"}, timings=timings(1)),
        chunk({"content": " world"}, timings=timings(3, 4, 1)),
        chunk({"content": "!"}, timings=timings(4, 8, 1)),
        chunk({}, "stop"),
        {**EMPTY, "usage": usage(3, 4), "timings": timings(4, 8, 1)},
        DONE,
    ),
    card={"meta": {"n_ctx": 2048}},
)
LLAMA_CPP_PYTHON = Part(
    "me",
    (
        chunk({"role": "assistant"}, choice={"logprobs": None}),
        chunk({"content": "Hello"}),
        chunk({"content": " world!"}),
        chunk({}, "length"),
        DONE,
    ),
)
