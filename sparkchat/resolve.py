"""From layers of options to one frozen RunConfig: typed flag > environment > user profile > shipped profile.

A session command stands between environment and profile: ``RunConfig.fixed_by`` says what it may not change.
Every value keeps the name of the layer it came from, and every option that cannot be honoured is refused here,
before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparkchat import environment
from sparkchat.catalog import DrafterRef, ModelRef, is_deepseek_v4
from sparkchat.config import FIXED, RunConfig
from sparkchat.errors import UsageError
from sparkchat.locate import Located
from sparkchat.options import RESOLVED, RUN, SAMPLING, check, nearest, parse
from sparkchat.params import CostTable, LoadSpec, SamplingParams
from sparkchat.paths import Paths
from sparkchat.profile import CALIBRATION, Profile, Setting
from sparkchat.switches import WORDS

SWITCHES = (
    *("SPARKCHAT_MODEL", "SPARKCHAT_OFFLINE", "SPARKCHAT_DEBUG", "SPARKCHAT_API_KEY", "SPARKCHAT_ENGINE_KEY"),
    *("SPARKCHAT_VERBOSE", "SPARKCHAT_COLOR", "SPARKCHAT_ASCII"),
)
"""Variables beside those of the option table."""
TYPED_ALONE = (
    *("prompt_ids", "raw", "json", "jsonl", "plain", "resume", "trace", "force", "profile", "engine", "concurrency"),
    *("dummy_weights", "simulate_acceptance"),
)
"""Options that belong to one command line, and have no variable."""

_DEFAULTS: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in SAMPLING} | {
    "mode": "static",
    "context": None,
    "cache_tokens": None,
    "think": None,
    "reasoning_effort": None,
    "system": None,
    "device": "auto",
    "dtype": "auto",
    "drafter": None,
    "block_size": None,
    "accept_cap": None,
    "draft_temperature": "target",
    "refine": False,
    "tp": 1,
    "graphs": None,
}


@dataclass(frozen=True)
class Resolution:
    """Every option of a run with its source."""

    settings: Mapping[str, Setting]
    profile: Profile | None = None

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def source(self, name: str) -> str:
        return self.settings[name].source

    def is_typed(self, name: str) -> bool:
        """Asked for by the user in so many words, on the command line or in the environment."""
        return self.source(name).startswith(FIXED)

    def asked(self, name: str) -> str:
        """How the user asked for it, for messages: ``--block-size 9`` or ``SPARKCHAT_BLOCK_SIZE 9``."""
        source, value = self.source(name), self[name]
        word = source.split(" ", 1)[1] if self.is_typed(name) else f"{name} (from {source})"
        if isinstance(value, bool):
            return word if value else word.replace("--", "--no-", 1)
        return f"{word} {value}"

    def sampling(self) -> SamplingParams:
        try:
            return SamplingParams(**{name: self[name] for name in SAMPLING})
        except UsageError as error:
            # The class names the field; the user typed a flag or a variable.
            name = str(error).split(" ", 1)[0]
            if name in SAMPLING and self.is_typed(name):
                word = self.source(name).split(" ", 1)[1]
                raise UsageError(str(error).replace(name, word, 1)) from None
            raise

    def sources(self) -> Mapping[str, str]:
        return MappingProxyType({name: setting.source for name, setting in self.settings.items()})


def resolve_options(
    profile: Profile | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
) -> Resolution:
    """Merge the layers. Raises UsageError naming the flag or variable whose value is of the wrong kind."""
    settings = {name: Setting(value, "default") for name, value in _DEFAULTS.items()}
    settings |= _from_profile(profile)
    for name, option in RESOLVED.items():
        if option.variable in environ:
            value = parse(option, environ[option.variable], option.variable)
            settings[name] = Setting(value, f"environment {option.variable}")
    for name, value in flags.items():
        settings[name] = Setting(check(RESOLVED[name], value, RESOLVED[name].flag), f"flag {RESOLVED[name].flag}")
    if settings["drafter"].value is not None and "profile" in settings["block_size"].source:
        # The profile's block size belongs to the profile's drafter.
        settings["block_size"] = Setting(None, "default")
    return Resolution(MappingProxyType(settings), profile)


def _from_profile(profile: Profile | None) -> dict[str, Setting]:
    if profile is None:
        return {}
    found = {name: profile.settings[f"run.{name}"] for name in RUN if f"run.{name}" in profile.settings}
    for name, key in (("block_size", "drafter.block_size"), ("refine", "speculation.refine")):
        if key in profile.settings:
            found[name] = profile.settings[key]
    return found


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each SPARKCHAT_* variable that is unknown but close to a known one, or to an option."""
    known = {option.variable for option in RESOLVED.values()} | set(SWITCHES) | set(WORDS)
    found = []
    for name in sorted(environ):
        option = name.removeprefix("SPARKCHAT_").lower()
        if name == f"SPARKCHAT_{option.upper()}" and option in TYPED_ALONE:
            found.append(f"the environment variable {name} means nothing; type --{option.replace('_', '-')}")
            continue
        near = nearest(name, known, cutoff=0.85) if name.startswith("SPARKCHAT_") and name not in known else None
        if near is not None:
            found.append(f"the environment variable {name} means nothing to sparkchat; did you mean {near}?")
    return found


