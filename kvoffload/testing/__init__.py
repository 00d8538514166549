"""Testing tools, for users too: the simulated driver, a naive transfer, byte patterns, leak checks, conformance.

    device = kvoffload.open_device(backend=SimulatedDriver(seed=7)) # a GPU that is not there
    device.simulator.faults.fail_call("cuMemcpyAsync")              # its faults, on demand
    kvoffload.testing.check_copier_conformance(device)              # every copier against a loop; on a GPU too
    kvoffload.testing.check_tier(lambda: MyTier(...))               # does a tier keep the promises of `Tier`?
    kvoffload.testing.FaultyTier(TierFaults(fail=0.1), seed=7)      # a tier that fails on demand

`naive_transfer` is the meaning of `store` and `load` in ten lines; everything else in the library only does it faster.
"""

from kvoffload.simulator import Faults, SimulatedDriver, SimulatorError
from kvoffload.testing.faulty_tier import FaultyTier, TierFaults
from kvoffload.testing.tier_checks import check_tier
from kvoffload.testing.tier_model import FuzzReport, fuzz_tier
from kvoffload.testing.transfers import (
    POISON,
    ConformanceCase,
    Mirror,
    check_clean_close,
    check_copier_conformance,
    leak_check,
    naive_transfer,
    pattern,
    poison,
    scramble,
)

__all__ = [
    "POISON",
    "ConformanceCase",
    "Faults",
    "FaultyTier",
    "FuzzReport",
    "Mirror",
    "SimulatedDriver",
    "SimulatorError",
    "TierFaults",
    "check_clean_close",
    "check_copier_conformance",
    "check_tier",
    "fuzz_tier",
    "leak_check",
    "naive_transfer",
    "pattern",
    "poison",
    "scramble",
]
