"""A prefix cache: keys to slots of an engine. Below `BlockCache` nothing here touches a device or bytes.

BlockCache, CacheIndex   with and without an engine; their common part is KeyCache     key_cache.py
CacheJob, ...            the handles: jobs, reservations, leases, requests             reservations.py
Records                  the same as records, for tiers and other owners               records.py
CacheState               the life of reservations and leases; room for new keys        entries.py, repair.py
Tenant, Pools            keys by tenant and priority; which may be stored              pools.py
"""
