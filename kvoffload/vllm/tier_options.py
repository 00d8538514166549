"""kvoffload_tiers and what belongs to it in kv_connector_extra_config, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.internal.checks import shown


@dataclass(frozen=True)
class TierChoice:
    """A tier in kvoffload_tiers: an object with a "kind", and arguments of that tier.

    Attributes:
        kind: as for `kvoffload.tiers.load_tier`.
        arguments: by name. All kinds but "memory" are given `identity`, too, unless it is among them. In strings "{dp}"
            stands for the number of the data-parallel replica.
    """

    kind: str
    arguments: Mapping[str, Any]


def tier_choices(name: str, value: Any) -> tuple[TierChoice, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'{name} must be a list such as [{{"kind": "disk", ...}}], got {shown(value)}')
    for place, each in enumerate(value):
        if not isinstance(each, Mapping) or not isinstance(each.get("kind"), str):
            raise ValueError(
                f'{name}[{place}] must be an object with a "kind" such as "disk", "memory", "valkey", "objects" or '
                f'"mooncake", got {shown(each)}'
            )
    return tuple(
        TierChoice(each["kind"], {argument: given for argument, given in each.items() if argument != "kind"})
        for each in value
    )


def positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {shown(value)}")
    return float(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string that is not empty, got {shown(value)}")
    return value


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "kvoffload_tiers": tier_choices,
    "kvoffload_tier_identity": text,
    "kvoffload_promotion_seconds": positive,
    "kvoffload_prefill_tokens_per_second": positive,
}
