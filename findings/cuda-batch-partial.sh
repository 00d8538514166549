#!/usr/bin/env bash
# cuMemcpyBatchAsync that returns an error may have copied a part of the batch.
#
# Three entries, the middle one of size 0: the call returns CUDA_ERROR_INVALID_VALUE. One would take a refused call
# for one that did nothing, but the first entry has been copied. The third has not. So after an error the targets hold
# any mix of old and new bytes, and the stream has work in it that must end before they are used again.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   CUDA_ERROR_INVALID_VALUE; copied: first True, middle False, last False
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


class At:
    def __init__(self, address, nbytes):
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


block = 4096
host = ok(cu.cuMemHostAlloc(3 * block, 0))
np.asarray(At(host, 3 * block))[:] = 7
device = int(ok(cu.cuMemAlloc(3 * block)))
ok(cu.cuMemsetD8Async(device, 1, 3 * block, stream))
ok(cu.cuStreamSynchronize(stream))
attributes = cu.CUmemcpyAttributes()
attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
targets = [cu.CUdeviceptr(device + at) for at in range(0, 3 * block, block)]
sources = [cu.CUdeviceptr(host + at) for at in range(0, 3 * block, block)]
status = cu.cuMemcpyBatchAsync(targets, sources, [block, 0, block], 3, [attributes], [0], 1, stream)[0].name
ok(cu.cuStreamSynchronize(stream))
back = np.empty(3 * block, np.uint8)
ok(cu.cuMemcpyDtoH(back.ctypes.data, device, 3 * block))
first, middle, last = (bool((back[at : at + block] == 7).all()) for at in range(0, 3 * block, block))
text = f"{status}; copied: first {first}, middle {middle}, last {last}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
sys.exit(text != "CUDA_ERROR_INVALID_VALUE; copied: first True, middle False, last False")
PYTHON
"$python" "$folder/see.py" "$folder"
