"""Lab prefix."""

from __future__ import annotations

from itertools import takewhile

from lab_solutions import Wrong


def _found(self, parent, tokens, salt, right, before=None):
    """What has the hash, if it is ``right``."""
    before = (parent.hash if parent else 0) if before is None else before
    found = self._by_hash.get(self._hash(before, tokens, salt))
    return found if found is not None and right(found) else None


def _hash_decides(self, parent, tokens, salt):
    return _found(self, parent, tokens, salt, lambda found: True)


def _tokens_decide(self, parent, tokens, salt):
    return _found(self, parent, tokens, salt, lambda found: (found.tokens, found.salt) == (tokens, salt))


def _salt_is_in_the_hash(self, parent, tokens, salt):
    return _found(self, parent, tokens, salt, lambda found: found.parent is parent and found.tokens == tokens)


def _parent_by_its_hash(self, parent, tokens, salt):
    def right(found):
        before = [each.hash if each else 0 for each in (found.parent, parent)]
        return (found.tokens, found.salt) == (tokens, salt) and before[0] == before[1]

    return _found(self, parent, tokens, salt, right)


def _hash_of_the_tokens_only(self, parent, tokens, salt):
    def right(found):
        return found.parent is parent and (found.tokens, found.salt) == (tokens, salt)

    return _found(self, parent, tokens, salt, right, before=0)


def _find_by_search(self, parent, tokens, salt):
    for known in self.known():
        if known.parent is parent and (known.tokens, known.salt) == (tokens, salt):
            return known
    return None


def _last(chain):
    return chain[-1] if chain else None


