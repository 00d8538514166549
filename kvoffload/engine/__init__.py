"""OffloadEngine: copies blocks between planes and its own pinned slots, in the order that streams and hazards ask for.

OffloadEngine      store, load, plan; the life of an engine                   engine.py, preparation.py, lifecycle.py
                   what caches and integrations ask of it                     integration.py
Job                the handle of a transfer, and waits of streams for it      job.py, stream_order.py
Waitable           waiting, awaiting and callbacks of all handles             callbacks.py
make_request       the arguments of a transfer, checked                       request.py
GroupTransfer      one transfer of several groups                             groups.py
Source, NO_WAIT    what a transfer is to follow                               wait_streams.py
Transfer           the private record of a transfer, and its states           transfer.py
HazardTable        transfers of the other direction that must come first      hazards.py
InFlight           the transfers in flight, a TransferQueue a direction       queues.py
put_ahead          urgent loads                                               urgent.py
Launcher, Tracker  queue segments on streams, and find out what has ended     launcher.py, tracker.py
EngineResources    pool, streams, events and copiers                          resources.py
EngineStatistics   snapshots of what has been done                            statistics.py
PlanReport         what a transfer would be                                   report.py
"""
