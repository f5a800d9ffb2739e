"""Messages to the exact prompt: the checkpoint's chat template, and what is done when it refuses.

Ladder when a template raises, each step with a notice: neighbouring messages of one role are joined; the system text
is merged into the first user message; both; an empty user message is put in front of a chat that starts with an
answer; last, a fallback layout that the vocabulary suggests. The same fallback serves checkpoints without a template,
except for architectures whose prompt is defined in code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from sparkchat import deepseek_prompt
from sparkchat.bounded_render import TooMuch, render_bounded
from sparkchat.errors import UsageError
from sparkchat.spelled_tokens import SpelledTokens
from sparkchat.thinking import ThinkingSplitter, find_thinking_tags, prompt_opens_thinking
from sparkchat.tokenizer import LoadedTokenizer, load_tokenizer

__all__ = [
    "LoadedTokenizer",
    "RenderedPrompt",
    "ThinkingSplitter",
    "effort_levels",
    "encode_text",
    "find_thinking_tags",
    "load_tokenizer",
    "prompt_opens_thinking",
    "render_prompt",
    "template_kind",
]

TemplateKind = Literal["checkpoint", "profile", "fallback", "none"]
Message = dict[str, str]

CHATML_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
DEEPSEEK_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] -}}"
    "{%- elif message['role'] == 'user' -%}{{- '<｜User｜>' + message['content'] -}}"
    "{%- else -%}{{- '<｜Assistant｜></think>' + message['content'] + eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<｜Assistant｜><think>' if enable_thinking else '<｜Assistant｜></think>' -}}{%- endif -%}"
)
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] + '\\n\\n' -}}"
    "{%- elif message['role'] == 'user' -%}{{- 'User: ' + message['content'] + '\\n' -}}"
    "{%- else -%}{{- 'Assistant: ' + message['content'] + '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)

_ROLES = ("system", "user", "assistant")
_THINK_NAMES = ("enable_thinking", "thinking")
"""Template variables that published checkpoints use as the thinking switch."""
_EFFORT_NAME = "reasoning_effort"
_USUAL_LEVELS = ("low", "medium", "high")
# What a template can raise while it is compiled or rendered: jinja's own errors, and Python's from its expressions.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt ready to run."""

    token_ids: tuple[int, ...]
    text: str
    """Exactly what was tokenised; special tokens that a message spells are text there (``spelled_tokens.py``)."""
    notices: tuple[str, ...]
    """Plain words for the user about anything that was changed."""
    template: TemplateKind
    opens_thinking: bool
    """The prompt ends inside a thinking block, so the answer starts as thinking."""


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    system: str | None = None,
    think: bool | None = None,
    reasoning_effort: str | None = None,
    release: deepseek_prompt.Release | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    model_type: str | None = None,
) -> RenderedPrompt:
    """Render ``messages`` with ``chat_template`` if given, else the checkpoint's template, else a fallback.

    ``system`` goes in front (an empty one too: it replaces a template's built-in system text). ``think`` None leaves
    the choice to the template. ``reasoning_effort`` is a level of the model's own. ``model_type`` is config.json's, for
    prompts that are defined in code; ``release`` says whose levels those know. Raises UsageError for no tokenizer,
    roles other than system, user and assistant, content that is no text, and a ``think`` or a level that the template
    cannot honour.
    """
    if tokenizer is None:
        raise UsageError("a chat needs a tokenizer and this model has none; give --prompt-ids")
    chat = _with_system(_checked(messages), system)
    spelled = SpelledTokens(tokenizer, [message["content"] for message in chat])
    chat = [{**message, "content": spelled.mark(message["content"])} for message in chat]
    source, kind = _pick_template(tokenizer, chat_template)
    if source is None and model_type == deepseek_prompt.MODEL_TYPE:
        text = _write_deepseek(chat, think, reasoning_effort, release, add_generation_prompt)
        opens = add_generation_prompt and text.endswith(deepseek_prompt.THINK)
        return RenderedPrompt(spelled.encode(text), spelled.unmark(text), (), "checkpoint", opens)
    switches = _switches(source, think, reasoning_effort)
    notices: tuple[str, ...] = ()
    rendered = None
    if source is not None:
        rendered, error = _try_ladder(_renderer(tokenizer, source, switches), chat)
        if rendered is None:
            notices = (f"the {_NAMES[kind]} chat template fails ({error})",)
    if rendered is None:
        source, layout = _fallback(tokenizer)
        kind = "fallback"
        why = notices[0] if notices else "this model has no chat template"
        notices = (f"{why}; using {layout} instead",)
        switches = _switches(source, think, reasoning_effort)
        rendered, error = _try_ladder(_renderer(tokenizer, source, switches), chat)
        if rendered is None:
            raise UsageError(f"the chat cannot be written as a prompt: {error}; use --raw with the exact text")
    chat, changes = rendered
    render = _renderer(tokenizer, source, switches)
    text = render(chat, add_generation_prompt)
    opening = _generation_prompt(render, chat)
    _check_think(think, source, tokenizer, opening)
    token_ids = spelled.encode(_sound(text))
    opens = add_generation_prompt and prompt_opens_thinking(tokenizer, _encode(tokenizer, opening))
    return RenderedPrompt(token_ids, spelled.unmark(text), notices + changes, kind, opens)


