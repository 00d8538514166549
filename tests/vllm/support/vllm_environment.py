"""vLLM where it is installed; tests that need it skip elsewhere, or fail if KVOFFLOAD_VLLM=required."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import pytest

VARIABLE = "KVOFFLOAD_VLLM"


def installed() -> str:
    """Why vLLM cannot be imported; "" if it can."""
    if "vllm" in sys.modules and getattr(sys.modules["vllm"], "__file__", None) is None:  # `fake_vllm` is in its place
        return "vLLM is not installed; .ci/vllm FOLDER makes an environment with it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        try:
            _use_no_compiled_part()
            import vllm.v1.core.sched.scheduler  # noqa: F401
        except ImportError as error:
            return f"vLLM is not installed ({error}); .ci/vllm FOLDER makes an environment with it"
    return ""


def _use_no_compiled_part() -> None:
    """Where vLLM finds a GPU it imports its compiled part, of which the tests need nothing, unless told not to."""
    if importlib.util.find_spec("vllm") and not importlib.util.find_spec("vllm._C_stable_libtorch"):
        import vllm.platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        vllm.platforms._current_platform = UnspecifiedPlatform()


def need_vllm() -> None:
    """Skip a module's tests where vLLM is not installed; fail where it is required."""
    reason = installed()
    if reason and os.environ.get(VARIABLE) == "required":
        pytest.fail(f"{VARIABLE}=required, and {reason}", pytrace=False)
    if reason:
        pytest.skip(reason, allow_module_level=True)
