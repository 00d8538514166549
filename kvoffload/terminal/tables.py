"""Tables and text of at most 80 columns, broken between words only."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest

WIDTH = 80
WIDE = 1000  # of --wide: as wide as the figures are
_GAP = 2  # between the columns of a table


def wrap(text: str, indent: str = "", width: int = WIDTH) -> str:
    """Lines of at most `width` columns, the later ones indented; a longer word has a line of its own."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(lines)


def column_widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of a table's columns, whose lines fit `width` if their words do; the first line is the headings.

    The widest column is narrowed first, and none below its longest word. Headings are broken before cells.
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    whole = [max(word, *map(len, column[1:]), 0) for word, column in zip(words, columns, strict=True)]
    room = width - _GAP * (len(columns) - 1)
    for least in (whole, words):
        while sum(widths) > room:
            narrowed = [index for index, each in enumerate(widths) if each > least[index]]
            if not narrowed:
                break
            widths[max(narrowed, key=widths.__getitem__)] -= 1
    return widths


def render(columns: Sequence[str], rows: Sequence[Sequence[object]], *, wide: bool, left: Collection[str] = ()) -> str:
    """A table as text: the first column and those named in `left` aligned left, the others right, two spaces
    between.
    """
    cells = [[str(cell) for cell in line] for line in (columns, *rows)]
    widths = column_widths(cells, WIDE if wide else WIDTH)
    aligned = [str.ljust if not index or name in left else str.rjust for index, name in enumerate(columns)]
    lines = []
    for row in cells:  # a row takes several lines where its cells are broken between words
        broken = [wrap(cell, width=max(width, 1)).splitlines() for cell, width in zip(row, widths, strict=True)]
        physical = []
        for texts in zip_longest(*broken, fillvalue=""):
            placed = (align(text, width) for align, text, width in zip(aligned, texts, widths, strict=True))
            physical.append("  ".join(placed).rstrip())
        lines.append("\n".join(physical))
        if row is cells[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n"
