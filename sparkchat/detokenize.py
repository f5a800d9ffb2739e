"""Token ids to text, one id at a time, never taking back a character.

Rule for special tokens: added tokens flagged special in the tokenizer (ChatML markers, end-of-text) give no text, as
with ``skip_special_tokens=True``; added tokens without the flag (``<think>`` of Qwen3) are text like any other. With
``skip_special_tokens=False`` every token is text. Ids the tokenizer does not know give no text.

The pieces joined equal ``tokenizer.decode(all_ids, clean_up_tokenization_spaces=False)`` with the same flag. Each push
costs the same however long the text is. The one exception to equality: in vocabularies with byte fallback, the library
turns a whole run of byte tokens into U+FFFD when any byte in it is wrong, so a run that turns out wrong only after more
than ``MAX_HELD`` tokens keeps its good characters, and only the wrong bytes become U+FFFD.
"""

from __future__ import annotations

import codecs
import json
import re
from types import MappingProxyType
from typing import Any, Protocol

from tokenizers import Regex, decoders

MAX_HELD = 8
"""Tokens that may be waiting for the rest of a character."""

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LARGEST_ID = 2**32


class Detokenizer:
    """Incremental text of one token stream.

    ``tokenizer`` is a transformers tokenizer (fast, or slow with ``decode`` and ``convert_ids_to_tokens``).
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._text = _stream_for(tokenizer)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        if token_id in self._skipped:
            return ""
        token = token_of(self._tokenizer, token_id)
        return "" if token is None else self._text.push(token_id, token)

    def flush(self) -> str:
        """The rest at the end of the stream: an unfinished character becomes U+FFFD, as in a whole decode."""
        return self._text.flush()


def decode_all(tokenizer: Any, token_ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
    """Text of a whole sequence by the same rule as the stream."""
    stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join(map(stream.push, token_ids)) + stream.flush()


def token_text(tokenizer: Any, token_id: int) -> str:
    """What one token looks like on its own, special or not; broken characters show as U+FFFD. For display only."""
    token = token_of(tokenizer, token_id)
    if token is None:
        return ""
    stream = _stream_for(tokenizer, keep_leading_space=True)
    return stream.push(token_id, token) + stream.flush()


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of one token on its own, special or not; empty for an id that the tokenizer does not know."""
    token = token_of(tokenizer, token_id)
    return b"" if token is None else _stream_for(tokenizer, keep_leading_space=True).bytes_of(token_id, token)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids whose text is left out of answers: added tokens flagged special."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        return frozenset(getattr(tokenizer, "all_special_ids", ()))
    return frozenset(token_id for token_id, token in added.items() if token.special)


def token_of(tokenizer: Any, token_id: int) -> str | None:
    """The vocabulary entry of an id, or None when the tokenizer has none (a model may have more rows than that)."""
    if not 0 <= token_id < _LARGEST_ID:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.id_to_token(token_id)
    if token_id >= len(tokenizer):
        return None
    return tokenizer.convert_ids_to_tokens(token_id)


class _Respelling(Protocol):
    def decode(self, tokens: list[str]) -> str: ...


class _TextStream(Protocol):
    def push(self, token_id: int, token: str) -> str: ...

    def flush(self) -> str: ...

    def bytes_of(self, token_id: int, token: str) -> bytes: ...


def _stream_for(tokenizer: Any, *, keep_leading_space: bool = False) -> _TextStream:
    steps = _decoder_steps(tokenizer)
    respell, steps = _split_respelling(steps)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream(respell)
    if kinds == ["ByteFallback", "Fuse"]:
        return _ByteFallbackStream(respell, " ", 0)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[-1]["stop"] == 0:
        return _ByteFallbackStream(respell, steps[-1]["content"], 0 if keep_leading_space else steps[-1]["start"])
    return _WindowStream(tokenizer)


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _split_respelling(steps: list[dict[str, Any]]) -> tuple[_Respelling | None, list[dict[str, Any]]]:
    """The leading steps that change one token at a time, as one decoder, and the steps after them."""
    leading: list[Any] = []
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"]
            old = pattern["String"] if "String" in pattern else Regex(pattern["Regex"])
            leading.append(decoders.Replace(old, step["content"]))
        elif step["type"] == "Strip":
            leading.append(decoders.Strip(step["content"], step["start"], step["stop"]))
        else:
            break
    respelling = decoders.Sequence(leading) if leading else None
    return respelling, steps[len(leading) :]


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level vocabularies spell bytes with: visible Latin-1 as itself, the rest from U+0100 up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = MappingProxyType(_byte_alphabet())


