"""All exercises, as data. Ids are stable: a new exercise gets a new number, a retired one leaves a gap."""

from __future__ import annotations

from minibatch.labs.exercise import Exercise, Lab

METRICS = Lab(
    "metrics",
    "Latency from events",
    60,
    (
        "say what TTFT, TBT and TPOT are, and in which of them a stall shows",
        "tell what was not measured from what was measured as zero",
        "count as good only what a user would call good",
    ),
    (
        Exercise(
            "metrics.1",
            "Time between tokens",
            "minibatch.metrics:gaps",
            "timeline.token_times is the list of the times at which the request got its tokens, in order; two may be "
            "equal. A request that got them at 5, 6, 7 and 9 s has the gaps 1, 1 and 2. The wait for the first token "
            "is none of them. Return an array of float64, with no element for fewer than two tokens.",
            2,
            "09_measuring",
            "metrics.gaps",
        ),
        Exercise(
            "metrics.2",
            "From first arrival to last finish",
            "minibatch.metrics:makespan",
            "trace.timelines is the list of requests, in any order. Of each you need arrival; scheduled, the start of "
            "the first iteration that computed for it; token_times, a list; and finish. scheduled is None if it never "
            "ran: it was refused, or aborted while it waited. Such a request does not count, although it has an "
            "arrival and a finish. Every other one counts with its arrival, and ends with its finish, aborted or not; "
            "finish is None while it still runs, and then it ends with its last token, or has no end yet. 0.0 is a "
            "time like any other. With arrivals at 2 and 3 s, of which the first has finished at 5 and the second "
            "still runs, with tokens at 7 and 9 s, the answer is 9 - 2 = 7 s. If no request has an end, return "
            "math.nan.",
            3,
            "09_measuring",
            "metrics.makespan",
        ),
        Exercise(
            "metrics.3",
            "Goodput",
            "minibatch.metrics:goodput",
            "requests_table(trace) is a table (pandas) with one row for each submitted request: a column for each "
            "name in OBJECTIVES, in seconds, and finish_reason, which is in COMPLETED if the request was completed. "
            "What was not measured is NaN there, so for a single token both tpot and max_tbt; that breaks no bound. A "
            "latency that equals its bound keeps it, a bound of 0 is a bound, and with no objectives every completed "
            "request is good. makespan(trace) is the time to divide by; ratio(part, whole) is part / whole, and NaN "
            "where there is no whole, as rate is if nothing ran or in no time, and share if there are no requests. "
            "Objectives are checked even then. Four requests with TTFT 1, 2, 8 and 1 s and TPOT 1 s, 4 s, 1 s and "
            "undefined, in 10 s, with ttft=5 and tpot=2: the first and the last are good, {'good': 2, 'rate': 0.2, "
            "'share': 0.5}.",
            4,
            "09_measuring",
            "metrics.goodput",
        ),
    ),
    look="TBT, throughput and the latency picture come from your gaps and makespan. Whose P99 is far from the P50, "
    "and which configuration has the best TBT though nobody would want to wait for it?",
)

STATIC = Lab(
    "static",
    "Static batches and their waste",
    60,
    (
        "form a batch, pad it, and keep it together to its end",
        "count the rows that run for nobody",
    ),
    (
        Exercise(
            "static.1",
            "A batch decodes until all have ended",
            "minibatch.static_batching:StaticBatching._decode",
            "active are the members of the batch, one of them at least alive; request.is_finished tells. Return a "
            "Plan with a Chunk(request, start, stop) for each one that is alive: it computes the one token that has "
            "no K/V yet, from num_computed to num_tokens. Each finished member has a dead row instead, "
            "Padding(request, 1, dead=True) in the plan's padding; a place that nobody took has no row. Nobody joins "
            "from the queue; if somebody waits there (len(queue) > 0), the plan's rest is a text that says why, in "
            "your words, else the empty string. chunks and padding are tuples; lists will do. With a finished and b "
            "at 5 tokens, 4 of them computed, that is Chunk(b, 4, 5) and Padding(a, 1, dead=True). Planning changes "
            "nothing: leave active, queue and requests as they are.",
            3,
            "01_static_batches",
            "static.decode",
        ),
        Exercise(
            "static.2",
            "Forming a rectangle",
            "minibatch.static_batching:StaticBatching._form",
            "Nobody is active, and you form a batch. PlanDraft([], kv, math.inf, self.batch_size, ReserveMaximum(), "
            "Never()) is a plan in the making: its admit(queue, now) takes requests in the queue's order, with rows "
            "for all that they may become, up to the first that finds no place or no memory; its plan() is a Plan "
            "with their chunks (whole prompts) and admissions, and with waiting, which names who was asked in vain; "
            "its memory.free then counts the slots or blocks that are left. If there are no chunks, return that plan "
            "as it is. The batch is full if it has self.batch_size members, if somebody was asked in vain, or if no "
            "memory is left. If it is not full and now is before the earliest arrival_time of its members + "
            "self.max_wait, return a Plan without chunks whose wake_at is that time (waiting may say why, with a "
            "Waiting(request, text)). Otherwise return the plan (replace(plan, ...) makes a copy with changes) with a "
            "Padding(request, n, dead=False) for each prompt that is n tokens shorter than the longest of this batch, "
            "but none for n = 0 (a tuple of them; a list will do): prompts of 2, 5 and 3 tokens get 3, no and 2 left "
            "pads. Planning changes nothing: call admit only on the draft.",
            5,
            "01_static_batches",
            "static.form",
        ),
        Exercise(
            "static.3",
            "Useful rows and wasted ones",
            "minibatch.accounting:_add",
            "table has for each request_id a dict with the counts prefill, decode, recomputed, left_padding, "
            "dead_padding, useful_rows and executed_rows; add this iteration to them, in place, and leave those of "
            "others alone. step.members are the requests that computed: each has a request_id and its tokens by kind, "
            "as prefill, decode and recomputed. step.padding has entries with request_id, num_tokens and dead: tokens "
            "of dead_padding if dead, else of left_padding. A request has one row in every iteration in which it is a "
            "member or has padding (left pads stand in the row of their prompt, a dead row is one too): executed_rows "
            "counts these rows, whatever is in them. useful_rows counts those in which it computed at least one token "
            "for the first time, prefill or decode. A prompt of 2 tokens with 3 left pads adds 2 to prefill, 3 to "
            "left_padding, and 1 each to useful_rows and executed_rows.",
            4,
            "01_static_batches",
            "static.tally",
        ),
    ),
    shows="static",
    look="In the membership picture of static every batch is a rectangle: the hatched rows have finished and run "
    "on. Compare the useful share of the table with that of continuous.",
)

