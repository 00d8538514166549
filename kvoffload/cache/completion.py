"""What a cache needs of a transfer."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Completion(Protocol):
    """What a cache needs of a transfer; `kvoffload.Job` has it."""

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended, successfully or not; does not ask the GPU."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""

    @property
    def done(self) -> bool:
        """The same as `finished`, but asks the GPU."""

    @property
    def lock(self) -> threading.RLock:
        """Its engine's."""

    def order_before(self, stream: Any) -> None:
        """Make work queued on `stream` from now on start after it has ended."""
