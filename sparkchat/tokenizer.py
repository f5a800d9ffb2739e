"""Loads the tokenizer of a checkpoint folder or a GGUF file. Local files only, and no code from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from sparkchat import strict_json
from sparkchat.errors import DamagedFile, ModelNotFound
from sparkchat.gguf_tokenizer import RustErrors, build_tokenizer, end_token_ids, read_metadata

_NO_LIMIT = int(1e30)
"""What transformers takes for a tokenizer without one."""
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json", "spiece.model")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, or None with a notice that says why; prompts given as token ids need none."""

    tokenizer: Any | None
    end_token_ids: tuple[int, ...]
    """Ids that end an answer, ascending; empty when the checkpoint names none."""
    notices: tuple[str, ...] = ()
    model_type: str | None = None
    """As config.json says; some architectures define their prompt in code instead of a chat template."""


def load_tokenizer(path: str | Path, *, cache_dir: str | Path | None = None) -> LoadedTokenizer:
    """Load from a Hugging Face folder or a ``.gguf`` file.

    ``cache_dir`` keeps tokenizers that are slow to convert. Raises ModelNotFound when the path is not there, and
    DamagedFile when a tokenizer file is there but cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        loaded = replace(_from_folder(path), model_type=_model_type(path))
    elif path.is_file():
        loaded = _from_gguf(path, Path(cache_dir) if cache_dir is not None else None)
    else:
        raise ModelNotFound(f"no model at {path}; give a checkpoint folder or a .gguf file")
    if loaded.tokenizer is not None:
        # The context is the limit; the tokenizer's own only warns, and fails where its file holds no number.
        loaded.tokenizer.model_max_length = _NO_LIMIT
    return loaded


def _from_gguf(path: Path, cache_dir: Path | None) -> LoadedTokenizer:
    metadata = read_metadata(path)
    ends = end_token_ids(metadata.values)
    if not metadata.values.get("tokenizer.ggml.tokens") or "tokenizer.ggml.model" not in metadata.values:
        return LoadedTokenizer(None, ends, (_missing(path),))
    tokenizer, notices = build_tokenizer(path, metadata, cache_dir)
    return LoadedTokenizer(tokenizer, ends, notices)


def _missing(path: Path) -> str:
    return f"{path.name} has no tokenizer, so text cannot be read or written; prompts as token ids (--prompt-ids) work"


def _from_folder(folder: Path) -> LoadedTokenizer:
    ends = _folder_end_ids(folder)
    if not (folder / "tokenizer.json").is_file():
        return _from_other_files(folder, ends)
    # Read as the file says, not as the class that config.json's model type would rebuild from its vocabulary.
    try:
        with RustErrors(folder):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise DamagedFile(f"the tokenizer of {folder} cannot be read: {error}; download it again") from error
    notices = _take_template_file(tokenizer, folder)
    if not ends and tokenizer.eos_token_id is not None:
        ends = (tokenizer.eos_token_id,)
    return LoadedTokenizer(tokenizer, ends, notices)


def _from_other_files(folder: Path, ends: tuple[int, ...]) -> LoadedTokenizer:
    """Older folders without tokenizer.json, converted by transformers if it can without the checkpoint's own code."""
    if not any((folder / name).is_file() for name in _OTHER_FILES):
        return LoadedTokenizer(None, ends, (_missing(folder),))
    from transformers import AutoTokenizer  # brings torch in, which tokenizer.json does not need

    try:
        with RustErrors(folder):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        notice = f"the tokenizer of {folder.name} cannot be converted ({reason}); prompts as token ids still work"
        return LoadedTokenizer(None, ends, (notice,))
    notices = _take_template_file(tokenizer, folder)
    if not ends and tokenizer.eos_token_id is not None:
        ends = (tokenizer.eos_token_id,)
    return LoadedTokenizer(tokenizer, ends, notices)


def _take_template_file(tokenizer: Any, folder: Path) -> tuple[str, ...]:
    """Use chat_template.json, which transformers reads for processors only, when nothing else gave a template."""
    path = folder / "chat_template.json"
    if tokenizer.chat_template or not path.is_file():
        return ()
    template = _read_object(path).get("chat_template")
    if not isinstance(template, str):
        return (f"{path.name} of {folder.name} holds no chat template and is left out",)
    tokenizer.chat_template = template
    return ()


def _folder_end_ids(folder: Path) -> tuple[int, ...]:
    """End ids of generation_config.json, else of config.json; a number or a list."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        ids = _read_object(folder / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return tuple(sorted(set(ids)))
    return ()


def _model_type(folder: Path) -> str | None:
    try:
        name = _read_object(folder / "config.json").get("model_type")
    except DamagedFile:  # missing or unreadable: the weights' loader says so
        return None
    return name if isinstance(name, str) else None


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = strict_json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DamagedFile(f"{path} cannot be read as JSON: {error}; download it again") from error
    return value if isinstance(value, dict) else {}
