#!/usr/bin/env bash
# Triton 3.9 assembles Hopper kernels with the ptxas of CUDA 13, and TRITON_PTXAS_PATH does not change that.
#
# The wheels of 3.8 and 3.9 have two assemblers: `ptxas` of CUDA 12.9 and `ptxas-blackwell` of CUDA 13. Triton 3.8
# takes the first for sm_90. Triton 3.9 takes the second for everything from sm_90 on, whatever its name says: PTX 9.4
# where it was 8.8, and a cubin with OS ABI 0x41, version 8 in its header, where it was 0x33, version 7. A driver of
# CUDA 12 need not load that. The variable that chooses another assembler for Hopper is TRITON_PTXAS_BLACKWELL_PATH
# now: with it, and the older ptxas of the same wheel, the cubin is as before. TRITON_PTXAS_PATH has no effect on
# sm_90 any more.
#
# Seen on Python 3.11, compiled for sm_90 without a GPU:
#   3.8.0 (ptxas 12.9.86, ptxas-blackwell 13.3.33): PTX 8.8, cubin of version 7
#   3.9.0 (ptxas 12.9.86, ptxas-blackwell 13.4.59): PTX 9.4, cubin of version 8
#   3.9.0 with TRITON_PTXAS_PATH=.../ptxas: PTX 9.4, cubin of version 8
#   3.9.0 with TRITON_PTXAS_BLACKWELL_PATH=.../ptxas: PTX 8.8, cubin of version 7
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
import os
import re
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(source, target):
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(source + at))


tools = sorted(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*"))
versions = [re.search(r"V([.0-9]+)", subprocess.check_output([path, "--version"], text=True))[1] for path in tools]
named = [f"{path.name} {version}" for path, version in zip(tools, versions)]
about = f"({', '.join(named)})"
if len(sys.argv) > 2:
    os.environ[sys.argv[2]] = str(tools[0])
    about = f"with {sys.argv[2]}=.../{tools[0].name}"
source = ASTSource(kernel, {"source": "*i32", "target": "*i32"})
asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm
ptx, version = re.search(r"\.version (\S+)", asm["ptx"])[1], asm["cubin"][8]
print(f"  {triton.__version__} {about}: PTX {ptx}, cubin of version {version}")
sys.exit(f"{ptx} {version}" != sys.argv[1])
PYTHON
status=0
for version in 3.8.0 3.9.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "triton==$version"
done
export TRITON_ALWAYS_COMPILE=1 TRITON_CACHE_DIR="$folder/cache"
compile() { "$folder/$1/bin/python" "$folder/kernel.py" "${@:2}" || status=1; }
compile 3.8.0 "8.8 7"
compile 3.9.0 "9.4 8"
compile 3.9.0 "9.4 8" TRITON_PTXAS_PATH
compile 3.9.0 "8.8 7" TRITON_PTXAS_BLACKWELL_PATH
exit "$status"