ITERATION = Lab(
    "iteration",
    "One iteration at a time",
    60,
    (
        "say what continuous batching is, and what it is not",
        "name what an iteration computes for a request",
    ),
    (
        Exercise(
            "iteration.1",
            "Who leaves",
            "minibatch.plan_draft:IterationLevel.leaving",
            "The engine asks this after every iteration in which somebody has ended. active is the list of those who "
            "have place and memory; request.is_finished tells who has ended, for whatever reason. Return a new list "
            "of those who leave, each of them once; an empty list if nobody does. The engine does the rest: do not "
            "change active itself. Of a (alive), b (finished) and c (alive), [b] leaves, and a and c stay.",
            2,
            "02_iteration_level_scheduling",
            "iteration.leaving",
        ),
        Exercise(
            "iteration.2",
            "Prefill, decode or again",
            "minibatch.plan:Chunk.kinds",
            "A chunk, which has request, start and stop, computes the tokens start:stop (start is one of them, stop "
            "is not) of its request. Those below request.high_water had been computed before, and their K/V was lost: "
            "they are recomputed, whether they belong to the prompt or were generated. Of the others, those below "
            "request.num_prompt are prefill (the last of the prompt too, from which a token is sampled), and those "
            "from there on are decode. Return how many the chunk has of each, three numbers that are never negative "
            "and add up to stop - start. A chunk may begin at, below or beyond the mark: a prefix cache makes it "
            "begin beyond. With a prompt of 4, 6 generated tokens and a mark of 9, chunk 0:10 is (0, 1, 9).",
            4,
            "02_iteration_level_scheduling",
            "iteration.kinds",
        ),
        Exercise(
            "iteration.3",
            "Who is asked first",
            "minibatch.continuous_batching:ContinuousBatching.plan",
            "PlanDraft(active, kv, self.max_num_batched_tokens, self.max_num_seqs, self.admission, self.preemption) "
            "is a plan in the making, which keeps to all limits: run(requests) gives active requests their next token "
            "while the budget lasts, admit(queue, now) lets waiting ones join with their whole prompts up to the "
            "first that does not fit, chunks is empty as long as nothing is planned, and plan() is the result. What "
            'you decide is who is asked first, and takes from the budget first. With self.phase_order "mixed" both '
            'are asked in every iteration: first those who run if self.first is "decode", first those who wait if it '
            'is "prefill"; but if self.preemption.displaces is not None (newcomers may displace others), those who '
            'run in any case: asked second, they might push the newcomer out again. With "prefill-first", whatever '
            "self.first says, those who wait are asked first, and those who run only if nobody joined. If the budget "
            "is too small for all who run, they take turns: run them in the order of "
            "least_recently_scheduled(active). With a budget of 4, two who run and a prompt of 3 that waits, the "
            'plans are: two decodes ("decode"), the prompt and one decode ("prefill"), the prompt alone '
            '("prefill-first"). Planning changes nothing: leave active, queue and requests as they are.',
            5,
            "02_iteration_level_scheduling",
            "iteration.plan",
        ),
    ),
    shows="continuous",
    look="In the membership picture of continuous a row ends and another begins in the next column. How many "
    "iterations does static need for the same tokens?",
)