def _write_deepseek(
    chat: list[Message],
    think: bool | None,
    effort: str | None,
    release: deepseek_prompt.Release | None,
    add_generation_prompt: bool,
) -> str:
    if effort is not None and release is None:
        raise UsageError(
            f"reasoning effort {effort} was asked for, but this folder does not say which release of DeepSeek V4 it "
            "holds; name its profile with --profile, or leave it out"
        )
    return deepseek_prompt.write_chat(
        chat,
        think=effort is not None if think is None else think,
        effort=effort,
        release=release or "0731",
        add_generation_prompt=add_generation_prompt,
    )


def _switches(source: str | None, think: bool | None, effort: str | None) -> dict[str, Any]:
    """Variables for the template. Raises UsageError for a level where it asks for none."""
    switches: dict[str, Any] = {} if think is None else dict.fromkeys(_THINK_NAMES, think)
    if effort is None:
        return switches
    if not _has_levels(source):
        raise UsageError(
            f"reasoning effort {effort} was asked for, but this model's chat template has no levels; leave it out"
        )
    return switches | {_EFFORT_NAME: effort}


def template_kind(
    tokenizer: Any | None, chat_template: str | None = None, model_type: str | None = None
) -> TemplateKind:
    """Where the chat template would come from; "none" without a tokenizer."""
    if tokenizer is None:
        return "none"
    source, kind = _pick_template(tokenizer, chat_template)
    has_own = source is not None or model_type == deepseek_prompt.MODEL_TYPE
    return kind if has_own else "fallback"


def effort_levels(
    tokenizer: Any | None,
    chat_template: str | None = None,
    model_type: str | None = None,
    release: deepseek_prompt.Release | None = None,
) -> tuple[str, ...]:
    """The levels of reasoning effort that chats can ask for; a template does not say which, and may know others."""
    source = None if tokenizer is None else _pick_template(tokenizer, chat_template)[0]
    if source is None and model_type == deepseek_prompt.MODEL_TYPE:
        return () if release is None else tuple(deepseek_prompt.EFFORTS[release])
    return _USUAL_LEVELS if _has_levels(source) else ()


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of exact text without a chat template.

    The tokenizer's own start token goes in front where it has one, unless the text spells it already.
    """
    if tokenizer is None:
        raise UsageError("a text prompt needs a tokenizer and this model has none; give --prompt-ids")
    has_start = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tuple(tokenizer.encode(_sound(text), add_special_tokens=not has_start))


_NAMES = {"checkpoint": "checkpoint's", "profile": "profile's"}
_Render = Callable[[list[Message], bool], str]


def _checked(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    chat = []
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        role = "system" if role == "developer" else role
        if role not in _ROLES:
            raise UsageError(
                f"message {number} has role {role!r}, which sparkchat does not take; use {', '.join(_ROLES)}"
            )
        if not isinstance(content, str):
            raise UsageError(f"message {number} has no text as its content; give a string")
        chat.append({"role": role, "content": _sound(content)})
    return chat


def _sound(text: str) -> str:
    """Text that UTF-8 can carry: bytes of the command line that were no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def _with_system(chat: list[Message], system: str | None) -> list[Message]:
    if system is not None and chat and chat[0]["role"] == "system":
        both = "\n\n".join(text for text in (_sound(system), chat[0]["content"]) if text)
        chat = [{"role": "system", "content": both}, *chat[1:]]
    elif system is not None:
        chat = [{"role": "system", "content": _sound(system)}, *chat]
    if not any(message["role"] != "system" for message in chat):
        raise UsageError("the chat has no message to answer; give at least one user message")
    return chat


def _pick_template(tokenizer: Any, override: str | None) -> tuple[str | None, TemplateKind]:
    if override is not None:
        return override, "profile"
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):  # several named templates; the default one is for plain chats
        own = own.get("default")
    return own or None, "checkpoint"


def _fallback(tokenizer: Any) -> tuple[str, str]:
    """(template, its name in words), by the turn markers that the vocabulary holds."""
    added = tokenizer.get_added_vocab()
    if "<|im_start|>" in added:
        return CHATML_TEMPLATE, "ChatML"
    if "<｜User｜>" in added and "<｜Assistant｜>" in added:
        return DEEPSEEK_TEMPLATE, "DeepSeek's layout"
    start = tokenizer.bos_token if tokenizer.encode("", add_special_tokens=True)[:1] == [tokenizer.bos_token_id] else ""
    return f"{{{{- {start!r} -}}}}" + PLAIN_TEMPLATE, "plain 'User: ... Assistant:' lines"


