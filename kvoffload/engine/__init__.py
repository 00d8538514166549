"""Engines: copy blocks between planes and pinned slots of their own, in the order that streams and hazards ask for.

Engine                   the calls of an engine, over one device or several      base.py
OffloadEngine            one device                                              engine.py
ShardedEngine            several: each step on all devices before the next       sharded.py
Shard                    what an engine has on a device; the steps there         shard.py, resources.py
Limits, GroupTransfer    the arguments of a transfer, checked                    request.py
Source, NO_WAIT          what a transfer is to follow                            wait_streams.py
Transfer, Job            the private record of a transfer; the handle on it      job.py
Waitable                 waiting, awaiting and callbacks of all handles          callbacks.py
HazardTable              transfers of the other direction that must come first   hazards.py
InFlight, Reports        the transfers in flight; results until `poll`           queues.py
Launcher, Tracker        queue segments, and find out what has ended             launcher.py, tracker.py
set_tracer               follow every transfer; what is told outside the lock    tracing.py
EngineStatistics         snapshots of what has been done                         statistics.py
PlanReport               what a transfer would be                                report.py
"""
