"""check_tier: what the docstrings of `Tier` promise, tried on tiers with pools of host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvoffload.internal.checks import at_least, to_wait
from kvoffload.testing import tier_checks_calls, tier_checks_ends, tier_checks_records
from kvoffload.testing.tier_session import TierSetup
from kvoffload.tiers import Tier

Check = Callable[[TierSetup], None]


def check_tier(
    make: Callable[[], Tier],
    *,
    entries: int = 16,
    row_bytes: int = 4096,
    pools: int = 2,
    seed: int = 0,
    timeout: float = 60.0,
) -> list[str]:
    """Check that a tier keeps what `Tier` promises: bytes, outcomes, removals, refusals, closing. A few seconds.

    Args:
        make: a new tier without a pool, each time. Durable tiers are all over the same store, which loses its records;
            the others are empty. It must have room for four times `entries` records and no reason to decline them.
            Whether it stays within `max_bytes` is checked if that is at most 4096 records.
        entries: of the pool that the tier gets, 8 at least.
        row_bytes: of an entry on each device, a multiple of 4096.
        pools: devices, for each of which there is one array; check a tier with 1 and with 2. A durable tier needs
            another store for another number.
        seed: of the contents and the order.
        timeout: seconds that a job may take; a check, four times as long.

    Returns:
        The names of the checks.

    Raises:
        AssertionError: a promise is broken; the message has the name of the check and what was expected.
    """
    at_least("entries", entries, 8)
    setup = TierSetup(make, entries, row_bytes, at_least("pools", pools, 1), seed, to_wait("timeout", timeout))
    modules = (tier_checks_calls, tier_checks_records, tier_checks_ends)
    checks: list[Check] = [check for module in modules for check in module.CHECKS]
    checks += tier_checks_records.MIXED_CHECKS
    if make().capabilities.durable:
        checks += tier_checks_ends.DURABLE_CHECKS
    for check in checks:
        _run(check, setup)
    return [_name(check) for check in checks]


def _name(check: Check) -> str:
    return check.__name__.replace("_", " ")


def _run(check: Check, setup: TierSetup) -> None:
    """In a thread of its own, since a call of the tier may not return."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            check(setup)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"check_tier: {_name(check)}", daemon=True)
    thread.start()
    thread.join(4 * setup.timeout)
    where = f"check_tier, {_name(check)}, seed={setup.seed}"
    assert not thread.is_alive(), f"{where}: not over after {4 * setup.timeout} seconds; a call or a job does not end"
    for error in errors:
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{where}: {text}") from error
