"""HTML representations that an upper floor registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload import KVLayout, Plane
from kvoffload.internal.representation import HtmlRepresentation, register


class Thing(HtmlRepresentation):
    def __init__(self, secret: int) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "<Thing>"

    def _html_options(self) -> Mapping[str, Any]:
        return {"secret": self._secret}


class Other(Thing):
    """Represented as its base class is."""


def test_an_object_is_represented_by_what_is_registered_for_its_class() -> None:
    assert Thing(5)._repr_html_() == "<pre>&lt;Thing&gt;</pre>", "nothing is registered yet"
    register(Thing, lambda thing, secret: f"<b>{thing!r} {secret}</b>")
    assert Thing(5)._repr_html_() == "<b><Thing> 5</b>"
    assert Other(6)._repr_html_() == "<b><Thing> 6</b>"
    register(Other, lambda thing, secret: "<i>other</i>")  # noqa: ARG005
    assert (Other(6)._repr_html_(), Thing(5)._repr_html_()) == ("<i>other</i>", "<b><Thing> 5</b>")


def test_importing_the_package_registers_the_card_of_a_layout() -> None:
    layout = KVLayout([[Plane(4096, block_bytes=512, num_blocks=8)]])
    assert "<table" in layout._repr_html_()