ADMISSION = Lab(
    "admission",
    "Memory decides who joins",
    75,
    (
        "compute how many tokens of K/V fit beside the weights",
        "say what a watermark and a forecast promise",
    ),
    (
        Exercise(
            "admission.1",
            "Tokens that fit a GPU",
            "minibatch.cost_model:CostModel.kv_tokens",
            "The share is one of the memory of all GPUs together, weights included: there are self.tensor_parallel "
            "GPUs with self.gpu.memory bytes each. self.weight_bytes and self.kv_bytes_per_token are the sums over "
            "all GPUs. Return an int. Raise ValueError not only if no token fits, but also for a share that is not "
            "above 0 and at most 1, and if self.gpu.memory is 0, which means that nobody knows it. Example: a GPU of "
            "192 bytes, weights of 56, 8 bytes a token and a share of 0.75 leave 0.75 * 192 - 56 = 88 bytes, so 11 "
            "tokens.",
            3,
            "03_memory_decides_admission",
            "admission.kv_tokens",
        ),
        Exercise(
            "admission.2",
            "A watermark",
            "minibatch.policies.admission:Watermark.objection",
            "Return the empty string if the request may join, and else a reason in your own words. draft.memory is "
            "the cache as it will be if all that this plan has promised so far is done: draft.memory.free blocks are "
            "free, and draft.memory.need(request, num_tokens) of them would go to this request (fewer, if others have "
            "its first blocks already). draft.running are the requests that run, those that join in this plan "
            "included. The request may join if at least self.share of the pool (draft.memory.kv.num_units blocks), "
            "rounded down to whole blocks, is still free afterwards; also if nobody runs, and also if "
            "draft.memory.kv.grows is False, for then nobody needs another slot. Whether its own blocks are there at "
            "all is asked elsewhere: if they are not, either answer is right. The draft is only looked at: you are "
            "asked several times. Example: 10 blocks, 6 of them free, a share of 0.25: 2 are kept, so a request that "
            "needs 4 may join, and one that needs 5 has to wait.",
            4,
            "03_memory_decides_admission",
            "admission.watermark",
        ),
        Exercise(
            "admission.3",
            "A forecast of the peak",
            "minibatch.policies.admission:Future",
            "Others use only Future(...), peak and joined_by; what you keep in it is up to you. Of each request you "
            "need request.num_tokens, the tokens that it has now, and left(request), for how many iterations it still "
            "runs (at least 1; this one is the first). Its newest token has no K/V yet: in the first iteration it "
            "holds K/V of num_tokens tokens, in each later one of one more, until its last; after that it holds "
            "nothing. A request has blocks of its own, each of block_size tokens. peak is the most blocks that all of "
            "them hold together in any iteration (there is at least one request). joined_by returns another Future, "
            "with a request more that has so many tokens and iterations left, and leaves this one as it is. The list "
            "requests is the scheduler's, who will change it: do not keep it. Example: in blocks of 4, a request with "
            "4 tokens and 9 iterations left and one with 4 and 5 hold 2 + 2 blocks in iteration 5, and the first "
            "alone 3 in iteration 9; the peak is 4.",
            6,
            "03_memory_decides_admission",
            "admission.forecast",
        ),
    ),
    run={"admission": "forecast", "block_size": 4, "load": 30.0},
    look="Your forecast lets nobody join who would have to be preempted later: paged and chunked show no "
    "preemption. What does that cost in TTFT? (Set load or admission in minibatch compare.)",
)

PAGING = Lab(
    "paging",
    "Blocks, tables, and copies",
    90,
    (
        "keep a pool of blocks that several tables may point to",
        "translate a token's place in its request into a row of the cache",
        "let a table grow, and copy a shared block before writing to it",
    ),
    (
        Exercise(
            "paging.1",
            "A pool of counted blocks",
            "minibatch.paged_kv_cache:BlockPool",
            "Blocks are the numbers 0 to num_blocks - 1. Two attributes are read by others and have to be kept: "
            "references, a list with the number of tables that point to each block, and num_shares, the sum of "
            "(references - 1) over the blocks that have any: a block in three tables counts 2. How you keep the free "
            "blocks is up to you, but the one that has been free longest is taken next (at first: 0, 1, 2, ...), and "
            "of blocks that become free in one drop() the first named is taken first. take() is called only when "
            "there is a free block, share() and drop() only for blocks that somebody has; what drop() is given may be "
            "an iterator.",
            5,
            "04_paging",
            "paging.pool",
        ),
        Exercise(
            "paging.2",
            "Which row is a token in",
            "minibatch.kv_cache:KVCache.rows",
            "self.units(request) are the blocks (or the one slot) of the request in token order, self.unit_size is "
            "how many rows each has. With blocks of 4 and the table [7, 2], token 5 is in row 2 * 4 + 1 = 9. Return "
            "one row number for each of the tokens start:stop, as a numpy array of int64; an empty one for start == "
            "stop. It works for slots in the same way.",
            3,
            "04_paging",
            "paging.rows",
        ),
        Exercise(
            "paging.3",
            "A table that grows",
            "minibatch.paged_kv_cache:PagedKVCache.reserve",
            "self.tables[request] is the block table of a request, a list of block numbers in token order; who holds "
            "nothing has no entry. self.need(request, num_tokens) says how long the table has to be; blocks that are "
            "missing come from self.pool.take() and go to its end, and a table that is longer stays as it is. The "
            "block that is written next may be shared with others: self._copy_on_write(request, table) puts another "
            "one in its place, in that very list, if that is so, and returns the rows to be copied, or None; reserve "
            "returns the same. Note in self.reserved[request] the largest num_tokens since the request holds "
            "anything, and in request.room how many rows the blocks of its table have. Other methods see to it that "
            "the blocks are there, and forget a request that gives them back. Example: in blocks of 4, reserving 5 "
            "tokens and then 9 makes a table of 2 and then 3 blocks, and room 8 and then 12.",
            4,
            "04_paging",
            "paging.reserve",
        ),
        Exercise(
            "paging.4",
            "Copy on write",
            "minibatch.paged_kv_cache:PagedKVCache._copy_on_write",
            "table is the block table of the request, a list of block numbers, and has to be changed in place. "
            "self.shared_block(request) is the index in it of the block that the request writes next, or None if it "
            "need not be copied, and then None is returned. Else the request gets a free block (self.pool.take()) in "
            "its place, and gives back its reference to the shared one (self.pool.drop, which takes a list). Return "
            "RowCopy(source, target), two integer arrays that say which rows have to be copied where: the rows of "
            "block b begin with b * self.unit_size, and what is copied are the first request.num_computed % "
            "self.unit_size of them, for only these have been computed. Example: blocks of 4, 6 computed tokens, the "
            "table [0, 1] and block 2 taken: the table becomes [0, 2], and rows 4 and 5 are copied to 8 and 9.",
            5,
            "04_paging",
            "paging.copy_on_write",
        ),
    ),
    look="In the KV picture of paged hardly anything is reserved, and fragmentation is at most a part of a block a "
    "request; in that of continuous whole slots are held.",
)

