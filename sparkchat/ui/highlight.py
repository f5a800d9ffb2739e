"""Colours for one row of code, without knowing the language: comments, strings, numbers, common words.

It runs on the rows that are on the screen and on nothing else, so a long code block costs nothing while it streams.
"""

from __future__ import annotations

import re
from functools import lru_cache

_WORDS = (
    "abstract and as assert async await bool break case catch char class const continue def default del do double elif "
    "else enum except export extends false finally float fn for foreach from func function global if impl implements "
    "import in int interface is lambda let long loop match mod module mut namespace new nil None not null or package "
    "pass private protected pub public raise return self short static string struct super switch template this throw "
    "trait true True False try type typedef union unsafe unsigned use using var virtual void where while with yield"
)
_TOKEN = re.compile(
    r"(?P<comment>(?:(?<=\s)|^)(?:#(?=[ !])|//|--(?= )|/\*).*$)"
    r"|(?P<string>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`)"
    r"|(?P<number>\b\d[\w.]*)"
    rf"|(?P<keyword>\b(?:{'|'.join(_WORDS.split())})\b)"
)


@lru_cache(maxsize=2048)
def highlight(text: str) -> tuple[tuple[int, int, str], ...]:
    """(start, end, name) of each coloured run, in order; name is comment, string, number or keyword."""
    return tuple((*m.span(), m.lastgroup or "") for m in _TOKEN.finditer(text))
