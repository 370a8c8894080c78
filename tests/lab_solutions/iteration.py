"""Lab iteration."""

from __future__ import annotations

from lab_solutions import Wrong
from minibatch.plan_draft import PlanDraft, least_recently_scheduled

# ---------------------------------------------------------------- iteration.1: who leaves


def _all_together(self, active):
    return list(active) if all(r.is_finished for r in active) else []


def _one_ends_all(self, active):
    return list(active) if any(r.is_finished for r in active) else []


def _only_by_length(self, active):
    return [r for r in active if len(r.generated) == r.max_new_tokens]


def _only_one(self, active):
    return [r for r in active if r.is_finished][:1]


def _taken_out(self, active):
    gone = [r for r in active if r.is_finished]
    for r in gone:
        active.remove(r)
    return gone


def _leaving_by_filter(self, active):
    alive = {r for r in active if r.finish_reason is None}
    return list(filter(lambda r: r not in alive, reversed(active)))


# ---------------------------------------------------------------- iteration.2: kinds of tokens


def _kinds(count):
    """The class with a property that counts so."""
    return type("Chunk", (), {"kinds": property(count)})


def _by_phase(chunk):
    new = chunk.stop - chunk.start
    return (new, 0, 0) if chunk.start < chunk.request.num_prompt else (0, new, 0)


def _whole_chunks(chunk):
    request, start, stop = chunk
    if start < request.high_water:
        return 0, 0, stop - start
    return _by_phase(chunk)


def _samples_is_decode(chunk):
    request, start, stop = chunk
    again = max(min(stop, request.high_water) - start, 0)
    decode = int(stop == request.num_tokens)
    return stop - start - again - decode, decode, again


def _again_only_in_the_prompt(chunk):
    request, start, stop = chunk
    again = max(min(stop, request.high_water, request.num_prompt) - start, 0)
    prefill = max(min(stop, request.num_prompt) - start - again, 0)
    return prefill, stop - start - again - prefill, again


def _less_than_nothing(chunk):
    request, start, stop = chunk
    again = min(stop, request.high_water) - start
    prefill = max(min(stop, request.num_prompt) - start - again, 0)
    return prefill, stop - start - again - prefill, again


def _by_sets(chunk):
    mine = set(range(chunk.start, chunk.stop))
    again = mine & set(range(chunk.request.high_water))
    prefill = mine & set(range(chunk.request.num_prompt)) - again
    return len(prefill), len(mine - again - prefill), len(again)


# ---------------------------------------------------------------- iteration.3: phase order


def _draft(self, active, kv):
    return PlanDraft(active, kv, self.max_num_batched_tokens, self.max_num_seqs, self.admission, self.preemption)


def _batch_after_batch(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    if active:
        draft.run(least_recently_scheduled(active))
    else:
        draft.admit(queue, now)
    return draft.plan()


def _prompts_before_decodes(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    if self.phase_order == "mixed" and (self.first == "decode" or self.preemption.displaces is not None):
        draft.run(least_recently_scheduled(active))
        draft.admit(queue, now)
    else:
        draft.admit(queue, now)
        draft.run(least_recently_scheduled(active))
    return draft.plan()


def _always_decodes_first(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    if self.phase_order == "mixed":
        draft.run(least_recently_scheduled(active))
    draft.admit(queue, now)
    if not draft.chunks:
        draft.run(least_recently_scheduled(active))
    return draft.plan()


def _stalls_while_anybody_waits(self, queue, active, kv, now):
    draft = _draft(self, active, kv)
    if self.phase_order == "prefill-first" and queue:
        draft.admit(queue, now)
        return draft.plan()
    return _in_steps(self, queue, active, kv, now)


def _as_they_came(self, queue, active, kv, now):
    return _in_steps(self, queue, active, kv, now, turns=list)


def _in_steps(self, queue, active, kv, now, turns=least_recently_scheduled):
    """What is to be done, as a list, and then it is done."""
    draft = _draft(self, active, kv)
    decode, join = (lambda: draft.run(turns(active))), (lambda: draft.admit(queue, now))
    steps = {"decode": [decode, join], "prefill": [join, decode]}[self.first]
    if self.preemption.displaces is not None:
        steps = [decode, join]
    if self.phase_order == "prefill-first":
        steps = [join, lambda: draft.chunks or decode()]
    for step in steps:
        step()
    return draft.plan()


def _tried_first(self, queue, active, kv, now):
    """Finds out on a draft that is thrown away whether a prompt can join; asks one decode after the other."""
    draft = _draft(self, active, kv)
    trial = _draft(self, active, kv)
    trial.admit(queue, now)
    if self.phase_order == "prefill-first" and trial.admissions:
        return trial.plan()
    late = self.phase_order == "mixed" and self.first == "prefill" and self.preemption.displaces is None
    if late:
        draft = trial
    for one in sorted(active, key=lambda r: (r.last_scheduled, active.index(r))):
        draft.run([one])
    if not late:
        draft.admit(queue, now)
    return draft.plan()


WRONG = {
    "iteration.1": [
        Wrong("all leave together, as from a static batch", _all_together, "does not wait for the others"),
        Wrong("one end is the end of all", _one_ends_all, "who is alive stays"),
        Wrong("only who has all its tokens has finished", _only_by_length, "whatever the reason"),
        Wrong("one leaves at a time", _only_one, "not only one of them"),
        Wrong("takes them out of the batch itself", _taken_out, "is not to be changed"),
    ],
    "iteration.2": [
        Wrong("the prompt is prefill, however often", _kinds(_by_phase), "though it is one of the prompt"),
        Wrong("all of a chunk is of one kind", _kinds(_whole_chunks), "tokens of several kinds"),
        Wrong("who samples decodes", _kinds(_samples_is_decode), "The last token of a prompt is prefill"),
        Wrong("a generated token is always decode", _kinds(_again_only_in_the_prompt), "not decoded a second time"),
        Wrong("recomputed is negative beyond the mark", _kinds(_less_than_nothing), "not less than none"),
    ],
    "iteration.3": [
        Wrong("joins only when the batch is over", _batch_after_batch, "nobody waits until the others have ended"),
        Wrong("decodes run beside prompts in prefill-first", _prompts_before_decodes, "prompts only"),
        Wrong("decodes always come first", _always_decodes_first, "first='prefill'"),
        Wrong("decodes stall while anybody waits", _stalls_while_anybody_waits, "When no prompt can join"),
        Wrong("decodes in the order they came", _as_they_came, "who went without the last time come first"),
    ],
}
RIGHT = {
    "iteration.1": [_leaving_by_filter],
    "iteration.2": [_kinds(_by_sets)],
    "iteration.3": [_in_steps, _tried_first],
}
