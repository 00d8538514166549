"""Policies: they choose the keys that a full cache evicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from kvoffload.cache.policies.arc import ARC
from kvoffload.cache.policies.base import Policy, Protected, RequestPolicy, Room
from kvoffload.cache.policies.lru import LRU
from kvoffload.cache.policies.prefix import Prefix
from kvoffload.cache.policies.s3fifo import S3FIFO

PolicyName: TypeAlias = Literal["arc", "lru", "prefix", "s3fifo"]
PolicyChoice: TypeAlias = PolicyName | Policy | Callable[[int], Policy]
"""`policy=` of a cache; the function takes the capacity in keys."""

POLICIES: dict[PolicyName, Callable[[int], Policy]] = {"arc": ARC, "lru": LRU, "prefix": Prefix, "s3fifo": S3FIFO}
DEFAULT_POLICY: PolicyName = "prefix"

__all__ = [
    "ARC",
    "DEFAULT_POLICY",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "Policy",
    "PolicyChoice",
    "PolicyName",
    "Prefix",
    "Protected",
    "RequestPolicy",
    "Room",
    "make_policy",
]


def make_policy(policy: PolicyChoice | str, capacity: int) -> Policy:
    """Return the policy for a cache of `capacity` keys: by name, the object itself, or what `policy(capacity)` returns.

    Raises:
        ValueError: no policy has that name.
        TypeError: neither a name nor a `Policy` nor a function that makes one.
        Any error of the function.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, a Policy or a function, got {policy!r}")
        policy = POLICIES[policy]
    found = policy if isinstance(policy, Policy) or not callable(policy) else policy(capacity)
    if not isinstance(found, Policy):
        raise TypeError(
            f"policy must be a name, a kvoffload.cache.policies.Policy or a function that makes one, got {found!r:.80}"
        )
    return found
