"""A prefix cache: keys to slots of an engine. Below `BlockCache` nothing here touches a device or bytes.

BlockCache           lookup, store, load, reserve, acquire                        block_cache.py, block_queries.py
CacheIndex           the same bookkeeping without an engine                       index.py, queries.py
chain_keys           keys from token ids                                          keys.py
CacheJob, ...        what calls return: jobs, reservations, leases                reservations.py
CacheRequest         an open request, whose keys come in pieces                   requests.py
CacheState           the life of reservations and leases                          state.py, entries.py, repair.py
Tenant               quotas and priorities; which keys may be stored              admission.py
Pools, find_space    keys by tenant and priority, and room for new ones           pools.py, space.py
CacheStatistics      counts, histograms, events                                   statistics.py
policies             which keys a full cache evicts                               policies/
"""
