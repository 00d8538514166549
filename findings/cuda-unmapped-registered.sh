#!/usr/bin/env bash
# Memory that is unmapped while it is registered: copies from what is mapped there next bring the old bytes.
#
# A program registers memory, unmaps it without unregistering it, and maps other memory at the same address, as malloc
# does by itself. cuMemcpyAsync from there succeeds, and copies what the first memory held: the driver keeps its
# pages. After cuMemHostUnregister and cuMemHostRegister, the new bytes arrive.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   copied the old bytes, CUDA_SUCCESS; registered again, the new bytes
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
import ctypes
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


class At:
    def __init__(self, address, nbytes):
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def mapped(address, nbytes):
    """Fresh memory, in the place of what is at `address`."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10 if address else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    return libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


def copied():
    status = cu.cuMemcpyAsync(device, address, nbytes, stream)[0].name
    ok(cu.cuStreamSynchronize(stream))
    back = np.empty(nbytes, np.uint8)
    ok(cu.cuMemcpyDtoH(back.ctypes.data, device, nbytes))
    return {1: "the old bytes", 2: "the new bytes"}.get(int(back[0]), str(back[0])), status


nbytes = 1 << 24
device = int(ok(cu.cuMemAlloc(nbytes)))
address = mapped(None, nbytes)
np.asarray(At(address, nbytes))[:] = 1
ok(cu.cuMemHostRegister(address, nbytes, 0))
assert mapped(address, nbytes) == address
np.asarray(At(address, nbytes))[:] = 2
first, status = copied()
ok(cu.cuMemHostUnregister(address))
ok(cu.cuMemHostRegister(address, nbytes, 0))
text = f"copied {first}, {status}; registered again, {copied()[0]}"
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
sys.exit(text != "copied the old bytes, CUDA_SUCCESS; registered again, the new bytes")
PYTHON
"$python" "$folder/see.py" "$folder"
