"""Who runs next: arrival order, one request of a session at a time, rows given back."""

from __future__ import annotations

from typing import Any

from sparkchat.engine.request import RequestState
from sparkchat.engine.scheduler import Scheduler
from sparkchat.params import GenerateRequest


class FakeSlots:
    """Counts rows; a session finds two tokens cached."""

    def __init__(self) -> None:
        self.num_held = 0
        self.released: list[tuple[str | None, list[int]]] = []

    def acquire(self, session: str | None, prompt_ids: tuple[int, ...], spare: int) -> tuple[object, int]:
        self.num_held += 1
        return object(), 2 if session else 0

    def release(self, slot: object, session: str | None, tokens: list[int]) -> None:
        self.num_held -= 1
        self.released.append((session, tokens))


def state(name: str, session: str | None = None) -> RequestState:
    request = GenerateRequest(id=name, prompt_ids=(1, 2, 3), session=session)
    return RequestState(request, (1, 2, 3), 0, 100, 0, output=None, history=None)


def scheduler(concurrency: int, *states: RequestState) -> tuple[Scheduler, FakeSlots]:
    slots: Any = FakeSlots()
    made = Scheduler(concurrency, slots)
    for one in states:
        made.add(one)
    return made, slots


def names(states: list[RequestState]) -> list[str]:
    return [one.id for one in states]


def test_arrival_order_up_to_the_concurrency() -> None:
    made, slots = scheduler(2, *map(state, "abc"))
    assert names(made.admit()) == ["a", "b"]
    assert names(made.admit()) == []
    made.find("a").finish("stop")
    assert names(made.retire()) == ["a"]
    assert names(made.admit()) == ["c"]
    assert slots.num_held == 2


def test_a_second_request_of_a_session_waits_and_holds_up_no_one_else() -> None:
    made, _ = scheduler(3, state("a", "s"), state("b", "s"), state("c"), state("d", "t"), state("e", "s"))
    assert names(made.admit()) == ["a", "c", "d"]
    made.find("c").finish("stop")
    made.retire()
    assert made.admit() == []
    made.find("a").finish("stop")
    made.retire()
    started = made.admit()
    assert names(started) == ["b"]
    assert (started[0].cached_tokens, started[0].prefilled) == (2, 2)
    made.find("b").finish("stop")
    made.retire()
    assert names(made.admit()) == ["e"]


def test_requests_without_a_session_never_wait_for_each_other() -> None:
    made, _ = scheduler(4, *map(state, "abcd"))
    assert len(made.admit()) == 4


def test_a_request_that_ends_while_it_waits_holds_no_row() -> None:
    made, slots = scheduler(1, state("a"), state("b"), state("c"))
    made.admit()
    made.find("b").finish("cancelled")
    assert names(made.retire()) == ["b"]
    assert slots.released == []
    made.find("a").finish("stop")
    made.retire()
    assert names(made.admit()) == ["c"]
    assert made.has_work
    made.find("c").finish("stop")
    made.retire()
    assert not made.has_work
    assert slots.num_held == 0


def test_what_a_request_leaves_behind() -> None:
    ended, failed, early = state("ended", "s"), state("failed", "t"), state("early", "u")
    made, slots = scheduler(3, ended, failed, early)
    made.admit()
    ended.tokens, ended.delivered = [1, 2, 3, 9, 8], [9, 8]
    ended.finish("stop")
    failed.finish("error", error="x")
    early.finish("cancelled")
    made.retire()
    # The newest token is not in the cache; nothing of a failed request is kept; a prompt may be half there.
    assert slots.released[0] == ("s", [1, 2, 3, 9])
    assert slots.released[1][0] is None
    assert slots.released[2] == ("u", [1, 2])


def test_filling_and_decoding_are_told_apart() -> None:
    first, second = state("a"), state("b")
    made, _ = scheduler(2, first, second)
    made.admit()
    first.tokens = [1, 2, 3, 4]
    assert (names(made.decoding), names(made.filling)) == (["a"], ["b"])
    first.finish("stop")
    second.finish("error")
    assert made.decoding == made.filling == []
    assert made.find("nobody") is None