def refuse_impossible(options: Resolution, model: ModelRef, drafter: DrafterRef) -> None:
    """Raise UsageError for what the machine, the model or the mode cannot honour."""
    options.sampling()
    _refuse_device(options)
    _refuse_parallel(options, model)
    for name in ("block_size", "context", "cache_tokens"):
        if options[name] is not None and options[name] < 1:
            raise UsageError(f"{options.asked(name)} is not possible; give a whole number of 1 or more")
    limit = options["cache_tokens"]
    if limit is not None and options.is_typed("context") and limit < options["context"]:
        raise UsageError(
            f"{options.asked('cache_tokens')} does not hold {options.asked('context')}; give --context {limit} or less"
        )
    if not drafter.is_present:
        _refuse_without_drafter(options, drafter)
    if options.is_typed("draft_temperature") and options.is_typed("mode") and options["mode"] == "off":
        raise UsageError(f"{options.asked('draft_temperature')} is for drafts, and mode off drafts nothing; drop one")
    if options["refine"] and options.is_typed("refine") and options.is_typed("mode") and not _plans(options["mode"]):
        raise UsageError(f"{options.asked('refine')} is for plans, and mode {options['mode']} plans nothing; drop one")
    if options["accept_cap"] is not None:
        if options["accept_cap"] < 1:
            raise UsageError(f"{options.asked('accept_cap')} is not possible; give a whole number of 1 or more")
        if options["mode"] != "cap-accept":
            raise UsageError(
                f"{options.asked('accept_cap')} is for mode cap-accept, and this is {options['mode']}; "
                "add --mode cap-accept"
            )
    if options["think"] and has_thinking(model) is False:
        raise UsageError(f"{options.asked('think')}: {model.name} has no thinking mode; leave it out")


def _refuse_without_drafter(options: Resolution, drafter: DrafterRef) -> None:
    reason = drafter.reason_off or "no drafter"
    if options.is_typed("mode") and options["mode"] != "off":
        raise UsageError(f"{options.asked('mode')} needs a drafter, but {reason}; give --drafter PATH or --mode off")
    if options.is_typed("block_size"):
        raise UsageError(f"{options.asked('block_size')} needs a drafter, but {reason}; give --drafter PATH")
    if options["refine"] and options.is_typed("refine"):
        raise UsageError(f"{options.asked('refine')} needs a drafter, but {reason}; give --drafter PATH")
    if options.is_typed("draft_temperature"):
        raise UsageError(f"{options.asked('draft_temperature')} needs a drafter, but {reason}; give --drafter PATH")


def _plans(mode: str) -> bool:
    return mode in ("compact", "cap-accept")


def _refuse_parallel(options: Resolution, model: ModelRef) -> None:
    asked = options.asked("tp")
    if options["tp"] < 1:
        raise UsageError(f"{asked} is not possible; give the number of devices to use, or leave it out")
    if options["tp"] > 1 and can_share(model) is False:
        raise UsageError(
            f"{asked}: {model.name} is not DeepSeek V4, which alone several devices can share; leave it out"
        )
    counts = {} if model.profile is None else model.profile.get("model.min_memory_gb", {})
    if model.path is None and len(counts) > 1 and options["tp"] not in counts:
        # Of a folder, its config says so; nobody fetches a model to hear it.
        known = ", ".join(map(str, sorted(counts)))
        raise UsageError(f"{asked}: {model.name} is shared by {known} devices and by no other number; give one of them")
    if options["tp"] > 1 and cost_device(options) != "cpu":
        left = len(environment.gpus()) - int(options["device"].partition(":")[2] or 0)
        if options["tp"] > left:
            raise UsageError(f"{asked}: NVIDIA GPUs to use: {left}; give --tp {left} or fewer")
    if options["graphs"] and cost_device(options) == "cpu":
        raise UsageError(f"{options.asked('graphs')}: CUDA graphs need a GPU, and this run is on the CPU; leave it out")


def _refuse_device(options: Resolution) -> None:
    device = options["device"]
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise UsageError(f"{options.asked('device')} is unknown; give auto, cpu, cuda or cuda:N")
    if not device.startswith("cuda"):
        return
    if not environment.torch_has_cuda():
        torch = environment.package_version("torch") or "no torch"
        raise UsageError(f"{options.asked('device')}: the installed torch ({torch}) has no CUDA; give --device cpu")
    found = len(environment.gpus())
    if int(match[1] or 0) >= found:
        raise UsageError(
            f"{options.asked('device')}: this machine shows {found} NVIDIA GPUs; give --device cpu or auto"
        )