class _ByteLevelStream:
    """GPT-2 style vocabularies: every token is a byte string; bytes are decoded as UTF-8 across tokens."""

    def __init__(self, respell: _Respelling | None) -> None:
        self._respell = respell
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(self.bytes_of(token_id, token))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def bytes_of(self, token_id: int, token: str) -> bytes:
        if self._respell is not None:
            token = self._respell.decode([token])
        try:
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            # An added token such as <｜User｜> is spelled in plain characters, outside the byte alphabet.
            return token.encode("utf-8", "replace")


class _ByteFallbackStream:
    """SentencePiece style vocabularies: plain pieces with a space mark, and <0xNN> tokens for unknown characters."""

    def __init__(self, respell: _Respelling | None, strip: str, strip_count: int) -> None:
        self._respell = respell
        self._strip = strip
        self._strip_left = strip_count
        self._run = bytearray()
        self._is_run_wrong = False
        self._is_run_shown = False

    def push(self, token_id: int, token: str) -> str:
        if self._respell is not None:
            token = self._respell.decode([token])
        spelled = _BYTE_TOKEN.fullmatch(token)
        if spelled:
            self._run.append(int(spelled[1], 16))
            return self._stripped(self._certain_of_run())
        return self._stripped(self._end_run() + token)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def bytes_of(self, token_id: int, token: str) -> bytes:
        if self._respell is not None:
            token = self._respell.decode([token])
        spelled = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(spelled[1], 16)]) if spelled else token.encode("utf-8", "replace")

    def _certain_of_run(self) -> str:
        complete, is_wrong = _complete_utf8(self._run)
        if not self._is_run_shown:
            self._is_run_wrong |= is_wrong
            if self._is_run_wrong:
                # The library replaces every byte of a run with a wrong byte in it, whatever follows.
                return self._take(len(self._run), _REPLACEMENT * len(self._run))
            if len(self._run) <= MAX_HELD:
                return ""
            self._is_run_shown = True
        if is_wrong:
            complete = len(self._run) - _tail_length(self._run)
        return self._take(complete, self._run[:complete].decode("utf-8", "replace"))

    def _end_run(self) -> str:
        complete, _ = _complete_utf8(self._run)
        size = len(self._run)
        is_kept = self._is_run_shown or (complete == size and not self._is_run_wrong)
        self._is_run_wrong = self._is_run_shown = False
        return self._take(size, self._run.decode("utf-8", "replace") if is_kept else _REPLACEMENT * size)

    def _take(self, count: int, text: str) -> str:
        del self._run[:count]
        return text

    def _stripped(self, text: str) -> str:
        while text and self._strip_left:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


def _complete_utf8(data: bytearray) -> tuple[int, bool]:
    """(length of the prefix made of whole characters, whether the bytes after it can never become one)."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start, error.reason != "unexpected end of data"
    return len(data), False


def _tail_length(data: bytearray) -> int:
    """How many bytes at the end may still become one character."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(bytes(data))
    return len(utf8.getstate()[0])


class _WindowStream:
    """Any other decoder: the new text is what a few tokens of left context gain by the new ones."""

    _CONTEXT = 4

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._held.append(token_id)
        text = self._gain()
        if text.endswith(_REPLACEMENT) and len(self._held) < MAX_HELD:
            return ""
        self._context = (self._context + self._held)[-self._CONTEXT :]
        self._held = []
        return text

    def flush(self) -> str:
        text = self._gain() if self._held else ""
        self._held = []
        return text

    def bytes_of(self, token_id: int, token: str) -> bytes:
        return self._decode([token_id]).encode("utf-8", "replace")

    def _gain(self) -> str:
        before, after = self._decode(self._context), self._decode(self._context + self._held)
        if after.startswith(before):
            return after[len(before) :]
        same = next(i for i in range(len(before) + 1) if not after.startswith(before[: i + 1]))
        return after[same:]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
