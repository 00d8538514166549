"""`kvoffload doctor --store`: whether a remote store can be reached, and how fast it is, by records of its own."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvoffload.internal.checks import reason, shown
from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import bandwidth
from kvoffload.tiers import Outcome, RemoteTier, TierJob, load_tier

_RECORDS = 32
_RECORD_BYTES = 1 << 20
_SECONDS = 30.0  # that a job may take
_ENVIRONMENT = "env:"
_OWN = {"identity": "kvoffload doctor", "prefix": "kvoffload-doctor"}


def probe(words: Sequence[str]) -> dict[str, Any]:
    """Findings on a store; `problem` says why a tier cannot use it, or is None; `made`: whether there is a tier at all.

    Args:
        words: the tier's kind, as for `load_tier`, and "name=value" for each of its arguments.
    """
    fields: dict[str, Any] = {
        "store": words[0], "made": False, "problem": None, "says": {}, "ask_seconds": None, "probe_bytes": 0,
        "write_gb_per_s": None, "read_gb_per_s": None,
    }  # fmt: skip
    try:
        tier = load_tier(words[0], **(_OWN | dict(map(argument, words[1:]))))
        if not isinstance(tier, RemoteTier):
            raise TypeError(f"{words[0]} is no tier over a remote store; try its folder with --path")
        fields["made"] = True
        _try(tier, fields)
    except Exception as error:  # of any client
        fields["problem"] = reason(error)
    return fields


def argument(word: str, variables: Mapping[str, str] = os.environ) -> tuple[str, Any]:
    """A tier's argument from "name=value": the value is JSON, or the variable of "env:VARIABLE", or else text."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--store takes arguments as name=value, got {shown(word)}")
    if value.startswith(_ENVIRONMENT):
        variable = value.removeprefix(_ENVIRONMENT)
        if variable not in variables:
            raise ValueError(f"{name}={value}: the environment has no variable {variable}")
        return name, variables[variable]
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _try(tier: RemoteTier, fields: dict[str, Any]) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * _RECORDS * _RECORD_BYTES), np.uint8).reshape(-1, _RECORD_BYTES)
    memory[:_RECORDS] = np.frombuffer(os.urandom(_RECORD_BYTES), np.uint8)
    keys = [b"%d %d" % (os.getpid(), number) for number in range(_RECORDS)]
    tier.attach([memory], bytes(16))
    try:
        tier.have_records(keys[:1])  # connects; what it raises says more than an outcome
        begin = time.perf_counter()
        tier.have_records(keys[:1])
        fields["ask_seconds"] = round(time.perf_counter() - begin, 6)
        fields["says"] = tier.describe()
        fields |= _speeds(tier, keys, memory)
    finally:
        tier.remove(keys).wait(_SECONDS)
        tier.close()


def _speeds(tier: RemoteTier, keys: Sequence[bytes], memory: UInt8Array) -> dict[str, Any]:
    nbytes = _RECORDS * _RECORD_BYTES
    write = _seconds(tier.put(keys, range(_RECORDS)), "written")
    read = _seconds(tier.get(keys, range(_RECORDS, 2 * _RECORDS)), "read")
    if not np.array_equal(memory[:_RECORDS], memory[_RECORDS:]):
        raise AssertionError("bytes that were read are not those that were written")
    return {"probe_bytes": nbytes, "write_gb_per_s": bandwidth(nbytes, write), "read_gb_per_s": bandwidth(nbytes, read)}


def _seconds(job: TierJob, done: str) -> float:
    begin = time.perf_counter()
    outcomes = job.wait(_SECONDS)
    if set(outcomes) != {Outcome.DONE}:
        kinds = ", ".join(sorted({each.value for each in outcomes}))
        raise OSError(f"of {len(outcomes)} records {outcomes.count(Outcome.DONE)} were {done}; outcomes: {kinds}")
    return time.perf_counter() - begin
