"""The tested releases of vLLM. Its offloading interface is experimental, and changes between releases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kvoffload.errors import CapabilityError

TESTED = ("0.33.0",)
VARIABLE = "KVOFFLOAD_VLLM_UNTESTED"  # set to 1: any release is taken


def release_of(version: str) -> str:
    """Return the release of a build (0.33.0+cu130) or post-release (0.33.0.post1), and any other version as it is."""
    return re.sub(r"(\.post\d+)?(\+.*)?$", "", version)


def check_release(variables: Mapping[str, str] = os.environ) -> None:
    """Raise CapabilityError if vLLM cannot be imported, or was not tested and `VARIABLE` is not set to 1."""
    try:
        import vllm
    except ImportError as error:
        raise CapabilityError(
            f"kvoffload.vllm needs vLLM, which cannot be imported ({error}); install it: pip install vllm=={TESTED[-1]}"
        ) from error
    version: str = getattr(vllm, "__version__", "unknown")
    if release_of(version) not in TESTED and variables.get(VARIABLE) != "1":
        raise CapabilityError(
            f"kvoffload.vllm was tested with vLLM {', '.join(TESTED)}, and this is {version}: its offloading "
            f"interface may differ; install a tested release, or set {VARIABLE}=1 and compare outputs with and without "
            "offloading first"
        )