PREFIX = Lab(
    "prefix",
    "Finding a prefix again",
    90,
    (
        "chain blocks so that equal tokens after different prefixes are told apart",
        "publish only what is computed, and forget before overwriting",
    ),
    (
        Exercise(
            "prefix.1",
            "The same tokens after the same prefix",
            "minibatch.prefix_cache:PrefixCache.find",
            "A known block is a CachedBlock(block, hash, parent, tokens, salt); its parent is the CachedBlock before "
            "it in the chain, None for the first block of a prompt. self._by_hash maps a hash to the CachedBlock that "
            "has it, and self._hash(parent_hash, tokens, salt) is the hash of a block: parent_hash is that of the "
            "block before it, 0 if there is none. Return the CachedBlock that has these tokens, this salt and this "
            "very CachedBlock as parent, or None. The hash only says where to look: the checks use bad hash functions "
            "too (always 7), with which less can be known, but nothing wrong may be found. None and '' are two salts. "
            "Looking up changes nothing. If 1, 2 is known at the beginning and 3, 4 after it, then find(None, (3, 4), "
            "None) is None: at the beginning of a prompt 3, 4 has other K/V.",
            3,
            "05_prefix_cache",
            "prefix.find",
        ),
        Exercise(
            "prefix.2",
            "The longest known prefix",
            "minibatch.prefix_cache:PrefixCachedKVCache._find",
            "Look up the request's full blocks of self.unit_size tokens, from the first on, with "
            "self.pool.find(parent, tokens, salt): parent is the CachedBlock found just before (None for the first), "
            "tokens a tuple, salt request.request.cache_salt. Return what was found up to the first None, as a list "
            "of CachedBlocks. All tokens of a request count, prompt and generated, since a preempted one comes back "
            "with both: there are request.num_tokens, request.tokens(start, stop) is a list of some, and "
            "self._pieces(request, first, last) yields the token tuples of its blocks first:last. At least one token "
            "must be left to compute: of 12 tokens in blocks of 4 at most two blocks are found, of 13 three. With "
            "request.params.prompt_logprobs (anything but None) nothing is found. Planning calls this, so it changes "
            "nothing.",
            4,
            "05_prefix_cache",
            "prefix.longest",
        ),
        Exercise(
            "prefix.3",
            "What may be found from now on",
            "minibatch.prefix_cache:PrefixCachedKVCache._publish",
            "Called after each iteration that has computed tokens of the request: the first request.num_computed of "
            "its tokens have K/V now, the others not yet. self.tables[request] lists its blocks (of self.unit_size "
            "tokens) in token order, and self._pieces(request, first, last) yields the token tuples of its blocks "
            "first:last. For every full, computed block, in order, call self.pool.remember(block, parent, tokens, "
            "salt), the salt being request.request.cache_salt. It returns the CachedBlock that the next block has as "
            "parent (None is the parent of the first block only); this can be another one that holds the same "
            "already. Or it returns None: the block cannot be found, and then no later block of the request may be "
            "remembered, neither after an earlier block nor as the first of a chain (to ask again for the same block "
            "in a later call is allowed, and not needed). For your notes between two calls there is self._chains, "
            "from requests to lists with one entry for each leading block: what a request has found in the cache is "
            "already in its list, and others have no list yet. With blocks of 4 and 6 of 10 tokens computed block 0 "
            "can be found; when all 10 are computed block 1 too, after block 0.",
            5,
            "05_prefix_cache",
            "prefix.publish",
        ),
        Exercise(
            "prefix.4",
            "Forget before you overwrite",
            "minibatch.prefix_cache:PrefixCache.take",
            "self._free is a deque of the free blocks without content, and super().take() takes the one on its left "
            "(there has to be one) and gives it one reference. self._idle has the free blocks that can still be found "
            "as its keys, the one idle longest first; self._by_block maps a block to its CachedBlock. "
            "self._forget(known) removes a CachedBlock from all tables: nobody can find it any more, and if its block "
            "is idle it becomes the last one of self._free. Blocks without content are taken first. If there are "
            "none, the block idle longest is taken, and nobody may find its old tokens from then on; all others can "
            "still be found. take() is called only when len(self) > 0. With block 0 idle and block 1 free without "
            "content, 1 is taken first, then 0.",
            2,
            "05_prefix_cache",
            "prefix.take",
        ),
        Exercise(
            "prefix.5",
            "The tail first",
            "minibatch.paged_kv_cache:PagedKVCache.release",
            "self.tables maps a request to the list of its blocks in token order, and self.reserved to the number "
            "of tokens that they were taken for; a request that holds nothing has no entry in either, and afterwards "
            "this one has none. self.pool.drop(blocks) takes one reference away from each of these, one after the "
            "other, and a block that has none left is free; other tables may go on pointing to it. In a prefix cache "
            "such a block can still be found, until blocks are needed: then the one that was dropped first is evicted "
            "first. So drop them in the order in which as many leading tokens as possible can still be found when "
            "only some are evicted. request.room is how many leading tokens the request may write without asking for "
            "memory: 0 from now on; nothing else of the request changes. If it holds nothing this does nothing.",
            3,
            "05_prefix_cache",
            "prefix.release",
        ),
    ),
    run={"prefix_cache": True, "block_size": 4, "load": 30.0},
    look="Found tokens are the light blue beginnings in the membership picture; a request that was preempted finds "
    "its own blocks again.",
)

