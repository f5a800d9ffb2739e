"""What a MODEL argument means: a profile, a hub repository, a local folder, or a GGUF file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparkchat import strict_json
from sparkchat.errors import DamagedFile, ModelNotFound, UsageError
from sparkchat.finite import short
from sparkchat.options import nearest
from sparkchat.paths import Paths, typed_path
from sparkchat.profile import HubSource, Profile, ProfileFile, Source, merge_profiles, read_profile

DEFAULT_MODEL = "smollm2-135m"

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_HUB_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[A-Za-z0-9._/-]+))?")

Kind = Literal["profile", "hub", "local"]


@dataclass(frozen=True)
class ModelRef:
    """A MODEL argument, understood."""

    kind: Kind
    name: str
    """How messages and results call it."""
    profile: Profile | None = None
    path: Path | None = None
    """A folder with a config.json, or a .gguf file."""
    sources: tuple[Source, ...] = ()
    """Where to fetch it from, when ``path`` is None."""


@dataclass(frozen=True)
class DrafterRef:
    """Where the drafter is, or why there is none."""

    path: Path | None = None
    sources: tuple[Source, ...] = ()
    reason_off: str | None = None
    is_inner: bool = False
    """It lies in the model's own checkpoint."""
    kind: str | None = None
    """What the profile asks for: dspark or mtp."""

    @property
    def is_present(self) -> bool:
        return self.path is not None or bool(self.sources) or self.is_inner


def profile_files(paths: Paths) -> dict[str, list[tuple[Path, Literal["shipped", "user"]]]]:
    """Profile name -> its files, the shipped one first. Raises UsageError for a folder that cannot be looked into:
    without it a model would be run as its user did not ask for."""
    found: dict[str, list[tuple[Path, Literal["shipped", "user"]]]] = {}
    places: tuple[tuple[Path, Literal["shipped", "user"]], ...] = (
        (paths.shipped_profiles, "shipped"),
        (paths.profiles, "user"),
    )
    for folder, origin in places:
        for name in _names_in(folder):
            if name.endswith(".toml"):
                found.setdefault(name.removesuffix(".toml"), []).append((folder / name, origin))
    return found


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        if not os.path.isdir(folder):  # nothing there, or nothing that can be known of
            return []
        raise UsageError(f"profiles folder {folder} cannot be read ({error.strerror}); allow it, or move it") from None


def load_profile(name: str, paths: Paths) -> Profile | None:
    """The profile of that name, or None. Raises UsageError when one of its files is wrong."""
    files = profile_files(paths).get(name)
    if not files:
        return None
    layers: tuple[ProfileFile, ...] = tuple(read_profile(file, origin) for file, origin in files)
    return merge_profiles(layers)


def known_repositories(paths: Paths) -> set[str]:
    """Hub repositories that profiles name; a broken profile names none."""
    found: set[str] = set()
    for name in profile_files(paths):
        try:
            profile = load_profile(name, paths)
        except UsageError:
            continue
        sources = (*profile.get("model.sources", ()), *profile.get("drafter.sources", ())) if profile else ()
        found |= {source.repo for source in sources if isinstance(source, HubSource)}
    return found


def find_model(argument: str | None, paths: Paths, profile: str | None = None) -> ModelRef:
    """Understand a MODEL argument. Raises ModelNotFound with the nearest known name.

    ``profile``: a profile by name or file. Without MODEL it is what is run; beside MODEL its drafter, options and
    tables are laid over those of MODEL, whose files stay.
    """
    if profile is not None:
        chosen = chosen_profile(profile, paths)
        return _from_profile(chosen) if argument is None else _under(find_model(argument, paths), chosen)
    name = DEFAULT_MODEL if argument is None else argument
    if name.startswith("hf:"):
        source = parse_hub_name(name)
        return ModelRef("hub", name, sources=(source,))
    profile = load_profile(name, paths)
    if profile is not None:
        return _from_profile(profile)
    if name and (os.path.exists(typed_path(name)) or _looks_like_path(name)):
        return ModelRef("local", name, path=checked_model_path(typed_path(name), name))
    raise ModelNotFound(_unknown_model(name, paths))


