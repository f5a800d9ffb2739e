"""The target's tokenizer and its ChatML control tokens, as far as writing conversations needs them."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from sparkchat.errors import ModelNotFound, UsageError

_GGUF_CONTROL = 3


@dataclass(frozen=True)
class ChatTokens:
    """Encodes text and knows the ids that structure a conversation."""

    tokenizer: Tokenizer
    start: int
    """<|im_start|>"""
    end: int
    """<|im_end|>"""
    special: tuple[int, ...]
    """Every control id of the vocabulary, ascending."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; control tokens spelled out in it are not recognised."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def header(self, role: str) -> list[int]:
        """``<|im_start|>role`` and the newline behind it."""
        return [self.start, *self.encode(f"{role}\n")]

    def turn(self, role: str, text: str) -> list[int]:
        """A whole turn, with the newline that separates it from the next."""
        return [*self.header(role), *self.encode(text), self.end, *self.encode("\n")]


def load_chat_tokens(path: Path) -> ChatTokens:
    """Reads the tokenizer beside the target at ``path``, or inside it for a .gguf file.

    Raises UsageError when the vocabulary has no ChatML tokens.
    """
    tokenizer, special = _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    if start is None or end is None:
        raise UsageError(f"target {path}: its vocabulary has no <|im_start|> and <|im_end|>, which training data needs")
    return ChatTokens(tokenizer, start, end, special)


def _from_folder(path: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFound(f"target {path}: no tokenizer.json there")
    tokenizer = Tokenizer.from_file(str(file))
    added = tokenizer.get_added_tokens_decoder()
    return tokenizer, tuple(sorted(index for index, token in added.items() if token.special))


def _from_gguf(path: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    kind = fields["tokenizer.ggml.model"].contents()
    if kind != "gpt2":
        raise UsageError(f"target {path}: tokenizer kind {kind!r} cannot be read for training; use the model folder")
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer, tuple(i for i, kind in enumerate(types) if kind == _GGUF_CONTROL)