RAGGED = Lab(
    "ragged",
    "One ragged sequence",
    75,
    (
        "pack requests of different lengths into one sequence",
        "align the mask of a later chunk",
    ),
    (
        Exercise(
            "ragged.1",
            "Packing",
            "minibatch.models.packing:pack",
            "Return Packed(tokens, positions, slots, spans, logits, num_logits). The sequence has first the chunks of "
            "one token, the one with the fewest tokens up to its stop first, then the longer chunks in the order of "
            "plan.chunks, then plan.padding. A chunk (request, start, stop) brings request.tokens(start, stop), at "
            "the positions start:stop; a Padding brings num_tokens times token 0 at position 0. slots has for each "
            "token the row that its K/V is written to: a token of a chunk has its own row, kv.rows(request, start, "
            "stop), padding has scratch_row. spans has a Span(first, length, rows) for each chunk, in the order of "
            "the sequence: the place of its first token, the number of its tokens, and the rows that it reads, those "
            "of all tokens of the request up to stop, earlier chunks included. logits has places in the sequence, in "
            "the order of plan.chunks: of each chunk its last chunk.num_logits tokens (often one; none if it does not "
            "reach the newest token), and after all of them one place for each Padding that is dead, its last token. "
            "num_logits is how many come before those of the dead. For a plan of a prompt of 3 and then the token at "
            "position 8 of another request the positions are 8, 0, 1, 2, and logits is [3, 0].",
            6,
            "13_inside_the_executor",
            "ragged.pack",
        ),
        Exercise(
            "ragged.2",
            "The mask of a chunk",
            "minibatch.models.packing:visible",
            "All requests of the batch have the same number of queries, the tokens of their chunks: in a request with "
            "n tokens so far they are its last ones, n - queries:n, and the keys are its tokens 0:n. A query sees its "
            "own key and those before it, only the last window of these if there is a window (window=1: itself "
            "alone). The batch has as many columns as its longest request has keys; in the rows of a shorter request "
            "the columns after its keys are padding, which nobody sees. Return an array of truth values [batch, "
            "queries, keys]: for lengths [5], 2 queries and window 3 query 0 (token 3) sees keys 1, 2, 3 and query 1 "
            "keys 2, 3, 4. window is None or at least 1. Do not change lengths.",
            4,
            "13_inside_the_executor",
            "ragged.visible",
        ),
    ),
    look="The toy behind this run sees the sequence and masks that your code makes: a token that is read or "
    "written in the wrong place would change the answers in the last lines.",
)

CHUNKED = Lab(
    "chunked",
    "A token budget",
    75,
    (
        "split a budget between decodes and prompts",
        "say who waits for whom with and without chunks",
        "let requests take turns where the budget is too small for all",
    ),
    (
        Exercise(
            "chunked.1",
            "How much of it now",
            "minibatch.plan_draft:PlanDraft._size",
            "A draft is one iteration in the making. self.budget is what is left of its tokens: others may have taken "
            "theirs already. pending is how many tokens a request still has to compute. self.max_chunk is the most "
            "that one request may have in one iteration (math.inf: no such limit). If self.partial is true, a request "
            "may compute a part of what it has pending, else it is all or nothing. Return the largest number that all "
            "this allows, 0 if there is none; change nothing: the caller takes the tokens off the budget. With 10 "
            "pending, 5 left and a max_chunk of 8 the answer is 5 if partial, else 0; with 10 pending, all 64 left "
            "and a max_chunk of 8 it is 8 if partial, else 0 again.",
            3,
            "07_chunked_prefill",
            "chunked.size",
        ),
        Exercise(
            "chunked.2",
            "Decodes first, then what the budget has left",
            "minibatch.chunked_prefill:ChunkedPrefill.plan",
            "Plan the next iteration of at most self.token_budget tokens. Three groups are asked, one after the "
            "other: first whoever decodes (request.is_decoding), in the order that least_recently_scheduled(requests) "
            "gives; then the prompts that were begun before and are not done (all others in active: those that are "
            "computed again after a preemption, too), in the order of active; then those that wait in the queue, "
            "whenever there is something left for them. PlanDraft(active, kv, token_budget, max_num_seqs, admission, "
            "preemption, partial, max_chunk) keeps the books of budget, places and memory: draft.run(requests) gives "
            "each as many tokens as it may have, draft.admit(queue, now) lets waiting requests join, draft.plan() is "
            "the result (it is the package's, whether or not you have done chunked.1). Limits and policies are the "
            "fields of self; partial is True, because prompts may be cut; where self.max_chunk is None the draft "
            "wants math.inf. Change neither active nor anything else.",
            5,
            "07_chunked_prefill",
            "chunked.plan",
        ),
        Exercise(
            "chunked.3",
            "Taking turns",
            "minibatch.plan_draft:least_recently_scheduled",
            "request.last_scheduled is the index of the last iteration that computed tokens of the request, -1 if "
            "none has. Return a new list, the longest unserved first; those with the same last iteration stay in the "
            "order in which they were given. requests can be any iterable; if it is a list, leave it as it is. With "
            "a, b, c last scheduled in 4, 3, 4 the result is b, a, c. Schedulers call this for the requests that "
            "decode and serve as many from the front as the budget allows.",
            2,
            "07_chunked_prefill",
            "chunked.turns",
        ),
    ),
    run={"workload": "mixed", "token_budget": 64},
    shows="chunked",
    look="In the token budget picture paged has tall columns, the prompts; chunked cuts them to 64. Compare the "
    "P99 of TBT, and of TTFT.",
)

