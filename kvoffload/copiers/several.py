"""The shares of a transfer of several groups: what one copier of the copy engine carries of all groups is one share."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.copiers.base import Share
from kvoffload.planning.transfer_plan import TransferPlan, joined


def shares_together(shares: Sequence[Share]) -> tuple[Share, ...]:
    """The same work in as few shares as can be. Those of kernels come first, as they are quicker to queue.

    A kernel is launched for one group, so each of its shares stays. Each copier of the copy engine has one share at
    most: it has room for what is staged of one.

    Args:
        shares: of plans in one direction, none of them in parts.
    """
    of_kernels = [share for share in shares if share.copier.is_kernel]
    others: dict[int, list[Share]] = {}
    for share in shares:
        if not share.copier.is_kernel:
            others.setdefault(id(share.copier), []).append(share)
    return (*of_kernels, *map(_together, others.values()))


def _together(shares: Sequence[Share]) -> Share:
    """Shares of one copier as one."""
    if len(shares) == 1:
        return shares[0]
    plans: list[TransferPlan] = [share.work for share in shares]  # type: ignore[misc]  # what these copiers prepare
    return Share(
        joined(plans), shares[0].copier, sum(share.size for share in shares), sum(share.nbytes for share in shares)
    )
