#!/usr/bin/env bash
# JAX 0.11.2 silently does not donate a sharded array once np.asarray has looked at it.
#
# A jitted step with `donate_argnums=0` updates a sharded array in place, and the old array is deleted. After
# `np.asarray(x)`, JAX 0.11.2 does not donate x: the step writes a copy, x stays readable, no warning comes. With an
# array on one device the donation happens. JAX 0.11.1 and 0.12.0 donate in all cases.
#
# Seen on the CPU (two devices, Python 3.13):
#   0.11.1: sharded donated, after np.asarray donated; on one device after np.asarray donated
#   0.11.2: sharded donated, after np.asarray not donated; on one device after np.asarray donated
#   0.12.0: sharded donated, after np.asarray donated; on one device after np.asarray donated
# Needs Python 3.12 or newer. Exit status: 0 if it is still so, 1 if not, 77 with an older Python.
set -euo pipefail
python=${PYTHON:-$(command -v python3.14 python3.13 python3.12 python3 | head -1)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "needs Python 3.12: PYTHON=..."; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/donate.py" <<'PYTHON'
import os
import sys
import warnings

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

warnings.simplefilter("error")
sharded = NamedSharding(Mesh(np.array(jax.devices()), ("heads",)), PartitionSpec(None, "heads"))
update = jax.jit(lambda values: values.at[1].set(7), donate_argnums=0)
found = []
for where, look in ((sharded, False), (sharded, True), (jax.devices()[0], True)):
    array = jax.block_until_ready(jax.device_put(jnp.zeros((6, 8), jnp.float32), where))
    if look:
        float(np.asarray(array).sum())
    jax.block_until_ready(update(array))
    found.append("donated" if array.is_deleted() else "not donated")
first, after, one = found
print(f"  {jax.__version__}: sharded {first}, after np.asarray {after}; on one device after np.asarray {one}")
sys.exit(found != ["donated", sys.argv[1], "donated"])
PYTHON
status=0
for version in "0.11.1:donated" "0.11.2:not donated" "0.12.0:donated"; do
  "$python" -m venv "$folder/${version%%:*}"
  "$folder/${version%%:*}/bin/pip" install --quiet --disable-pip-version-check "jax[cpu]==${version%%:*}"
  "$folder/${version%%:*}/bin/python" "$folder/donate.py" "${version#*:}" || status=1
done
exit "$status"
