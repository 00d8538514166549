"""Urgent loads: where they go among the loads that wait on the host.

    loads in flight    |queued on the GPU|begun|held|held|held|
                                               ^ an urgent one goes here, or behind what it must follow

Sequence numbers say in which order loads end, so those of the loads behind an urgent one rise. Everything here is
called under the engine's lock, with `InFlight.consistent` False.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.engine.queues import InFlight
from kvoffload.engine.request import Request
from kvoffload.engine.transfer import Event, Transfer
from kvoffload.planning.transfer_plan import Direction


def put_ahead(in_flight: InFlight, transfer: Transfer, requests: Sequence[Request]) -> bool:
    """Put an urgent load in flight ahead of all that wait, but of what it must follow.

    It is in flight from when it is in its queue. What an interrupt leaves, `restore_order` mends.

    Returns:
        False if it may go ahead of none: then nothing has changed.
    """
    queue, hazards = in_flight.loads, in_flight.hazards
    place = _place_ahead(in_flight, transfer, requests)
    if place == len(queue.waiting):
        return False
    sequence = queue.waiting[place].sequence
    queue.reordering = True
    hazards.make_room(Direction.LOAD, sequence)
    for request in requests:
        hazards.record_ahead(Direction.LOAD, request.group, request.slots, request.blocks, sequence)
    transfer.step(Event.SUBMITTED)
    queue.transfers.insert(len(queue.transfers) - len(queue.waiting) + place, transfer)
    queue.submitted += 1
    queue.renumber()
    queue.reordering = False
    queue.waiting.insert(place, transfer)
    return True


def _place_ahead(in_flight: InFlight, transfer: Transfer, requests: Sequence[Request]) -> int:
    """How many of the loads that wait stay ahead of an urgent one. There are four that do, and those ahead of them:

    1. One that has begun: some of it is queued on the GPU.
    2. Another urgent one: these keep their order.
    3. One that writes a block that this one writes, too.
    4. One that a store follows which this one follows: else each would wait for the next one, in a circle.
    """
    waiting = in_flight.loads.waiting
    latest = max(
        in_flight.hazards.latest_on_blocks(Direction.LOAD, request.group, request.blocks) for request in requests
    )
    if transfer.conflict is not None:
        for store in in_flight.stores.waiting:
            if store.sequence <= transfer.conflict.sequence and store.conflict is not None:
                latest = max(latest, store.conflict.sequence)
    place = len(waiting)
    while place:
        other = waiting[place - 1]
        if other.urgent or other.ordered or other.segments or other.sequence <= latest:
            break
        place -= 1
    return place


def restore_order(in_flight: InFlight) -> None:
    """`put_ahead` was interrupted: number the transfers anew. May be interrupted itself.

    Which of them touches what is not known any more, so all of it counts as touched by the latest: later transfers of
    the other direction wait for more than they need.
    """
    queue = in_flight.loads
    queue.renumber()
    queue.submitted = queue.counted + len(queue.transfers)
    in_flight.hazards.forget_order(Direction.LOAD, queue.counted, queue.submitted)
    queue.reordering = False
