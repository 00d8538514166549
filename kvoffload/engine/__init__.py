"""Engines: copy blocks between planes and their own pinned slots, in the order that streams and hazards require.

Engine                   the calls of an engine, over one device or several      base.py
OffloadEngine            one device                                              engine.py
ShardedEngine            several: each step on all devices before the next       sharded.py
Shard                    an engine's part on one device; the steps there         shard.py, resources.py
Limits, GroupTransfer    the arguments of a transfer, checked                    request.py
Source, WaitStreams      streams and arrays that a transfer follows              wait_streams.py
Transfer, Job            the private record of a transfer; the handle on it      job.py
Waitable                 waiting, awaiting and callbacks of all handles          callbacks.py
HazardTable              transfers of the other direction that must come first   hazards.py
InFlight, Reports        the transfers in flight; results until `poll`           queues.py
Launcher, Tracker        queue segments; find which transfers have ended         launcher.py, tracker.py
set_tracer               follow every transfer; notices outside the lock         tracing.py
EngineStatistics         counts and totals                                       statistics.py
PlanReport               a transfer that is not submitted                        report.py
"""