def chosen_profile(name: str, paths: Paths) -> Profile:
    """What ``--profile`` names: a profile, or a TOML file. Raises UsageError with the nearest known name."""
    if name.endswith(".toml") or "/" in name:
        file = typed_path(name)
        return merge_profiles((read_profile(file, "user", may_be_pipe=True),))
    found = load_profile(name, paths)
    if found is None:
        near = nearest(name, profile_files(paths))
        hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(profile_files(paths)))}"
        raise UsageError(f"--profile {name} is unknown; {hint} (or give a .toml file)")
    return found


_OF_ANY_MODEL = ("model.chat_template", "model.thinking", "model.prompt_release")
"""Keys of [model] that say how to talk to it, rather than which one it is."""


def _under(model: ModelRef, chosen: Profile) -> ModelRef:
    """The model with another profile laid over its own."""
    above = tuple(
        replace(layer, values={key: v for key, v in layer.values.items() if _is_of_any_model(key)})
        for layer in chosen.files
    )
    below = model.profile.files if model.profile is not None else ()
    return replace(model, profile=replace(merge_profiles((*below, *above)), name=model.name))


def _is_of_any_model(key: str) -> bool:
    return not key.startswith("model.") or key in _OF_ANY_MODEL


def parse_hub_name(text: str) -> HubSource:
    """``hf:org/repo``, ``hf:org/repo@revision`` or ``hf:org/repo/file.gguf``."""
    match = _HUB_NAME.fullmatch(text.removeprefix("hf:").removesuffix("/"))
    if match is None or ".." in re.split(r"[/@]", text):
        raise UsageError(f"{text!r} is not a hub name; give hf:org/repo or hf:org/repo@revision")
    return HubSource(match["repo"], match["revision"] or "main", match["file"])


def checked_model_path(path: Path, asked: str) -> Path:
    """A folder with a config.json, or a GGUF file; anything else raises with the reason."""
    if not os.path.exists(path):  # Path.exists raises where a name is too long or a folder may not be entered
        raise ModelNotFound(f"there is no model folder or file {asked}; check the path, or see `sparkchat list`")
    check_regular(path, asked)
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise ModelNotFound(
                f"the folder {asked} holds no config.json, so it is no model folder; give one that does"
            )
        return path
    if path.suffix == ".toml":
        raise UsageError(f"{asked} is a profile, not a model; give it as --profile {asked}")
    if not _is_gguf(path):
        raise DamagedFile(
            f"{asked} is not a GGUF file (it does not begin with GGUF); give a model folder or a .gguf file"
        )
    return path


def check_regular(path: Path, asked: str) -> None:
    """Raise DamagedFile for a pipe, socket or device as a file or inside a folder: reading it may never end."""
    try:
        found = [path, *(sorted(path.iterdir()) if os.path.isdir(path) else ())]
    except OSError as error:
        raise DamagedFile(f"{asked} cannot be read: {error.strerror}") from None
    for file in found:
        if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
            where = asked if file is path else f"{file.name} in {asked}"
            raise DamagedFile(f"{where} is a pipe, socket or device; put a regular file in its place")


def find_drafter(choice: str | None, model: ModelRef, paths: Paths) -> DrafterRef:
    """The drafter for ``--drafter`` (PATH, hf:..., none), or else the profile's own."""
    if choice == "none":
        return DrafterRef(reason_off="no drafter: none was asked for")
    if choice is not None:
        if choice.startswith("hf:"):
            return DrafterRef(sources=(parse_hub_name(choice),))
        return DrafterRef(path=_drafter_folder(typed_path(choice), choice))
    if model.profile is not None and (model.kind == "profile" or _names_drafter(model.profile)):
        found = _profile_drafter(model.profile, paths)
        if found.is_inner and model.path is not None:
            check_inner_drafter(found, model.path, model)
        return found
    if model.path is not None and inner_drafter_kind(model.path) is not None:
        return DrafterRef(is_inner=True)
    return DrafterRef(reason_off="no drafter: this model has no profile that names one; give --drafter")