def can_share(model: ModelRef) -> bool | None:
    """May several devices share the model? None when that cannot be told without fetching it."""
    if model.path is not None:
        return is_deepseek_v4(model.path)
    known = None if model.profile is None else model.profile.get("model.architecture")
    return None if known is None else known == "deepseek_v4"


def cost_device(options: Resolution) -> str:
    """The name under which a profile keeps its cost table for this run: ``cpu``, a GPU's name, ``2 x`` a GPU's name."""
    name = _device_name(options)
    return name if options["tp"] == 1 or name == "cpu" else f"{options['tp']} x {name}"


def _device_name(options: Resolution) -> str:
    device = options["device"]
    if device == "cpu" or (device == "auto" and not environment.torch_has_cuda()):
        return "cpu"
    found = environment.gpus()
    index = int(device.partition(":")[2] or 0)
    return found[index].name if index < len(found) else "cpu"


def cost_table(options: Resolution) -> CostTable | None:
    return options.profile.cost_table(cost_device(options)) if options.profile is not None else None


def has_thinking(model: ModelRef) -> bool | None:
    """Does the model have a thinking mode? None when that cannot be told without fetching it."""
    known = model.profile.get("model.thinking") if model.profile is not None else None
    if known is not None:
        return bool(known)
    if model.path is None:
        return None
    return is_deepseek_v4(model.path) or "thinking" in _template_text(model.path)


def _template_text(path: Path) -> str:
    if os.path.isfile(path):
        # The template of a GGUF lies in its header, before the tensors.
        with path.open("rb") as file:
            return "enable_thinking" if b"enable_thinking" in file.read(32 << 20) else ""
    texts = [
        file.read_text(encoding="utf-8", errors="replace")
        for file in path.glob("chat_template.*")
        if os.path.isfile(file)
    ]
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        texts.append(str(settings.get("chat_template") or ""))
    except (OSError, ValueError, AttributeError):
        pass
    return "\n".join(texts)


def corrections_of(options: Resolution) -> dict[str, Any]:
    """What the user's profile says of confidences wins over what was fitted here; what the shipped one says does not,
    and holds for the shipped drafter alone."""
    profile, found = options.profile, dict[str, Any]()
    is_own = options["drafter"] is not None or (profile is not None and _names_drafter(profile))
    for key, setting in ({} if profile is None else profile.settings).items():
        if _is_shipped(setting) and is_own:
            continue
        before = "shipped_" if _is_shipped(setting) else ""
        if key == "speculation.temperatures":
            found[f"{before}temperatures"] = setting.value
        elif key.startswith(CALIBRATION):
            found.setdefault(f"{before}calibration", {})[key.removeprefix(CALIBRATION)] = setting.value
    return found


def _names_drafter(profile: Profile) -> bool:
    """A file of the user's says where the drafter is."""
    places = [profile.settings.get(f"drafter.{word}") for word in ("path", "packaged", "sources")]
    return any(place is not None and not _is_shipped(place) for place in places)


def _is_shipped(setting: Setting) -> bool:
    return setting.source.startswith("shipped")


def _context(options: Resolution) -> int | None:
    """A context that was not typed gives way to a limit of the cache."""
    context, limit = options["context"], options["cache_tokens"]
    return context if limit is None or context is None or options.is_typed("context") else min(context, limit)


def is_level_typed(options: Resolution) -> bool:
    """A level of effort that was asked for, which asks for thinking whatever a profile says of that."""
    return options.is_typed("reasoning_effort") and not options.is_typed("think")


def build_config(
    options: Resolution, model: ModelRef, drafter: DrafterRef, files: tuple[Located, Located | None], paths: Paths
) -> RunConfig:
    """The RunConfig of a run whose files are on this machine; output choices are added by the command."""
    found, found_drafter = files
    profile = options.profile
    spec = LoadSpec(
        name=model.name,
        model_path=str(found.path),
        drafter_path=None if found_drafter is None else str(found_drafter.path),
        device=options["device"],
        tp=options["tp"],
        dtype=options["dtype"],
        context=_context(options),
        cache_tokens=options["cache_tokens"],
        block_size=options["block_size"],
        mode=options["mode"],
        accept_cap=options["accept_cap"],
        draft_temperature=options["draft_temperature"],
        graphs=options["graphs"],
        refine=options["refine"],
        cost_table=cost_table(options),
        **corrections_of(options),
        chat_template=None if profile is None else profile.get("model.chat_template"),
        prompt_release=None if profile is None else profile.get("model.prompt_release"),
        cache_dir=str(paths.cache),
        revision=found.revision,
        drafter_revision=None if found_drafter is None else found_drafter.revision,
    )
    return RunConfig(
        spec=spec,
        sampling=options.sampling(),
        system=options["system"],
        think=None if is_level_typed(options) and not options["think"] else options["think"],
        reasoning_effort=options["reasoning_effort"],
        label=model.name if profile is None else profile.get("model.label", model.name),
        reason_off=drafter.reason_off,
        sources=options.sources(),
    )
