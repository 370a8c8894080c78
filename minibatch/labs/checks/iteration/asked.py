"""Requests for runs: prompts, new tokens, arrivals."""

from __future__ import annotations

from hypothesis import strategies as st

Asked = list[tuple[int, int, int]]
ASKED = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5)
