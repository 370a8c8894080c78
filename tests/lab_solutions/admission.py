"""Lab admission."""

from __future__ import annotations

import math

from lab_solutions import Wrong

# ---------------------------------------------------------------- admission.1: kv_tokens


def _kv_tokens(self, share=0.9, memory=None, fewest=1):
    """A right one; with other arguments it is wrong in one way."""
    if not 0 < share <= 1:
        raise ValueError("share")
    if not self.gpu.memory:
        raise ValueError("memory unknown")
    memory = share * self.gpu.memory * self.tensor_parallel if memory is None else memory
    tokens = int((memory - self.weight_bytes) // self.kv_bytes_per_token)
    if tokens < fewest:
        raise ValueError("too small")
    return tokens


def _share_of_the_rest(self, share=0.9):
    rest = self.gpu.memory * self.tensor_parallel - self.weight_bytes
    return _kv_tokens(self, share, share * rest + self.weight_bytes)


def _one_gpu(self, share=0.9):
    return _kv_tokens(self, share, share * self.gpu.memory)


def _weights_are_free(self, share=0.9):
    return _kv_tokens(self, share, share * self.gpu.memory * self.tensor_parallel + self.weight_bytes)


def _rounded(self, share=0.9):
    if not 0 < share <= 1 or not self.gpu.memory:
        raise ValueError("share or memory")
    tokens = round((share * self.gpu.memory * self.tensor_parallel - self.weight_bytes) / self.kv_bytes_per_token)
    if tokens < 1:
        raise ValueError("too small")
    return tokens


def _none_is_a_number(self, share=0.9):
    return max(_kv_tokens(self, share, fewest=-math.inf), 0)


def _kv_tokens_each(self, share=0.9):
    """Of one GPU, which has its part of all."""
    parts = self.tensor_parallel
    tokens = 0 if not self.gpu.memory or share > 1 or share <= 0 else self.gpu.memory * share
    tokens = math.floor((tokens - self.weight_bytes / parts) / (self.kv_bytes_per_token / parts))
    if tokens >= 1:
        return tokens
    raise ValueError("nothing fits")


# ---------------------------------------------------------------- admission.2: objection


def _objection(self, request, num_tokens, draft, free=None, keep=None, alone=True):
    """A right one; with other arguments it is wrong in one way."""
    memory = draft.memory
    if (alone and not draft.running) or not memory.kv.grows:
        return ""
    keep = int(self.share * memory.kv.num_units) if keep is None else keep
    left = (memory.free if free is None else free) - memory.need(request, num_tokens)
    return f"only {left} would be left" if left < keep else ""


def _more_than_kept(self, request, num_tokens, draft):
    keep = int(self.share * draft.memory.kv.num_units)
    return _objection(self, request, num_tokens, draft, keep=keep + 1 if keep else 0)


def _before_it_joins(self, request, num_tokens, draft):
    free = draft.memory.free + draft.memory.need(request, num_tokens)
    return _objection(self, request, num_tokens, draft, free=free)


def _also_when_alone(self, request, num_tokens, draft):
    return _objection(self, request, num_tokens, draft, alone=False)


def _free_before_the_plan(self, request, num_tokens, draft):
    return _objection(self, request, num_tokens, draft, free=draft.memory.kv.num_free)


def _all_its_blocks(self, request, num_tokens, draft):
    memory = draft.memory
    if not draft.running or not memory.kv.grows:
        return ""
    left = memory.free - memory.kv.units_for(num_tokens)
    return "not enough" if left < int(self.share * memory.kv.num_units) else ""


def _objection_by_cases(self, request, num_tokens, draft):
    if len(draft.running) == 0:
        return ""
    if draft.memory.kv.grows:
        after = draft.memory.copy()
        if not after.reserve(request, num_tokens):
            return "does not fit at all"
        if after.free < math.floor(self.share * after.kv.num_units):
            return "too little would be left for the others"
    return ""


# ---------------------------------------------------------------- admission.3: Future


class _Future:
    """A right one: a list, gone through iteration by iteration."""

    def __init__(self, requests, left, block_size):
        self.asks = [(request.num_tokens, left(request)) for request in requests]
        self.size = block_size

    def joined_by(self, tokens, left):
        other = type(self)([], None, self.size)
        other.asks = [*self.asks, (tokens, left)]
        return other

    def blocks(self, tokens, iteration):
        return math.ceil((tokens + iteration - 1) / self.size)

    def at(self, iteration):
        return sum(self.blocks(tokens, iteration) for tokens, left in self.asks if left >= iteration)

    @property
    def peak(self):
        return max(self.at(iteration) for iteration in range(1, max(left for _, left in self.asks) + 1))


class _AllAtTheirLongest(_Future):
    @property
    def peak(self):
        return sum(self.blocks(tokens, left) for tokens, left in self.asks)


class _NewestTokenCounts(_Future):
    def blocks(self, tokens, iteration):
        return math.ceil((tokens + iteration) / self.size)


class _RowsOfAllTogether(_Future):
    def at(self, iteration):
        return math.ceil(sum(t + iteration - 1 for t, left in self.asks if left >= iteration) / self.size)


class _GoneInItsLastIteration(_Future):
    def at(self, iteration):
        stay = sum(self.blocks(tokens, iteration) for tokens, left in self.asks if left > iteration)
        return stay + max(
            (self.blocks(tokens, iteration) for tokens, left in self.asks if left == iteration), default=0
        )


class _JoinsForGood(_Future):
    def joined_by(self, tokens, left):
        self.asks.append((tokens, left))
        return self


class _Sweep:
    """From the last end to the first, with only the peak kept beside the requests."""

    def __init__(self, requests, left, block_size):
        self._size = block_size
        self._ends = sorted(((left(r), r.num_tokens) for r in requests), reverse=True)

    @property
    def peak(self):
        most, there = 0, []
        for number, (end, tokens) in enumerate(self._ends):
            there.append(tokens)
            last_of_its_end = number + 1 == len(self._ends) or self._ends[number + 1][0] < end
            if last_of_its_end:
                most = max(most, sum((count + end - 2) // self._size + 1 for count in there))
        return most

    def joined_by(self, tokens, left):
        twin = _Sweep((), None, self._size)
        twin._ends = sorted([*self._ends, (left, tokens)], reverse=True)
        return twin


WRONG = {
    "admission.1": [
        Wrong("a share of what the weights leave", _share_of_the_rest, "not a share of what the weights leave"),
        Wrong("the memory of one GPU", _one_gpu, "put their memory together"),
        Wrong("weights take no memory", _weights_are_free, "the weights are taken first"),
        Wrong("rounded to the nearest", _rounded, "does not fit: round down"),
        Wrong("0 tokens is an answer", _none_is_a_number, "no number is right"),
    ],
    "admission.2": [
        Wrong("more has to be left than is kept", _more_than_kept, "Exactly as many blocks as are kept"),
        Wrong("what is free before it joins counts", _before_it_joins, "not what is free now"),
        Wrong("blocks are kept for nobody", _also_when_alone, "nobody to keep blocks for"),
        Wrong("what was promised in this plan is free", _free_before_the_plan, "promised in this very plan"),
        Wrong("blocks that are shared count", _all_its_blocks, "counts the 2 that are missing"),
    ],
    "admission.3": [
        Wrong("all are at their longest at once", _AllAtTheirLongest, "at the same time"),
        Wrong("the newest token has K/V already", _NewestTokenCounts, "The newest token has no K/V yet"),
        Wrong("rows are added up before they are rounded", _RowsOfAllTogether, "rounded up for each request"),
        Wrong("who ends is gone for another that ends", _GoneInItsLastIteration, "still holds its blocks in it"),
        Wrong("asking what would be makes it so", _JoinsForGood, "changes nothing"),
    ],
}
RIGHT = {
    "admission.1": [_kv_tokens, _kv_tokens_each],
    "admission.2": [_objection, _objection_by_cases],
    "admission.3": [_Future, _Sweep],
}
