"""Calls inside calls: which threads are in one."""

from __future__ import annotations

from programs import run_program

FORK = """
    import os, threading, warnings
    from kvoffload.internal.nesting import in_any_call, new_lock

    warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
    lock, held = new_lock(), threading.Event()

    def hold():
        with lock:
            held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        said = []
        for _ in range(3):  # with glibc, the first one has the number of the parent's thread
            threads = [threading.Thread(target=lambda: said.append(in_any_call())) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        os._exit(any(said))
    print(os.waitpid(child, 0)[1])
"""


def test_no_thread_of_a_forked_child_is_taken_for_one_that_held_a_lock() -> None:
    assert run_program(FORK) == "0\n"
