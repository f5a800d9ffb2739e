"""The tokenizer inside a GGUF file, built from the file's metadata alone.

Byte-level vocabularies (``tokenizer.ggml.model = gpt2``) whose pre-tokenizer we know are built here in a fraction of a
second. The rest goes through transformers, which takes many seconds, so that result is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sparkchat.errors import DamagedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Control tokens that end a turn even in files whose metadata names only the end of text."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class GgufMetadata:
    """Key-value section of a GGUF file, and the sha256 of its bytes."""

    values: dict[str, Any]
    sha256: str


def read_metadata(path: Path) -> GgufMetadata:
    """Read the key-value section. Raises DamagedFile for anything that is not a complete little-endian GGUF 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != b"GGUF":
                raise DamagedFile(f"{path} is not a GGUF file: it does not start with 'GGUF'; download it again")
            cursor.offset = 4
            version, _, num_values = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
            if version not in (2, 3):
                raise DamagedFile(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read")
            values = {}
            for _ in range(num_values):
                key = cursor.string()
                values[key] = cursor.value(cursor.scalar("I"))
            _check_types(path, values)
            return GgufMetadata(values, hashlib.sha256(data[: cursor.offset]).hexdigest())
    except (struct.error, ValueError, KeyError, MemoryError) as error:
        raise DamagedFile(f"{path} is not a complete GGUF file ({error}); download it again") from None


class _Cursor:
    """Reads values one after the other; struct.error or ValueError past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.offset
        if size > len(self._data) - start:
            raise ValueError("a string runs past the end of the file")
        self.offset = start + size
        return self._data[start : self.offset].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if count > len(self._data) - self.offset:
                raise ValueError("an array runs past the end of the file")
            return self._array(kind, count)
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _ARRAY:
            raise ValueError("an array of arrays, which no known file has")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return list(values)


def build_tokenizer(path: Path, metadata: GgufMetadata, cache_dir: Path | None) -> tuple[Any, tuple[str, ...]]:
    """(transformers tokenizer, notices). Raises DamagedFile when the vocabulary does not fit together."""
    values = metadata.values
    kind, pre = values["tokenizer.ggml.model"], values.get("tokenizer.ggml.pre", "default")
    layout = _LAYOUTS.get(pre) if kind == "gpt2" else None
    if layout is not None:
        return _wrap(path, _byte_level(path, values, layout), values), ()
    tokenizer = _converted(path, metadata.sha256, cache_dir)
    if kind == "gpt2":
        notice = (
            f"the pre-tokenizer {pre!r} of {path.name} is not known exactly; the prompt's tokens may differ slightly"
        )
        return tokenizer, (notice,)
    return tokenizer, ()


def _check_types(path: Path, values: dict[str, Any]) -> None:
    """What is read of the tokenizer section has the types it should have."""
    want: dict[str, type] = {"tokens": str, "merges": str, "token_type": int, "scores": float}
    for name, kind in want.items():
        found = values.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise DamagedFile(f"{path} has {name} of the wrong type in its tokenizer; download it again")
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        if not isinstance(values.get(f"tokenizer.ggml.{name}_token_id", 0), int):
            raise DamagedFile(f"{path} has a {name} token id that is no number; download it again")
    for name in ("ggml.model", "ggml.pre", "chat_template"):
        if not isinstance(values.get(f"tokenizer.{name}", ""), str):
            raise DamagedFile(f"{path} has a tokenizer.{name} that is no text; download it again")


def end_token_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: those the metadata names, and turn-end markers in the vocabulary."""
    named = {values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    tokens, types = values.get("tokenizer.ggml.tokens", []), values.get("tokenizer.ggml.token_type", [])
    pairs = enumerate(zip(tokens, types, strict=False))
    marked = {token_id for token_id, (token, kind) in pairs if kind == _CONTROL and token in _TURN_ENDS}
    return tuple(sorted(named | marked))


class RustErrors:
    """Turns the bare ``Exception`` that the tokenizers library raises into DamagedFile; subclasses pass through."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception:
            raise DamagedFile(f"the tokenizer of {self._path} cannot be read: {error}; download it again") from error


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm(tokenizer: Tokenizer) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _split_by(pattern: str) -> Callable[[Tokenizer], None]:
    def set_split(tokenizer: Tokenizer) -> None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])

    return set_split


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    _split_by(_QWEN2_SPLIT)(tokenizer)


_LAYOUTS: dict[str, Callable[[Tokenizer], None]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "llama-bpe": _split_by(_LLAMA3_SPLIT),
}
"""``tokenizer.ggml.pre`` to normaliser and pre-tokenizer, as the models' own tokenizer.json files have them."""


def _byte_level(path: Path, values: dict[str, Any], layout: Callable[[Tokenizer], None]) -> Tokenizer:
    tokens, pre = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", ())]
    if any(len(pair) != 2 for pair in merges):
        raise DamagedFile(f"the tokenizer of {path} has a merge without two parts; download it again")
    with RustErrors(path):
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        layout(tokenizer)
        tokenizer.decoder = decoders.ByteLevel()
        types = values.get("tokenizer.ggml.token_type", ())
        added = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in added if k == _CONTROL])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in added if k == _USER_DEFINED])
        _add_ends(tokenizer, values)
    return tokenizer


def _add_ends(tokenizer: Tokenizer, values: dict[str, Any]) -> None:
    """BOS before and EOS after raw text where the metadata asks for them."""
    before, after = _named_token(values, "bos"), _named_token(values, "eos")
    before = before if values.get("tokenizer.ggml.add_bos_token", False) else None
    after = after if values.get("tokenizer.ggml.add_eos_token", False) else None
    parts = [*([before] if before else []), "$A", *([after] if after else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in {before, after} if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)


def _named_token(values: dict[str, Any], name: str) -> str | None:
    token_id, tokens = values.get(f"tokenizer.ggml.{name}_token_id"), values["tokenizer.ggml.tokens"]
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None


def _wrap(path: Path, tokenizer: Tokenizer, values: dict[str, Any]) -> PreTrainedTokenizerFast:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: _named_token(values, key) for name, key in names.items()}
    template = values.get("tokenizer.chat_template")
    with RustErrors(path):
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special
        )


def _converted(path: Path, key: str, cache_dir: Path | None) -> Any:
    """transformers' own conversion, from the cache when it was made before from the same metadata."""
    kept = cache_dir / "tokenizers" / key if cache_dir is not None else None
    if kept is not None and (kept / "tokenizer.json").is_file():
        with RustErrors(path):
            return PreTrainedTokenizerFast.from_pretrained(str(kept), local_files_only=True)
    from transformers import AutoTokenizer  # brings torch in, which the direct way does not need

    try:
        with RustErrors(path):
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError) as error:
        raise DamagedFile(f"the tokenizer of {path} cannot be built: {error}; use a Hugging Face folder") from error
    if kept is not None:
        _keep(tokenizer, kept)
    return tokenizer


def _keep(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer so that only a complete folder ever has the final name; a full disk costs only time."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(dir=folder.parent, prefix=".part-")
        try:
            tokenizer.save_pretrained(part)
            os.rename(part, folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
    except OSError:
        return
