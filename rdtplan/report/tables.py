"""Plain text that keeps to the width it is given: tables with aligned columns, and paragraphs.

Everything returns lines. Text columns fold, number columns never do: where even folding does not help, columns are left
out from the right and a last line says so (`--json` has them all).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import click

_NARROWEST = 16
"""A text column is not folded below this."""


def table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    text: Sequence[int] = (0,),
    graphs: Sequence[int] = (),
) -> list[str]:
    """Lines of a table no wider than `width`.

    Columns listed in `text` are left aligned and fold, those in `graphs` are left aligned, the others right.
    """
    least = _least_widths([headings, *rows], text)
    gap = 2 if sum(least) + 2 * (len(least) - 1) <= width else 1
    shown = _columns_that_fit(least, width, gap)
    widths = _widths([headings, *rows], shown, width, text, gap)
    lines = [click.style(line, bold=True) for line in paragraph(title, width)] if title else []
    left = {*text, *graphs}
    heads = [(headings[c], w, c in left) for c, w in zip(shown, widths, strict=True)]
    lines.append(click.style((" " * gap).join(_cell(h, w, to_left) for h, w, to_left in heads).rstrip(), dim=True))
    for row in rows:
        cells = [_fold(row[c], w) if c in text else [row[c]] for c, w in zip(shown, widths, strict=True)]
        for k in range(max(map(len, cells))):
            parts = [
                _cell(cell[k] if k < len(cell) else "", w, c in left)
                for cell, c, w in zip(cells, shown, widths, strict=True)
            ]
            lines.append((" " * gap).join(parts).rstrip())
    hidden = [headings[c] for c in range(len(headings)) if c not in shown]
    if hidden:
        lines += paragraph(f"(not shown at this width: {', '.join(hidden)})", width)
    return lines


def _least_widths(rows: Sequence[Sequence[str]], text: Sequence[int]) -> list[int]:
    """What every column needs at least: its longest number, or a text folded."""
    return [min(n, _NARROWEST) if c in text else n for c, n in enumerate(_natural(rows, range(len(rows[0]))))]


def _columns_that_fit(least: Sequence[int], width: int, gap: int) -> list[int]:
    """Indices of the columns to show: all, or without the last ones that are too much."""
    shown = list(range(len(least)))
    while len(shown) > 1 and sum(least[c] for c in shown) + gap * (len(shown) - 1) > width:
        shown.pop()
    return shown


def _natural(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> list[int]:
    return [max(len(row[c]) for row in rows) for c in columns]


def _widths(rows: Sequence[Sequence[str]], shown: list[int], width: int, text: Sequence[int], gap: int) -> list[int]:
    """Widths of the shown columns; the widest text columns give way first."""
    widths = _natural(rows, shown)
    while (over := sum(widths) + gap * (len(widths) - 1) - width) > 0:
        folding = [k for k, c in enumerate(shown) if c in text and widths[k] > min(_NARROWEST, width)]
        if not folding:
            break
        widest = max(folding, key=lambda k: widths[k])
        widths[widest] -= min(over, max(1, widths[widest] - min(_NARROWEST, width)))
    return widths


def _cell(value: str, width: int, left: bool) -> str:
    return value.ljust(width) if left else value.rjust(width)


def _fold(value: str, width: int) -> list[str]:
    """Break after spaces, dots and commas where possible, so that dotted names stay readable."""
    lines: list[str] = []
    line = ""
    for piece in re.findall(r"[^ .,]*[ .,]*", value):
        if line and len(line) + len(piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        while len(piece.rstrip()) > width:
            lines.append(piece[:width])
            piece = piece[width:]
        line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def paragraph(line: str, width: int, indent: int = 0) -> list[str]:
    """One sentence, folded; its further lines are indented by `indent`."""
    return textwrap.wrap(line, max(20, width), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]


def bar(share: float, width: int = 20) -> str:
    """A bar of blocks, `share` of 1 long."""
    full = max(0.0, min(1.0, share)) * width
    eighths = " ▏▎▍▌▋▊▉"
    whole = int(full)
    rest = eighths[int((full - whole) * 8)] if whole < width else ""
    return ("█" * whole + rest).ljust(width)


def sparkline(shares: Sequence[float]) -> str:
    """One block a number, 0 to 1."""
    blocks = " ▁▂▃▄▅▆▇█"
    return "".join(blocks[min(8, max(0, -(-int(s * 800) // 100)))] for s in shares)
