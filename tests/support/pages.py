"""The HTML that a notebook would show of an object, parsed strictly."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Parses strictly: every element is closed, in order. Keeps text, elements and their styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.texts_of: list[tuple[str, str]] = []  # the same, each with the element that it is in
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        self.texts_of.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    @property
    def styles(self) -> list[str]:
        return [value for name, value in self.attributes if name == "style"]

    @property
    def widths(self) -> list[float]:
        """Of the segments of bars, in percent."""
        return [float(width) for style in self.styles for width in re.findall(r"^width:([\d.e+-]+)%", style)]


def page(shown: Any) -> Page:
    """What a notebook would show; it must not depend on anything but the page that it is on."""
    source = shown._repr_html_()
    assert type(source)(source) == source
    parsed = Page(source)
    assert set(parsed.names) <= {"div", "span", "strong", "table", "tr", "th", "td"}
    assert {name for name, _ in parsed.attributes} <= {"style"}
    assert not [style for style in parsed.styles if "url" in style or re.search(r"(^|[;-])color:", style)]
    coloured = [style for style in parsed.styles if "background" in style]
    assert all(style.startswith("width:") or "width:9px" in style for style in coloured)  # bars and their legends
    return parsed


def row(parsed: Page, head: str) -> str:
    """The text in the cell next to a heading."""
    return parsed.texts[parsed.texts.index(head) + 1]
