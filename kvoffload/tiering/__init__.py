"""What belongs below the host: which blocks of a cache are worth writing to a tier.

admission   WriteAdmission: the events of a cache, and which of its blocks to write                  admission.py
readback    how many reads a block of each kind brings once it is written, learned from the traffic  readback.py
memory      which kind a key was of when it was last asked for, in bounded memory                    memory.py
"""
