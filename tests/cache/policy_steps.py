"""Hypothesis strategies for what a cache asks of a policy."""

from __future__ import annotations

from hypothesis import strategies as st
from policy_oracles import ACTIONS, Step

KEYS = [b"%d" % number for number in range(24)]

SOME_KEYS = st.lists(st.sampled_from(KEYS), unique=True, max_size=8).map(tuple)
STEPS = st.builds(
    Step,
    action=st.sampled_from(ACTIONS),
    keys=SOME_KEYS,
    protected=st.frozensets(st.sampled_from(KEYS), max_size=12),
    most=st.integers(0, 8),
)
