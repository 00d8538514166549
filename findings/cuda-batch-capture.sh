#!/usr/bin/env bash
# cuMemcpyBatchAsync in a capturing stream is refused, and the capture lives on.
#
# Calls that a graph cannot contain (cuStreamSynchronize of the stream, for one) invalidate the capture: the program
# hears of it at cuStreamEndCapture at the latest. The batch call returns CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and
# nothing else: the stream goes on capturing, cuStreamEndCapture succeeds, and its graph lacks the copies. A program
# that ignores the status of the copy replays a graph that copies nothing.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   batch CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, then ACTIVE, end CUDA_SUCCESS
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

host, device = ok(cu.cuMemHostAlloc(4096, 0)), ok(cu.cuMemAlloc(4096))
attributes = cu.CUmemcpyAttributes()
attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
arrays = [cu.CUdeviceptr(int(device))], [cu.CUdeviceptr(host)], [4096]
status = cu.cuMemcpyBatchAsync(*arrays, 1, [attributes], [0], 1, stream)[0].name
state = ok(cu.cuStreamIsCapturing(stream)).name.rsplit("_", 1)[1]
end = cu.cuStreamEndCapture(stream)[0].name
text = f"batch {status}, then {state}, end {end}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
sys.exit(text != "batch CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, then ACTIVE, end CUDA_SUCCESS")
PYTHON
"$python" "$folder/see.py" "$folder"
