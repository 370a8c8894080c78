"""Lab static."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from lab_solutions import Wrong
from minibatch.plan import Admission, Chunk, Padding, Plan
from minibatch.plan_draft import PlanDraft
from minibatch.policies.admission import Optimistic, ReserveMaximum
from minibatch.policies.preemption import Never

# ---------------------------------------------------------------- static.1: a batch decodes


def _alive(active):
    return tuple(Chunk(r, r.num_computed, r.num_tokens) for r in active if not r.is_finished)


def _no_dead_rows(self, queue, active):
    return Plan(_alive(active), rest="the batch runs")


def _finished_go_on(self, queue, active):
    return Plan(tuple(Chunk(r, r.num_computed, r.num_tokens) for r in active), rest="the batch runs")


def _first_end_ends_all(self, queue, active):
    if any(r.is_finished for r in active):
        return Plan(padding=tuple(Padding(r, 1, dead=True) for r in active), rest="the batch is over")
    return Plan(_alive(active), rest="the batch runs")


def _left_pads_for_the_dead(self, queue, active):
    return Plan(_alive(active), tuple(Padding(r, 1, dead=False) for r in active if r.is_finished), rest="it runs")


def _dead_rows_make_room(self, queue, active):
    dead = [r for r in active if r.is_finished]
    joins = [r for r, _ in zip(queue, dead, strict=False)]
    return Plan(
        (*_alive(active), *(Chunk(r, 0, r.num_tokens) for r in joins)),
        tuple(Padding(r, 1, dead=True) for r in dead[len(joins) :]),
        tuple(Admission(r, r.max_cached_tokens) for r in joins),
    )


def _decode_by_loop(self, queue, active):
    chunks, dead = [], []
    for one in active:
        if one.finish_reason is None:
            chunks.append(Chunk(one, one.num_tokens - 1, one.num_tokens))
        else:
            dead.append(Padding(one, 1, True))
    plan = Plan(chunks=chunks, padding=dead[::-1])
    return replace(plan, rest="it is not over yet") if len(queue) > 0 else plan


# ---------------------------------------------------------------- static.2: forming a batch


def _form(self, queue, kv, now, admission=None, full=None, since=min, width=None):
    """The exercise, with places where it can go wrong."""
    draft = PlanDraft([], kv, math.inf, self.batch_size, admission or ReserveMaximum(), Never())
    draft.admit(queue, now)
    plan = draft.plan()
    if not plan.chunks:
        return plan
    is_full = len(plan.chunks) == self.batch_size
    if full is None:
        is_full = is_full or bool(plan.waiting) or draft.memory.free == 0
    until = since(c.request.arrival_time for c in plan.chunks) + self.max_wait
    if not is_full and now < until:
        return Plan(wake_at=until)
    longest = width(queue) if width else max(c.stop for c in plan.chunks)
    pads = [Padding(c.request, longest - c.stop, False) for c in plan.chunks]
    return replace(plan, padding=tuple(p for p in pads if p.num_tokens))


def _longest_that_waits(self, queue, kv, now):
    return _form(self, queue, kv, now, width=lambda queue: max(r.num_prompt for r in queue))


def _pads_of_nothing(self, queue, kv, now):
    plan = _form(self, queue, kv, now)
    longest = max((c.stop for c in plan.chunks), default=0)
    return replace(plan, padding=tuple(Padding(c.request, longest - c.stop, False) for c in plan.chunks))


def _only_prompts_have_to_fit(self, queue, kv, now):
    return _form(self, queue, kv, now, admission=Optimistic())


def _waits_since_the_newest(self, queue, kv, now):
    return _form(self, queue, kv, now, since=max)


def _waits_with_no_memory_left(self, queue, kv, now):
    return _form(self, queue, kv, now, full="only by number")


class _FormByHand:
    """Without a draft."""

    def _form(self, queue, kv, now):
        members, free, somebody_left = [], kv.num_free, False
        for one in queue:
            need = kv.units_for(one.max_cached_tokens)
            if len(members) == self.batch_size or need > free:
                somebody_left = True
                break
            members.append(one)
            free -= need
        if not members:
            return Plan()
        start = min(one.arrival_time for one in members) + self.max_wait
        may_grow = len(members) < self.batch_size and not somebody_left and free > 0
        return Plan(wake_at=start) if may_grow and start > now else self._rectangle(members)

    def _rectangle(self, members):
        width = max(one.num_prompt for one in members)
        return Plan(
            chunks=tuple(Chunk(one, 0, one.num_prompt) for one in members),
            padding=tuple(Padding(m, width - m.num_prompt, False) for m in members if m.num_prompt != width),
            admissions=tuple(Admission(one, one.max_cached_tokens) for one in members),
        )


# ---------------------------------------------------------------- static.3: accounting


def _tally(step, table, *, useful=lambda m: m.prefill + m.decode > 0, left="left_padding", dead_runs=True, pad_rows=0):
    """The exercise, with places where it can go wrong."""
    for m in step.members:
        row = table[m.request_id]
        for kind in ("prefill", "decode", "recomputed"):
            row[kind] += getattr(m, kind)
        row["useful_rows"] += useful(m)
        row["executed_rows"] += 1
    for pad in step.padding:
        row = table[pad.request_id]
        row["dead_padding" if pad.dead else left] += pad.num_tokens
        row["executed_rows"] += dead_runs if pad.dead else pad_rows


def _tokens_for_rows(step, table):
    _tally(step, table, useful=lambda m: m.prefill + m.decode)


def _left_pads_have_rows(step, table):
    _tally(step, table, pad_rows=1)


def _dead_rows_do_not_run(step, table):
    _tally(step, table, dead_runs=False)


def _computed_again_is_useful(step, table):
    _tally(step, table, useful=lambda m: 1)


def _all_padding_is_dead(step, table):
    _tally(step, table, left="dead_padding")


def _add_by_counters(step, table):
    members, pads = list(step.members), list(step.padding)
    ran = Counter(dict.fromkeys([x.request_id for x in members + pads], 1))
    new = Counter(m.request_id for m in members if m.stop - m.start > m.recomputed)
    dead, left = Counter(), Counter()
    for pad in pads:
        (dead if pad.dead else left)[pad.request_id] += pad.num_tokens
    for name, row in table.items():
        mine = [m for m in members if m.request_id == name]
        more = {kind: sum(getattr(m, kind) for m in mine) for kind in ("prefill", "decode", "recomputed")}
        more |= {"left_padding": left[name], "dead_padding": dead[name]}
        more |= {"useful_rows": new[name], "executed_rows": ran[name]}
        row.update({column: row[column] + more[column] for column in row})


WRONG = {
    "static.1": [
        Wrong("a finished row is left out", _no_dead_rows, "A finished row still goes through the model"),
        Wrong("a finished request is computed on", _finished_go_on, "A finished request gets no more tokens"),
        Wrong("the first end is the end of all", _first_end_ends_all, "not the end of the batch"),
        Wrong("a dead row is left padding", _left_pads_for_the_dead, "marked dead, left pads are for prompts"),
        Wrong("a dead row makes room for who waits", _dead_rows_make_room, "Nobody joins a batch that runs"),
    ],
    "static.2": [
        Wrong("padded to the longest that waits", _longest_that_waits, "padded to its own longest prompt"),
        Wrong("the longest has a pad of 0 tokens", _pads_of_nothing, "a Padding of 0 tokens is none"),
        Wrong("only the prompts have to fit", _only_prompts_have_to_fit, "A batch cannot be stopped"),
        Wrong("the wait begins with the newest", _waits_since_the_newest, "not since now, or the newest"),
        Wrong("waits though nobody could join", _waits_with_no_memory_left, "nobody else can join is full"),
    ],
    "static.3": [
        Wrong("tokens for rows", _tokens_for_rows, "useful_rows counts rows"),
        Wrong("left pads are a row of their own", _left_pads_have_rows, "one row in the iteration, not two"),
        Wrong("a dead row is not executed", _dead_rows_do_not_run, "A dead row was executed"),
        Wrong("computed again is useful", _computed_again_is_useful, "only computes again"),
        Wrong("all padding is dead", _all_padding_is_dead, "of two kinds, and counted apart"),
    ],
}
RIGHT = {"static.1": [_decode_by_loop], "static.2": [_FormByHand], "static.3": [_add_by_counters]}