def _longest(self, request, leave=1, parent=_last, holes=False, scored=False, tokens=None):
    """A right one; with other arguments it is wrong in one way."""
    chain = []
    if request.params.prompt_logprobs is not None and not scored:
        return chain
    tokens = request.num_tokens if tokens is None else tokens
    for piece in self._pieces(request, 0, (tokens - leave) // self.unit_size):
        found = self.pool.find(parent(chain), piece, request.request.cache_salt)
        if found is not None:
            chain.append(found)
        elif not holes:
            break
    return chain


def _all_of_it(self, request):
    return _longest(self, request, leave=0)


def _over_the_hole(self, request):
    return _longest(self, request, holes=True)


def _prompt_only(self, request):
    return _longest(self, request, tokens=request.num_prompt)


def _each_from_the_beginning(self, request):
    return _longest(self, request, parent=lambda chain: None)


def _scored_prompts_too(self, request):
    return _longest(self, request, scored=True)


class _Recursive:
    def _find(self, request):
        if request.params.prompt_logprobs is not None:
            return []
        return list(self._from(request, None, 0))

    def _from(self, request, before, start):
        stop = start + self.unit_size
        if stop < request.num_tokens:
            tokens = tuple(request.tokens(start, stop))
            found = self.pool.find(before, tokens, request.request.cache_salt)
            if found is not None:
                yield found
                yield from self._from(request, found, stop)


def _find_by_takewhile(self, request):
    if request.params.prompt_logprobs is not None:
        return []
    everything, size, found = request.tokens(0, request.num_tokens), self.unit_size, [None]

    def known(start):
        found.append(self.pool.find(found[-1], tuple(everything[start : start + size]), request.request.cache_salt))
        return found[-1] is not None

    count = len(list(takewhile(known, range(0, len(everything) - size, size))))
    return found[1 : count + 1]


def _publish(self, request, computed=None, parent=lambda chain, first: _last(chain), lost=None):
    """A right one; with other arguments it is wrong in one way."""
    chain, table = self._chains.setdefault(request, []), self.tables[request]
    first, computed = len(chain), request.num_computed if computed is None else computed
    for index, tokens in enumerate(self._pieces(request, first, computed // self.unit_size), start=first):
        before = parent(chain, first)
        if before is None and chain and lost is None:
            chain.append(None)
        else:
            chain.append(self.pool.remember(table[index], before, tokens, request.request.cache_salt))


def _what_is_known_of_it(self, request):
    _publish(self, request, request.num_tokens)


def _rounded_up(self, request):
    _publish(self, request, request.num_computed + self.unit_size - 1)


def _each_call_anew(self, request):
    _publish(self, request, parent=lambda chain, first: chain[-1] if len(chain) > first else None, lost="a root")


def _root_after_a_collision(self, request):
    _publish(self, request, lost="a root")


def _prompts_only(self, request):
    _publish(self, request, min(request.num_computed, request.num_prompt))


def _from_scratch(self, request):
    """Every time all of it: what is known already comes back as it is."""
    before = None
    for index in range(request.num_computed // self.unit_size):
        start = index * self.unit_size
        tokens = tuple(request.tokens(start, start + self.unit_size))
        before = self.pool.remember(self.units(request)[index], before, tokens, request.request.cache_salt)
        if before is None:
            return


def _try_again_later(self, request):
    """Stops at a block that cannot be found, and tries it again in the next call."""
    chain = self._chains.setdefault(request, [])
    while (len(chain) + 1) * self.unit_size <= request.num_computed:
        [tokens] = self._pieces(request, len(chain), len(chain) + 1)
        parent = chain[-1] if chain else None
        made = self.pool.remember(self.tables[request][len(chain)], parent, tokens, request.request.cache_salt)
        if made is None:
            break
        chain.append(made)


class _NotForgotten:
    def take(self):
        if not self._free:
            self._free.append(self._idle.popitem(last=False)[0])
        return super().take()


class _NewestFirst:
    def take(self):
        if not self._free:
            self._forget(self._by_block[next(reversed(self._idle))])
        return super().take()


class _IdleBeforeEmpty:
    def take(self):
        if self._idle:
            block = next(iter(self._idle))
            self._forget(self._by_block[block])
            self._free.remove(block)
            self._free.appendleft(block)
        return super().take()


class _AllAtOnce:
    def take(self):
        if not self._free:
            for block in list(self._idle):
                self._forget(self._by_block[block])
        return super().take()


class _HalfForgotten:
    def take(self):
        if not self._free:
            block, _ = self._idle.popitem(last=False)
            del self._by_hash[self._by_block[block].hash]
            self._free.append(block)
        return super().take()


def _take_by_hand(self):
    if self._free:
        block = self._free.popleft()
    else:
        block, _ = self._idle.popitem(last=False)
        known = self._by_block.pop(block)
        self._by_hash = {key: value for key, value in self._by_hash.items() if value is not known}
    self.references[block] = 1
    return block


def _release(self, request, blocks=reversed, table=True, reserved=True, room=0):
    """A right one; with other arguments it is wrong in one way."""
    self.pool.drop(blocks(self.tables.get(request, [])))
    if table:
        self.tables.pop(request, None)
    if reserved:
        self.reserved.pop(request, None)
    request.room = room


def _head_first(self, request):
    _release(self, request, blocks=iter)


def _room_is_kept(self, request):
    _release(self, request, room=request.room)


def _table_is_kept(self, request):
    _release(self, request, table=False)


def _still_reserved(self, request):
    _release(self, request, reserved=False)


def _shared_or_not(self, request):
    for block in self.tables.get(request, []):
        self.pool.references[block] = 1
    _release(self, request)


def _block_by_block(self, request):
    table = self.tables.get(request)
    while table:
        self.pool.drop((table.pop(),))
    for book in (self.tables, self.reserved):
        if request in book:
            del book[request]
    request.room = 0


WRONG = {
    "prefix.1": [
        Wrong("what has the same hash is the same", _hash_decides, "A hash only says where to look"),
        Wrong("the same tokens are the same K/V", _tokens_decide, "The block before is compared as well"),
        Wrong("the salt is in the hash, that is enough", _salt_is_in_the_hash, "The salt is compared"),
        Wrong("the block before is compared by its hash", _parent_by_its_hash, "the same hash"),
        Wrong("the hash of a block is that of its tokens", _hash_of_the_tokens_only, "The hash of a block goes on"),
    ],
    "prefix.2": [
        Wrong("a prompt can be found whole", _all_of_it, "At least one token"),
        Wrong("what comes after an unknown block is found as well", _over_the_hole, "The chain ends"),
        Wrong("only the prompt can be found", _prompt_only, "A preempted request comes back"),
        Wrong("a block is found by its tokens, wherever it stands", _each_from_the_beginning, "Every block"),
        Wrong("a prompt that is to be scored needs no logits", _scored_prompts_too, "prompt_logprobs finds nothing"),
    ],
    "prefix.3": [
        Wrong("what is planned can be found", _what_is_known_of_it, "when it has been computed"),
        Wrong("a block can be found before it is full", _rounded_up, "Only full blocks"),
        Wrong("every chunk begins a new chain", _each_call_anew, "goes on where the last one ended"),
        Wrong(
            "after a block that lost its place a new chain begins", _root_after_a_collision, "nor can anything after"
        ),
        Wrong("only prompts are worth remembering", _prompts_only, "Generated tokens are tokens"),
    ],
    "prefix.4": [
        Wrong("the block changes hands, and keeps its name", _NotForgotten, "Forget before you overwrite"),
        Wrong("the one idle for the shortest time goes first", _NewestFirst, "idle longest"),
        Wrong("what can be found goes first", _IdleBeforeEmpty, "Blocks without content go first"),
        Wrong("whoever needs one block empties the cache", _AllAtOnce, "so one is forgotten"),
        Wrong("not found any more, and still counted as content", _HalfForgotten, "has no content"),
    ],
    "prefix.5": [
        Wrong("the head goes first", _head_first, "the tail goes before the head"),
        Wrong("it may go on writing", _room_is_kept, "request.room"),
        Wrong("the table stays", _table_is_kept, "its table is gone"),
        Wrong("what is given back is free", _shared_or_not, "not free"),
        Wrong("the reservation stays", _still_reserved, "With the table goes"),
    ],
}
RIGHT = {
    "prefix.1": [_find_by_search],
    "prefix.2": [_longest, _Recursive, _find_by_takewhile],
    "prefix.3": [_publish, _from_scratch, _try_again_later],
    "prefix.4": [_take_by_hand],
    "prefix.5": [_release, _block_by_block],
}
