#!/usr/bin/env bash
# cuMemcpyBatchAsync from ordinary memory returns before it has read it; cuMemcpyAsync does not.
#
# cuMemcpyAsync from memory that is not pinned stages the bytes: once it has returned, the caller may change them. The
# batch call, with the access order STREAM, returns at once, and reads the memory later. What the program writes there
# in between is what arrives.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   64 MiB overwritten after the call: cuMemcpyAsync sent 0 MiB of the later bytes, the batch 45 (46 to 50 on an H100)
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

part, count = 1 << 20, 64
device = int(ok(cu.cuMemAlloc(part * count)))
memory, back = np.empty(part * count, np.uint8), np.empty(part * count, np.uint8)
attributes = cu.CUmemcpyAttributes()
attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
late = []
for batch in (False, True):
    memory[:] = 5
    if batch:
        targets = [cu.CUdeviceptr(device + at * part) for at in range(count)]
        sources = [cu.CUdeviceptr(memory.ctypes.data + at * part) for at in range(count)]
        ok(cu.cuMemcpyBatchAsync(targets, sources, [part] * count, count, [attributes], [0], 1, stream))
    else:
        ok(cu.cuMemcpyAsync(device, memory.ctypes.data, part * count, stream))
    memory[:] = 9
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuMemcpyDtoH(back.ctypes.data, device, part * count))
    late.append(int((back == 9).sum()) >> 20)
text = f"64 MiB overwritten after the call: cuMemcpyAsync sent {late[0]} MiB of the later bytes, the batch {late[1]}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
sys.exit(not (late[0] == 0 < late[1]))
PYTHON
"$python" "$folder/see.py" "$folder"
