"""kv_connector_extra_config as checked options."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kvoffload.cache.policies import DEFAULT_POLICY, PolicyName
from kvoffload.cache.tiering.attaching import WriteName
from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, shown
from kvoffload.layout.coding import CodecName

PREFIX = "kvoffload_"
Preference = Literal["overlap", "latency"]

# Options of vLLM's own specs that have no effect here, and what to do instead.
_REFUSED = {
    "eviction_policy": "give kvoffload_policy instead",
    "cache_policy_module_path": "give kvoffload_policy; policies of vLLM cannot be used",
    "canonical_layout": "leave it out; slots hold blocks in the layout of the GPU",
    "secondary_tiers": "give kvoffload_tiers; tiers of vLLM cannot be used",
}
# Options that have no effect with a pool, and what to do instead.
OF_OWNER = {
    "cpu_bytes_to_use": "the pool's owner has the memory, give it --bytes",
    "kvoffload_policy": "the pool's owner chooses what to evict",
    "kvoffload_tiers": "vLLM reads no tiers below a pool",
    "self_describing_kv_events": "the pool's evictions are not known here, so chunks in it are no events",
}


@dataclass(frozen=True)
class TierChoice:
    """A tier in kvoffload_tiers: an object with a "kind", and the arguments of that tier.

    Attributes:
        kind: as for `kvoffload.tiers.load_tier`.
        arguments: by name. All kinds but "memory" also get `identity`, unless you give it. In strings "{dp}" stands for
            the number of the data-parallel replica.
    """

    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """The options in kv_connector_extra_config; docs/guides/vllm.md says what each means. Only `read` checks them.

    Names without "kvoffload_" are vLLM's. None of an option is the default of `OffloadEngine` or of the tiers. With a
    `kvoffload_staging_bytes` of 0 only copy engines copy.
    """

    cpu_bytes_to_use: int = 0
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    kvoffload_policy: PolicyName = DEFAULT_POLICY
    kvoffload_prefer: Preference = "overlap"
    kvoffload_codec: CodecName = "raw"
    kvoffload_staging_bytes: int | None = None
    kvoffload_max_in_flight: int | None = None
    kvoffload_most_queued_bytes: int | None = None
    kvoffload_tiers: tuple[TierChoice, ...] = ()
    kvoffload_tier_identity: str | None = None
    kvoffload_tier_write: WriteName = "admitted"
    kvoffload_promotion_seconds: float = 10.0
    kvoffload_prefill_tokens_per_second: float | None = None
    kvoffload_pool: str | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Options:
        """Read a kv_connector_extra_config. Other options of vLLM are ignored.

        Raises:
            ValueError: cpu_bytes_to_use is missing, a name that begins with "kvoffload_" is unknown, or a value has a
                wrong type or is out of range.
            CapabilityError: eviction_policy, cache_policy_module_path, canonical_layout or secondary_tiers is set; they
                have no effect here. Or with kvoffload_pool, what its owner decides.
        """
        known = {field.name for field in fields(cls)}
        for name in config:
            if name.startswith(PREFIX) and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
                raise ValueError(f"kv_connector_extra_config has no option {name} (got {shown(config[name])}); {hint}")
            if name in _REFUSED and config[name]:
                raise CapabilityError(f"{name}={shown(config[name])} has no effect with kvoffload; {_REFUSED[name]}")
        pooled = "kvoffload_pool" in config
        if "cpu_bytes_to_use" not in config and not pooled:
            raise ValueError(
                "cpu_bytes_to_use must be specified in kv_connector_extra_config: host memory for all workers "
                "together, bytes; or kvoffload_pool"
            )
        for name in [name for name in OF_OWNER if pooled and config.get(name)]:
            raise CapabilityError(
                f"{name}={shown(config[name])} has no effect with kvoffload_pool: leave it out; {OF_OWNER[name]}"
            )
        given: dict[str, Any] = {name: _checked(name, config[name]) for name in known & config.keys()}
        return cls(**given)


_CHOICES: dict[str, tuple[str, ...]] = {
    "kvoffload_policy": get_args(PolicyName),
    "kvoffload_prefer": get_args(Preference),
    "kvoffload_codec": get_args(CodecName),
    "kvoffload_tier_write": get_args(WriteName),
}
_LOWEST = {"store_threshold": 0, "kvoffload_staging_bytes": 0}


def _checked(name: str, value: Any) -> Any:
    if name == "kvoffload_tiers":
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
    if name in ("kvoffload_tier_identity", "kvoffload_pool"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a string that is not empty, got {shown(value)}")
        return value
    if name in ("kvoffload_promotion_seconds", "kvoffload_prefill_tokens_per_second"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a number above 0, got {shown(value)}")
        return float(value)
    if name not in _CHOICES:
        return at_least(name, value, _LOWEST.get(name, 1))
    if value not in _CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {shown(value)}")
    return value
