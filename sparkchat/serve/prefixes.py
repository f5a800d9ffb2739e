"""Which chat goes on: a request that repeats an earlier one and its answer continues in that one's session.

OpenAI's protocol has no conversations: every request carries all messages. The engine reuses the common prefix of
requests of one session, so the server remembers under which session each chat was last answered.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Sequence

from sparkchat import strict_json
from sparkchat.params import GenerateRequest

Message = dict[str, str]


class Prefixes:
    """Sessions of finished chats, the least recently finished forgotten first."""

    def __init__(self, most: int) -> None:
        """``most``: as many as the engine has places; it keeps no more prefixes than that."""
        self._most = most
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def take(self, request: GenerateRequest) -> str:
        """The session for a chat request: its predecessor's, which is then its own alone, or a new one."""
        known = self._sessions.pop(_key(request, (request.messages or ())[:-1]), None)
        return known or uuid.uuid4().hex

    def keep(self, request: GenerateRequest, answer: str) -> None:
        """A chat was answered: the next request of it repeats its messages and this answer."""
        if request.session is None or not answer:
            return
        said = (*(request.messages or ()), {"role": "assistant", "content": answer})
        self._sessions[_key(request, said)] = request.session
        while len(self._sessions) > self._most:
            self._sessions.popitem(last=False)


def _key(request: GenerateRequest, said: Sequence[Message]) -> str:
    # The system text and the thinking switch shape the prompt from its beginning.
    turns = [[message["role"], message["content"]] for message in said]
    chosen = [request.system, request.think, request.reasoning_effort, turns]
    return hashlib.sha256(strict_json.dumps(chosen).encode()).hexdigest()
