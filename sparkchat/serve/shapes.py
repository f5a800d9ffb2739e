"""The two forms an answer is given in: chat and text completions, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sparkchat.serve import usage
from sparkchat.serve.choices import Choice
from sparkchat.serve.fields import Asked

Event = dict[str, Any]
Json = dict[str, Any]


class Shape:
    """What both forms share. A chunk is one server-sent event."""

    whole_object = ""
    chunk_object = ""

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        self._head = {"id": asked.id, "created": int(time.time()), "model": model}

    def opening(self, choice: Choice) -> list[Json]:
        """Chunks before the first text of a choice."""
        raise NotImplementedError

    def piece(self, choice: Choice, event: Event) -> Json | None:
        """The chunk of a delta; None when it would carry nothing."""
        raise NotImplementedError

    def closing(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _whole_choice(self, choice: Choice) -> Json:
        raise NotImplementedError

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The response that is no stream."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._whole_choice(choice) for choice in choices],
            **self._figures(choices),
        }

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": [], **self._figures(choices)}

    def _figures(self, choices: Sequence[Choice]) -> Json:
        results = [choice.result for choice in choices if choice.result is not None]
        num_thinking = sum(choice.num_thinking for choice in choices)
        return {
            "usage": usage.usage(results, num_thinking, self._asked.num_per_prompt),
            "metrics": usage.metrics(results),
        }

    def _chunk(self, choice: Choice, content: Mapping[str, Any], **more: Any) -> Json:
        chunk = {**self._head, "object": self.chunk_object}
        chunk["choices"] = [{"index": choice.index, **content, "finish_reason": None, "logprobs": None, **more}]
        if self._asked.usage_in_every_chunk:
            prompt = len(choice.prompt_ids or ())
            chunk["usage"] = usage.counts(prompt, len(choice.token_ids), choice.cached_tokens, choice.num_thinking)
        elif self._asked.include_usage:
            chunk["usage"] = None
        return chunk

    def _ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": list(token_ids)} if self._asked.wants_ids else {}

    def _stop(self, choice: Choice) -> Json:
        assert choice.result is not None
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.result["stop"]}

    def _carries(self, event: Event) -> bool:
        wants_tokens = self._asked.wants_ids or self._asked.wants_logprobs
        return bool(event["text"] or (wants_tokens and event["token_ids"]))


class ChatShape(Shape):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> list[Json]:
        chunk = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        if self._asked.wants_ids:
            chunk["prompt_token_ids"] = choice.prompt_ids
        return [chunk]

    def piece(self, choice: Choice, event: Event) -> Json | None:
        if not self._carries(event):
            return None
        name = "reasoning_content" if event["channel"] == "thinking" else "content"
        more = {} if "logprobs" not in event else {"logprobs": {"content": list(map(_chat_record, event["logprobs"]))}}
        return self._chunk(choice, {"delta": {name: event["text"]}, **self._ids(event["token_ids"])}, **more)

    def closing(self, choice: Choice) -> Json:
        return self._chunk(choice, {"delta": {}}, **self._stop(choice))

    def whole(self, choices: Sequence[Choice]) -> Json:
        ids = {"prompt_token_ids": choices[0].prompt_ids} if self._asked.wants_ids else {}
        return super().whole(choices) | ids

    def _whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.texts["answer"], "refusal": None}
        if choice.texts["thinking"]:
            message["reasoning_content"] = choice.texts["thinking"]
        records = {"content": list(map(_chat_record, choice.records))} if self._asked.wants_logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": records,
            **self._stop(choice),
            **self._ids(choice.token_ids),
        }


class TextShape(Shape):
    whole_object = chunk_object = "text_completion"

    def __init__(self, asked: Asked, model: str) -> None:
        super().__init__(asked, model)
        self._offsets: dict[int, int] = {}

    def opening(self, choice: Choice) -> list[Json]:
        return []

    def piece(self, choice: Choice, event: Event) -> Json | None:
        if not self._carries(event):
            return None
        first = {"prompt_token_ids": choice.prompt_ids} if self._is_first(choice, event) else {}
        more = {} if "logprobs" not in event else {"logprobs": self._records(choice, event["logprobs"])}
        return self._chunk(choice, {"text": event["text"], **first, **self._ids(event["token_ids"])}, **more)

    def _is_first(self, choice: Choice, event: Event) -> bool:
        return self._asked.wants_ids and len(choice.token_ids) == len(event["token_ids"])

    def closing(self, choice: Choice) -> Json:
        return self._chunk(choice, {"text": ""}, **self._stop(choice))

    def _whole_choice(self, choice: Choice) -> Json:
        ids = {"prompt_token_ids": choice.prompt_ids} if self._asked.wants_ids else {}
        return {
            "index": choice.index,
            # A text completion has no place beside its text: thinking is part of what was said.
            "text": choice.said,
            "logprobs": self._records(choice, choice.records) if self._asked.wants_logprobs else None,
            **self._stop(choice),
            **ids,
            **self._ids(choice.token_ids),
        }

    def _records(self, choice: Choice, records: Sequence[Json]) -> Json:
        """OpenAI's older form: four lists side by side; offsets count characters of the tokens' texts."""
        offset = self._offsets.get(choice.index, 0)
        offsets = []
        for record in records:
            offsets.append(offset)
            offset += len(record["token"])
        self._offsets[choice.index] = offset
        return {
            "tokens": [record["token"] for record in records],
            "token_logprobs": [record["logprob"] for record in records],
            "top_logprobs": [{top["token"]: top["logprob"] for top in reversed(record["top"])} for record in records],
            "text_offset": offsets,
        }


def _chat_record(record: Json) -> Json:
    return {**_token(record), "top_logprobs": [_token(top) for top in record["top"]]}


def _token(record: Json) -> Json:
    return {"token": record["token"], "logprob": record["logprob"], "bytes": record["bytes"]}
