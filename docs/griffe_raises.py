"""For mkdocstrings: what a `Raises:` section says about all of its cases becomes a paragraph behind it.

Docstrings here end such a section with sentences like "Nothing has changed in any of these cases."; the parser takes
only `exception: description`, and would drop them with a warning.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_SECTION = re.compile(r"^Raises:\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
_CASE = re.compile(r"    \w+(?:, \w+)*: ")


class SentencesOfRaises(Extension):
    """Applied to every docstring, before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_sentences_behind(obj.docstring.value)


def with_sentences_behind(docstring: str) -> str:
    """The docstring with the sentences of its `Raises:` section in a paragraph of their own."""
    return _SECTION.sub(_split, docstring)


def _split(section: re.Match[str]) -> str:
    cases: list[str] = []
    sentences: list[str] = []
    latest = cases
    for line in filter(str.strip, section[1].splitlines()):
        if not line.startswith("     "):  # else it goes on with what the line before it began
            latest = cases if _CASE.match(line) else sentences
        latest.append(line)
    if not sentences:
        return section[0]
    return (
        ("Raises:\n" + "\n".join(cases) + "\n\n" if cases else "Raises: ") + " ".join(map(str.strip, sentences)) + "\n"
    )
