#!/usr/bin/env bash
# cuda.bindings: two CUstream of one value are equal, two CUdeviceptr or CUdevice of one value are not.
#
# Streams, events, contexts and memory pools compare and hash by their value. Device pointers and devices compare and
# hash by identity: `CUdeviceptr(5) == CUdeviceptr(5)` is False, and a dictionary by pointers finds nothing by a
# second object of the same address. They print alike and turn into the same int. What helps: int(pointer) as the key.
#
# Seen with cuda-bindings 12.9.4 and 13.5.0 on Python 3.11, without a GPU:
#   12.9.4: equal CUstream CUevent CUcontext CUmemoryPool, not equal CUdeviceptr CUdevice
#   13.5.0: equal CUstream CUevent CUcontext CUmemoryPool, not equal CUdeviceptr CUdevice
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/compare.py" <<'PYTHON'
import sys

import cuda.bindings
from cuda.bindings import driver

names = ("CUstream", "CUevent", "CUcontext", "CUmemoryPool", "CUdeviceptr", "CUdevice")
found = {}
for name in names:
    kind = getattr(driver, name)
    found[name] = kind(5) == kind(5)
    assert int(kind(5)) == 5
    assert len({kind(5), kind(5)}) == (1 if found[name] else 2)
equal, different = (" ".join(name for name in names if found[name] is same) for same in (True, False))
print(f"  {cuda.bindings.__version__}: equal {equal}, not equal {different}")
sys.exit(different != "CUdeviceptr CUdevice")
PYTHON
status=0
for version in 12.9.4 13.5.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "cuda-bindings==$version"
  "$folder/$version/bin/python" "$folder/compare.py" || status=1
done
exit "$status"
