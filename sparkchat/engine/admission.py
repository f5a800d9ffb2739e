"""From what was asked to a request that can run, or a reason why it cannot."""

from __future__ import annotations

from sparkchat.engine.output import OutputStream, Spellings
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.request import RequestState, fresh_seed
from sparkchat.engine.sampling import TokenHistory
from sparkchat.engine.stopping import StopRules
from sparkchat.engine.text_model import TextModel
from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, LoadSpec


class Admission:
    """Checks requests against the loaded pair. Raises UsageError with the reason."""

    def __init__(self, spec: LoadSpec, pair: LoadedPair, text: TextModel) -> None:
        self._spec = spec
        self._pair = pair
        self._text = text
        self._spellings = Spellings(text.tokenizer)

    def admit(self, request: GenerateRequest) -> tuple[RequestState, list[str]]:
        """The request's state, and notices in plain words about how its prompt was made."""
        _check_types(request)
        self._check_speculation(request)
        prompt = self._text.prompt_of(request)
        prompt_ids = prompt.token_ids
        self._check_tokens(request, prompt_ids)
        sampling = request.sampling
        rules = StopRules(
            end_ids=frozenset(self._pair.target.config.eos_token_ids),
            max_tokens=sampling.max_tokens,
            context=self._pair.context,
            prompt_len=len(prompt_ids),
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
        )
        splitter = self._text.splitter(prompt)
        output = OutputStream(self._text.tokenizer, rules, sampling.stop, splitter, self._spellings)
        state = RequestState(
            request=request,
            prompt_ids=prompt_ids,
            block_size=self._block_size(request),
            context=self._pair.context,
            seed=fresh_seed() if sampling.seed is None else sampling.seed,
            output=output,
            history=TokenHistory(prompt_ids),
            mode_override=request.mode,
            accept_cap=self._spec.accept_cap if request.accept_cap is None else request.accept_cap,
            draft_temperature=request.draft_temperature or self._spec.draft_temperature,
        )
        return state, list(prompt.notices)

    def _block_size(self, request: GenerateRequest) -> int:
        return request.block_size or self._spec.block_size or self._pair.block_size

    def _check_speculation(self, request: GenerateRequest) -> None:
        trained = self._pair.block_size
        if self._pair.drafter is None:
            if request.mode not in (None, "off"):
                raise UsageError(f"mode {request.mode} was asked for, but {self._pair.reason_off}; use mode off")
            if request.block_size is not None:
                raise UsageError(
                    f"block size {request.block_size} was asked for, but {self._pair.reason_off}; leave it out"
                )
        if request.accept_cap is not None and (request.mode or self._spec.mode) != "cap-accept":
            raise UsageError(
                f"accept_cap {request.accept_cap} was asked for, but the mode is {request.mode or self._spec.mode}; "
                "ask for mode cap-accept"
            )
        if request.block_size is not None and self._pair.drafter is not None and request.block_size > trained:
            raise UsageError(
                f"block size {request.block_size} was asked for, but the drafter was trained with {trained}; "
                f"give 1 to {trained}"
            )
        temperatures = self._pair.temperatures
        if temperatures is not None and len(temperatures) < self._block_size(request):
            raise UsageError(
                f"block size {request.block_size} was asked for, but there are confidence temperatures for "
                f"{len(temperatures)} drafts; give 1 to {len(temperatures)}"
            )

    def _check_tokens(self, request: GenerateRequest, prompt_ids: tuple[int, ...]) -> None:
        vocab, context = self._pair.target.config.vocab_size, self._pair.context
        if not prompt_ids:
            raise UsageError("the prompt has no tokens; give at least one word or id")
        outside = next((i for i in prompt_ids if not 0 <= i < vocab), None)
        if outside is not None:
            raise UsageError(f"prompt id {outside} is not a token of {self._spec.name}; give ids from 0 to {vocab - 1}")
        outside = next((i for i, _ in request.sampling.logit_bias if i >= vocab), None)
        if outside is not None:
            raise UsageError(f"logit_bias id {outside} is not a token of {self._spec.name}; give 0 to {vocab - 1}")
        if len(prompt_ids) >= context:
            raise UsageError(
                f"the prompt has {len(prompt_ids)} tokens, and the context holds {context} with the answer; "
                "shorten it, or give a larger --context"
            )
        if request.logprobs is not None and self._text.tokenizer is None:
            raise UsageError(f"logprobs were asked for, but {self._spec.name} has no tokenizer; leave them out")
        if request.sampling.stop and self._text.tokenizer is None:
            raise UsageError(f"stop strings were given, but {self._spec.name} has no tokenizer; leave --stop out")


_KINDS = dict.fromkeys(("prompt", "system", "session", "reasoning_effort"), str) | dict.fromkeys(
    ("raw", "think", "steps"), bool
)


def _check_types(request: GenerateRequest) -> None:
    """A request comes as JSON; what is no text must not get as far as the tokenizer."""
    for name, kind in _KINDS.items():
        value = getattr(request, name)
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{name} {value!r} is not possible; give {'a text' if kind is str else 'true or false'}")
    if any(not isinstance(message, dict) for message in request.messages or ()):
        raise UsageError("messages must be objects with role and content")
    if any(type(token) is not int for token in request.prompt_ids or ()):
        raise UsageError("prompt_ids must be whole numbers")
