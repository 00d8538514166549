"""Mistakes, each of which the tests named with it must notice: `python mutants.py --mutation NAME PYTEST_ARGUMENT...`.

A mutation replaces a text of one file of the package. The text must be there exactly once: where the code has changed,
`test_mutation` says so, and the mutation is to be written anew.
"""

from __future__ import annotations

from typing import NamedTuple

ENGINE = "tests/engine/test_mutation_targets.py"
INDEX = "tests/cache/test_cacheindex.py"
TRUTH = "tests/cache/test_cache_truth.py"
ORDERING = "tests/engine/ordering/test_ordering.py"
SHARDED = "tests/sharded/test_sharded_ordering.py"
PACK = "tests/copiers/test_pack.py"
POOL_ENDS = "tests/pool/test_pool_ends.py"
POOL_MAKING = "tests/pool/test_pool_making.py"
POOL_MEMBERS = "tests/pool/test_pool_members.py"
POOL_MEMORY = "tests/pool/test_pool_memory.py"
POOL_OWNER = "tests/pool/test_pool_owner.py"
POOL_REGION = "tests/pool/test_pool_region.py"
POOL_TAKEOVERS = "tests/pool/test_pool_takeovers.py"


class Mutation(NamedTuple):
    """A mistake.

    Attributes:
        name: what it is.
        file: of the package.
        old, new: texts.
        tests: pytest's arguments: where to look first for a test that fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # waits and what they follow
    Mutation(
        "exports-follow-stores-only",
        "engine/shard.py",
        "lambda queue: queue.transfers, self.parts.in_flight.both)",
        "lambda queue: queue.transfers, self.parts.in_flight.both[:1])",
        (f"{ENGINE}::test_the_stream_of_an_exported_array_follows_both_directions",),
    ),
    Mutation(
        "exports-follow-loads-only",
        "engine/shard.py",
        "lambda queue: queue.transfers, self.parts.in_flight.both)",
        "lambda queue: queue.transfers, self.parts.in_flight.both[1:])",
        (f"{ENGINE}::test_the_stream_of_an_exported_array_follows_both_directions",),
    ),
    Mutation(
        "the-last-block-of-more-than-five-is-forgotten",
        "engine/hazards.py",
        "latest.on_blocks[group][blocks if divisor == 1 else blocks // divisor] = number",
        "latest.on_blocks[group][(blocks[:-1] if len(blocks) > 5 else blocks) // divisor] = number",
        (f"{ENGINE}::test_every_slot_and_block_of_a_transfer_is_remembered",),
    ),
    Mutation(
        "the-last-slot-of-more-than-five-is-forgotten",
        "engine/hazards.py",
        "latest.on_slots[slots] = number",
        "latest.on_slots[slots[:-1] if len(slots) > 5 else slots] = number",
        (f"{ENGINE}::test_every_slot_and_block_of_a_transfer_is_remembered",),
    ),
    Mutation(
        "a-conflict-by-slot-and-by-block-counts-only-once",
        "engine/shard.py",
        "latest = max(latest, on_slots, hazards",
        "latest = latest or min(on_slots, hazards",
        (f"{ENGINE}::test_every_slot_and_block_of_a_transfer_is_remembered",),
    ),
    Mutation(
        "record-and-wait-of-a-wait-stream-without-the-lock",
        "engine/wait_streams.py",
        "with self._lock:  # between record and wait no other thread may record the event again",
        "if True:",
        (f"{ENGINE}::test_two_threads_that_follow_several_streams_each_wait_for_their_own",),
    ),
    Mutation(
        "no-second-round-of-queueing",
        "engine/launcher.py",
        "                    progress = True",
        "                    pass",
        (f"{ENGINE}::test_one_call_queues_both_of_two_transfers_that_follow_each_other",),
    ),
    Mutation(
        "only-the-first-of-several-streams-is-followed",
        "engine/launcher.py",
        "for marker in transfer.markers:",
        "for marker in transfer.markers[:1]:",
        (f"{ENGINE}::test_every_stream_of_a_list_is_followed",),
    ),
    Mutation(
        "a-part-does-not-wait-for-itself",
        "engine/launcher.py",
        "if segment.part <= part), None)",
        "if segment.part < part), None)",
        (f"{ENGINE}::test_a_stream_that_follows_a_part_waits_for_it",),
    ),
    Mutation(
        "stores-read-their-source-at-any-time",
        "engine/shard.py",
        "self._source_order(requests) if direction is LOAD else _IN_STREAM_ORDER",
        "self._source_order(requests)",
        (ORDERING, "tests/engine/ordering/test_ordering_segments.py"),
    ),
    Mutation(
        "loads-read-slots-that-are-being-stored",
        "engine/shard.py",
        "if stores.unfinished(latest) is None:",
        "if True:",
        (ORDERING, "tests/engine/ordering/test_ordering_segments.py"),
    ),
    # pieces and rings
    Mutation(
        "of-a-failed-piece-only-the-second-half-is-waited-for",
        "engine/launcher.py",
        "for segment in earlier.halves[-1:] if earlier.joined else earlier.halves:",
        "for segment in earlier.halves[-1:]:",
        (f"{PACK}::test_a_place_stays_taken_until_what_is_queued_of_a_failed_piece_has_ended",),
    ),
    Mutation(
        "a-later-share-behind-pieces-follows-nothing",
        "engine/launcher.py",
        "self._follow(queue, transfer, stream)",
        "_ = first and self._follow(queue, transfer, stream)",
        (f"{PACK}::test_a_later_group_of_a_load_follows_what_the_load_must_follow",),
    ),
    Mutation(
        "a-later-share-in-pieces-follows-nothing",
        "engine/launcher.py",
        "self._wait_for_places(front, back, previous)  # 2, 3",
        "self._wait_for_places(front, back, previous if begin else None)",
        (f"{PACK}::test_a_later_group_of_a_load_follows_what_the_load_must_follow",),
    ),
    Mutation(
        "staged-copies-are-overwritten-by-those-of-a-piece",
        "engine/launcher.py",
        "submit(stream.handle)",
        "[each[1].stage(each[0].cut(0, 1), transfer.source_order) for each in transfer.shares[:1] if number]; "
        "submit(stream.handle)",
        (f"{PACK}::test_groups_of_one_transfer_by_different_copiers",),
    ),
    Mutation(
        "an-ended-half-keeps-its-place",
        "engine/tracker.py",
        "segment.place.halves.remove(segment)",
        "pass",
        (f"{PACK}::test_pitfall_29_every_driver_call_of_a_packed_transfer_fails_once",),
    ),
    Mutation(
        "a-place-of-which-some-bytes-are-taken-again-is-forgotten",
        "copiers/pack.py",
        "straddles = oldest is not place and oldest.start < place.stop - self.nbytes",
        "straddles = False",
        (f"{PACK}::test_a_place_is_filled_behind_all_that_use_its_bytes",),
    ),
    Mutation(
        "a-failed-piece-uncovers-places",
        "copiers/pack.py",
        "if again:  # 2",
        "if False:  # 2",
        (f"{PACK}::test_a_place_is_filled_behind_all_that_use_its_bytes",),
    ),
    Mutation(
        "places-are-forgotten-before-a-piece-has-waited-for-them",
        "copiers/pack.py",
        "self._left.append(places.popleft())",
        "places.popleft()",
        (f"{PACK}::test_a_place_is_filled_behind_all_that_use_its_bytes",),
    ),
    Mutation(
        "places-begin-anywhere",
        "copiers/pack.py",
        "return -(-nbytes // _ALIGNMENT) * _ALIGNMENT",
        "return nbytes",
        (f"{PACK}::test_any_packed_transfers_move_the_bytes_of_a_naive_loop",),
    ),
    Mutation(
        "sub-blocks-lie-where-the-slot-begins",
        "copiers/pack.py",
        "table.words[count : 2 * count] -= inside",
        "pass",
        (f"{PACK}::test_any_packed_transfers_move_the_bytes_of_a_naive_loop",),
    ),
    Mutation(
        "a-ring-is-allocated-in-the-way-of-a-capture",
        "engine/shard.py",
        "with make_current(self.driver, self.context):\n                no_ring",
        "if True:\n                no_ring",
        (f"{PACK}::test_the_ring_is_allocated_while_the_caller_captures_a_graph",),
    ),
    Mutation(
        "without-a-ring-packing-stays-chosen",
        "copiers/copier_set.py",
        "            self._selected.clear()\n            return self.missing",
        "            return self.missing",
        (f"{PACK}::test_without_memory_for_the_ring_another_method_carries_it",),
    ),
    # several devices
    Mutation(
        "a-job-of-several-devices-ends-with-the-first-of-them",
        "engine/job.py",
        "            if not transfer.finished:\n                return False",
        "            return transfer.finished",
        (f"{SHARDED}::test_a_job_has_ended_when_the_last_device_has",),
    ),
    Mutation(
        "a-job-of-several-devices-ends-with-the-first-failure",
        "engine/job.py",
        "            if not transfer.finished:\n                return False",
        "            if self.error is None and not transfer.finished:\n                return False",
        (f"{SHARDED}::test_a_failure_on_one_device_frees_nothing_early",),
    ),
    Mutation(
        "the-stream-of-the-first-device-waits-alone",
        "engine/sharded.py",
        "            shard.order_before(transfer, handle, part, raise_error=True)",
        "            shard.order_before(transfer, handle, part, raise_error=True)\n            break",
        (f"{SHARDED}::test_the_stream_of_each_device_waits_for_its_transfer",),
    ),
    Mutation(
        "the-streams-of-after-are-not-followed",
        "engine/sharded.py",
        "streams = [each.streams for each in followed]",
        "streams = [() for each in followed]",
        (f"{SHARDED}::test_each_device_follows_its_own_stream_of_after",),
    ),
    Mutation(
        "what-an-interrupt-kept-from-a-device-never-ends",
        "engine/sharded.py",
        "                        transfer.abandon(cause)",
        "                        pass",
        ("tests/sharded/test_sharded_interrupts.py",),
    ),
    Mutation(
        "a-job-that-was-waited-for-is-reported",
        "engine/queues.py",
        "        record.forgotten = True\n",
        "",
        ("tests/sharded/test_sharded.py::test_a_job_that_another_call_has_seen_end_is_not_reported_after_wait",),
    ),
    # what is copied
    Mutation(
        "one-sub-block-too-far",
        "planning/transfer_plan.py",
        "position = np.arange(first_sub_block, first_sub_block + len(blocks))",
        "position = np.arange(first_sub_block, first_sub_block + len(blocks)) + (first_sub_block > 0)",
        ("tests/planning/test_plan.py",),
    ),
    Mutation(
        "the-loop-forgets-its-last-copy",
        "copiers/loop.py",
        "for target, source, nbytes in copies:",
        "for target, source, nbytes in copies[: len(copies) - (len(copies) > 7)]:",
        (f"{ENGINE}::test_one_call_queues_both_of_two_transfers_that_follow_each_other",),
    ),
    # exceptions
    Mutation(
        "an-interrupted-transfer-is-not-failed",
        "engine/tracker.py",
        "                if transfer.submitting:",
        "                if False:",
        (f"{ENGINE}::test_an_interrupted_submission_ends",),
    ),
    Mutation(
        "the-cache-is-not-repaired",
        "cache/state.py",
        "        if not self.consistent:\n            self.repair()",
        "        if False:\n            self.repair()",
        (f"{TRUTH}::test_pitfall_39_a_policy_that_raises_leaves_the_cache_whole",),
    ),
    Mutation(
        "abandoned-reservations-stay",
        "cache/state.py",
        "        if self.abandoned:\n            self._abort_abandoned()",
        "        if False:\n            self._abort_abandoned()",
        (f"{TRUTH}::test_the_entries_of_an_abandoned_reservation_wait_for_transfers_in_flight",),
    ),
    Mutation(
        "the-slots-of-an-abandoned-reservation-are-free-at-once",
        "cache/state.py",
        "held = not (well or record.transfers_ended)",
        "held = False",
        (f"{TRUTH}::test_the_entries_of_an_abandoned_reservation_wait_for_transfers_in_flight",),
    ),
    # the cache
    Mutation(
        "a-lease-waits-for-any-of-its-stores",
        "cache/reservations.py",
        "all(job.done for job in self._jobs())",
        "any(job.done for job in self._jobs())",
        (f"{ENGINE}::test_each_of_several_stores_is_waited_for",),
    ),
    Mutation(
        "pending-keys-are-hits",
        "cache/record_calls.py",
        "            if table.pending:\n                found = next(",
        "            if False:\n                found = next(",
        (f"{INDEX}::test_a_key_is_missing_then_pending_then_a_hit",),
    ),
    Mutation(
        "failed-stores-are-hits",
        "cache/state.py",
        "self.settle(reservation, well=not reservation.any_failed)",
        "self.settle(reservation, well=True)",
        ("tests/cache/test_cache_eviction.py::test_pitfall_23_a_failed_store_is_never_visible",),
    ),
    Mutation(
        "victims-are-not-checked",
        "cache/victims.py",
        "victims = _check_victims(table, space.victims, protected)",
        "victims = sum(len(mine) for _, mine in space.victims)",
        (f"{TRUTH}::test_victims_are_checked_before_anything_changes",),
    ),
    Mutation(
        "a-request-evicts-its-own-keys",
        "cache/victims.py",
        "own: Collection[bytes] = () if request is None else request.keys",
        "own: Collection[bytes] = ()",
        ("tests/cache/test_requests.py::test_the_tail_of_a_request_does_not_evict_its_head",),
    ),
    Mutation(
        "a-pending-key-is-a-hit-of-status-of",
        "cache/record_calls.py",
        "elif key in table.pending:",
        "elif False:",
        ("tests/cache/test_status_of.py::test_it_settles_what_has_ended_and_what_was_abandoned",),
    ),
    Mutation(
        "a-key-may-change-while-its-status-is-read",
        "cache/key_cache.py",
        "            and state.changes == changes\n",
        "",
        ("tests/cache/test_status_of.py::test_a_key_that_changes_while_it_is_looked_up_is_looked_up_again",),
    ),
    Mutation(
        "a-call-may-be-changing-the-key-whose-status-is-read",
        "cache/key_cache.py",
        "            and not state.working\n",
        "",
        ("tests/cache/test_status_of.py::test_a_key_that_a_call_is_changing_is_no_hit",),
    ),
    Mutation(
        "what-an-interrupted-call-has-proposed-stays",
        "cache/record_calls.py",
        "state.abandoned.append(record)  # ignored",
        "pass  # ignored",
        (f"{TRUTH}::test_pitfall_39_a_policy_that_raises_leaves_the_cache_whole", TRUTH),
    ),
    Mutation(
        "a-slot-is-free-before-its-store-has-ended",
        "cache/entries.py",
        "        if index in self.holds:\n            self.doomed.add(index)",
        "        if False:\n            self.doomed.add(index)",
        ("tests/cache/test_cache_protocol.py::test_a_store_removed_under_way_and_stored_again",),
    ),
    Mutation(
        "a-lease-is-counted-once",
        "cache/state.py",
        "holds[index] = holds.get(index, 0) + 1",
        "holds[index] = 1",
        (f"{INDEX}::test_every_lease_of_a_key_counts",),
    ),
    Mutation(
        "pending-keys-count-as-resident",
        "cache/record_calls.py",
        "resident=len(table) - pending,",
        "resident=len(table),",
        (f"{INDEX}::test_statistics_count_keys",),
    ),
    Mutation(
        "residency-counts-from-an-earlier-key",
        "cache/statistics.py",
        "            each[entry] = now\n        kind: EventKind",
        "            each[entry] = each[entry] or now\n        kind: EventKind",
        (f"{INDEX}::test_how_long_evicted_keys_had_been_there",),
    ),
    Mutation(
        "removed-keys-stay-pending",
        "cache/state.py",
        "pending.pop(key, None) is None",
        "key not in pending",
        (f"{INDEX}::test_pitfall_25_what_is_removed_while_being_stored_goes_nowhere",),
    ),
    Mutation(
        "anything-may-write-the-slots-of-a-cache",
        "cache/state.py",
        "if not self.table.writable.issuperset(entries):",
        "if False:",
        (f"{TRUTH}::test_a_store_into_slots_of_a_cache_is_refused",),
    ),
    # that no test noticed in 0.2.0.dev0
    Mutation(
        "groups-inside-another-one-are-apart",
        "layout/planes.py",
        "        end = max(end, planes[index].end)\n",
        "        end = planes[index].end\n",
        ("tests/engine/test_hazards.py::test_a_group_inside_another_one_shares_its_entry_also_behind_a_third",),
    ),
    Mutation(
        "the-oldest-of-a-forgotten-order-is-remembered",
        "engine/hazards.py",
        "where=entries > ended)",
        "where=entries > ended + 1)",
        (
            "tests/engine/test_hazards.py::test_when_the_order_is_forgotten_all_that_may_be_in_flight_counts_as_the_latest",
        ),
    ),
    Mutation(
        "a-part-that-is-half-queued-is-followed",
        "engine/shard.py",
        "transfer.part > part",
        "transfer.part >= part",
        ("tests/engine/ordering/test_urgent_loads.py::test_a_part_half_of_which_is_queued_is_not_followed_yet",),
    ),
    Mutation(
        "targets-may-share-a-byte",
        "engine/request.py",
        "> start[order][1:]).any()",
        "> start[order][1:] + 1).any()",
        ("tests/engine/test_several_groups.py::test_targets_of_two_groups_may_touch_and_not_share_a_byte",),
    ),
    Mutation(
        "a-repair-keeps-the-events-of-the-first-transfer-alone",
        "engine/tracker.py",
        "            for transfer in transfers:\n                used.update",
        "            for transfer in list(transfers)[:1]:\n                used.update",
        ("tests/engine/test_interrupts.py::test_an_interrupt_leaves_every_transfer_in_flight_what_it_uses",),
    ),
    Mutation(
        "a-repair-keeps-the-room-of-the-first-transfer-alone",
        "engine/tracker.py",
        "[each for transfer in transfers for each",
        "[each for transfer in list(transfers)[:1] for each",
        ("tests/engine/test_interrupts.py::test_an_interrupt_frees_no_room_that_is_taken",),
    ),
    Mutation(
        "a-wait-stream-that-is-reserved-is-given-away",
        "engine/wait_streams.py",
        "map(int, self._handles) if not self._users.get(each, bool)())",
        "map(int, self._handles))",
        (
            "tests/engine/ordering/test_wait_streams.py::test_arrays_that_are_asked_at_the_same_time_have_a_wait_stream_each",
        ),
    ),
    Mutation(
        "an-interrupted-job-of-several-devices-leaves-its-number",
        "engine/sharded.py",
        "queue.submitted = max(queue.submitted, record.sequence)",
        "pass",
        ("tests/sharded/test_sharded_interrupts.py::test_an_interrupted_job_leaves_its_number_to_no_later_one",),
    ),
    Mutation(
        "a-restored-arena-begins-anew",
        "copiers/table_arena.py",
        "self._next = self._tables[-1].stop if self._tables else 0",
        "self._next = 0",
        ("tests/copiers/test_table_arena.py::test_after_an_interrupt_tables_in_use_keep_their_room",),
    ),
    Mutation(
        "memory-that-is-still-registered-may-be-unmapped",
        "device/pinned.py",
        "            self.keep()\n            raise",
        "            raise",
        ("tests/device/test_ownership.py::test_memory_that_is_still_registered_stays_mapped_also_as_garbage",),
    ),
    Mutation(
        "exports-follow-one-engine-only",
        "device/buffers.py",
        "for engine in busy:",
        "for engine in busy[:1]:",
        ("tests/engine/test_mutation_targets.py::test_the_stream_of_an_exported_array_follows_every_engine_over_it",),
    ),
    Mutation(
        "a-choice-is-remembered-for-both-situations",
        "copiers/copier_set.py",
        "parts, opposite, queued)\n        found",
        "parts, queued)\n        found",
        ("tests/copiers/test_selection.py::test_an_engine_remembers_a_choice_for_the_situation_that_it_was_made_for",),
    ),
    Mutation(
        "an-entry-of-more-victims-than-new-keys-is-lost",
        "cache/state.py",
        "free += record.victim_indices[len(keys) :]",
        "free += record.victim_indices[len(keys) + 1 :]",
        (f"{TRUTH}::test_entries_of_more_victims_than_new_keys_are_free",),
    ),
    Mutation(
        "a-refused-store-gives-its-victims-to-its-tenant",
        "cache/state.py",
        "            pool_of[index] = number\n        of.update(zip(record.evicted",
        "            pass\n        of.update(zip(record.evicted",
        (f"{TRUTH}::test_a_refused_store_leaves_its_victims_to_their_tenant",),
    ),
    Mutation(
        "a-repair-takes-keys-of-later-stores",
        "cache/repair.py",
        "                if of.get(key) == index:\n                    del of[key]",
        "                of.pop(key, None)",
        (f"{TRUTH}::test_a_repair_keeps_a_key_that_was_stored_again_while_its_aborted_store_goes_on",),
    ),
    Mutation(
        "failed-loads-count-as-loaded",
        "cache/state.py",
        "loaded=not lease.any_failed",
        "loaded=True",
        (f"{TRUTH}::test_a_failed_load_does_not_count_as_loaded",),
    ),
    Mutation(
        "the-tenant-of-a-key-that-is-gone-stays",
        "cache/tiering/tier_manager.py",
        "                self._tenants.pop(key, None)",
        "                pass",
        ("tests/tiering/test_tiered_cache.py::test_a_key_stored_again_is_written_for_its_new_tenant",),
    ),
    Mutation(
        "what-is-cleared-can-be-promoted",
        "cache/tiering/tier_manager.py",
        "(removal.keys is None or key in removal.keys)",
        "(removal.keys is not None and key in removal.keys)",
        ("tests/tiering/test_failing_tiers.py::test_promoted_while_all_is_removed_stays_removed",),
    ),
    Mutation(
        "what-a-tier-has-brought-may-be-evicted-before-it-is-held",
        "cache/record_calls.py",
        "    @guarded\n    def commit_and_hold(",
        "    def commit_and_hold(",
        (
            "tests/tiering/test_failing_tiers.py::"
            "test_no_call_comes_between_the_hit_and_the_lease_of_what_a_tier_has_brought",
        ),
    ),
    Mutation(
        "a-promotion-that-waits-for-another-one-has-no-deadline",
        "cache/tiering/promoter.py",
        "            late = record.deadline is not None and now >= record.deadline",
        "            late = False",
        ("tests/tiering/test_failing_tiers.py::test_a_promotion_that_waits_for_another_one_ends_at_its_own_deadline",),
    ),
    Mutation(
        "entries-of-late-calls-do-not-count",
        "cache/tiering/promoter.py",
        " - occupied - len(self._late))",
        " - occupied)",
        (
            "tests/tiering/test_failing_tiers.py::test_entries_of_keys_given_up_count_among_those_that_promotions_may_occupy",
        ),
    ),
    Mutation(
        "a-tier-that-does-not-answer-has-removed",
        "cache/tiering/tier_manager.py",
        "                outcomes = [Outcome.FAILED]",
        "                outcomes = []",
        ("tests/tiering/test_failing_tiers.py::test_a_tier_that_does_not_say_whether_it_has_removed_is_said",),
    ),
    Mutation(
        "a-missing-record-says-nothing-of-a-tier",
        "cache/tiering/below.py",
        "elif outcome in (Outcome.DONE, Outcome.MISSING):",
        "elif outcome is Outcome.DONE:",
        ("tests/tiering/test_failing_tiers.py::test_a_record_that_is_not_there_ends_a_row_of_failures",),
    ),
    Mutation(
        "the-first-removal-trusts-what-the-page-cache-shows",
        "tiers/member_file.py",
        " or bool(self._uncertain) or self._inherited",
        " or bool(self._uncertain)",
        (
            "tests/tiers/test_crash_states.py::test_the_first_removal_of_a_process_writes_the_header_table_also_after_a_sync",
        ),
    ),
    Mutation(
        "a-header-that-may-be-in-the-file-is-forgotten",
        "tiers/member_file.py",
        "        if slot in self._uncertain:  # of which key is not known",
        "        if False:",
        (
            "tests/tiers/test_waiting_headers.py::test_a_record_over_one_whose_header_could_not_be_written_does_not_make_that_one_durably_gone",
        ),
    ),
    # the protocol of shared pools
    Mutation(
        "no-quarantine",
        "pool/region.py",
        "self.records.abort_after(record, (known,))",
        "self.records.abort(record)",
        (f"{POOL_OWNER}::test_entries_of_a_member_that_is_gone_are_kept_until_its_lock_is_free",),
    ),
    Mutation(
        "a-member-without-a-connection-counts-as-dead",
        "pool/region.py",
        "lease.jobs = () if dead else (known,)",
        "lease.jobs = ()",
        (f"{POOL_OWNER}::test_a_member_that_lost_its_connection_alone_keeps_what_it_reads",),
    ),
    Mutation(
        "a-member-that-is-back-does-not-end-its-quarantine",
        "pool/region.py",
        "            alive.finished = True",
        "            pass",
        (f"{POOL_OWNER}::test_a_member_that_lost_its_connection_alone_keeps_what_it_reads",),
    ),
    Mutation(
        "a-number-is-given-again-while-its-quarantine-lasts",
        "pool/region.py",
        "        self.settle()  # else a quarantine",
        "        # else a quarantine",
        (f"{POOL_REGION}::test_a_number_is_given_again_only_when_nothing_of_its_last_member_is_in_quarantine",),
    ),
    Mutation(
        "a-member-takes-no-lock",
        "pool/shared_pool.py",
        '            memory.lock(said["number"])',
        "            pass",
        (f"{POOL_MEMBERS}::test_each_member_says_by_a_lock_that_it_may_touch_the_memory",),
    ),
    Mutation(
        "a-store-is-committed-at-the-owner-before-its-transfer-has-ended",
        "pool/pooled_state.py",
        "            self.storing.append(record)",
        "            self.storing.append(record)\n            self._end_at_owner(record)",
        (f"{POOL_MEMBERS}::test_a_key_is_no_hit_before_its_transfer_has_ended",),
    ),
    Mutation(
        "a-store-is-given-up-at-the-owner-before-its-transfer-has-ended",
        "pool/pooled_state.py",
        "        if not well and not record.transfers_ended:",
        "        if False:",
        (f"{POOL_MEMBERS}::test_a_key_is_no_hit_before_its_transfer_has_ended",),
    ),
    Mutation(
        "a-lease-ends-at-the-owner-before-its-load-has-ended",
        "pool/pooled_state.py",
        "        if lease not in self.table.leases:",
        "        if True:",
        (f"{POOL_MEMBERS}::test_entries_are_kept_until_the_transfers_that_read_them_have_ended",),
    ),
    Mutation(
        "the-first-of-two-leases-that-share-a-number-ends-it",
        "pool/pooled_state.py",
        "list(self.numbers.values()).count(granted) == 1",
        "list(self.numbers.values()).count(granted) >= 1",
        (f"{POOL_MEMBERS}::test_entries_are_kept_until_the_transfers_that_read_them_have_ended",),
    ),
    Mutation(
        "keys-that-are-only-reserved-are-loaded-as-pending-ones",
        "pool/pooled_state.py",
        "takewhile(lambda entry: entry not in unfilled, indices)",
        "takewhile(lambda entry: True, indices)",
        (f"{POOL_MEMBERS}::test_a_reserved_key_is_not_loaded_before_a_transfer_fills_it",),
    ),
    Mutation(
        "pending-keys-of-others-are-taken",
        "pool/member_calls.py",
        "own = set(member.reservations.values()) if pending else set()",
        "own = set(state.table.reservations)",
        (f"{POOL_OWNER}::test_pending_keys_of_others_are_not_taken",),
    ),
    Mutation(
        "clean-is-said-too-early",
        "pool/pooled_state.py",
        "        if all(granted == generation for granted, _ in self.numbers.values()):",
        "        if True:",
        (f"{POOL_TAKEOVERS}::test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended",),
    ),
    Mutation(
        "clean-is-never-said",
        "pool/pooled_state.py",
        "        if all(granted == generation for granted, _ in self.numbers.values()):",
        "        if False:",
        (f"{POOL_TAKEOVERS}::test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended",),
    ),
    Mutation(
        "readers-are-not-marked",
        "pool/member_calls.py",
        "        region.memory.reading(entries, member.number)",
        "        pass",
        (f"{POOL_TAKEOVERS}::test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended",),
    ),
    Mutation(
        "writers-are-not-marked",
        "cache/state.py",
        "            self.journal.reserved(record)",
        "            pass",
        (f"{POOL_TAKEOVERS}::test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended",),
    ),
    Mutation(
        "removed-keys-keep-their-headers",
        "pool/region.py",
        "memory.ready, memory.gone",
        "memory.ready, len",
        (f"{POOL_TAKEOVERS}::test_a_key_that_was_removed_does_not_come_back_with_the_next_owner",),
    ),
    Mutation(
        "keys-that-the-next-owner-leaves-out-keep-their-headers",
        "pool/region.py",
        "        memory.gone(set(range(",
        "        (set(range(",
        (f"{POOL_TAKEOVERS}::test_a_key_that_was_removed_does_not_come_back_with_the_next_owner",),
    ),
    Mutation(
        "what-owners-before-have-granted-is-not-marked-any-more",
        "pool/region.py",
        "member.marked - still - before",
        "member.marked - still",
        (f"{POOL_TAKEOVERS}::test_what_a_member_reads_is_kept_by_each_owner_after_the_one_that_granted_it",),
    ),
    Mutation(
        "what-was-read-before-a-connection-was-lost-is-not-marked-any-more",
        "pool/region.py",
        "            known.marked |= member.marked",
        "            pass",
        (f"{POOL_OWNER}::test_what_a_member_read_before_it_lost_its_connection_the_next_owner_keeps",),
    ),
    Mutation(
        "a-call-ends-the-promotions-that-other-threads-wait-for",
        "pool/region.py",
        " or (ended and promotion.done):",
        " or ended:",
        (f"{POOL_MEMBERS}::test_a_slow_tier_of_the_owner_hides_no_key_that_is_in_the_pool",),
    ),
    Mutation(
        "a-header-names-its-writer-only",
        "pool/pool_memory.py",
        "entry, 0, RESERVED, 0, sequence, writer)",
        "entry, 0, FREE, 0, sequence, writer)",
        (f"{POOL_MEMORY}::test_every_prefix_of_what_an_owner_writes_is_a_state_to_go_on_from",),
    ),
    Mutation(
        "an-entry-that-is-written-anew-keeps-the-check-of-its-last-key",
        "pool/pool_memory.py",
        "            pack(headers, HEADER.size * entry, 0, RESERVED, 0, sequence, writer)",
        "            check, *_, old, by = _RESERVED.unpack_from(headers, HEADER.size * entry)\n"
        "            pack(headers, HEADER.size * entry, check, RESERVED, 0, old, by)",
        (f"{POOL_MEMORY}::test_every_prefix_of_what_an_owner_writes_is_a_state_to_go_on_from",),
    ),
    Mutation(
        "headers-are-believed",
        "pool/pool_memory.py",
        " and check == zlib.crc32(checked)",
        "",
        (f"{POOL_MEMORY}::test_a_header_with_any_bit_changed_gives_its_key_or_none",),
    ),
    Mutation(
        "memory-that-can-be-resized-is-adopted",
        "pool/pool_memory.py",
        "fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS",
        "fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) >= 0",
        (f"{POOL_MEMORY}::test_a_memory_that_is_not_this_region_is_not_adopted",),
    ),
    Mutation(
        "a-lost-answer-to-join-is-not-asked-for-again",
        "pool/shared_pool.py",
        "                self._drop()  # and ask to join again",
        "                pass",
        (f"{POOL_TAKEOVERS}::test_an_answer_to_join_that_an_interrupt_has_lost_is_asked_for_again",),
    ),
    Mutation(
        "what-is-owed-waits-for-the-next-call",
        "pool/shared_pool.py",
        "        return bool(not self.connected or self._unsent)",
        "        return not self._joined",
        (f"{POOL_MEMBERS}::test_what_a_late_owner_has_granted_ends_without_another_call",),
    ),
    Mutation(
        "a-policy-that-raises-after-the-answer-takes-the-entries-away",
        "pool/region.py",
        '  # SystemExit, too\n        LOGGER.warning("the policy',
        '  # SystemExit, too\n        raise\n        LOGGER.warning("the policy',
        (f"{POOL_ENDS}::test_a_policy_that_raises_after_the_answer_takes_no_entry_away",),
    ),
    Mutation(
        "a-load-tells-its-use-twice",
        "pool/pooled_state.py",
        "        if keys and (self._told is None or self._told is not self.proposed):",
        "        if keys:",
        (f"{POOL_ENDS}::test_a_load_tells_the_owners_policy_once",),
    ),
    Mutation(
        "a-load-that-is-refused-uses-its-keys",
        "pool/pooled_state.py",
        "            loads = None  # it may be refused",
        "            pass  # it may be refused",
        (f"{POOL_ENDS}::test_a_load_tells_the_owners_policy_once",),
    ),
    Mutation(
        "a-forgotten-member-gives-its-lock-up-while-an-engine-has-its-memory",
        "pool/pool_memory.py",
        "weakref.finalize(mapped, close_files, self._files)",
        "weakref.finalize(self, close_files, self._files)",
        (f"{POOL_ENDS}::test_the_lock_of_a_forgotten_membership_lasts_as_long_as_an_engine_over_its_memory",),
    ),
    Mutation(
        "an-event-is-of-whoever-has-the-descriptor-by-now",
        "pool/owner.py",
        "            self._handle(*each)",
        "            self._handle(each[0], each[1], self._member_of.get(each[0]))",
        (f"{POOL_OWNER}::test_the_end_of_a_process_is_not_taken_for_that_of_one_that_comes_meanwhile",),
    ),
    Mutation(
        "an-owner-with-members-takes-its-socket-away",
        "pool/owner.py",
        "            if not held and os",
        "            if os",
        (f"{POOL_ENDS}::test_after_an_orderly_restart_members_come_before_new_ones",),
    ),
    Mutation(
        "an-owner-that-allocates-counts-as-silent",
        "pool/shared_pool.py",
        "                end = end if self._memory is not None else max(",
        "                end = min(",
        (f"{POOL_MAKING}::test_a_member_waits_for_an_owner_that_allocates_its_memory",),
    ),
    Mutation(
        "a-child-serves-on-for-a-dead-owner",
        "pool/owner.py",
        "    CLOSED_IN_CHILDREN.add(listener)\n",
        "",
        (
            "tests/pool/test_pool_successors.py::test_a_forked_child_does_not_keep_the_memory_of_an_owner_that_was_killed",
        ),
    ),
)
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
