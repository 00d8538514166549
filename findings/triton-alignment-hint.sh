#!/usr/bin/env bash
# Triton from 3.8 on forgets tl.multiple_of(pointer, 4) when a constant was added to the integer that became the
# pointer.
#
# A kernel adds 512 to an address that it has loaded, casts the sum to a pointer and says that it is a multiple of 4.
# Triton 3.7 stores four bytes at a time, 3.8 and 3.9 store byte by byte: right bytes, four times the instructions, no
# warning. In the other order (the hint on the pointer, then the constant) all of them store four bytes at a time.
#
# Seen with Triton 3.7.1, 3.8.0 and 3.9.0, compiled for sm_90 on Python 3.11 without a GPU, stores in the PTX:
#   3.7.1: constant first {'st.global.b32': 4}; hint first {'st.global.b32': 4}
#   3.8.0: constant first {'st.global.b8': 16}; hint first {'st.global.b32': 4}
#   3.9.0: constant first {'st.global.b8': 16}; hint first {'st.global.b32': 4}
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PYTHON'
import collections
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(source, table, HINT_FIRST: tl.constexpr):
    word = tl.arange(0, 256)
    row = tl.arange(0, 2)
    record = tl.load(table.to(tl.pointer_type(tl.int64)) + row)
    address = tl.multiple_of((source + row * 1024).to(tl.pointer_type(tl.int32)), 16)[:, None] + word[None, :]
    if HINT_FIRST:
        target = tl.multiple_of(record.to(tl.pointer_type(tl.int8)), 4)[:, None] + 512 + word[None, :]
    else:
        target = tl.multiple_of((record + 512).to(tl.pointer_type(tl.int8)), 4)[:, None] + word[None, :]
    tl.store(target, tl.load(address).to(tl.int8))


found = []
for hint_first in (False, True):
    signature = {"source": "i64", "table": "i64", "HINT_FIRST": "constexpr"}
    source = ASTSource(kernel, signature=signature, constexprs={"HINT_FIRST": hint_first})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    found.append(dict(collections.Counter(re.findall(r"\bst\.global[.\w]*", ptx))))
print(f"  {triton.__version__}: constant first {found[0]}; hint first {found[1]}")
wide, narrow = {"st.global.b32": 4}, {"st.global.b8": 16}
sys.exit(found != [wide if sys.argv[1] == "wide" else narrow, wide])
PYTHON
status=0
for version in 3.7.1:wide 3.8.0:narrow 3.9.0:narrow; do
  python3 -m venv "$folder/${version%:*}"
  "$folder/${version%:*}/bin/pip" install --quiet --disable-pip-version-check "triton==${version%:*}"
  TRITON_CACHE_DIR="$folder/cache" "$folder/${version%:*}/bin/python" "$folder/kernel.py" "${version#*:}" || status=1
done
exit "$status"
