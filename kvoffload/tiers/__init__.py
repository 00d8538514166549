"""Tiers: stores of fixed-size records by key, below the pinned pool. Nothing here touches a device.

DiskIndex            the records of a disk: policies, tenants, restart            disk_index.py
SlotFiles            the files of a set as an array of verified slots             slot_files.py
Member               one file: lock, superblock, headers, what is durable         member.py
format               superblocks and headers, byte by byte                        format.py
open_set             whether files are a set; creating one                        sets.py, opening.py
Checksum             xxh3_128, or keyed blake2b                                   checksums.py
FileOperations       the system calls, behind which tests put failures            files.py
"""