PREEMPTION = Lab(
    "preemption",
    "Giving way",
    90,
    (
        "say why somebody must be preempted, and who",
        "preempt by recompute without losing a token",
        "see why equals must not displace each other",
    ),
    (
        Exercise(
            "preemption.1",
            "Who outranks whom",
            "minibatch.policies.preemption:PreemptionPolicy.outranked",
            "self.displaces is None, or a function that gives each request a number, such as its priority: the lower, "
            "the more urgent. Return a new list (the plan takes victims out of it) of those who run and have a "
            "strictly greater number than the one that waits, in the order in which they are given; if displaces is "
            "None, nobody. Which of them go, and whether one is enough, is decided elsewhere. Equal numbers never "
            "displace each other, whoever came first: else the victim would come back and do the same. By priority, a "
            "waiting request of priority 1 outranks two of four that run with 0, 1, 2 and 5: the last two.",
            3,
            "08_policies",
            "preemption.outranked",
        ),
        Exercise(
            "preemption.2",
            "Preempted, and back in the queue",
            "minibatch.lifecycle:Lifecycle.preempt",
            "preemption.request is the victim, preemption.by the request that it gives way to, and now the time. The "
            "victim leaves self.active (change this very list: the engine holds it too), gives back its memory "
            "(self.kv.release), and with the status Status.WAITING it is put back into the queue (self.queue.add), "
            "which knows its old place: it does not arrive again. Without preemption.swap none of its tokens counts "
            "as computed any more (num_computed). With swap num_computed stays; self.store.swap_out(victim, rows) "
            "copies the rows of the computed tokens, which self.kv.rows(victim, 0, num_computed) names while it still "
            "holds them, and the dict self.kv.host gets their number, by victim. In victim.timeline, num_preemptions "
            "counts this one, num_swapped adds up the tokens of every swap, and the last of runs, a list of [start, "
            "end], ends now. To the list self.changes.preempted a Preempted(request_id, by, num_tokens, swapped) is "
            "added, with the labels of both and the number of tokens that were computed until now. All else of the "
            "victim stays, above all what it has generated, and high_water, how far it was ever computed. What to do "
            "if the queue raises an error is not your concern.",
            5,
            "08_policies",
            "preemption.preempt",
        ),
        Exercise(
            "preemption.3",
            "Making room",
            "minibatch.plan_draft:PlanDraft._make_room",
            "Called while a plan is made, for a running request that needs rows for its first num_tokens tokens. "
            "self.memory.reserve(request, num_tokens) promises them and returns True; if they are not there it "
            "returns False and changes nothing, and then somebody is displaced, one after the other, until they are "
            "there. Those who join in this very plan go first, whatever the policy says, the last one to join before "
            "the others: they are the keys of self.admissions, in the order in which they joined. When there is none "
            "left, self._choose(self._candidates(), self.memory) names the victim; it may be the request itself, and "
            "None means that nobody may go. self._displace(victim, request, why) takes all that the victim has out of "
            "the plan: rows, a chunk that was planned, its tokens of the budget; why is a text for people, such as "
            "'needs its blocks'. Return True once the rows are promised. Return False at once if the request itself "
            "was displaced, or if nobody may go: then it keeps what it holds, and a Waiting(request, reason) is "
            "appended to self.waiting (self.memory.shortage(request, num_tokens) says what is missing). Example: of "
            "four blocks two requests hold two each, all full, and the older one needs a third: the newer one is "
            "displaced, and one block is left over.",
            6,
            "08_policies",
            "preemption.make_room",
        ),
    ),
    run={"preemption": "priority", "priorities": 3, "block_size": 4, "load": 40.0},
    look="Dashed lines in the membership picture are waits after a preemption, pink hatched bars what is computed "
    "again. Are they the less urgent ones? See TTFT by priority.",
)

