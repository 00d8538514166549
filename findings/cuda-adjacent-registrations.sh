#!/usr/bin/env bash
# Two registrations side by side look like one range to the GPU, and no copy crosses from one to the other.
#
# Two halves of a mapping, each registered with cuMemHostRegister. cuMemHostGetDevicePointer gives addresses that
# follow each other, so nothing there tells them from one registration. A copy of both halves at once returns
# CUDA_ERROR_INVALID_VALUE; two copies work. Who registers a large pool in pieces must cut every copy at their
# borders.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   device addresses follow: True; one copy over both CUDA_ERROR_INVALID_VALUE, two copies CUDA_SUCCESS
# Needs a GPU. FINDINGS_PYTHON: a Python that has these packages, for a machine that can install none.
# Exit status: 0 if it is still so, 1 if not, 77 without a GPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${FINDINGS_PYTHON:-$folder/venv/bin/python}
if [ -z "${FINDINGS_PYTHON:-}" ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install --quiet --disable-pip-version-check cuda-bindings==13.3.1 numpy
fi
cat > "$folder/see.py" <<'PYTHON'
import mmap
import sys

import numpy as np
from cuda.bindings import driver as cu


def ok(result):
    if result[0] != 0:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


try:
    ok(cu.cuInit(0))
except RuntimeError as error:
    print(f"  needs a GPU: {error}")
    sys.exit(77)
ok(cu.cuCtxPushCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
stream = ok(cu.cuStreamCreate(1))

half = 1 << 20
array = np.frombuffer(mmap.mmap(-1, 2 * half), np.uint8)
array[:] = 7
source, device = array.ctypes.data, int(ok(cu.cuMemAlloc(2 * half)))
for at in (0, half):
    ok(cu.cuMemHostRegister(source + at, half, 0))
pointers = [int(ok(cu.cuMemHostGetDevicePointer(source + at, 0))) for at in (0, half)]
one = cu.cuMemcpyAsync(device, source, 2 * half, stream)[0].name
two = {cu.cuMemcpyAsync(device + at, source + at, half, stream)[0].name for at in (0, half)}
ok(cu.cuStreamSynchronize(stream))
for at in (0, half):
    ok(cu.cuMemHostUnregister(source + at))
follow = pointers[1] - pointers[0] == half
text = f"device addresses follow: {follow}; one copy over both {one}, two copies {' '.join(two)}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
expected = "device addresses follow: True; one copy over both CUDA_ERROR_INVALID_VALUE, two copies CUDA_SUCCESS"
sys.exit(text != expected)
PYTHON
"$python" "$folder/see.py" "$folder"
