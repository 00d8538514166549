"""EasyDeL where it is installed; tests that need it skip elsewhere, or fail if KVOFFLOAD_EASYDEL=required."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

VARIABLE = "KVOFFLOAD_EASYDEL"


def need_easydel() -> None:
    """Skip a module's tests where EasyDeL is not installed; fail where it is required."""
    try:
        importlib.metadata.version("easydel")
    except importlib.metadata.PackageNotFoundError:
        reason = "EasyDeL is not installed; .ci/esurge FOLDER makes an environment with it"
        if os.environ.get(VARIABLE) == "required":
            pytest.fail(f"{VARIABLE}=required, and {reason}", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