PRIORITY = Lab(
    "priority",
    "Who is next",
    45,
    (
        "age priorities with a key that never changes",
        "let small requests past a large one without starving it",
    ),
    (
        Exercise(
            "priority.1",
            "Priority with ageing",
            "minibatch.policies.queueing:Priority.key",
            "The queue keeps the waiting requests sorted by this key, the smallest first, and of equal keys whoever "
            "came first. It asks for a key once, when a request begins to wait, and never sorts again: so the key may "
            "not depend on the time now, on who else waits, or on how often it is asked for. request.priority is a "
            "whole number (lower is more urgent), request.arrival_time is in seconds, self.ageing is how many seconds "
            "of waiting are worth one level; parts of a level count. With ageing math.inf only priority counts. With "
            "10 s a level, priority 1 since 0 s goes before priority 0 since 15 s, and behind priority 0 since 5 s. "
            "Any numbers that sort like this are right.",
            2,
            "08_policies",
            "priority.key",
        ),
        Exercise(
            "priority.2",
            "Overtaking, and patience",
            "minibatch.policies.queueing:FCFS.walk",
            "Yield the waiting requests (iterating over self gives them in the order of their arrival), one after the "
            "other, for the caller to ask. The caller admits a request, or not, before it comes back for the next "
            "one: after a yield, request in draft.admissions says whether the one just yielded has joined. The walk "
            "ends for good after a request that has not joined and has waited longer than self.patience seconds "
            "(exactly patience is not longer); now and request.arrival_time are in seconds. Such a request is asked "
            "itself, and whoever has joined stops nobody, however long it waited. The caller counts lookahead and "
            "leaves the walk when it is used up, so you need not. Change nothing.",
            4,
            "08_policies",
            "priority.walk",
        ),
    ),
    run={"order": "priority", "priorities": 3, "load": 30.0},
    look="TTFT by priority: where the batch has room for all, priority decides nothing. Where do the urgent ones "
    "gain most, and who pays?",
)

FAIRNESS = Lab(
    "fairness",
    "A fair share for every client",
    90,
    (
        "share service by client and not by request",
        "charge what was served, once",
        "lift a client that was idle",
    ),
    (
        Exercise(
            "fairness.1",
            "A turn for each client",
            "minibatch.policies.queueing:RoundRobin",
            "The base class keeps a queue for each client and asks yours for a number: next is a request of the "
            "client with the lowest standing(client); of equals, the one whose first waiting request came first. Let "
            "the number be the turn (1, 2, 3, ... counted over all clients) in which the client was last served, 0 if "
            "it never was; a client keeps it while it has nothing to ask. take(request) is called when a request of "
            "request.client is admitted: that is a turn, unless the request comes back from a preemption, for then it "
            "has been active before, and request.timeline.runs is not empty. A plan is made before anybody is "
            "admitted, perhaps in vain, so it changes nothing of yours; and yet those who join in one plan count each "
            "other: after(standing, request, draft) returns what the standing of its client, up to now standing, "
            "would be with the request admitted, the last one in draft.admissions (a dict, in the order of joining); "
            "of one that comes back from a preemption it stays standing. note(request) is a text for people. __init__ "
            "and take have to call those of the base class. Example: with 4 places free and 4 requests of X before 2 "
            "of Y, there join X, Y, X, Y.",
            4,
            "08_policies",
            "fairness.round_robin",
        ),
        Exercise(
            "fairness.2",
            "What a request has cost",
            "minibatch.policies.queueing:Fair.charge",
            "A prompt token costs self.input_weight, a generated one self.output_weight; request.generated is the "
            "list of what it has generated so far. The whole prompt, request.num_prompt tokens, is charged from the "
            "admission on, though it may be computed piece by piece; but its first request.num_cached tokens, which a "
            "prefix cache had, are free. Only if request.finish_reason is 'abort', of the prompt no more is charged "
            "than was computed: request.high_water is how many leading tokens, of prompt and answer, ever were. It "
            "may be less than num_cached, but no charge is below 0. A preemption costs nothing more and gives nothing "
            "back: it changes num_computed, but neither high_water nor num_cached. The weight of the client "
            "(self.weights) has no part in this. Example: with the weights 1 and 2, a prompt of 10 tokens, of which 8 "
            "were cached, and 3 generated tokens cost 2 + 6 = 8.",
            3,
            "08_policies",
            "fairness.charge",
        ),
        Exercise(
            "fairness.3",
            "No credit for idleness",
            "minibatch.policies.queueing:Fair.add",
            "The engine calls add(request) when a request arrives, and again when it comes back from a preemption; in "
            "both cases it waits from then on: super().add(request). A client was idle if no request of it waits "
            "(iterate over self for those who wait, or use self._queues, a dict by client), even if one is running, "
            "unless this request itself has only been preempted: then it is in self._served[client], the requests "
            "that were admitted and have not ended (a client may be missing there). If self.lift is set, a client "
            "that was idle is lifted before its request is among those who wait: its standing becomes at least "
            "self._lowest(), the lowest standing of the clients that wait (if none does, that of the one that waited "
            "last). A lift never lowers. standing(client) is counter(client) divided by the weight, "
            "self.weights.get(client, 1.0); the counter is self.settled[client] (0 if missing) plus what its requests "
            "in self._served have cost so far, and what you can raise is settled. Example: X waits and has a standing "
            "of 50; Y is idle, with a counter of 20 and the weight 2, so its standing is 10; a request of Y arrives, "
            "and the counter of Y becomes 100.",
            5,
            "08_policies",
            "fairness.lift",
        ),
    ),
    run={"order": "fair", "clients": 3, "num_requests": 24, "load": 30.0},
    look="TTFT by client, with the number of requests in brackets: c0 sends most. Whose wait is longest under fcfs "
    "(minibatch compare --clients 3), and whose under your order?",
)

