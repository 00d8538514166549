"""HTML representations in notebooks: `kvoffload.observability.notebook` registers a function for each class.

A class derives from `HtmlRepresentation`, and knows nothing of its card, so no floor imports the one that draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def register(kind: type, function: Callable[..., str]) -> None:
    """Represent objects of `kind` by what `function(instance, **instance._html_options())` returns.

    Args:
        kind: a class derived from `HtmlRepresentation`; its subclasses are represented alike, unless registered.
        function: returns HTML. A second registration replaces the first.
    """
    kind._card = function  # type: ignore[attr-defined]


class HtmlRepresentation:
    """Gives a class `_repr_html_`, which IPython and Jupyter call; before `register` it shows the plain repr."""

    __slots__ = ()
    _card: Callable[..., str] | None = None

    def _repr_html_(self) -> str:
        if self._card is not None:
            return self._card(**self._html_options())
        from html import escape  # its table of entities takes 2 ms to import

        return f"<pre>{escape(repr(self))}</pre>"

    def _html_options(self) -> Mapping[str, Any]:
        """Return keyword arguments for the registered function: values that the public attributes do not give."""
        return {}
