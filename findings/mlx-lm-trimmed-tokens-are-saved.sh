#!/usr/bin/env bash
# mlx-lm 0.32 saves the keys and values that a prompt cache was trimmed by, and up to 255 tokens of room behind them.
#
# `trim_prompt_cache` lowers the number of tokens, and leaves keys and values as they are. `save_prompt_cache` of 0.31.3
# wrote those of the tokens that are left. That of 0.32.2 writes the whole buffers, and the number of tokens as a third
# tensor, "<layer>.2": what was trimmed is in the file, and a reader that takes the shape for the length has wrong tokens.
# The classes of the layers moved from "2.<layer>" of the metadata to "1.<layer>".
#
# Seen on the CPU (Python 3.13, mlx 0.32.4), a cache of 700 tokens, trimmed by 399:
#   0.31.3: tensors 0.0 (1, 2, 301, 4) 0.1 (1, 2, 301, 4); trimmed tokens are not in the file; classes at 2.0
#   0.32.2: tensors 0.0 (1, 2, 768, 4) 0.1 (1, 2, 768, 4) 0.2 (); trimmed tokens are in the file; classes at 1.0
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
python=${PYTHON:-$(command -v python3.13 python3.12 python3 | head -1)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/trim.py" <<'PYTHON'
import sys

import mlx.core as mx
from mlx_lm.models import cache as caches

(path, version, shapes, kept, at) = sys.argv[1:]
one = caches.KVCache()
values = mx.arange(2 * 700 * 4, dtype=mx.float32).reshape(1, 2, 700, 4)
one.update_and_fetch(values, -values)
assert caches.trim_prompt_cache([one], 399) == 399
caches.save_prompt_cache(path, [one], {"said": "by the user"})
tensors, metadata = mx.load(path, return_metadata=True)
names = sorted(tensors)
found = " ".join(f"{name} {tuple(tensors[name].shape)}" for name in names)
keys = tensors["0.0"]
inside = keys.shape[2] >= 700 and bool(mx.array_equal(keys[:, :, 301:700], values[:, :, 301:]))
place = next(name for name, value in metadata.items() if value == "KVCache")
print(f"  {version}: tensors {found}; trimmed tokens are {'' if inside else 'not '}in the file; classes at {place}")
sys.exit((found, str(inside), place) != (shapes, kept, at))
PYTHON
status=0
while IFS=: read -r version shapes kept at; do
  "$python" -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "mlx[cpu]==0.32.4" "mlx-lm==$version"
  "$folder/$version/bin/python" "$folder/trim.py" "$folder/$version.safetensors" "$version" "$shapes" "$kept" "$at" || status=1
done <<'VERSIONS'
0.31.3:0.0 (1, 2, 301, 4) 0.1 (1, 2, 301, 4):False:2.0
0.32.2:0.0 (1, 2, 768, 4) 0.1 (1, 2, 768, 4) 0.2 ():True:1.0
VERSIONS
exit "$status"
