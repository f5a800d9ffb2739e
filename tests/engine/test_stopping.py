"""Ends of an answer: rules on ids in any cut into blocks, stop strings against a character-by-character oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sparkchat.engine.stopping import RunEnd, StopRules, StopStrings, StopText


def rules(**changes: object) -> StopRules:
    return StopRules(
        **{"end_ids": frozenset({7, 8, 9}), "max_tokens": None, "context": 100, "prompt_len": 10, **changes}
    )  # type: ignore[arg-type]


def test_an_end_token_inside_a_block_ends_the_answer_there():
    for k in range(5):
        run = [1, 2, 3, 4, 5]
        run[k] = 9
        assert rules().apply(run, 0) == RunEnd(k, "stop", 9)


def test_the_first_of_several_end_tokens_counts():
    assert rules().apply([1, 8, 9], 0) == RunEnd(1, "stop", 8)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 7, 11, 64])
def test_the_budget_is_charged_by_delivered_token(max_tokens):
    assert rules(max_tokens=max_tokens).apply([1] * 6, 0) == (
        RunEnd(max_tokens, "length", None) if max_tokens <= 6 else RunEnd(6, None, None)
    )


def test_an_end_token_after_the_last_delivered_one_is_never_seen():
    assert rules(max_tokens=3).apply([1, 2, 3, 9], 0) == RunEnd(3, "length", None)
    assert rules(max_tokens=3).apply([1, 2, 9], 0) == RunEnd(2, "stop", 9)


def test_the_context_limits_the_answer():
    assert rules(context=13).apply([1, 2, 3, 4], 0) == RunEnd(3, "length", None)
    assert rules(context=13, max_tokens=2).room(0) == 2
    assert rules(context=13, max_tokens=9).room(1) == 2
    assert rules(context=10).apply([1], 0) == RunEnd(0, "length", None)


def test_ignored_and_premature_end_tokens_are_ordinary():
    assert rules(ignore_eos=True).apply([1, 9, 2], 0) == RunEnd(3, None, None)
    assert rules(min_tokens=2).apply([9, 9, 9], 0) == RunEnd(2, "stop", 9)
    assert rules(min_tokens=2).apply([9], 1) == RunEnd(1, None, None)


def test_the_cut_into_blocks_does_not_matter():
    rng = random.Random(8)
    for _ in range(500):
        stream = [rng.randrange(12) for _ in range(40)]
        rule = rules(
            end_ids=frozenset(rng.sample(range(12), rng.choice([0, 1, 2]))),
            max_tokens=rng.choice([None, rng.randint(1, 45)]),
            context=rng.choice([100, rng.randint(11, 49)]),
            min_tokens=rng.choice([0, 5]),
            ignore_eos=rng.random() < 0.2,
        )
        outcomes = set()
        for width in (1, 3, 6, 40):
            delivered: list[int] = []
            for at in range(0, 40, width):
                end = rule.apply(stream[at : at + width], len(delivered))
                delivered += stream[at : at + end.num_delivered]
                if end.finish_reason:
                    break
            outcomes.add((tuple(delivered), end.finish_reason, end.stop))
        assert len(outcomes) == 1


# Stop strings


def oracle(pieces: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Text, tokens pushed and stop string, looking at every prefix of the whole text."""
    text, starts = "".join(pieces), [len("".join(pieces[:i])) for i in range(len(pieces))]
    for end in range(1, len(text) + 1):
        met = [
            s for s in stop
            if text[:end].endswith(s) and sum(start < end - len(s) for start in starts) >= min_tokens
        ]  # fmt: skip
        if met:
            return text[: end - max(map(len, met))], sum(start < end for start in starts), max(met, key=len)
    return text, len(pieces), None


def stream(pieces: Sequence[str], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, int, str | None]:
    """The same through StopStrings, checking every promise on the way."""
    matcher, text = StopStrings(stop, min_tokens), ""
    final = oracle(pieces, stop, min_tokens)
    for i, piece in enumerate(pieces):
        part = matcher.push(piece)
        text += part.text
        assert final[0].startswith(text), "shown text was taken back"
        if part.stop is not None:
            return text, i + 1, part.stop
        held = "".join(pieces[: i + 1])[len(text) :]
        assert not held or any(s.startswith(held) for s in stop), "text was held back for nothing"
    part = matcher.finish()
    return text + part.text, len(pieces), part.stop


