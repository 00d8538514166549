"""Which of the keys in slots are written to tiers, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffload.tiering.admission import WriteAdmission


class WriteChoice(Protocol):
    """Follows what happens in the pool of slots, and says what to write. Used by one thread at a time.

    `stored`, `ended` and `about_to_go` return keys to write, of those given; a key that cannot be written any more, or
    need not, is left out by the caller.

    Attributes:
        looks_ahead: whether `about_to_go` is to be asked.
        learns: whether `written` is to be told what tiers have already, and `lost` what they have not.
    """

    looks_ahead: bool
    learns: bool

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """These keys of a request, in its order, were computed and are in slots now."""

    def ended(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """A request with these keys, in slots or not, has ended."""

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """These are among the next to be evicted from the slots."""

    def promoted(self, keys: Sequence[bytes]) -> None:
        """A tier has brought these keys into slots."""

    def written(self, keys: Sequence[bytes]) -> None:
        """A tier has taken these keys, or has them already."""

    def lost(self, keys: Sequence[bytes]) -> None:
        """No tier has these keys, in slots or not: it has evicted them, or never had them."""

    def left(self, keys: Sequence[bytes]) -> None:
        """These keys are in slots no longer."""

    def dropped(self, keys: Sequence[bytes]) -> None:
        """These keys were to be written, and no tier has taken them, or has them."""

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Exactly these keys are in slots: it has not been told of all that happened. Returns keys to write."""


class _Nothing:
    """Writes nothing: the base of the others."""

    looks_ahead = learns = False

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def ended(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()

    def promoted(self, keys: Sequence[bytes]) -> None: ...

    def written(self, keys: Sequence[bytes]) -> None: ...

    def lost(self, keys: Sequence[bytes]) -> None: ...

    def left(self, keys: Sequence[bytes]) -> None: ...

    def dropped(self, keys: Sequence[bytes]) -> None: ...

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        return ()


class WriteNothing(_Nothing):
    """Tiers are read only: write="none"."""


class WriteThrough(_Nothing):
    """Everything, as soon as it is in slots: write="through"."""

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys


class WriteBack(_Nothing):
    """Everything, shortly before it is evicted: write="back"."""

    looks_ahead = True

    def __init__(self) -> None:
        self._chosen = set[bytes]()  # of the keys in slots; a tier has them, or is given them

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        fresh = [key for key in keys if key not in self._chosen]
        self._chosen.update(fresh)
        return fresh

    def left(self, keys: Sequence[bytes]) -> None:
        self._chosen.difference_update(keys)

    dropped = left

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        self._chosen.intersection_update(keys)
        return ()


class WriteAdmitted(_Nothing):
    """What is worth it, as learned from what is asked for again: write="admitted"; see `WriteAdmission`.

    Args:
        capacity: records that the tiers hold.
    """

    learns = True

    def __init__(self, capacity: int) -> None:
        self._admission = WriteAdmission(capacity)

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        self._admission.stored(keys)
        return ()

    def ended(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return self._admission.ended(keys)

    def promoted(self, keys: Sequence[bytes]) -> None:
        self._admission.promoted(keys)

    def written(self, keys: Sequence[bytes]) -> None:
        self._admission.written(keys)

    def lost(self, keys: Sequence[bytes]) -> None:
        self._admission.left_disk(keys)

    def left(self, keys: Sequence[bytes]) -> None:
        self._admission.left_host(keys)

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        self._admission.resynchronise(keys)
        return ()
