"""Text as it is shown: nothing from outside reaches the terminal, streaming changes nothing, and cost stays flat."""

from __future__ import annotations

import random
import time
import unicodedata

import pytest
from rich.cells import cell_len

from sparkchat.ui.document import Section
from sparkchat.ui.glyphs import ASCII, UNICODE
from sparkchat.ui.line import Line
from sparkchat.ui.long_text import CHUNK, LongText
from sparkchat.ui.safe_text import TerminalFilter, fit, in_columns, most_cells, text_width, visible
from sparkchat.ui.wrap import wrap

HOSTILE = [
    "[/]",
    "[/INST]",
    "[bold red]x",
    "[0] Hello",
    "[r",
    "[/home/me]",
    "[link=x]y",
    "a[i][j]",
    "[b + should",
    "if 0<foo or foo>10",
    "std::vector<int>",
    "<div>hi</div>",
    "<!-- x -->",
    "&lt;b&gt;",
    "2*3*4 and a_b_c and x**2",
    "![alt](http://a) [text](javascript:x) \\(x\\)",
]
MARKDOWN = (
    "# Head *x*\nsome **bold** `code` ~~gone~~ text that is long enough to wrap around twice or more\n- item one\n"
    "  - nested 你好\n1. abc\n> quote > y\n> > deep\n```python\ndef f(x):\n\treturn x  # [/]\n```\n---\n"
    "| a | b |\n|---|---|\n| 1 | **2** |\n| 👨‍👩‍👧 | ไทย |\n\nend [/] <div> unclosed ** mark `tick\n```\nnever closed"
)


def rows(section: Section) -> list[str]:
    """Every row as the transcript finds it."""
    return [row(section.line(index), number) for index, number in map(section.place, range(section.num_rows))]


def lines(section: Section) -> list[Line]:
    return [section.line(index) for index in range(section.num_lines)]


def row(line: Line, number: int) -> str:
    return "".join(piece.text for piece in (*line.margin(number), *line.row_pieces(number)))


def section(text: str, width: int = 30, syntax: str = "markdown") -> Section:
    made = Section(syntax, "", width, UNICODE)
    made.append(text)
    made.finish()
    return made


@pytest.mark.parametrize("text", HOSTILE)
def test_every_character_of_hostile_text_is_shown(text: str) -> None:
    assert "".join(rows(section(text, 80))) == text


@pytest.mark.parametrize("width", [2, 7, 30, 80])
def test_streamed_text_ends_up_like_a_fresh_one(width: int) -> None:
    source = MARKDOWN + "\n" + "\n".join(HOSTILE)
    fresh = rows(section(source, width))
    chooser = random.Random(width)
    for _ in range(40):
        streamed = Section("markdown", "", width, UNICODE)
        at = 0
        while at < len(source):
            size = chooser.randint(1, 9)
            streamed.append(source[at : at + size])
            at += size
        streamed.finish()
        assert rows(streamed) == fresh
        assert streamed.text == source


def test_rewrapping_gives_what_that_width_would_have_given() -> None:
    changed = section(MARKDOWN, 80)
    for width in (20, 133, 40):
        changed.rewrap(width)
        assert rows(changed) == rows(section(MARKDOWN, width))


@pytest.mark.parametrize("width", [20, 41, 80])
def test_no_row_is_wider_than_the_screen(width: int) -> None:
    wide = "你好" * 40 + " 👋🏽 🇫🇷 1️⃣ ＡＢＣ " + "e\u0301\u0302" * 50 + " שלום ไทย " + "x" * 300
    for syntax in ("markdown", "plain"):
        for shown in rows(section(f"{wide}\n> {wide}\n- {wide}\n```\n{wide}", width, syntax)):
            assert text_width(shown.rstrip(" ")) <= width
            # The library that draws must count as we do, or borders drift.
            assert cell_len(shown) == text_width(shown)


def test_marks_are_hidden_and_styles_are_given() -> None:
    line = section("a **b `c**` d** *e*", 80).line(0)
    assert row(line, 0) == "a b c** d e"
    assert [(piece.text, piece.style) for piece in line.formatted.pieces if piece.style] == [
        ("b ", "bold"),
        ("c**", "bold code"),
        (" d", "bold"),
        ("e", "italic"),
    ]


def test_table_is_aligned_when_it_fits_and_as_written_when_not() -> None:
    source = "| name | n |\n|---|---|\n| long name | 1 |\nafter"
    assert rows(section(source, 40)) == ["name      │ n", "──────────┼──", "long name │ 1", "after"]
    assert rows(section(source, 11)) == ["name     │n", "─────────┼─", "long name│1", "after"]
    assert rows(section(source, 10))[0].startswith("| name")


def test_code_keeps_its_text_and_closes_only_at_its_own_fence() -> None:
    shown = rows(section("````\n```\n# not a head\n````\n# head", 40))
    assert shown == ["╭─ code 1 ", "│ ```", "│ # not a head", "╰─ ", "head"]


def test_two_hundred_quote_marks_do_no_harm() -> None:
    text = "> " * 200 + "deep"
    assert "deep" in "".join(rows(section(text, 60)))


@pytest.mark.parametrize("kind", ["prose", "fence", "one line", "table", "marks"])
def test_cost_of_an_update_does_not_grow(kind: str) -> None:
    piece = {
        "prose": "Some words **of** prose, and a few more of them to read.\n",
        "fence": "    call(argument, other)\n",
        "one line": "abcdefghijklmnopqrstuvwx",
        "table": "| a | b | c |\n",
        "marks": "**a* `b_ ~~c ",
    }[kind]
    made = Section("markdown", "", 78, UNICODE)
    made.append({"fence": "```\n", "table": "| a | b | c |\n|---|---|---|\n"}.get(kind, ""))
    times = []
    for _ in range(4000):
        started = time.perf_counter()
        made.append(piece)
        times.append(time.perf_counter() - started)
    first, last = sorted(times[200:600])[200], sorted(times[-400:])[200]
    assert last < 4 * first + 0.0003, f"{1e6 * first:.0f} us at first, {1e6 * last:.0f} us at last"


def test_offsets_lead_back_to_the_source() -> None:
    source = "- **bold** and `code`\n\tx\x1by 👨‍👩‍👧z"
    made = section(source, 80)
    first, second = lines(made)
    assert source[first.source_offset(0, row(first, 0).index("and")) :].startswith("and")
    assert source[second.source_offset(0, row(second, 0).index("z")) :] == "z"
    assert source[second.source_offset(0, row(second, 0).index("\u241b")) :].startswith("\x1by")


def test_controls_are_spelt_out() -> None:
    shown = visible("a\x1b[31mb\x07\x9b1m\u202ec\x7f\u2028\ud800")
    assert shown == "a␛[31mb␇<9B>1m<U+202E>c␡<U+2028><U+D800>"
    assert visible("\x1b\x7f", ascii_only=True) == "^[^?"
    assert "\x1b" not in visible("".join(map(chr, range(0x300))))


@pytest.mark.parametrize("text", ["👨‍👩‍👧", "1️⃣", "🇫🇷", "👋🏽", "❤️"])
def test_joined_emoji_are_as_wide_for_every_terminal(text: str) -> None:
    from wcwidth import wcwidth

    shown = visible(text)
    assert text_width(shown) == cell_len(shown) == sum(max(wcwidth(c), 0) for c in shown)


def test_terminal_filter_keeps_line_ends_over_chunks() -> None:
    passed = TerminalFilter()
    assert "".join(passed.feed(part) for part in ("a\r", "\nb\x1b", "[1mc\rd\r")) + passed.flush() == "a\nb␛[1mc␍d␍"


