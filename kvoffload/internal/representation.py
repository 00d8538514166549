"""HTML representations in notebooks: `kvoffload.observability.notebook` registers a function for each class.

A class derives from `HtmlRepresentation`, and knows nothing of its card, so no floor imports the one that draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_functions: dict[type, Callable[..., str]] = {}


def register(kind: type, function: Callable[..., str]) -> None:
    """Represent objects of `kind` by what `function(instance, **instance._html_options())` returns.

    Args:
        kind: a class derived from `HtmlRepresentation`; its subclasses are represented alike, unless registered.
        function: returns HTML. A second registration replaces the first.
    """
    _functions[kind] = function


class HtmlRepresentation:
    """Gives a class `_repr_html_`, which IPython and Jupyter call; before `register` it shows the plain repr."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        for kind in type(self).__mro__:
            if kind in _functions:
                return _functions[kind](self, **self._html_options())
        from html import escape  # its table of entities takes 2 ms to import

        return f"<pre>{escape(repr(self))}</pre>"

    def _html_options(self) -> Mapping[str, Any]:
        """Return keyword arguments for the registered function: values that the public attributes do not give."""
        return {}
