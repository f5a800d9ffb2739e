"""What is asked of the engine: plain frozen dataclasses shared by every front end and the engine.

Standard library only, so that the parent process never needs torch to build a request.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from sparkchat.errors import UsageError
from sparkchat.finite import is_number, short

Mode = Literal["off", "static", "compact", "cap-accept"]
MODES: tuple[Mode, ...] = get_args(Mode)
DraftTemperature = Literal["target", "adaptive"]
"""What drafts are drawn at: the request's own temperature, or less where the drafter is sure and more elsewhere."""
DRAFT_TEMPERATURES: tuple[DraftTemperature, ...] = get_args(DraftTemperature)

MOST_LOGPROBS = 20
"""Most tokens reported at one position, beside the delivered one."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when an answer ends. Temperature comes before the filters."""

    temperature: float = 0.0
    """0 means greedy."""
    top_p: float = 1.0
    """1 means no limit, 0 the likeliest token alone."""
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; > 1 discourages (Hugging Face's rule)."""
    presence_penalty: float = 0.0
    """Over the output only (OpenAI's rule)."""
    frequency_penalty: float = 0.0
    """Over the output only (OpenAI's rule)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    min_tokens: int = 0
    """End tokens are impossible, and stop strings ignored, before this many delivered tokens."""
    max_tokens: int | None = None
    """Delivered tokens; None means up to the context limit."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """None draws a fresh seed, reported in the trace."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, value: object, want: str) -> None:
            if not ok:
                raise UsageError(f"{name} {short(value)} is not possible; give {want}")

        def number(name: str) -> float:
            value = getattr(self, name)
            need(is_number(value), name, value, "a finite number")
            # JSON and TOML write 1 for 1.0, which compiled kernels and torch take for another type.
            object.__setattr__(self, name, float(value))
            return float(value)

        def whole(name: str, value: object) -> int:
            need(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")
            return int(value)  # type: ignore[call-overload]

        need(0.0 <= number("temperature") <= 100.0, "temperature", self.temperature, "0 (greedy) to 100")
        need(0.0 <= number("top_p") <= 1.0, "top_p", self.top_p, "0 (the likeliest token alone) up to at most 1")
        need(whole("top_k", self.top_k) >= 0, "top_k", self.top_k, "0 (no limit) or more")
        need(0.0 <= number("min_p") <= 1.0, "min_p", self.min_p, "0 to 1")
        need(number("repetition_penalty") > 0.0, "repetition_penalty", self.repetition_penalty, "a number above 0")
        number("presence_penalty")
        number("frequency_penalty")
        need(whole("min_tokens", self.min_tokens) >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None:
            need(whole("max_tokens", self.max_tokens) >= 1, "max_tokens", self.max_tokens, "1 or more")
            need(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        if self.seed is not None:
            need(0 <= whole("seed", self.seed) < 2**64, "seed", self.seed, "0 to 2^64-1, or none for a fresh one")
        for text in self.stop:
            need(isinstance(text, str) and text != "", "stop", text, "a string of at least one character")
        for token_id, bias in self.logit_bias:
            need(whole("logit_bias id", token_id) >= 0, "logit_bias id", token_id, "a token id of 0 or more")
            need(is_number(bias) or bias in (math.inf, -math.inf), "logit_bias", bias, "a number")


@dataclass(frozen=True)
class GenerateRequest:
    """One answer to produce. Exactly one of ``prompt``, ``messages``, ``prompt_ids`` is given."""

    id: str
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    """[{"role": ..., "content": ...}, ...]"""
    prompt_ids: tuple[int, ...] | None = None
    raw: bool = False
    """With ``prompt``: the exact text, no chat template."""
    system: str | None = None
    think: bool | None = None
    reasoning_effort: str | None = None
    """How long to think, in a word that the model knows; None is its own default."""
    mode: Mode | None = None
    """None takes the engine's current mode."""
    block_size: int | None = None
    """None takes the drafter's own block size."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    accept_cap: int | None = None
    """With mode cap-accept: most drafts committed a step; None lets the cost table choose."""
    draft_temperature: DraftTemperature | None = None
    """None takes the engine's."""
    steps: bool = True
    """Tell every step in an event; its counts are in the result anyway."""
    session: str | None = None
    """Requests of one session share a KV timeline: the common prefix is not computed again."""
    logprobs: int | None = None
    """Report each delivered token's log-probability, and those of this many likeliest tokens; None reports none."""

    def __post_init__(self) -> None:
        given = [n for n in ("prompt", "messages", "prompt_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            raise UsageError(f"a request needs exactly one of prompt, messages, prompt_ids; got {given or 'none'}")
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"mode {self.mode!r} is unknown; give one of {', '.join(MODES)}")
        if self.accept_cap is not None and not (type(self.accept_cap) is int and self.accept_cap >= 1):
            raise UsageError(f"accept_cap {self.accept_cap!r} is not possible; give a whole number of 1 or more")
        if self.draft_temperature not in (None, *DRAFT_TEMPERATURES):
            raise UsageError(
                f"draft_temperature {self.draft_temperature!r} is unknown; give one of {', '.join(DRAFT_TEMPERATURES)}"
            )
        if self.block_size is not None and (not isinstance(self.block_size, int) or self.block_size < 1):
            raise UsageError(f"block_size {self.block_size!r} is not possible; give a whole number of 1 or more")
        if self.logprobs is not None and not (type(self.logprobs) is int and 0 <= self.logprobs <= MOST_LOGPROBS):
            raise UsageError(f"logprobs {self.logprobs!r} is not possible; give 0 to {MOST_LOGPROBS}")

    @property
    def question(self) -> str | None:
        """The text that is answered: the prompt, or the newest message; None for token ids."""
        return self.messages[-1].get("content") if self.messages else self.prompt

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GenerateRequest:
        data = dict(data)
        sampling = dict(data.pop("sampling", {}))
        sampling["logit_bias"] = tuple((int(i), float(b)) for i, b in sampling.get("logit_bias", ()))
        sampling["stop"] = tuple(sampling.get("stop", ()))
        for name in ("messages", "prompt_ids"):
            if data.get(name) is not None:
                data[name] = tuple(data[name])
        return cls(sampling=SamplingParams(**sampling), **data)

    def with_sampling(self, **changes: Any) -> GenerateRequest:
        return replace(self, sampling=replace(self.sampling, **changes))


@dataclass(frozen=True)
class ContextCosts:
    """What cached tokens add to a step, linear in their number: attention reads every one of them."""

    tokens: int
    """Cached tokens of all requests together while the times without them were measured."""
    ms_per_token: float
    ms_per_token_row: float = 0.0
    """On top, for every row that a request has on average: each row attends."""

    def __post_init__(self) -> None:
        for value in (self.tokens, self.ms_per_token, self.ms_per_token_row):
            if not (is_number(value) and value >= 0):
                raise UsageError(f"context costs {value!r} must be a number of 0 or more")


@dataclass(frozen=True)
class BatchCosts:
    """Milliseconds of a step of ``requests`` requests by verified rows, summed over them."""

    requests: int
    rows: tuple[int, ...]
    """Strictly increasing, first >= 1."""
    step_ms: tuple[float, ...]
    plain_ms: float | None = None
    """A step of as many requests without drafting; None when not measured."""
    filtered_ms: float = 0.0
    """What top-k, top-p and min-p add to a step that drafts; 0 where the times are with filters."""
    context: ContextCosts | None = None
    """What cached tokens add to a step of so many requests; None: as the table says for all."""

    def __post_init__(self) -> None:
        if not isinstance(self.requests, int) or isinstance(self.requests, bool) or self.requests < 1:
            raise UsageError(f"cost table requests {self.requests!r} must be a whole number of 1 or more")
        if not (is_number(self.filtered_ms) and self.filtered_ms >= 0):
            raise UsageError(f"cost table filtered_ms {self.filtered_ms!r} must be a number of 0 or more")
        _check_costs(self.rows, self.step_ms)


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a whole step by verified rows, summed over all requests of the step."""

    rows: tuple[int, ...]
    """Strictly increasing, first >= 1."""
    step_ms: tuple[float, ...]
    source: str = "profile"
    """profile | measured | cached"""
    plain_ms: float | None = None
    """A plain decode step of one request without drafting; None when only the profile's table is known."""
    batches: tuple[BatchCosts, ...] = ()
    """By number of requests, ascending; where there are any, they count, and ``rows`` are those of one request."""
    pads_up: bool = True
    """Rows between entries cost what the next larger entry does, as captured steps pad up; else they lie on the line
    between."""
    context: ContextCosts | None = None

    def __post_init__(self) -> None:
        _check_costs(self.rows, self.step_ms)
        counts = [batch.requests for batch in self.batches]
        if any(a >= b for a, b in itertools.pairwise(counts)):
            raise UsageError(f"cost table requests {counts} must increase")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostTable:
        """From its fields as ``asdict`` and JSON leave them."""
        data = {**data, "rows": tuple(data["rows"]), "step_ms": tuple(data["step_ms"])}
        data["batches"] = tuple(
            BatchCosts(**{**_with_context(b), "rows": tuple(b["rows"]), "step_ms": tuple(b["step_ms"])})
            for b in data.get("batches") or ()
        )
        return cls(**_with_context(data))


def _with_context(data: dict[str, Any]) -> dict[str, Any]:
    found = data.get("context")
    return {**data, "context": None if found is None else ContextCosts(**found)}


def _check_costs(rows: tuple[int, ...], step_ms: tuple[float, ...]) -> None:
    if not rows:
        raise UsageError("cost table has no rows; give at least one, with its step_ms")
    if len(rows) != len(step_ms):
        raise UsageError(f"cost table has {len(rows)} rows and {len(step_ms)} step_ms; give equally many")
    if rows[0] < 1 or any(a >= b for a, b in itertools.pairwise(rows)):
        raise UsageError(f"cost table rows {list(rows)} must start at 1 or more and increase")
    if any(not (is_number(t) and t > 0) for t in step_ms):
        raise UsageError(f"cost table step_ms {list(step_ms)} must be positive numbers")


@dataclass(frozen=True)
class Correction:
    """What makes a raw confidence z of draft k a chance: sigmoid(z / temperatures[k] + shifts[k])."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.shifts) or not self.temperatures:
            raise UsageError(
                f"calibration has {len(self.temperatures)} temperatures and {len(self.shifts)} shifts; "
                "give one of each per draft position"
            )
        if not all(is_number(t) and t > 0 for t in self.temperatures) or not all(map(is_number, self.shifts)):
            raise UsageError(
                f"calibration temperatures {list(self.temperatures)} must be numbers above 0, and shifts "
                f"{list(self.shifts)} finite numbers"
            )

    def stretched(self, block: int) -> Correction:
        """For blocks of ``block`` drafts: the next draft is nearest to the last one that was fitted."""
        more = max(0, block - len(self.temperatures))
        return Correction(self.temperatures + self.temperatures[-1:] * more, self.shifts + self.shifts[-1:] * more)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Correction:
        return cls(tuple(map(float, data["temperatures"])), tuple(map(float, data["shifts"])))


@dataclass(frozen=True)
class LoadSpec:
    """Everything the engine process needs to load a pair; every path is local."""

    name: str
    model_path: str
    """A Hugging Face folder, or a .gguf file."""
    drafter_path: str | None = None
    """A DeepSpec drafter folder."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N"""
    tp: int = 1
    """Devices of this machine that share the model, from ``device`` on."""
    dtype: str = "auto"
    """auto | float32 | bfloat16"""
    context: int | None = None
    """None takes the model's own limit."""
    cache_tokens: int | None = None
    """Most tokens that all requests have cached together; None takes what there is room for."""
    block_size: int | None = None
    mode: Mode = "static"
    accept_cap: int | None = None
    draft_temperature: DraftTemperature = "target"
    concurrency: int = 1
    cost_table: CostTable | None = None
    temperatures: tuple[float, ...] | None = None
    """One per draft position, whatever was fitted on this machine; None takes what was fitted."""
    shipped_temperatures: tuple[float, ...] | None = None
    """Those of the shipped profile, for a machine that has fitted none; None means 1.0 everywhere."""
    calibration: dict[str, Correction] = field(default_factory=dict)
    """By kind of sampling (sampling_kind.py), as the user's profile has it; wins over all other corrections."""
    shipped_calibration: dict[str, Correction] = field(default_factory=dict)
    """By kind, of the shipped profile, where nothing was fitted to that kind on this machine."""
    refine: bool = False
    """Costs and confidences are corrected by what finished steps show, while the engine runs."""
    chat_template: str | None = None
    """A jinja template that replaces the checkpoint's own."""
    prompt_release: str | None = None
    """Whose effort levels a DeepSeek V4 checkpoint knows, for one that does not say so itself."""
    threads: int | None = None
    cache_dir: str | None = None
    """Where measured cost tables and fitted temperatures are kept, each in a folder; None keeps none."""
    revision: str | None = None
    drafter_revision: str | None = None
    graphs: bool | None = None
    """CUDA graphs: None captures them where they can be, True asks for them, False takes the reference path."""
    dummy_weights: bool = False
    """Random weights in the shapes of the config.json files, which are all that is read."""
    simulate_acceptance: str | None = None
    """Accept drafts by this profile instead of by the models' laws; see simulation.py."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LoadSpec:
        data = dict(data)
        names = {f.name for f in fields(cls)}
        unknown = set(data) - names
        if unknown:
            raise UsageError(f"load spec has unknown keys {sorted(unknown)}")
        if data.get("cost_table") is not None:
            data["cost_table"] = CostTable.from_json(data["cost_table"])
        for name in ("temperatures", "shipped_temperatures"):
            if data.get(name) is not None:
                data[name] = tuple(data[name])
        for name in ("calibration", "shipped_calibration"):
            data[name] = {kind: Correction.from_json(found) for kind, found in data.get(name, {}).items()}
        return cls(**data)