COST = Lab(
    "cost",
    "How long an iteration takes",
    75,
    (
        "count what an iteration reads and computes",
        "fit a roofline to measured times",
    ),
    (
        Exercise(
            "cost.1",
            "What an iteration reads and computes",
            "minibatch.cost_model:Counts.of",
            "Return cls(tokens, logits, ...). plan.chunks are (request, start, stop): tokens start:stop are computed, "
            "and if stop == request.num_tokens one position goes through the head, else none. The query at position i "
            "sees the keys 0 to i, or with a window the last `window` of these; a chunk reads the K/V of each token "
            "that any of its queries sees, its own included, once, and writes those of its own tokens. plan.padding "
            "are (request, num_tokens, dead): all go through the linear layers, those of dead rows through the head, "
            "too; nothing of them is read, written or attended. plan.preemptions are (request, by, swap), "
            "plan.admissions (request, reserve, cached): swapped is request.num_computed, summed over preemptions "
            "with swap and over admissions with cached == 0 (theirs come back). Tokens 4:6 of nine give tokens 2, "
            "logits 0, kv_read 6, kv_written 2, attended 5 + 6 = 11; with a window of 3, kv_read 4 and attended 6. "
            "_beyond(spans, window) tells what a window spares, as (K/V tokens, pairs), if you want it; _scored is "
            "for prompt_logprobs, which no request here asks for: leave it out.",
            5,
            "11_at_gpu_scale",
            "cost.counts",
        ),
        Exercise(
            "cost.2",
            "Fitting the roofline",
            "minibatch.calibration:fit_linear",
            "Layers read each weight once, 2 bytes, however many tokens go through, and compute 2 operations for each "
            "weight and token. bandwidth and compute are the shares of gpu.bandwidth (bytes/s) and gpu.flops "
            "(operations/s) that are reached: if 1e9 weights take 4 ms for one token at 1e12 bytes/s, bandwidth is "
            "0.5. smooth_max(read, computed, sharpness) is the predicted time, of arrays too. Find the three numbers "
            "with the least mean of |predicted / measured - 1|: relative, so that short work counts as much as long, "
            "and not squared, so that a few slow measurements do not decide. _search(loss, starts) returns the three "
            "positive numbers with the least loss(bandwidth, compute, sharpness), a float; starts is a list of such "
            "triples, tried one after the other (so give it several sharpnesses between 1 and 5), and no sharpness "
            "that it returns is below 1. Efficiency(bandwidth, compute, sharpness) refuses shares above 2 and a "
            "sharpness that is not between 1 and 100; a search of your own has to keep to that. "
            "_check_enough(distinct, seconds) raises the errors (FEWEST is 12); distinct is how many different pairs "
            "(tokens, weights) there are, seconds an array. Exact times have to give the shares back within 1 %.",
            5,
            "11_at_gpu_scale",
            "cost.fit",
        ),
    ),
    look="The clock of this run asks your Counts.of how long each iteration takes: a prompt is longer than a "
    "decode, and a decode hardly longer with eight rows than with one.",
)

CAPSTONE = Lab(
    "capstone",
    "A scheduler of your own",
    240,
    (
        "design a policy for several kinds of load at once, and defend it with numbers",
        "say what a policy takes from whom: goodput, fairness, work done twice",
    ),
    (
        Exercise(
            "capstone.1",
            "Beat the reference",
            "minibatch.labs.scorecard:parts",
            "Give the order of the queue and the scheduler with which the scorecard of minibatch/labs/scorecard.py "
            "comes out better than that of its reference(), FCFS and ChunkedPrefill(token_budget=256): five workloads "
            "(bursts, a client that floods, long answers, long documents, a steady mix), each with a score of 100 x "
            "(goodput - fairness gap / 2 - preemption tax), all of them defined there; `minibatch lab run .` prints "
            "your card beside the reference's and draws it. What counts is the gain: your mean score minus the "
            "reference's, divided by what the reference lacks to 100. Points begin at a gain of 0.2 and grow evenly "
            "up to 0.65, which is worth all of them; but no workload may fall more than 15 points below the "
            "reference, every request has to be answered, and none may wait more than 25 s for a token, the first or "
            "any other. Take what minibatch.policies has, or derive classes of your own in this file (an Order needs "
            "key or walk; see also AdmissionPolicy, PreemptionPolicy, ChunkedPrefill.plan). parts is called before "
            "every run, does not know which workload comes, and has to make a new order and a new scheduler each "
            "time. They may use what a server knows: the requests that have arrived and those that run, with prompt, "
            "client, limit and what is generated so far, the memory, and the time; but not the workload's random "
            "numbers or the length of an answer, and graders use other seeds than yours.",
            20,
            "08_policies",
            "capstone",
            open_ended=True,
        ),
    ),
    run=None,
)

LABS: dict[str, Lab] = {
    lab.name: lab
    for lab in (
        METRICS,
        STATIC,
        ITERATION,
        ADMISSION,
        PAGING,
        PREFIX,
        RAGGED,
        CHUNKED,
        PREEMPTION,
        PRIORITY,
        FAIRNESS,
        COST,
        CAPSTONE,
    )
}
EXERCISES: dict[str, Exercise] = {exercise.id: exercise for lab in LABS.values() for exercise in lab.exercises}
