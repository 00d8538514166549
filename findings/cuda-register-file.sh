#!/usr/bin/env bash
# cuMemHostRegister does not take a shared mapping of a file on ext4, and takes a private one and a memfd.
#
# Writable, flags 0: CUDA_ERROR_INVALID_VALUE, the status of a wrong argument, for a mapping that the process reads and
# writes like any other. A private mapping, whose pages are then copies of the process's own, a memfd and anonymous
# memory register. So a pool of slots that is to be a file on a disk cannot be pinned.
#
# Seen with driver 580.159 (CUDA 13.0) and cuda-bindings 13.3 on an H200:
#   ext4 shared CUDA_ERROR_INVALID_VALUE, ext4 private CUDA_SUCCESS, memfd CUDA_SUCCESS
# Needs a temporary folder on ext4 (TMPDIR), else 77.
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
import os
import subprocess
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

nbytes, folder = 1 << 24, sys.argv[1]
kind = subprocess.check_output(["stat", "-f", "-c", "%T", folder], text=True).strip()
if kind != "ext2/ext3":  # its name of ext4, too
    print(f"  needs a folder on ext4, {folder} is on {kind}")
    sys.exit(77)
files = {}
for name in ("ext4 shared", "ext4 private"):
    files[name] = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT)
files["memfd"] = os.memfd_create("finding")
found = []
for name, file in files.items():
    os.write(file, bytes(nbytes))
    mapping = mmap.mmap(file, nbytes, mmap.MAP_PRIVATE if "private" in name else mmap.MAP_SHARED)
    array = np.frombuffer(mapping, np.uint8)
    status = cu.cuMemHostRegister(array.ctypes.data, nbytes, 0)[0].name
    if status == "CUDA_SUCCESS":
        ok(cu.cuMemHostUnregister(array.ctypes.data))
    found.append(f"{name} {status}")
text = ", ".join(found)
print(f"  driver {ok(cu.cuDriverGetVersion())}: {text}")
refused = "CUDA_ERROR_INVALID_VALUE"
sys.exit(text != f"ext4 shared {refused}, ext4 private CUDA_SUCCESS, memfd CUDA_SUCCESS")
PYTHON
"$python" "$folder/see.py" "$folder"
