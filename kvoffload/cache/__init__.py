"""A prefix cache: keys to slots of an engine. Below `BlockCache` nothing here touches a device or bytes.

BlockCache           lookup, store, load, reserve, acquire, promote           block_cache.py, key_cache.py
CacheIndex           the same bookkeeping without an engine                   index.py, key_cache.py
chain_keys           keys from token ids                                      keys.py
CacheJob, ...        the handles: jobs, reservations, leases, requests        reservations.py
Records              the same as records, for tiers and other owners          records.py
CacheState           the life of reservations and leases; room for new keys   state.py, entries.py, repair.py
Tenant, Pools        keys by tenant and priority; which may be stored         pools.py
CacheStatistics      counts, histograms, events                               statistics.py
policies             choose the keys that a full cache evicts                 policies/
tiering              tiers below the slots: promotions, writes                tiering/
"""
