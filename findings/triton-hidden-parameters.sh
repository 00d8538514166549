#!/usr/bin/env bash
# A Triton kernel takes more parameters than it has arguments, and how many more depends on the release.
#
# Who launches a compiled kernel with cuLaunchKernel passes an array of pointers to its arguments. The kernel here has
# two. Its PTX takes two with Triton 3.2, three with 3.3 and 3.4, four from 3.5 to 3.9: pointers to scratch memory
# that this kernel does not use. An array of two is too short, and nothing in `signature` or the metadata counts them.
# With an array that is too short, the driver reads past its end. What helps: count `.param` in the PTX.
#
# Seen on Python 3.11, compiled for sm_90 without a GPU:
#   3.2.0: 2 arguments, 2 parameters
#   3.4.0: 2 arguments, 3 parameters
#   3.6.0: 2 arguments, 4 parameters
#   3.9.0: 2 arguments, 4 parameters
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(source, target):
    at = tl.arange(0, 128)
    tl.store(target + at, tl.load(source + at))


source = ASTSource(kernel, {"source": "*i32", "target": "*i32"})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
taken = len(re.findall(r"\.param ", ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]))
print(f"  {triton.__version__}: 2 arguments, {taken} parameters")
sys.exit(taken != int(sys.argv[1]))
PYTHON
status=0
for version in 3.2.0:2 3.4.0:3 3.6.0:4 3.9.0:4; do
  python3 -m venv "$folder/${version%:*}"
  # Triton 3.2 imports setuptools without asking for it
  "$folder/${version%:*}/bin/pip" install --quiet --disable-pip-version-check "triton==${version%:*}" setuptools
  TRITON_CACHE_DIR="$folder/cache" "$folder/${version%:*}/bin/python" "$folder/kernel.py" "${version#*:}" || status=1
done
exit "$status"
