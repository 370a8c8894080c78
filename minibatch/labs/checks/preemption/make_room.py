"""Making room for one that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs.counterexample import expect
from minibatch.labs.facts import judge
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.trial import Broken, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan_draft import PlanDraft
from minibatch.policies import FCFS, Never, Optimistic, PreemptionPolicy, Recompute, Swap, lowest_priority, most_blocks
from minibatch.request import RequestState, Status
from minibatch.trace import StepReport

PROMISED = "The rows that were made free are promised to the one that asked for them."
STAYS = "Where nobody may be chosen, nobody is displaced."
SAID = "Where nobody may be chosen, it goes without, keeps what it has, and the plan says why."


def check(part: type[PlanDraft]) -> None:
    for idea, start, want, *better in BY_HAND:
        _plan(idea, start, want, *better)
    _stuck_for_a_while()
    _joined_in_vain()
    for_all(
        _somebody_always_gets_on,
        examples=40,
        sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(0, 4)), min_size=1, max_size=5),
        way=st.sampled_from([Recompute(), Swap(), Recompute(most_blocks), Recompute(lowest_priority)]),
        first=st.sampled_from(["decode", "prefill"]),
        blocks=st.integers(5, 7),
    )


# --- plans by hand ---


class Start(NamedTuple):
    """Requests that run or wait, on blocks of 4.

    ``running``  label -> tokens computed, the oldest first; all have priority 0 but for ``priorities``, and one token
                 pending but for ``pending``
    ``asked``    the labels of those that run, in the order in which they are asked
    ``joining``  label -> prompt tokens, of those that join in the same plan before anybody who runs is asked
    """

    blocks: int
    running: Mapping[str, int]
    asked: str
    way: PreemptionPolicy = Recompute()
    joining: Mapping[str, int] = {}
    pending: Mapping[str, int] = {}
    priorities: Mapping[str, int] = {}
    budget: int = 16

    def runs(self, label: str, rank: int, kv: PagedKVCache) -> RequestState:
        computed = self.running[label]
        prompt, urgency = computed + self.pending.get(label, 1) - 1, self.priorities.get(label, 0)
        made = state(label, prompt, 1, computed, rank=rank, priority=urgency, status=Status.ACTIVE)
        made.timeline.runs.append([0.0, 0.0])
        kv.reserve(made, computed)
        return made

    def in_words(self, kv: PagedKVCache, running: Mapping[str, RequestState], free: int) -> str:
        each = []
        for label, computed in self.running.items():
            rest = f", next computes {self.pending[label]}" if label in self.pending else ""
            urgency = f", priority {self.priorities[label]}" if label in self.priorities else ""
            each.append(f"{label} holds {kv.num_held(running[label])} ({computed} tokens{rest}{urgency})")
        join = "".join(f"; {label} joins in this plan with {n} tokens" for label, n in self.joining.items())
        tight = f"; budget {self.budget}" if self.budget < 16 else ""
        rule = self.way.victim.__name__ if isinstance(self.way, Recompute) else "nobody"
        head = f"{self.blocks} blocks of 4, {free} left; {', '.join(each)}{join}{tight}; victim: {rule}"
        return f"{head}; asked in the order {', '.join(self.asked)}"


class End(NamedTuple):
    """What the plan says, and how many blocks it leaves."""

    computes: str
    preempted: str = "nobody"
    joins: str = "nobody"
    waits: str = "nobody"
    blocks_left: int = 0


def _plan(idea: str, start: Start, want: End, better: Mapping[str, str] = {}) -> None:
    """``idea`` is that of all that may be wrong, but for ``better``."""
    kv = PagedKVCache(start.blocks, 4)
    running = {label: start.runs(label, rank, kv) for rank, label in enumerate(start.running)}
    draft = PlanDraft(list(running.values()), kv, start.budget, 8, Optimistic(), start.way, partial=True)
    queue = FCFS()
    for rank, (label, prompt) in enumerate(start.joining.items(), start=len(running)):
        queue.add(state(label, prompt, rank=rank))
    draft.admit(queue, 0.0)
    case, free = start.in_words(kv, running, draft.memory.free), kv.num_free
    draft.run([running[label] for label in start.asked])
    plan = draft.plan()
    got = End(
        computes=_said(f"{each.label} {first}:{stop}" for each, first, stop in plan.chunks),
        preempted=_said(f"{change.request.label} by {change.by.label}" for change in plan.preemptions),
        joins=_said(admission.request.label for admission in plan.admissions),
        waits=_said(sorted({each.request.label for each in plan.waiting if each.reason})),
        blocks_left=draft.memory.free,
    )
    names = [name.replace("_", " ") for name in End._fields]
    facts = [(name, *values, better.get(name, idea)) for name, *values in zip(names, got, want, strict=True)]
    used = sum(stop - first for _, first, stop in plan.chunks)
    judge([*facts, ("budget left", draft.budget, start.budget - used, idea)], case)
    pure = "Planning changes nothing: what is promised and given up is so in the draft, not yet in the cache."
    expect(kv.num_free, free, what="free blocks of the cache itself", case=case, idea=pure)


def _said(each: Iterable[str]) -> str:
    return ", ".join(each) or "nobody"


BY_HAND = (
    (
        "Somebody gives way when the rows are not there; then they are, and the one that asked computes.",
        Start(4, {"a": 8, "b": 8}, "ab"),
        End("a 8:9", "b by a", waits="b", blocks_left=1),
        {"blocks left": PROMISED},
    ),
    (
        "Rows that are there are promised to the one that asks: the next one does not find them.",
        Start(5, {"a": 8, "b": 8}, "ab", Never()),
        End("a 8:9", waits="b"),
        {"waits": SAID, "preempted": STAYS},
    ),
    ("While the rows are there nobody gives way.", Start(6, {"a": 8, "b": 8}, "ab"), End("a 8:9, b 8:9")),
    (
        "The one that asks may be the victim itself: a is senior, so b is the only candidate, and gets no room.",
        Start(3, {"a": 2, "b": 8}, "ab"),
        End("a 2:3", "b by b", waits="b", blocks_left=2),
    ),
    (
        "The one that asks may be the victim itself: c is the newest. It gets no room, and nobody else goes for it.",
        Start(5, {"a": 8, "b": 4, "c": 8}, "ca"),
        End("a 8:9", "c by c", waits="c", blocks_left=1),
    ),
    (
        "Displaced itself, it stops asking: nobody else has to go for one that waits.",
        Start(
            4,
            {"a": 3, "b": 4, "c": 3},
            "bac",
            Recompute(lowest_priority),
            pending={"b": 8},
            priorities={"b": 5},
        ),
        End("a 3:4, c 3:4", "b by b", waits="b", blocks_left=2),
    ),
    (
        "One victim need not be enough: it goes on until the rows are there, and not further.",
        Start(4, {"a": 4, "b": 3, "c": 3, "d": 3}, "ab", pending={"a": 8}),
        End("a 4:12, b 3:4", "d by a, c by a", waits="c, d"),
    ),
    (
        "A victim that was planned already leaves the plan, and its token of the budget is there for others.",
        Start(5, {"a": 8, "b": 2, "c": 6}, "cab", budget=2),
        End("a 8:9, b 2:3", "c by a", waits="c", blocks_left=1),
    ),
    (
        "Nobody loses what he has while another joins: newcomers of the same plan give way first, whatever the rule.",
        Start(5, {"a": 8, "b": 6}, "ab", Recompute(most_blocks), joining={"n": 3}),
        End("a 8:9, b 6:7", waits="n"),
    ),
    (
        "Of several newcomers the last goes first: it is behind the others in the queue.",
        Start(6, {"a": 8, "b": 6}, "ab", joining={"n": 3, "m": 3}),
        End("n 0:3, a 8:9, b 6:7", joins="n", waits="m"),
    ),
    (
        "As long as there are newcomers, they give way, and not those who run.",
        Start(5, {"a": 4, "b": 6}, "ab", Recompute(most_blocks), joining={"n": 3, "m": 3}, pending={"a": 8}),
        End("a 4:12, b 6:7", waits="m, n"),
    ),
    (
        "A newcomer makes way even where nobody is preempted: it has nothing to lose yet.",
        Start(5, {"a": 8, "b": 6}, "ab", Never(), joining={"n": 3}),
        End("a 8:9, b 6:7", waits="n"),
    ),
    (
        "When the newcomers are gone and rows are still missing, one of those who run has to go.",
        Start(5, {"a": 8, "b": 8}, "ab", joining={"n": 3}),
        End("a 8:9", "b by b", waits="b, n", blocks_left=2),
    ),
    (
        "Which of the candidates goes is for the policy to say; it need not be the newest.",
        Start(6, {"a": 8, "b": 7, "c": 7}, "ac", Recompute(lowest_priority), priorities={"b": 5}),
        End("a 8:9, c 7:8", "b by a", waits="b", blocks_left=1),
    ),
    (
        "The senior is no candidate while there is another one, even if the rule would pick it.",
        Start(7, {"a": 11, "b": 8, "c": 7}, "ba", Recompute(most_blocks)),
        End("b 8:9, a 11:12", "c by b", waits="c", blocks_left=1),
    ),
)


# --- in runs of the engine ---


def _stuck_for_a_while() -> None:
    pair = [request(4, 9), request(4, 9, first=1)]
    trial = run(pair, ContinuousBatching(preemption=Never(), admission=Optimistic()), PagedKVCache(5, 4))
    idea = "Nobody may be displaced: b keeps its two blocks, and goes on when a has ended."
    want = [*range(1, 6), *range(10, 14)]
    trial.expect(trial.emitted("b"), want, what="iterations in which b gets a token", idea=idea)


def _joined_in_vain() -> None:
    asked = [request(4, 6), request(8, 1, 1, first=1), request(1, 1, 1, first=2)]
    trial = run(asked, ContinuousBatching(8, 64, first="prefill"), PagedKVCache(3, 4))
    idea = "b gives back what it got in the same plan, as if it had never joined."
    trial.expect([trial.emitted(label) for label in "ab"], [[1, 2, 3, 4, 5, 6], [7]], what="tokens of a, b", idea=idea)


def _somebody_always_gets_on(sizes: list[tuple[int, int, int]], way: PreemptionPolicy, first: str, blocks: int) -> None:
    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        gone, joined = ([each.request_id for each in change] for change in (report.preempted, report.admitted))
        if gone and joined:
            said = f"{', '.join(gone)}; {', '.join(joined)}"
            yield "Nobody is preempted in an iteration in which another joins.", "one or the other", said
        if "a" in gone:
            yield "The oldest of equals is never preempted: so somebody always ends.", "a runs on", "a is preempted"

    asked = [request(p, g, at if i else None, first=i) for i, (p, g, at) in enumerate(sizes)]
    run(asked, ContinuousBatching(4, 32, first=first, preemption=way), PagedKVCache(blocks, 3), watch=watch)
