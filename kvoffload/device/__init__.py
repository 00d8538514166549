"""An open device: its context, its memory and streams, and how they are freed even after an interrupt.

open_device, Device         a GPU, or a simulated one                                    device.py
DeviceBuffer, DeviceArray   GPU memory that the device frees                             buffers.py
PinnedMemory                pinned host memory as numpy arrays                           pinned.py
HostMemory                  slots in host memory that the caller brings                  host_memory.py
SharedSlots                 such slots in memory that processes share                    shared_slots.py
Resource, DeviceResources   driver objects, freed exactly once                           ownership.py
Lane, EventPool             streams of a lane, pools of events, other programs' streams  streams.py
AllocationFinder            in which driver allocation planes are, and on which GPU      allocations.py
"""
