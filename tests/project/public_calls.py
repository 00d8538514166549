"""Every public call: functions, constructors and methods, with what they are given; for rules that hold for all."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvoffload.cache.policies import Policy
from kvoffload.testing import SimulatedDriver
from kvoffload.tiers import RemoteTier, ThreadedTier, Tier

MODULES = (
    "kvoffload",
    "kvoffload.cache.policies",
    "kvoffload.jax",
    "kvoffload.observability.prometheus",
    "kvoffload.observability.router_events",
    "kvoffload.pool",
    "kvoffload.session",
    "kvoffload.testing",
    "kvoffload.cache.tiering",
    "kvoffload.tiers",
    "kvoffload.tuning",
)

USERS_IMPLEMENT = (Policy, RemoteTier, ThreadedTier, Tier)
"""A user's subclass has their methods with the same arguments, so these are exempt; so are Protocols. (`kvoffload.vllm`
is not among the modules: vLLM prescribes its signatures.)"""

ONLY_THE_LIBRARY_MAKES = {
    *("Batch", "CacheEvent", "CacheJob", "CacheRequest", "CacheStatistics", "CacheTierStatistics", "ChainedLoad"),
    *("ConformanceCase", "Deviation", "Device", "DeviceArray", "DeviceBuffer", "FuzzReport", "HostCosts"),
    *("FetchJob", "HintAnswer", "Promotion", "Job", "Lease", "Origin", "PlanReport", "Profile", "ProfileKey"),
    *("Reservation", "Restored", "Room", "Shape", "SharedPool", "Stream", "TransferResult"),
}
"""Handles and records whose constructors are no calls of a user's."""


Call = tuple[Callable[..., Any], list[inspect.Parameter]]
"""The function, and what a caller gives it."""


def public_calls() -> dict[str, Call]:
    """Each once, by "function", "Class" or "Class.method". What is inherited from a public class is that class's."""
    return dict(_public_calls())


def _public_calls() -> Iterator[tuple[str, Call]]:
    public: dict[type, str] = {}
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            found = getattr(module, name)
            if inspect.isfunction(found) and not name.startswith("_"):
                yield name, (found, _parameters(found))
            elif (
                inspect.isclass(found)
                and not name.startswith("_")
                and not issubclass(found, BaseException | enum.Enum | SimulatedDriver)
            ):
                public.setdefault(found, name)
    for found, name in public.items():
        if getattr(found, "_is_protocol", False):
            continue
        if name not in ONLY_THE_LIBRARY_MAKES:
            yield name, (found, _parameters(found))
        yield from _methods_of(found, name, public)


def _methods_of(found: type, name: str, public: dict[type, str]) -> Iterator[tuple[str, Call]]:
    """Those that are not inherited from another public class, nor for users to implement."""
    for method in dir(found):
        origin = next(each for each in found.__mro__ if method in vars(each))
        inherited = origin.__module__ == "builtins" or (origin is not found and origin in public)
        implemented = any(hasattr(each, method) for each in USERS_IMPLEMENT if each in found.__mro__)
        if method.startswith("_") or inherited or implemented:
            continue
        function = inspect.getattr_static(found, method)
        if inspect.isfunction(function):
            yield f"{name}.{method}", (function, _parameters(function)[1:])
        elif isinstance(function, classmethod | staticmethod):
            yield f"{name}.{method}", (function.__func__, _parameters(getattr(found, method)))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """With each name of a TypedDict that is unpacked, `**options: Unpack[Options]`."""
    found = []
    for each in inspect.signature(function).parameters.values():
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation))
        if unpacked is None:
            found.append(each)
        else:
            options = getattr(importlib.import_module(function.__module__), unpacked[1])
            found += [inspect.Parameter(name, each.KEYWORD_ONLY, default=None) for name in options.__annotations__]
    return found
