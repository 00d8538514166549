"""Run several steps even if some fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def run_all(steps: Iterable[Callable[[], None]]) -> None:
    """Run every step, also after one has failed; then raise the first error."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001  # the first is raised once all is done
            first = first or error
    if first is not None:
        raise first
