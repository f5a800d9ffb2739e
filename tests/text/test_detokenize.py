"""Streamed text equals the whole decode byte for byte, however the bytes are cut into tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fixtures.tokenizer import byte_alphabet, spell
from sparkchat.detokenize import MAX_HELD, Detokenizer, decode_all, special_token_ids, token_text

SCRIPTS = {
    "family emoji": "a \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 b",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5",
    "chinese": "你好，世界。",
    "hangul": "안녕하세요 세계",
    "devanagari": "नमस्ते दुनिया क्षत्रिय",
    "combining": "e\u0301 o\u0308\u0323 n\u0303",
    "real replacement mark": "a\ufffdb\ufffd",
    "one space": " hello",
    "two spaces": "  hello  world ",
    "tabs and line ends": "\tx\r\ny\r\n\t",
    "newlines": "\n" * 300,
    "null and controls": "a\x00b\x7f\x1b[31m",
    "right to left": "שלום \u202b\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u202c",
}
PIECES = ["日本", "é", " hello", "\U0001f600", " ", "  ", "\ufffd", "ab"]
BROKEN = [b"\xf0\x9f", b"\x98\x80", b"\xed\xa0", b"\xc3\xa9\xc3", b"\xf4\x90", b"\xe0\x80"]
SPECIAL, VISIBLE = "<|im_end|>", "<think>"


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    backend.add_tokens([AddedToken(VISIBLE, normalized=False), AddedToken("｜日", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def byte_level(decoder: Any = None) -> PreTrainedTokenizerFast:
    spelled = [*byte_alphabet(), *(spell(piece.encode()) for piece in PIECES if piece != " "), *map(spell, BROKEN)]
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(spelled)}, merges=[]))
    backend.decoder = decoder or decoders.ByteLevel()
    return wrap(backend)


def byte_fallback(strip: bool) -> PreTrainedTokenizerFast:
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", "▁a", "b", "日", "\ufffd", "x▁y", "<0xZZ>"]
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(spelled)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return wrap(backend)


def plain(decoder: Any, vocab: Sequence[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(vocab={token: n for n, token in enumerate(vocab)}, unk_token=vocab[0]))
    if decoder is not None:
        backend.decoder = decoder
    return wrap(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "byte level behind a replacement": byte_level(
        decoders.Sequence([decoders.Replace(Regex("^Ġ"), "Ġh"), decoders.ByteLevel()])
    ),
    "byte fallback": byte_fallback(strip=False),
    "byte fallback with strip": byte_fallback(strip=True),
    "metaspace": plain(decoders.Metaspace(), ["?", "▁", "▁▁", "▁a", "b", "日", "\ufffd", "▁x▁"]),
    "wordpiece": plain(decoders.WordPiece(cleanup=True), ["?", "a", "##b", ".", "n't", "日", "##.", "\ufffd"]),
    "none": plain(None, ["?", "a", "b", "\ufffd"]),
}


def whole(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_byte_by_byte(script: str) -> None:
    tokenizer, text = TOKENIZERS["byte level"], SCRIPTS[script]
    pieces = pieces_of(tokenizer, text.encode())
    assert "".join(pieces) == text == whole(tokenizer, text.encode())
    # A character is shown with the token that completes it.
    for end in range(len(text)):
        shown = "".join(pieces[: len(text[:end].encode())])
        assert shown == text[:end]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_cut_at_every_byte_into_two_tokens(script: str) -> None:
    data = SCRIPTS[script].encode()[:80]
    words = {data[:cut] for cut in range(1, len(data))} | {data[cut:] for cut in range(1, len(data))}
    spelled = [*byte_alphabet(), *sorted(spell(word) for word in words if len(word) > 1)]
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(spelled)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrap(backend)
    ids = {token: n for n, token in enumerate(spelled)}
    for cut in range(1, len(data)):
        pair = [ids[spell(data[:cut])], ids[spell(data[cut:])]]
        pieces = pieces_of(tokenizer, pair)
        assert "".join(pieces) == data.decode("utf-8", "replace")
        assert "\ufffd" not in pieces[0] or "\ufffd" in SCRIPTS[script]


@pytest.mark.parametrize("script", SCRIPTS)
def test_cut_by_the_token_limit_shows_one_mark_at_the_end(script: str) -> None:
    tokenizer, text = TOKENIZERS["byte level"], SCRIPTS[script]
    data = text.encode()
    for end in range(1, min(len(data), 60)):
        joined = "".join(pieces_of(tokenizer, data[:end]))
        assert joined == whole(tokenizer, data[:end])
        if script != "real replacement mark":
            good = data[:end].decode("utf-8", "ignore")
            assert joined == good or joined == good + "\ufffd"


@pytest.mark.parametrize("byte", range(0x80, 0x100))
def test_every_lone_high_byte_before_a_space(byte: int) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = [ord("a"), byte, 0x20, ord("b"), byte]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids) == "a\ufffd b\ufffd"
    assert pieces[2] == ("\ufffd " if byte in range(0xC2, 0xF5) else " ")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_join_to_the_whole_decode(name: str, skip: bool) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(7)
    for _ in range(400):
        ids = [rng.randrange(len(tokenizer) + 2) for _ in range(rng.randrange(1, 40))]
        if "fallback" in name:
            # Short byte runs; long wrong ones are the stated exception.
            ids = [257 if i < 256 and n % 9 == 8 else i for n, i in enumerate(ids)]
        pieces = pieces_of(tokenizer, ids, skip)
        assert "".join(pieces) == whole(tokenizer, ids, skip), ids


@pytest.mark.parametrize("strip", [True, False])
def test_good_byte_fallback_runs_of_any_length_are_exact(strip: bool) -> None:
    tokenizer = byte_fallback(strip)
    for script, text in SCRIPTS.items():
        ids = [*text.encode(), *[tokenizer.convert_tokens_to_ids("▁a")], *text.encode()]
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == whole(tokenizer, ids), script


def test_byte_fallback_shows_a_character_after_at_most_eight_more_tokens() -> None:
    tokenizer = byte_fallback(strip=False)
    text = "你好世界" * 20
    data = text.encode()
    pieces, shown = pieces_of(tokenizer, data), ""
    for number, piece in enumerate(pieces):
        shown += piece
        assert len(shown.encode()) >= number + 1 - MAX_HELD - 3
    assert shown == text


def test_long_wrong_byte_fallback_run_keeps_its_good_characters() -> None:
    tokenizer = byte_fallback(strip=False)
    data = "日本語日本語".encode() + b"\xff" + "日".encode() + b"\xe6"
    assert "".join(pieces_of(tokenizer, data)) == "日本語日本語\ufffd日\ufffd"


def test_nothing_is_taken_back_at_any_cut() -> None:
    for tokenizer in TOKENIZERS.values():
        rng = random.Random(2)
        ids = [rng.randrange(len(tokenizer)) for _ in range(60)]
        stream, shown = Detokenizer(tokenizer), ""
        for n, token_id in enumerate(ids):
            shown += stream.push(token_id)
            alone = pieces_of(tokenizer, ids[: n + 1])
            assert "".join(alone).startswith(shown)


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    tokenizer = TOKENIZERS["byte level"]
    end, think = tokenizer.convert_tokens_to_ids([SPECIAL, VISIBLE])
    assert end in special_token_ids(tokenizer) and think not in special_token_ids(tokenizer)
    assert decode_all(tokenizer, [97, end, think, 98]) == "a<think>b"
    assert decode_all(tokenizer, [97, end, think, 98], skip_special_tokens=False) == "a<|im_end|><think>b"
    # A special token inside an unfinished character does not break it.
    assert decode_all(tokenizer, [0xC3, end, 0xA9]) == whole(tokenizer, [0xC3, end, 0xA9]) == "é"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_the_tokenizer_does_not_know_are_silent(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    last = len(tokenizer)
    assert pieces_of(tokenizer, [last, last + 5, 151_935, 2**40, -1]) == [""] * 6
    assert token_text(tokenizer, last) == "" and token_text(tokenizer, -1) == ""


class SlowTokenizer:
    """Only what a slow tokenizer offers; a decode of anything outside the vocabulary fails."""

    all_special_ids = (3,)
    _tokens = ("a", " b", "é", "</s>")

    def __len__(self) -> int:
        return len(self._tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self._tokens[token_id]

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(self._tokens[i] for i in ids)


def test_slow_tokenizers() -> None:
    assert decode_all(SlowTokenizer(), [0, 1, 3, 9, 2]) == "a bé"
    assert decode_all(SlowTokenizer(), [0, 3], skip_special_tokens=False) == "a</s>"


def test_single_tokens_for_display() -> None:
    assert token_text(TOKENIZERS["byte level"], ord(" ")) == " "
    assert token_text(TOKENIZERS["byte level"], 0xE6) == "\ufffd"
    fallback = TOKENIZERS["byte fallback with strip"]
    assert token_text(fallback, fallback.convert_tokens_to_ids("▁a")) == " a"
    end = TOKENIZERS["byte level"].convert_tokens_to_ids(SPECIAL)
    assert token_text(TOKENIZERS["byte level"], end) == SPECIAL


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "metaspace"])
def test_cost_of_a_push_does_not_grow_with_the_text(name: str) -> None:
    stream, times = Detokenizer(TOKENIZERS[name]), []
    for _ in range(6):
        start = time.process_time()
        for n in range(2000):
            stream.push(3 + n % 4)
        times.append(time.process_time() - start)
    assert min(times[-2:]) < 3 * max(times[:2])
