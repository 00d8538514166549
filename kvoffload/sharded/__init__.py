"""ShardedEngine: the engines of several devices of one process as one, with the same blocks, slots and jobs.

ShardedEngine      store, load, plan; the life of the engine                  engine.py, lifecycle.py
ShardedLayout      which part of the KV cache each device has                 layout.py
ShardedAfter       what a transfer on all devices is to follow                after.py
ShardedJob         the handle of a transfer on all devices                    job.py
ShardedTransfer    the private record of such a transfer                      record.py
ShardedTracker     those that have not ended, and their results               tracker.py
Shard              the engine of one device                                   shard.py
"""
