"""A forked child: calls of a ShardedEngine raise at once, whatever lock another thread held, and touch nothing."""

from __future__ import annotations

from programs import run_program

PROGRAM = """
import gc, os, signal, sys, threading, time, warnings
sys.path.append("tests/sharded")
from sharding import Machine
from kvoffload import NO_WAIT, BlockCache, ClosedError
made = Machine()
engine = made.engine
cache = BlockCache(engine)
stored = cache.store([b"a"], [2], after=NO_WAIT)
stored.wait(10)
finished = stored.jobs[0]
streams = made.one_each()
gate = made.hold(1, streams[1])
job = engine.load([1], [1], after=streams)
taken, free = threading.Event(), threading.Event()
def hold():
    with engine.lock:
        taken.set()
        free.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
calls = made.simulator.faults.total_calls
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(20)
    refused = dict(
        store=lambda: engine.store([1], [1]), load=lambda: engine.load([1], [1]), poll=engine.poll,
        done=lambda: job.done, wait=lambda: job.wait(1), order=lambda: job.order_before([1, 1]),
        submitted=lambda: engine.submitted, jobs=engine.jobs_in_flight, plan=lambda: engine.plan("load", [1], [1]),
        advance=engine.advance, guard=lambda: engine.guard_slots(cache), in_flight=lambda: engine.in_flight,
        resolve=lambda: engine.resolve([1, 1]), forget=lambda: engine.forget_report(1),
        callback=lambda: job.add_done_callback(print), drain=lambda: engine.drain(1), statistics=engine.statistics,
        room=lambda: engine.check_room(1), lookup=lambda: cache.lookup([b"a"]),
        cache_store=lambda: cache.store([b"b"], [1]), cache_load=lambda: cache.load([b"a"], [1]),
        wait_finished=lambda: finished.wait(1),
    )
    harmless = dict(
        finished=lambda: finished.done, engine=engine.close, repr=lambda: repr((engine, job, cache)),
        slots=lambda: engine.slots,
    )
    returned = []
    for name, call in (*refused.items(), *harmless.items()):
        try:
            call()
            returned.append(name)
        except ClosedError as error:
            assert "fork" in str(error), (name, error)
    print("returned", returned, "calls", made.simulator.faults.total_calls - calls, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
free.set()
thread.join()
gate.open()
job.wait(10)
made.close()
"""


def test_a_forked_child_is_refused_at_once() -> None:
    out = run_program(PROGRAM)
    assert out.splitlines() == ["returned ['finished', 'engine', 'repr', 'slots'] calls 0", "status 0"]
