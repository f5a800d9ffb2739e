"""An SVG of ours as PNG, drawn by resvg: small, and nothing has to be installed beside it but a font."""

from __future__ import annotations

FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica, sans-serif"
"""The first that is installed is taken; resvg knows no stand-in for the last."""
ZOOM = 2.0
_SAMPLE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    f'<text y="15" font-family="{FONTS}">{{}}</text></svg>'
)


def png_of(svg: str) -> tuple[bytes, str | None]:
    """(the picture, None), or (nothing, why there is none). A plot without its words would be no plot."""
    try:
        import resvg_py
    except ImportError:
        return b"", "no PNG: resvg-py is not installed; the SVG shows the same"
    try:
        if _drawn(resvg_py, _SAMPLE.format("x")) == _drawn(resvg_py, _SAMPLE.format("")):
            return b"", f"no PNG: none of the fonts {FONTS.rpartition(',')[0]} is installed; the SVG shows the same"
        return _drawn(resvg_py, svg), None
    except ValueError as error:
        return b"", f"no PNG: resvg-py said {str(error)[:200]!r}; the SVG shows the same"


def _drawn(resvg, svg: str) -> bytes:  # type: ignore[no-untyped-def]
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=ZOOM))
