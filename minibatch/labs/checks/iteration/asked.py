"""Requests for runs (prompts, new tokens, arrivals), and settings of continuous batching."""

from __future__ import annotations

from hypothesis import strategies as st

from minibatch.policies.preemption import Recompute, by_priority

Asked = list[tuple[int, int, int]]
ASKED = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5)

MIXED, PREFILLS, PHASES = {"first": "decode"}, {"first": "prefill"}, {"phase_order": "prefill-first"}
SETTINGS = (MIXED, PREFILLS, PHASES)
DISPLACING = Recompute(displaces=by_priority)
