"""Processes that are killed while they save: the old file is there, or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program
from seeds import rest_long, seeds

PROGRAM = """
    import os, random, signal, sys, time
    from pathlib import Path
    import numpy as np
    from conversations import SMALL, TERMS, talk, values_of, world
    from kvoffload.session import session_file
    from kvoffload.session.session_file import SessionFile

    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    session_file.SEGMENT_BYTES = 1000
    path, choose, seen, left = folder / "file", random.Random(seed), set(), 0
    talks = [talk(0, 16), talk(1, 12)]
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with world(SMALL, capacity=32, blocks=32) as each:
                for tokens in talks:
                    each.store(tokens)
                os.write(writing, b".")
                end = time.monotonic() + 10
                while time.monotonic() < end:
                    for tokens in talks:
                        each.save(path, tokens)
            os._exit(1)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        time.sleep(choose.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for part in folder.iterdir():
            if part != path:
                assert part.name.startswith(".file.") and part.suffix == ".part", part
                part.unlink()
                left += 1
        if not path.exists():
            seen.add(None)
            continue
        with SessionFile(path) as file:
            number = int(len(file.tokens) == len(talks[1]))
            assert file.sealed and (file.tokens == talks[number]).all()
            blocks, good = file.read(0, file.whole)
            assert good == file.whole == len(talks[number]) // 4
            assert (blocks[0] == values_of(SMALL, talks[number])[0]).all()
            seen.add(number)
    print(sorted(map(str, seen)), left)
"""


@pytest.mark.parametrize(("kills", "number"), rest_long([(10, seeds(2)[0]), (200, seeds(2)[1])], 1))
def test_the_old_file_or_the_new_one_is_there(kills: int, number: int, tmp_path: Path) -> None:
    program = f"    import sys\n    sys.argv[1:] = {[str(tmp_path), str(kills), str(number)]}\n{PROGRAM}"
    out = run_program(program, dev_mode=False)
    assert "'0'" in out or "'1'" in out
