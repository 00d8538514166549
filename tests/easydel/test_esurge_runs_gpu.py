"""Random conversations on eSurge with kvoffload inside, on a GPU: all that the model reads is compared there.

KVOFFLOAD_ESURGE_RUNS=3 runs each setting with 3 seeds; KVOFFLOAD_ESURGE_DTYPE=bfloat16, with another dtype.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from esurge_environment import need_easydel
from seeds import seeds

need_easydel()

import jax  # noqa: E402
from esurge_world import Setting, run_all  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(500)]

RUNS = int(os.environ.get("KVOFFLOAD_ESURGE_RUNS", "4"))
SETTINGS = {
    "filled": Setting(),
    "evicted": Setting(store="evicted"),
    "few slots": Setting(pages=10),
    "few slots, evicted": Setting(pages=10, store="evicted"),
    "failures": Setting(fail=0.3),
    "resets and aborts": Setting(reset=0.3, abort=0.1, fail=0.1, store="evicted"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_model_reads_is_what_it_has_computed(name: str, engine: Any) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU for JAX")
    total = run_all(engine, SETTINGS[name], seeds(RUNS))
    print(name, dict(sorted(total.items())))
    assert total["compared tokens"] > 500 * RUNS
    assert total["host tokens"] > 0, "no page came back from the host"