def _has_levels(source: str | None) -> bool:
    try:
        return source is not None and _EFFORT_NAME in _names_used(source)
    except jinja2.TemplateError:
        return False


def _renderer(tokenizer: Any, source: str, switches: Mapping[str, Any]) -> _Render:
    """A function of (chat, add_generation_prompt) that renders in transformers' sandbox."""

    def render(chat: list[Message], add_generation_prompt: bool) -> str:
        return render_bounded(tokenizer, source, chat, switches, add_generation_prompt)

    return render


def _try_ladder(render: _Render, chat: list[Message]) -> tuple[tuple[list[Message], tuple[str, ...]] | None, str]:
    """((the chat as the template takes it, notices), "") or (None, the first error)."""
    first_error = ""
    for candidate, notices in _candidates(chat):
        try:
            text = render(candidate, True)
        except _TEMPLATE_ERRORS as error:
            first_error = first_error or " ".join(f"{error}".split())[:200] or type(error).__name__
            if isinstance(error, TooMuch):
                break
            continue
        if not text:
            first_error = first_error or "it writes nothing"
            break
        if all(message["content"].strip() in text for message in candidate if message["role"] == "system"):
            return (candidate, notices), ""
        first_error = first_error or "it leaves the system text out"
    return None, first_error


def _candidates(chat: list[Message]) -> list[tuple[list[Message], tuple[str, ...]]]:
    """The chat as given, then changed as little as may be needed."""
    merged, joined = _merge_system(chat), _join_same_role(chat)
    both = _join_same_role(merged)
    system_notice = "this model's chat template takes no system message here; its text goes into the user message"
    join_notice = "this model's chat template wants roles to alternate; neighbouring messages of one role are joined"
    start_notice = "this model's chat template wants the user to begin; an empty user message is put in front"
    found = [(chat, ())]
    for candidate, notices in (
        (joined, (join_notice,)),
        (merged, (system_notice,)),
        (both, (system_notice, join_notice)),
        (_start_with_user(joined), (join_notice,) * (joined != chat) + (start_notice,)),
        (
            _start_with_user(both),
            (system_notice,) * (merged != chat) + (join_notice,) * (both != merged) + (start_notice,),
        ),
    ):
        if all(candidate != earlier for earlier, _ in found):
            found.append((candidate, notices))
    return found


def _join_same_role(chat: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in chat:
        if joined and joined[-1]["role"] == message["role"]:
            parts = (joined[-1]["content"], message["content"])
            joined[-1] = {"role": message["role"], "content": "\n\n".join(part for part in parts if part)}
        else:
            joined.append(dict(message))
    return joined


def _merge_system(chat: list[Message]) -> list[Message]:
    """Each system text moves to the front of the next user message; one that no user message follows becomes one."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in chat:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user":
            parts = [text for text in (*waiting, message["content"]) if text]
            merged.append({"role": "user", "content": "\n\n".join(parts)})
            waiting = []
        else:
            merged.append(dict(message))
    if any(waiting):
        merged.append({"role": "user", "content": "\n\n".join(filter(None, waiting))})
    return merged


def _start_with_user(chat: list[Message]) -> list[Message]:
    first = next((n for n, message in enumerate(chat) if message["role"] != "system"), len(chat))
    if first < len(chat) and chat[first]["role"] == "user":
        return chat
    return [*chat[:first], {"role": "user", "content": ""}, *chat[first:]]


def _generation_prompt(render: _Render, chat: list[Message]) -> str:
    """What the template adds to ask for an answer; empty when the two renderings do not share their start."""
    try:
        without, with_prompt = render(chat, False), render(chat, True)
    except _TEMPLATE_ERRORS:
        return ""
    return with_prompt.removeprefix(without)


def _check_think(think: bool | None, source: str, tokenizer: Any, opening: str) -> None:
    """Refuse a thinking switch that would change nothing."""
    if think is None or _names_used(source) & set(_THINK_NAMES):
        return
    always = prompt_opens_thinking(tokenizer, _encode(tokenizer, opening))
    if think and not always:
        raise UsageError("--think is not possible: this model's chat template has no thinking; leave the option out")
    if not think and always:
        raise UsageError("--no-think is not possible: this model's chat template always thinks; leave the option out")


def _names_used(source: str) -> set[str]:
    """Names a template refers to, attributes (``message.thinking``) not counted."""
    names: set[str] = set()
    after_dot = False
    for _, kind, value in jinja2.Environment().lex(source):
        if kind == "name" and not after_dot:
            names.add(value)
        after_dot = kind == "operator" and value == "."
    return names


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(_sound(text), add_special_tokens=False))
