#!/usr/bin/env bash
# cuda.bindings: functions answer with a tuple that begins with a CUresult, but without a driver library they raise.
#
# Every function of cuda.bindings.driver returns `(CUresult, ...)`, failures included, so `result[0]` is what a
# program checks. On a machine without libcuda, the module can be imported, and its handles and structures can be
# made. The first call raises a RuntimeError (13.x: DynamicLibNotFoundError, which is one), and so does every call
# after it. Functions that the driver is too old for raise, too (not shown here: FunctionNotFoundError for
# cuMemcpyBatchAsync, on a driver of CUDA 12 with the 13.x bindings). What helps: catch RuntimeError around the first
# call of each function.
#
# Seen with cuda-bindings 12.9.4 and 13.5.0 on Python 3.11, on a machine without a driver:
#   12.9.4: cuInit, cuDriverGetVersion, cuInit again: RuntimeError RuntimeError RuntimeError
#   13.5.0: cuInit, cuDriverGetVersion, cuInit again: DynamicLibNotFoundError DynamicLibNotFoundError ...
# Exit status: 0 if it is still so, 1 if not, 77 on a machine that has a driver.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/call.py" <<'PYTHON'
import sys

import cuda.bindings
from cuda.bindings import driver

structure = driver.CUDA_MEMCPY2D()
structure.WidthInBytes = 64
found = []
for name, arguments in (("cuInit", (0,)), ("cuDriverGetVersion", ()), ("cuInit", (0,))):
    try:
        found.append(repr(getattr(driver, name)(*arguments)))
    except RuntimeError as error:
        found.append(type(error).__name__)
print(f"  {cuda.bindings.__version__}: cuInit, cuDriverGetVersion, cuInit again: {' '.join(found)}")
if found[0].startswith("("):
    print("  this machine has a driver")
    sys.exit(77)
sys.exit(any(each.startswith("(") for each in found))
PYTHON
status=0
for version in 12.9.4 13.5.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "cuda-bindings==$version"
  "$folder/$version/bin/python" "$folder/call.py" || { status=$?; [ "$status" = 77 ] && break; }
done
exit "$status"