def is_deepseek_v4(path: Path) -> bool:
    """Whether a model folder holds that architecture, by its config.json."""
    return _config_of(path).get("model_type") == "deepseek_v4"


def inner_drafter_kind(path: Path) -> str | None:
    """dspark or mtp, where a checkpoint folder carries its own drafter (DeepSeek V4), by its config.json."""
    if not is_deepseek_v4(path):
        return None
    config = _config_of(path)
    if any(config.get(key) is not None for key in ("dspark_block_size", "dspark_target_layer_ids")):
        return "dspark"
    return "mtp" if config.get("num_nextn_predict_layers") else None


def _config_of(path: Path) -> dict[str, Any]:
    try:
        config = strict_json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # the loader says what is wrong with it
    return config if isinstance(config, dict) else {}


def check_inner_drafter(drafter: DrafterRef, path: Path, model: ModelRef) -> None:
    """Raise UsageError where the checkpoint at ``path`` does not carry the drafter that is asked for."""
    found = inner_drafter_kind(path)
    if found is None or drafter.kind not in (None, found):
        has = "no drafter" if found is None else f"a {found} drafter"
        asked = None if model.profile is None else model.profile.settings.get("drafter.kind")
        who = f"profile {model.name}" if asked is None else asked.source
        raise UsageError(
            f"{who} asks for a {drafter.kind or 'dspark'} drafter in the model's own checkpoint, "
            f"which carries {has}; change its [drafter] kind, or give --drafter none"
        )


def _names_drafter(profile: Profile) -> bool:
    return any(key.startswith("drafter.") for key in profile.settings)


def _profile_drafter(profile: Profile, paths: Paths) -> DrafterRef:
    kind = profile.get("drafter.kind")
    packaged = profile.get("drafter.packaged")
    if packaged is not None:
        folder = paths.shipped_drafters / packaged
        if os.path.isfile(folder / "config.json"):
            return DrafterRef(path=folder)
        return DrafterRef(reason_off=f"no drafter: this package does not carry the drafter {packaged}; give --drafter")
    path = profile.get("drafter.path")
    if path is not None:
        return DrafterRef(path=_drafter_folder(path, str(path)))
    sources = profile.get("drafter.sources", ())
    if sources or kind is None:
        return DrafterRef(sources=sources, reason_off=None if sources else "no drafter: the profile names none")
    return DrafterRef(is_inner=True, kind=kind)


def _drafter_folder(path: Path, asked: str) -> Path:
    if not os.path.exists(path):
        raise ModelNotFound(f"there is no drafter folder {asked}; check the path, or give --drafter none")
    check_regular(path, asked)
    if not os.path.isfile(path / "config.json"):
        raise ModelNotFound(
            f"{asked} holds no config.json, so it is no drafter folder; give --drafter none to do without"
        )
    return path


def _from_profile(profile: Profile) -> ModelRef:
    path: Path | None = profile.get("model.path")
    sources = profile.get("model.sources", ())
    if path is not None:
        return ModelRef("profile", profile.name, profile, checked_model_path(path, f"{path} of profile {profile.name}"))
    if not sources:
        raise UsageError(f"profile {profile.name} names no model; give it [model] path or [[model.sources]]")
    return ModelRef("profile", profile.name, profile, sources=sources)


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None


def _looks_like_path(name: str) -> bool:
    is_relative = name.startswith((".", "~", "/"))
    return is_relative or name.endswith(".gguf")


def _unknown_model(name: str, paths: Paths) -> str:
    known = profile_files(paths)
    web = re.fullmatch(r"https?://[^/]+/(?P<repo>[^/]+/[^/]+?)/?(?:tree/[^/]+/?)?", name)
    if web is not None:
        return f"{name} is a web address; type hf:{web['repo']}"
    if _HUB_NAME.fullmatch(name.removesuffix("/")) and "/" in name:
        return f"there is no local folder {name}; for the hub type hf:{name.removesuffix('/')}"
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
    return f"model {short(name)} is unknown; {hint} (or give hf:org/repo, a model folder, or a .gguf file)"
