"""Which of the keys in slots are written to tiers, and when: the simple answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class WriteChoice(Protocol):
    """Is told what happens in the pool of slots, and says what to write. Used by one thread at a time.

    `stored`, `ended` and `about_to_go` return keys to write, of those given; a key that cannot be written any more, or
    need not, is left out by the caller.
    """

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """These keys of a request, in its order, were computed and are in slots now."""

    def ended(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """A request with these keys, in slots or not, has ended."""

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """These are among the next to be evicted from the slots."""

    def promoted(self, keys: Sequence[bytes]) -> None:
        """A tier has brought these keys into slots."""

    def written(self, keys: Sequence[bytes]) -> None:
        """A tier has taken these keys."""

    def left(self, keys: Sequence[bytes]) -> None:
        """These keys are in slots no longer."""


class _Nothing:
    """Writes nothing: the base of the others."""

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def ended(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def promoted(self, keys: Sequence[bytes]) -> None: ...

    def written(self, keys: Sequence[bytes]) -> None: ...

    def left(self, keys: Sequence[bytes]) -> None: ...


class WriteNothing(_Nothing):
    """Tiers are read only: write="none"."""


class WriteThrough(_Nothing):
    """Everything, as soon as it is in slots: write="through"."""

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys


class WriteBack(_Nothing):
    """Everything, shortly before it is evicted: write="back"."""

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys
