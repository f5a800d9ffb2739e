"""Tokenizers from folders and GGUF files: exact, offline, and in words when there is none."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fixtures.tokenizer import CHATML, IM_END, TokenizerSpec, byte_alphabet, write_tokenizer
from sparkchat.chat import load_tokenizer, render_prompt
from sparkchat.detokenize import decode_all
from sparkchat.errors import DamagedFile, ModelNotFound
from sparkchat.gguf_tokenizer import read_metadata

TEXTS = [
    "Hello, world! It's 2024; I'm 1234567 years old.",
    "  two  spaces\tand\r\nlines\n\n\n",
    "naïve café 日本語 안녕 \U0001f468\u200d\U0001f469 e\u0301",
    "def f(x):\n    return x ** 2  # 3.14",
    "<|im_start|>user\nhi<|im_end|>\n<think>no</think>",
    "",
]


def write_gguf(path: Path, *, pre: str | None = "smollm", kind: str = "gpt2", **changes: Any) -> Path:
    """A GGUF file that holds a tokenizer and no tensors; a change of None leaves the key out."""
    words = ["Ġh", "he", "ll", "Ġ1", "12", "12345", "Ġhe"]
    merges = ["Ġ h", "h e", "l l", "Ġ 1", "1 2", "Ġh e"]
    added = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}
    tokens = [*byte_alphabet(), *words, *added]
    fields: dict[str, Any] = {
        "model": kind,
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (256 + len(words)) + list(added.values()),
        "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        **changes,
    }
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_string("tokenizer.chat_template", CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_folder_is_read_as_its_file_says(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TokenizerSpec(words=("one",), merged=("hello", " world")))
    # A model type of its own must not make transformers rebuild the tokenizer by another recipe.
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 1}')
    loaded = load_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.tokenizer is not None and loaded.notices == ()
    for text in TEXTS:
        assert ids(loaded.tokenizer, text) == backend.encode(text, add_special_tokens=False).ids
    assert render_prompt(loaded.tokenizer, [{"role": "user", "content": "x"}]).template == "checkpoint"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (IM_END,)),
        ({"config.json": {"eos_token_id": 7}}, (7,)),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [9, 3, 9]}}, (3, 9)),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {}}, (7,)),
        ({"config.json": {"eos_token_id": None}}, (IM_END,)),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 1.5}}, (7,)),
    ],
)
def test_end_ids_of_a_folder(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    write_tokenizer(tmp_path, TokenizerSpec())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).end_token_ids == expected


@pytest.mark.parametrize(
    "setting", [{"model_max_length": "long"}, {"model_max_length": 3}, {"chat_template": "\ud800x"}]
)
def test_settings_that_make_no_sense_stop_no_prompt(tmp_path: Path, setting: dict[str, Any], caplog: Any) -> None:
    write_tokenizer(tmp_path, TokenizerSpec(chat_template=None))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    prompt = render_prompt(load_tokenizer(tmp_path).tokenizer, [{"role": "user", "content": "hello there"}])
    assert len(prompt.token_ids) > 3 or setting.keys() == {"chat_template"}
    assert "longer than" not in caplog.text


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenizer is None and loaded.end_token_ids == (5,) and "--prompt-ids" in loaded.notices[0]


def test_tokenizer_that_only_its_own_code_could_load_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}')
    (tmp_path / "config.json").write_text('{"model_type": "own-kind"}')
    (tmp_path / "vocab.txt").write_text("a\n")
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenizer is None and "token ids" in loaded.notices[0]


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "no")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "BPE"}}', "\x00"]
)
def test_damaged_tokenizer_file(tmp_path: Path, content: str) -> None:
    write_tokenizer(tmp_path, TokenizerSpec())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DamagedFile):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_damaged_settings_file(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, TokenizerSpec())
    (tmp_path / name).write_text("{")
    with pytest.raises(DamagedFile):
        load_tokenizer(tmp_path)


def test_gguf_byte_level(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and loaded.notices == ()
    assert loaded.end_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    for text in TEXTS:
        assert tokenizer.decode(ids(tokenizer, text), clean_up_tokenization_spaces=False) == text
    # Digits one by one: the merge of "1 2" must not happen.
    assert ids(tokenizer, "12") == [ord("1"), ord("2")]
    assert tokenizer.convert_ids_to_tokens(ids(tokenizer, " hell")) == ["Ġhe", "ll"]
    assert ids(tokenizer, "<|im_end|><think>")[0] == loaded.end_token_ids[0] and len(ids(tokenizer, "<think>")) == 1
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert special["<|im_start|>"] and not special["<think>"]
    assert render_prompt(tokenizer, [{"role": "user", "content": "x"}]).template == "checkpoint"


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("gpt-2", ["12", "3", "4"]),
        ("llama-bpe", ["12", "3", "4"]),
    ],
)
def test_gguf_pre_tokenizers(tmp_path: Path, pre: str, digits: list[str]) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre)).tokenizer
    assert tokenizer.convert_ids_to_tokens(ids(tokenizer, "1234")) == digits
    for text in TEXTS:
        back = tokenizer.decode(ids(tokenizer, text), clean_up_tokenization_spaces=False)
        assert back == (text.replace("e\u0301", "é") if pre == "qwen2" else text)


def test_gguf_start_token_only_where_the_file_asks(tmp_path: Path) -> None:
    for flag in (True, False, None):
        loaded = load_tokenizer(write_gguf(tmp_path / f"{flag}.gguf", add_bos_token=flag))
        start = loaded.tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert (loaded.tokenizer.encode("a")[0] == start) == bool(flag)


def test_gguf_end_ids(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_gguf(tmp_path / "m.gguf", eos_token_id=5, eot_token_id=9, eom_token_id=9))
    turn_end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert loaded.end_token_ids == (5, 9, turn_end)


def test_gguf_with_an_unknown_pre_tokenizer_says_so_and_is_kept(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "m.gguf", pre="brand-new"), tmp_path / "cache"
    first = load_tokenizer(path, cache_dir=cache)
    assert "brand-new" in first.notices[0]
    kept = list(cache.glob("tokenizers/*/tokenizer.json"))
    assert len(kept) == 1
    again = load_tokenizer(path, cache_dir=cache)
    for text in TEXTS:
        assert ids(again.tokenizer, text) == ids(first.tokenizer, text)
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    load_tokenizer(path)  # no cache folder, and none made
    blocked = tmp_path / "file"
    blocked.write_text("")
    load_tokenizer(path, cache_dir=blocked)


def test_gguf_sentencepiece(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    types = [2, 3, 3, *[6] * 256, *[1] * 5]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    path = write_gguf(
        tmp_path / "m.gguf",
        kind="llama",
        pre=None,
        tokens=pieces,
        token_type=types,
        scores=scores,
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    loaded = load_tokenizer(path, cache_dir=tmp_path)
    assert loaded.notices == () and loaded.end_token_ids == (2,)
    assert loaded.tokenizer.convert_ids_to_tokens(ids(loaded.tokenizer, "hi")) == ["▁hi"]


def test_gguf_without_a_tokenizer(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_gguf(tmp_path / "m.gguf", tokens=None, token_type=None, merges=None))
    assert loaded.tokenizer is None and "--prompt-ids" in loaded.notices[0]


def test_cut_gguf_at_any_byte(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data, rng = path.read_bytes(), random.Random(1)
    for end in [0, 3, 4, 8, 23, 24, *(rng.randrange(len(data) - 1) for _ in range(60))]:
        path.write_bytes(data[:end])
        with pytest.raises(DamagedFile):
            read_metadata(path)


def test_hostile_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    cases = {
        "not gguf": b"PK\x03\x04" + bytes(100),
        "version": b"GGUF" + struct.pack("<IQQ", 77, 0, 0),
        "endless string": head + struct.pack("<IQ", 8, 2**62),
        "endless array": head + struct.pack("<IIQ", 9, 0, 2**62),
        "unknown type": head + struct.pack("<I", 99) + bytes(50),
        "deep arrays": head + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000 + bytes(64),
    }
    for name, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(DamagedFile):
            read_metadata(path)
            raise AssertionError(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [1, 2, 3]},
        {"merges": ["nospace"]},
        {"merges": ["h zzz"]},
        {"eos_token_id": "x"},
        {"token_type": ["x"]},
    ],
)
def test_gguf_whose_vocabulary_does_not_fit_together(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedFile):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", **changes))


def test_loading_never_asks_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies above 100,000 entries make transformers ask the hub unless told that files are local."""
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a tokenizer was loaded over the network")

    vocab = {char: n for n, char in enumerate(byte_alphabet())} | {f"w{n}": 256 + n for n in range(100_001)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load_tokenizer(tmp_path).tokenizer is not None


SMOLLM2_GGUF = os.environ.get("SPARKCHAT_TEST_SMOLLM2_GGUF", "")


@pytest.mark.skipif(not Path(SMOLLM2_GGUF).is_file(), reason="SPARKCHAT_TEST_SMOLLM2_GGUF names no SmolLM2 GGUF file")
def test_real_smollm2_file_against_transformers() -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = Path(SMOLLM2_GGUF)
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers leaves out that digits stand alone.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours.end_token_ids == (2,) and len(ours.tokenizer) == len(theirs) == 49152
    assert ours.tokenizer.chat_template == theirs.chat_template
    rng = random.Random(0)
    for _ in range(300):
        token_ids = [rng.randrange(49152) for _ in range(30)]
        text = theirs.decode(token_ids, skip_special_tokens=False)
        assert ours.tokenizer.decode(token_ids, skip_special_tokens=False) == text
        assert decode_all(ours.tokenizer, token_ids, skip_special_tokens=False) == text
        assert ids(ours.tokenizer, text) == ids(theirs, text)
    for text in TEXTS:
        assert ids(ours.tokenizer, text) == ids(theirs, text)
