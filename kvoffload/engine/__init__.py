"""Engines: copy blocks between planes and their own pinned slots, in the order that streams and hazards require."""
