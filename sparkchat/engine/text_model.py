"""Everything about text that belongs to one loaded checkpoint: tokenizer, template, thinking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkchat.chat import TemplateKind, effort_levels, encode_text, load_tokenizer, render_prompt, template_kind
from sparkchat.deepseek_prompt import release_of
from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, LoadSpec
from sparkchat.thinking import ThinkingSplitter, prompt_opens_thinking


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run."""

    token_ids: tuple[int, ...]
    opens_thinking: bool
    notices: tuple[str, ...]


@dataclass(frozen=True)
class TextModel:
    """``tokenizer`` is None for a checkpoint without one; prompts given as token ids still run."""

    tokenizer: Any | None
    chat_template: str | None
    """The profile's template, which replaces the checkpoint's."""
    notices: tuple[str, ...]
    model_type: str | None = None
    prompt_release: str | None = None
    """Whose levels of reasoning effort the checkpoint knows, where they are defined in code."""

    @classmethod
    def load(cls, spec: LoadSpec) -> TextModel:
        loaded = load_tokenizer(spec.model_path, cache_dir=None if spec.cache_dir is None else Path(spec.cache_dir))
        release = release_of(Path(spec.model_path)) or spec.prompt_release
        return cls(loaded.tokenizer, spec.chat_template, loaded.notices, loaded.model_type, release)

    @property
    def template_source(self) -> TemplateKind:
        return template_kind(self.tokenizer, self.chat_template, self.model_type)

    @property
    def reasoning_efforts(self) -> tuple[str, ...]:
        """The levels that chats can ask for."""
        return effort_levels(self.tokenizer, self.chat_template, self.model_type, self.prompt_release)

    def prompt_of(self, request: GenerateRequest) -> Prompt:
        """The exact ids of a request's prompt. Raises UsageError for options that its form cannot honour."""
        if request.prompt_ids is not None or request.raw:
            self._refuse_chat_options(request)
        if request.prompt_ids is not None:
            return self._exact(tuple(request.prompt_ids))
        if request.raw:
            if request.prompt is None:
                raise UsageError("raw was asked for with messages; give the exact text as prompt instead")
            return self._exact(encode_text(self.tokenizer, request.prompt))
        messages = request.messages
        if messages is None:
            assert request.prompt is not None
            messages = ({"role": "user", "content": request.prompt},)
        rendered = render_prompt(
            self.tokenizer,
            messages,
            system=request.system,
            think=request.think,
            reasoning_effort=request.reasoning_effort,
            release=self.prompt_release,
            chat_template=self.chat_template,
            model_type=self.model_type,
        )
        return Prompt(rendered.token_ids, rendered.opens_thinking, rendered.notices)

    def splitter(self, prompt: Prompt) -> ThinkingSplitter | None:
        """Tells the answer's thinking from its text."""
        if self.tokenizer is None:
            return None
        return ThinkingSplitter(self.tokenizer, starts_open=prompt.opens_thinking)

    def _exact(self, token_ids: tuple[int, ...]) -> Prompt:
        opens = self.tokenizer is not None and prompt_opens_thinking(self.tokenizer, token_ids)
        return Prompt(token_ids, opens, ())

    @staticmethod
    def _refuse_chat_options(request: GenerateRequest) -> None:
        form = "exact token ids" if request.prompt_ids is not None else "exact text"
        if request.system is not None:
            raise UsageError(
                f"a system text was given with a prompt of {form}; write it into the prompt, or leave it out"
            )
        if request.think is not None or request.reasoning_effort is not None:
            raise UsageError(
                f"thinking was chosen with a prompt of {form}; write its tags into the prompt, or leave it out"
            )