def test_random_texts_agree_with_the_oracle():
    rng = random.Random(9)
    for _ in range(4000):
        stop = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        pieces = [
            "".join(rng.choice("abc") for _ in range(rng.choice([0, 1, 1, 2, 4]))) for _ in range(rng.randint(0, 12))
        ]
        min_tokens = rng.choice([0, 0, 1, 3, 6])
        assert stream(pieces, stop, min_tokens) == oracle(pieces, stop, min_tokens), (pieces, stop, min_tokens)


def test_the_text_does_not_depend_on_the_cut_into_tokens():
    rng = random.Random(10)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(30))
        stop = ["".join(rng.choice("ab\n") for _ in range(rng.randint(2, 6))) for _ in range(2)]
        results = set()
        for width in (1, 2, 7, 30):
            shown, _, met = stream([text[i : i + width] for i in range(0, 30, width)], stop)
            results.add((shown, met))
        assert len(results) == 1


@pytest.mark.parametrize(
    ("pieces", "stop", "want"),
    [
        (["Hello", " wor", "ld"], ["wor"], ("Hello ", 2, "wor")),  # a token cut in the middle is delivered
        (["Hello", " wor", "ld"], [" wor"], ("Hello", 2, " wor")),  # and one of which no text is left
        (["a", "EN", "D", "b"], ["END"], ("a", 3, "END")),
        (["aEN", "D"], ["END"], ("a", 2, "END")),
        (["E", "N", "x"], ["END"], ("ENx", 3, None)),
        (["E", "N"], ["END"], ("EN", 2, None)),
        (["aab"], ["ab", "aab"], ("", 1, "aab")),  # both complete at b: the one that begins first
        (["abcde"], ["abcde", "bcd"], ("a", 1, "bcd")),  # bcd completes first
        (["\n", "\n"], ["\n\n", "\n"], ("", 1, "\n")),
        (["x", "", "", "é", "y"], ["é"], ("x", 4, "é")),  # the bytes of a character come in three tokens
        ([""], ["a"], ("", 1, None)),
        (["ééß"], ["éß"], ("é", 1, "éß")),
        (["aaaaab"], ["aaab"], ("aa", 1, "aaab")),
        (["abaaba", "baabac"], ["abaabac"], ("abaab", 2, "abaabac")),
    ],
)
def test_known_texts(pieces, stop, want):
    assert stream(pieces, stop) == want


def test_without_stop_strings_everything_is_certain_at_once():
    matcher = StopStrings([])
    assert matcher.push("abc") == StopText("abc", None)
    assert matcher.push("") == StopText("", None)
    assert matcher.finish("d") == StopText("d", None)


def test_a_match_before_the_minimum_is_text_and_a_later_one_ends():
    assert stream(["x", "END", "y", "END", "z"], ["END"], 3) == ("xENDy", 4, "END")
    assert stream(["END"], ["END"], 1) == ("END", 1, None)
    # Before the minimum nothing is held back.
    matcher = StopStrings(["END"], 2)
    assert matcher.push("E") == StopText("E", None)
    assert matcher.push("ND") == StopText("ND", None)


def test_trailing_text_may_complete_a_stop_string():
    matcher = StopStrings(["ab"])
    assert matcher.push("xa") == StopText("x", None)
    assert matcher.push("") == StopText("", None)
    assert matcher.finish("b") == StopText("", "ab")
    matcher = StopStrings(["ab"])
    matcher.push("xa")
    assert matcher.finish("c") == StopText("ac", None)


def test_hostile_stop_strings_stay_cheap():
    stop, piece = "a" * 5000 + "b", "a" * 50
    matcher = StopStrings([stop, stop[1:]])
    for _ in range(400):
        matcher.push(piece)
    assert matcher.push("b").stop == stop
