#!/usr/bin/env bash
# cuda.bindings answers 0 to CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, whatever GPU the pointer is on.
#
# cuPointerGetAttribute gives the number of a pointer's GPU. Through cuda.bindings it is 0 for every pointer, with
# CUDA_SUCCESS. (NVIDIA/cuda-python: issue 2928, pull request 2752.) With one GPU nobody sees it. What helps:
# CU_POINTER_ATTRIBUTE_CONTEXT, and cuCtxGetDevice of that context.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on two H200s:
#   pointer on device 1: DEVICE_ORDINAL 0, by its context 1
# Needs two GPUs, else 77.
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

if ok(cu.cuDeviceGetCount()) < 2:
    print("  needs two GPUs")
    sys.exit(77)
context = ok(cu.cuDevicePrimaryCtxRetain(1))
ok(cu.cuCtxPushCurrent(context))
pointer = ok(cu.cuMemAlloc(4096))
names = cu.CUpointer_attribute
ordinal = int(ok(cu.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, int(pointer))))
owner = ok(cu.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_CONTEXT, int(pointer)))
ok(cu.cuCtxPushCurrent(owner))
by_context = int(ok(cu.cuCtxGetDevice()))
text = f"pointer on device 1: DEVICE_ORDINAL {ordinal}, by its context {by_context}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
sys.exit((ordinal, by_context) != (0, 1))
PYTHON
"$python" "$folder/see.py" "$folder"