def test_fit_cuts_by_cells() -> None:
    assert fit("你好你好", 5) == "你好…"
    assert fit("ab", 4) == "ab  "
    assert text_width(fit("你好", 2)) == 2


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("width", [2, 3, 7, 20])
def test_a_vowel_sign_stays_with_its_letter(width: int, words: bool) -> None:
    text = "हिन्दी भाषा यहाँ हैं தமிழ் மொழி" * 3
    starts = wrap(text, width, words=words)
    rows = [text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert "".join(rows) == text and all(rows)
    assert not any(unicodedata.category(row[0]).startswith("M") for row in rows)
    assert all(sum(map(most_cells, row.rstrip(" "))) <= width for row in rows)


@pytest.mark.parametrize("words", [True, False])
def test_a_growing_line_breaks_where_the_whole_one_does(words: bool) -> None:
    text = "word " * 7 + "averyverylongwordindeed " * 3 + "你好" * 9 + " x" * 20
    for width in (5, 11, 30):
        whole = wrap(text, width, words=words)
        starts = [0]
        for end in range(1, len(text) + 1):
            starts[-1:] = wrap(text[:end], width, words=words, start=starts[-1])
        assert starts == whole


def test_ascii_glyphs_are_ascii() -> None:
    assert all(value.isascii() and len(value) == 1 for value in vars(ASCII).values())
    assert all(text_width(value) == 1 for value in vars(UNICODE).values())


@pytest.mark.parametrize("width", [12, 30, 79])
def test_a_line_that_is_made_again_looks_as_before(width: int) -> None:
    text = MARKDOWN + "\n```\n" + "\n".join(HOSTILE) * 8 + "\n```\n" + HOSTILE[4] + "\n~~~x\nlast `open"
    growing = Section("markdown", "", width, UNICODE)
    seen: dict[int, list[str]] = {}
    for part in text.split("\n"):
        growing.append(f"{part}\n")
        index = growing.num_lines - 2
        seen[index] = [row(growing.line(index), number) for number in range(len(growing.line(index).row_starts))]
    columns = [line.index for line in lines(growing) if line.formatted.kind == "table"]
    again = section(text + "\n", width)
    for other in (width, width + 7, width):
        again.rewrap(other)
        assert [line.text for line in lines(again)] == [*text.split("\n"), ""]
        assert all(text[line.start : line.end] == line.text for line in lines(again))
        assert [row_ for line in lines(again) for row_ in map(line.row_pieces, range(len(line.row_starts)))] == [
            again.line(index).row_pieces(number) for index, number in map(again.place, range(again.num_rows))
        ]
    for index, rows_then in seen.items():
        line = again.line(index)
        assert index in columns or [row(line, number) for number in range(len(line.row_starts))] == rows_then


def test_a_long_answer_leaves_little_behind_but_its_text() -> None:
    import tracemalloc

    made = Section("markdown", "", 78, UNICODE)
    part = "".join(each for each in MARKDOWN if each.isascii()).replace("never closed", "```\n| c |\n|---|\n| d |\n\n")
    lengths = []
    tracemalloc.start()
    for repeat in range(90):
        for at in range(0, len(part), 40):
            made.append(part[at : at + 40])
            made.mark_origin("draft", repeat)
        lengths.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    grown, added = lengths[-1] - lengths[29], 60 * len(part)
    assert grown < 2.5 * added, f"{grown} bytes for {added} characters"


def test_a_long_text_is_the_sum_of_what_was_added() -> None:
    chooser, whole, kept = random.Random(3), "", LongText("")
    assert not kept and kept.last == "" and kept.slice(0, 0) == ""
    for _ in range(300):
        added = chooser.choice(["a", "é\n", "你" * 70, "x" * CHUNK, ""]) * chooser.randint(0, 2)
        kept.append(added)
        whole += added
        low, high = sorted((chooser.randint(0, len(whole)), chooser.randint(0, len(whole))))
        assert kept.slice(low, high) == whole[low:high]
    assert str(kept) == whole and len(kept) == len(whole) and kept.last == whole[-1:]


def test_both_edges_of_a_block_know_its_code() -> None:
    made = section("a\n```py\nx\n\ny\n```\n```\n```\n~~~\ncut\nend")
    found = [made.code_at(line) for line in lines(made)]
    assert found == [None, "x\n\ny", None, None, None, "x\n\ny", "", "", "cut\nend", None, None]


def test_what_is_explained_stays_in_its_column() -> None:
    shown = in_columns([("/a", "one two " * 6), ("/long", "x"), ("", ""), ("/b", "w" * 50)], 40).split("\n")
    assert shown == [
        "/a     one two one two one two one two",
        "       one two one two",
        "/long  x",
        "",
        "/b     " + "w" * 33,
        " " * 7 + "w" * 17,
    ]
