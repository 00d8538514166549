#!/usr/bin/env bash
# obstore: a process that is killed in a put to a LocalStore leaves a file that the store can neither list nor delete.
#
# LocalStore writes an object "model" to a file "model#1" beside it, which it then renames. If the process is killed
# meanwhile (out of memory, `kill -9`), the part stays. `list` leaves it out, so what deletes all objects of a store
# leaves it on the disk; `head` and `delete` of its name raise GenericError ("Filenames containing trailing '/#\d+/'
# are not supported"). Each further killed put takes the next number. Only who looks into the folder finds them.
#
# Seen with obstore 0.12.1 on Python 3.11 (Linux, ext4), a put of 256 MiB killed while its file grew:
#   0.12.1: files ['model#1']; list [], delete raises GenericError; after the next kill ['model#1', 'model#2']
# Exit status: 0 if it is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kill.py" <<'PYTHON'
import os
import subprocess
import sys
import time

import obstore
from obstore.store import LocalStore

folder = sys.argv[1]
if len(sys.argv) > 2:
    obstore.put(LocalStore(folder), "model", bytes(256 << 20))
    os._exit(0)


def killed_put():
    before = set(os.listdir(folder))
    while True:  # until a kill comes in the middle
        child = subprocess.Popen([sys.executable, __file__, folder, "put"])
        while child.poll() is None and set(os.listdir(folder)) == before:
            time.sleep(0.001)
        child.kill()
        child.wait()
        if "model" not in os.listdir(folder):
            return sorted(os.listdir(folder))
        os.remove(os.path.join(folder, "model"))


os.makedirs(folder)
first = killed_put()
store = LocalStore(folder)
listed = [each["path"] for batch in obstore.list(store) for each in batch]
try:
    obstore.delete(store, "model#1")
    deleted = "works"
except Exception as error:
    deleted = f"raises {type(error).__name__}"
second = killed_put()
text = f"files {first}; list {listed}, delete {deleted}; after the next kill {second}"
print(f"  {obstore.__version__}: {text}")
expected = "files ['model#1']; list [], delete raises GenericError; after the next kill ['model#1', 'model#2']"
sys.exit(text != expected)
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1
"$folder/venv/bin/python" "$folder/kill.py" "$folder/store"
