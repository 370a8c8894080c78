# %% [markdown]
# # 13 · Inside the executor
#
# **Question.** How does an unmodified Hugging Face model run on a KV cache of ours, with all requests of an
# iteration in one call?
#
# **You will be able to** write down what a model is handed for a plan of mixed prompts, chunks and decodes (tokens,
# positions, rows, logits), compute one attention layer over block tables by hand, and name two mistakes that raise no
# error and pass the simplest tests.
#
# **Before this:** 04 (blocks and tables), 07 (chunks), and what query, key and value are
# · **Minutes:** 35 · **Runs:** tiny float64 Llama, SmolLM2-135M on this machine

# %%
import inspect
from dataclasses import astuple, replace
from textwrap import dedent

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from minibatch import (
    ChunkedPrefill,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    TransformersModel,
    plots,
)
from minibatch.clock import VirtualClock
from minibatch.models import UnsupportedModel, attention, packing
from minibatch.models.attention import Step, attend_batched
from minibatch.notebook import show

# %% [markdown]
# ## A plan of three kinds
#
# The engine decides; the *executor* computes. What it is given is a plan: for each request, which of its tokens to
# compute now. Three things can be asked of it in the same iteration: a prompt whole, a piece out of the middle of a
# prompt, and a decode.
#
# A small model is enough to see all of it: two layers of a stock `LlamaForCausalLM` with random weights, in float64,
# so that "equal" can mean twelve digits. Every call of `tiny()` gives the same weights, so a second one can be the
# judge.


# %%
def tiny():
    """Two layers; 4 query heads of 8 numbers, which share 2 key/value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # wide: attention is sharp, a token read wrongly shows
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


stock = tiny()  # never touched: what transformers says
executor = TransformersModel(tiny())  # taken over by us
for model in (executor.model, stock):
    print(type(model).__name__, "with attention:", model.config._attn_implementation)

# %% [markdown]
# That name is the whole change. `transformers` looks attention functions up by name, and ours is registered under
# `minibatch`; the class, its layers and its weights are as they were.
#
# Now an engine. A (4 tokens) and B (12) are there from the start, C (3) comes one iteration later; a budget of 9
# tokens, at most 5 of one request. The first iteration runs as usual. Of the second we only ask for the plan.

# %%
BLOCK, SEED = 4, 1
rng = np.random.default_rng(SEED)
sizes = {"A": 4, "B": 12, "C": 3}
prompts = {name: rng.integers(100, size=size).tolist() for name, size in sizes.items()}
requests = [
    Request(prompts["A"], SamplingParams(max_tokens=4), "A", arrival_time=0.0),
    Request(prompts["B"], SamplingParams(max_tokens=4), "B", arrival_time=0.0),
    Request(prompts["C"], SamplingParams(max_tokens=4), "C", arrival_time=1.0),
]


def new_engine(model):
    scheduler = ChunkedPrefill(token_budget=9, max_num_seqs=4, max_chunk=5)
    meta = {"workload": "prompts of 4, 12 and 3 random tokens", "seed": SEED}
    cache = PagedKVCache(num_blocks=8, block_size=BLOCK)
    return Engine(model, scheduler, cache, clock=VirtualClock(), meta=meta)


engine = new_engine(executor)
for request in requests[:2]:
    engine.submit(request)
first = engine.step()
engine.submit(replace(requests[2], arrival_time=None))  # now, so that we can plan by hand
plan = engine.scheduler.plan(engine.queue, engine.active, engine.kv, engine.clock.now())
print("iteration 0:", [(m.request_id, m.start, m.stop) for m in first.members])
print("iteration 1:", [(c.request.label, c.start, c.stop) for c in plan.chunks])
print("samples a token:", {chunk.request.label: chunk.samples for chunk in plan.chunks})

# %% [markdown]
# In iteration 1, A decodes (its token 4, the one it has just been given), B is in the middle of its prompt (5 to 9),
# and C's prompt is computed whole.
#
# A plan holds no addresses. The engine now gets rows for it; this cell does what `Engine._execute` does before it
# calls the model.

# %%
for admission in plan.admissions:
    engine.life.admit(admission, now=1.0)
    engine.life.reserve(admission.request, admission.reserve)
for chunk in plan.chunks:
    if chunk.stop > chunk.request.room:
        engine.life.reserve(chunk.request, chunk.stop)

kv, store = engine.kv, engine.store
for request, _, stop in plan.chunks:
    print(request.label, "blocks", kv.units(request), "rows", kv.rows(request, 0, stop))
shape = tuple(store.keys[0].shape)
print("keys of each layer:", shape, "[rows + 1 scratch row, heads, numbers]")

# %% [markdown]
# A's fifth token opened a new block, and the next free one was number 5: rows 0 to 3, then 20. Token 4 of A lies in
# row `table[4 // 4] * 4 + 4 % 4`. This is all there is to PagedAttention's address translation, and the last place
# where blocks are mentioned: the model sees rows.
#
# ## Predict
#
# Before you run on, write down, for the three chunks above:
#
# 1. how many tokens go through the linear layers, and how often are the weights read for that;
# 2. the `position_ids` of the packed sequence;
# 3. how many rows of K/V are written, and how many are read, in each layer;
# 4. how many (query, key) pairs attention may look at;
# 5. how many rows of logits are needed.

# %%
kinds = {"A": (4, 5), "B": (5, 10), "C": (0, 3)}  # computed now: from, to
predicted = {
    "packed tokens": sum(stop - start for start, stop in kinds.values()),
    "rows written": sum(stop - start for start, stop in kinds.values()),
    "rows read": sum(stop for _, stop in kinds.values()),
    # position p sees p + 1 keys
    "pairs": sum(sum(range(start + 1, stop + 1)) for start, stop in kinds.values()),
    "rows of logits": 2,  # A and C; B has not reached its newest token
}
print(predicted)

# %% [markdown]
# ## What the model is handed
#
# `Step` packs the plan, once an iteration. Only attention looks at more than one token; embeddings, matrix products
# and norms map each token by itself, so all requests can stand in one sequence `[1, T]` (Orca calls it *selective
# batching*, OSDI 2022, section 3.2). There is no padding and no batch dimension.

# %%
step = Step(plan, kv, store, executor.device, attend_batched)
print("input_ids     ", step.input_ids[0].tolist(), tuple(step.input_ids.shape))
print("position_ids  ", step.position_ids[0].tolist())
print("rows to write ", step.slots.tolist())
print("logits of     ", step.logit_index.tolist(), "  (places in the packed sequence)")
for chunk, span in zip(plan.chunks, step.spans, strict=True):  # here in the same order
    name, rows = chunk.request.label, span.rows.tolist()
    print(f"{name}: places {span.first} to {span.stop - 1}, reads rows {rows}")

masks = [packing.visible(np.array([len(s.rows)]), s.length, None) for s in step.spans]
observed = {
    "packed tokens": step.input_ids.shape[1],
    "rows written": len(step.slots),
    "rows read": sum(len(span.rows) for span in step.spans),
    "pairs": int(sum(mask.sum() for mask in masks)),
    "rows of logits": len(step.logit_index),
}
for what, number in predicted.items():
    print(f"{what:15} predicted {number:3}   observed {observed[what]:3}")
assert predicted == observed
assert step.position_ids[0].tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]

# %% [markdown]
# Positions restart with each chunk, and a later chunk begins where the last one ended. The 9 tokens pass each weight
# matrix in one product, so the weights are read once; three calls would read them three times.
#
# As a picture, who may look at whom: a row is a packed token, a column a key. Green keys were in the cache before;
# blue and orange ones are computed in this very iteration. The numbers under the columns are the rows of the store.

# %%
from matplotlib.patches import Patch

from minibatch.plot_style import MEMORY, TOKENS, new_axes, sign, tidy

HIDDEN = "white"  # with an edge


def mask_cells(step, names):
    """(query, key) pairs of one request after the other: place, column, and how to paint
    them."""
    left = 0
    for name, (first, length, rows) in zip(names, step.spans, strict=True):
        before = len(rows) - length  # so many keys were there before
        now = TOKENS["decode" if length == 1 else "prefill"]
        for i in range(length):
            for key, row in enumerate(rows):
                color = (MEMORY["filled"] if key < before else now).color
                color = color if key <= before + i else HIDDEN
                yield first + i, left + key, color, f"{name}, position {before + i}", row
        left += len(rows) + 1


def draw_mask(step, names):
    ax, queries, keys = new_axes(4.2), {}, {}
    for place, column, color, query, row in mask_cells(step, names):
        edge = "#BBBBBB" if color == HIDDEN else color
        box = {"width": 0.9, "bottom": place - 0.45, "fc": color, "ec": edge, "lw": 0.6}
        ax.bar(column, 0.9, **box)
        queries[place], keys[column] = f"{place}: {query}", row
    ax.set_ylim(step.num_tokens - 0.4, -0.6)
    title = "Who sees whom: one iteration, three requests, nine packed tokens"
    tidy(ax, title, "key: its row of the store", "query: its place, whose it is")
    ax.set_yticks(list(queries), queries.values())
    ax.set_xticks(list(keys), keys.values())
    kinds = {"in the cache before": MEMORY["filled"].color, "not visible": HIDDEN}
    kinds |= {f"computed now, {kind}": TOKENS[kind].color for kind in ("prefill", "decode")}
    handles = [Patch(fc=color, ec="#BBBBBB", label=kind) for kind, color in kinds.items()]
    ax.legend(handles=handles, loc="lower left", fontsize=8, frameon=False)
    says = "simulated clock · tiny Llama, float64 · prompts of 4, 12, 3 random tokens"
    sign(ax.figure, f"{says} · seed {SEED}")
    return ax


alt = "A block-diagonal mask: A sees 5 keys, B's chunk is a staircase that begins at key 5"
show(draw_mask(step, "ABC"), alt=alt)

# %% [markdown]
# - Between requests nothing, not even hidden cells: nobody builds this mask over 9 x 18 cells; each request's rows
#   are gathered and attended apart.
# - C's block is the triangle that everybody draws. B's is a triangle with a green wall before it: a later chunk sees
#   *all* keys before the chunk. Its triangle sits at the **bottom right**.
# - A's one row sees everything it has.
#
# ## One layer by hand
#
# Each layer calls our function, and that calls `step.attend` with the layer's queries, keys and values of all packed
# tokens. These are its first lines (the rest is for padding): the new keys and values go to their rows, then somebody
# attends.

# %%
print(dedent("".join(inspect.getsourcelines(Step.attend)[0][2:6])))

# %% [markdown]
# `attend_batched` is what usually attends. Here a wrapper keeps, of each layer, the queries that came and the answer
# that went, while the *model* is called as `TransformersModel.forward` does it:

# %%
seen = {}


def watched(step, layer, query, out, window, scale):
    attend_batched(step, layer, query, out, window, scale)
    seen[layer] = query.clone(), out.clone(), scale


@torch.inference_mode()
def call(attend, **changes):
    """The model's call for our plan; logits of all 9 packed tokens."""
    step = Step(plan, kv, store, executor.device, attend)
    arguments = {"input_ids": step.input_ids, "position_ids": step.position_ids} | changes
    arguments |= {"use_cache": False, "logits_to_keep": 0, "minibatch_step": step}
    return executor.model(**arguments).logits[0]


logits = call(watched)
query, answer, scale = seen[0]
print("queries", tuple(query.shape), "answer", tuple(answer.shape), "[tokens, heads, dim]")
print("scale", round(scale, 4), "= 1 / sqrt(8)")

# %% [markdown]
# And the same from the definition, softmax(scale · q k) v, over the rows that each request has:


# %%
def by_hand(step, layer, query, scale):
    out = torch.empty_like(query)
    for first, length, rows in step.spans:
        q = query[first : first + length]
        k, v = store.keys[layer][rows], store.values[layer][rows]  # [keys, 2 heads, 8]
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))  # two query heads share one
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        own = torch.arange(length) + len(rows) - length  # its own key: bottom right
        hidden = torch.arange(len(rows)) > own[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[first : first + length] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


for layer, (query, answer, scale) in seen.items():
    difference = (by_hand(step, layer, query, scale) - answer).abs().max().item()
    print(f"layer {layer}: by hand and executor agree to 1e-12:", difference < 1e-12)
    assert difference < 1e-12

# %% [markdown]
# So the layer is right if the rows are right. Is the whole model? The judge is the stock model, which gets the tokens
# of each request alone and whole, with attention and cache of its own. Compared are all 9 packed tokens, not only the
# two that will be sampled.

# %%
judged = []
for request, start, stop in plan.chunks:
    with torch.inference_mode():
        whole = stock(input_ids=torch.tensor([request.tokens(0, stop)])).logits[0]
    judged.append(whole[start:stop])
expected = torch.cat(judged)


def off(logits):
    """Largest difference of logits to the judge's, of each packed token."""
    errors = (logits - expected).abs().amax(dim=1).tolist()
    bounds = {1e-12: "< 1e-12", 1e-5: "< 1e-5"}
    says = [[text for bound, text in bounds.items() if error < bound] for error in errors]
    return [(text or [f"{error:.1f}"])[0] for text, error in zip(says, errors, strict=True)]


print(f"largest logit {expected.abs().max():.1f}; our errors:", *set(off(logits)))
assert set(off(logits)) == {"< 1e-12"}

# %% [markdown]
# ## Two mistakes that make no sound
#
# **1. `position_ids` is left out.** The model then counts through the packed sequence: 0 to 8.
#
# **2. `is_causal=True` for every chunk of more than one token.** PyTorch's flag aligns the triangle at the **top
# left**: query `i` sees keys 0 to `i`, however many keys there are. (With one query and many keys it would hide all
# keys but the first, and every decode would be wrong at once. So engines set it only for longer queries, as
# transformers' own sdpa wrapper does.)
#
# What do you expect: which of A, B and C will be wrong, in which of the two? (Rotary positions enter only as
# *differences* of positions. Keys in the cache keep the rotation that they were stored with.)


# %%
def top_left(step, layer, query, out, window, scale):
    for first, length, rows in step.spans:
        k, v = step.store.keys[layer][rows], step.store.values[layer][rows]
        q, k, v = (x.transpose(0, 1)[None] for x in (query[first : first + length], k, v))
        options = {"scale": scale, "enable_gqa": True, "is_causal": length > 1}
        answer = F.scaled_dot_product_attention(q, k, v, **options)
        out[first : first + length] = answer[0].transpose(0, 1)


def restored(attend, **changes):
    """A wrong call also stores wrong keys and values; the right one after it writes them
    again."""
    wrong = call(attend, **changes)
    call(attend_batched)
    return wrong


no_positions, wrong_mask = restored(attend_batched, position_ids=None), restored(top_left)
print(f"{'packed token':14} {'right':>8} {'no position_ids':>16} {'top-left mask':>14}")
who = [
    f"{request.label}, position {i}" for request, a, b in plan.chunks for i in range(a, b)
]
for row in zip(who, off(logits), off(no_positions), off(wrong_mask), strict=True):
    print("{:14} {:>8} {:>16} {:>14}".format(*row))

# %% [markdown]
# No error, no warning, no NaN. And look at what is *right*:
#
# - Without `position_ids`, C is right, up to rounding (transformers computes the rotations in float32). Its
#   whole prompt was shifted by 6, and rotary embeddings do not feel a shift of everything. A test that only computes
#   prompts whole **cannot find this mistake** (with learned positions, as in GPT-2, it would). A and B are wrong,
#   because their new queries meet keys that were stored at other distances.
# - With the top-left mask, A is right because a single query gets no mask, and C because a first chunk is square,
#   where top left and bottom right are the same. A test without a second chunk finds nothing.
# - The two tokens that are sampled in this iteration belong to A and C. With the wrong mask **both are right**: no
#   logits of B are asked for. But B's keys and values of layer 1 are computed from what layer 0 has seen, and these
#   stay.
#
# Does that show in tokens? The same three requests, run to their end; once with the wrong mask in iteration 1 *only*,
# and the right one before and after it:

# %%
greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
solo = {}
for name, ids in prompts.items():
    tokens = stock.generate(torch.tensor([ids]), **greedy)[0, len(ids) :]
    solo[name] = tuple(tokens.tolist())


def run(wrong_in):
    """All three to their end; with the top-left mask in one iteration, or in none."""
    engine = new_engine(executor)
    for request in requests:
        engine.submit(request)
    for iteration in range(6):
        executor.attend = top_left if iteration == wrong_in else attend_batched
        engine.step()
    return {name: engine.results[name].tokens for name in prompts}, engine.trace


answers, trace = run(wrong_in=None)
wrong_answers, wrong_trace = run(wrong_in=1)
print("alone, by transformers", solo)
print("the engine            ", answers)
print("wrong in iteration 1  ", wrong_answers)
assert answers == solo
assert {name for name in solo if wrong_answers[name] != solo[name]} == {"B"}

# %% [markdown]
# All four tokens of B are others, though everything that was computed for its sampled tokens itself was computed
# rightly: it read what iteration 1 had left in the cache. The picture of the run is the same for both, and looks
# healthy.

# %%
alt = "A and B prefill in iteration 0; in 1 A decodes, B has a chunk, C its prompt"
show(plots.membership(trace), alt=alt)
parts = [
    [[m[:3] for m in map(astuple, s.members)] for s in t.steps]
    for t in (trace, wrong_trace)
]
assert parts[0] == parts[1]  # (request, start, stop) of every member of every iteration

# %% [markdown]
# So the executor does not trust itself. When it takes a model over, it computes a prompt in *three* pieces over a
# cache of ours, and compares with the model's own forward pass; and attention must have been reached as often as
# there are layers. The wrong mask does not get through that door:

# %%
try:
    TransformersModel(tiny(), attend=top_left)
except UnsupportedModel as error:
    print(str(error).split(" (")[0][:64], "...")

# %% [markdown]
# ## Only the rows that are sampled
#
# `logits_to_keep=step.logit_index` names the packed tokens that need logits. Prediction for the default model: its
# layers hold about 106 million weights, the head 28 million (49,152 ids x 576). With logits for every packed token,
# each token costs (106 + 28) / 106 of what it must; and the logits of a 128-token prompt, of which one row is
# sampled, take

# %%
LAYERS, HEAD, VOCAB, SIZE = 106.2e6, 49_152 * 576, 49_152, 128
print(f"time, all rows / one row: {(LAYERS + HEAD) / LAYERS:.2f} (attention left out)")
all_rows, one_row = SIZE * VOCAB * 4, VOCAB * 4
print(f"float32 logits: {all_rows / 2**20:.0f} MiB instead of {one_row / 2**10:.0f} KiB")

# %%
smol = TransformersModel("smollm2-135m")  # float32 on the CPU
inner = smol.model.model
head = inner.embed_tokens.weight.numel()  # the same numbers are the embedding and the head
layers = sum(p.numel() for p in inner.parameters()) - head
print(f"{layers / 1e6:.1f} million weights in its layers, {head / 1e6:.1f} in the head")
assert (round(LAYERS, -5), HEAD) == (round(layers, -5), head)

# %%
prompt = Request(range(1000, 1000 + SIZE), SamplingParams(max_tokens=1), "prompt")
alone = Engine(smol, ChunkedPrefill(token_budget=SIZE), PagedKVCache(SIZE // 16, 16))
alone.submit(prompt)
whole = alone.scheduler.plan(alone.queue, alone.active, alone.kv, 0.0)
alone.life.admit(whole.admissions[0], 0.0)
alone.life.reserve(whole.admissions[0].request, SIZE)


def whole_call(all_rows):
    step = Step(whole, alone.kv, alone.store, smol.device, attend_batched)
    keep = 0 if all_rows else step.logit_index
    arguments = {"input_ids": step.input_ids, "position_ids": step.position_ids}
    smol.model(**arguments, use_cache=False, logits_to_keep=keep, minibatch_step=step)


def products(hidden):
    """All matrix products of the layers, with the MLPs' activation; no attention, no
    norms."""
    for layer in inner.layers:
        a = layer.self_attn
        for product in (a.q_proj, a.k_proj, a.v_proj, a.o_proj, layer.mlp):
            product(hidden)


# %% tags=["measured"]
import time


@torch.inference_mode()
def seconds(task, argument):
    begin = time.thread_time()  # of the CPU; what other programs take does not count
    task(argument)
    return time.thread_time() - begin


torch.set_num_threads(1)
hidden, lm_head = torch.randn(SIZE, 576), smol.model.lm_head
tasks = [(products, hidden), (lm_head, hidden), (lm_head, hidden[:1])]
tasks += [(whole_call, True), (whole_call, False)]
rounds = [[seconds(*task) for task in tasks] for _ in range(5)]  # in turns
body, head_all, head_one, call_all, call_one = map(min, zip(*rounds, strict=True))
print(f"CPU seconds of one thread (measured, best of 5), a prompt of {SIZE} tokens")
print(f"layers' products {body:.3f}, head {head_all:.3f}, head of one row {head_one:.3f}")
ratio = (body + head_all) / (body + head_one)
print(f"products alone: ratio {ratio:.2f}")
print(f"the whole call: {call_all:.3f} and {call_one:.3f}, ratio {call_all / call_one:.2f}")

# %% [markdown]
# The head for all rows costs about a quarter of the layers, as its share of the weights says. But the prediction left
# two things out. One row takes more than 1/128 of the time, because all 28 million weights are read from memory for
# it: about 1.2 for the products. And the rest of the call (attention with its gather, norms, Python: about a fifth)
# is the same in both, which dilutes the ratio further. (That of the whole call moves by a tenth from run to run on a
# shared machine.)
#
# ## A real model
#
# Nothing above depends on the tiny model. The same three kinds of chunk with SmolLM2-135M, in float32, against
# transformers' own loop, attention and cache (`executor.generate`, each request alone):

# %% tags=["measured"]
texts = {
    "A": "The sky is",
    "B": "A queue before a counter is a simple machine",
    "C": "One, two,",
}
ids = {name: smol.tokenizer.encode(text) for name, text in texts.items()}
scheduler = ChunkedPrefill(token_budget=9, max_num_seqs=4, max_chunk=5)
real = Engine(smol, scheduler, PagedKVCache(16, BLOCK), clock=VirtualClock())
params = SamplingParams(max_tokens=8, ignore_eos=True)
arrivals = {"A": 0.0, "B": 0.0, "C": 1.0}
for result in real.run([Request(ids[n], params, n, arrivals[n]) for n in ids]):
    judged, _ = smol.generate(ids[result.request_id], max_tokens=8)
    same = list(result.tokens) == judged
    print(f"{result.request_id}: {texts[result.request_id]!r} goes on: {result.text!r}")
    print("   the same tokens as alone:", same)
second = real.trace.steps[1]
print("iteration 1:", [(m.request_id, m.start, m.stop) for m in second.members])

# %% [markdown]
# ## Where it is in the code
#
# `minibatch/models/transformers_model.py` (the call, and the check at the door), `packing.py`, `attention.py` (`Step`,
# `attend_each` to read, `attend_batched` to run, and the function that is registered), `supported.py` (which models
# are refused, and why). `minibatch/kv_cache.py` has the one address translation. Next: [14 · A museum of real
# bugs](14_a_museum_of_real_bugs.ipynb).
#
# ## Try
#
# 1. **Take the flag literally.** In `top_left`, write `"is_causal": True`, and run from there to the three lines of
#    tokens. Which of the nine tokens is off now and was not, and by how much? The last `assert` of the run fails:
#    whose tokens are others as well? Why would this one be found on the first day?
# 2. **Break one row.** Below, B reads one wrong row: its key 2 comes from a row of C. Which packed tokens will be
#    off? And in which of the two layers does the error begin? Then let `PLACE` be 9: which are off now, and why
#    fewer?

# %%
PLACE = 2


def wrong_row(step, layer, query, out, window, scale):
    spans = step.spans
    rows = spans[1].rows.copy()
    rows[PLACE] = spans[2].rows[0]
    step.spans = [spans[0], spans[1]._replace(rows=rows), spans[2]]
    attention.attend_each(step, layer, query, out, window, scale)
    step.spans = spans


for row in zip(who, off(restored(wrong_row)), strict=True):
    print("{:14} {:>8}".format(*row))

# %% [markdown]
# 3. **Pack in another order.** `Step` puts decodes first. Does the order matter for the result? (Change
#    `plan.chunks` to another order with `dataclasses.replace(plan, chunks=plan.chunks[::-1])` and print
#    `Step(...).input_ids`.) Why are decodes put side by side? `packing.alike` has the answer.
# 4. **A model that is refused.** Give `LlamaConfig` another class, such as `Gemma2Config`, in `tiny()`, and read what
#    `TransformersModel` says. What would have gone wrong without that refusal?
#
# ## What this does not show
#
# - Speed. A tiny model in float64 tells nothing about time; what was measured is one thread of one CPU. On a GPU
#   attention over scattered rows is a kernel of its own (PagedAttention, FlashInfer); here the rows are gathered
#   first, which moves the K/V once more through memory in every layer. That is simple, and not fast.
# - Padding. A static batch would add pseudo-chunks that attend to themselves (see `Step`), and `Step.attend` has a
#   line for them.
# - Sliding windows, mixtures of experts, other families: `tests/test_transformers_model.py` compares those.
# - That float32 gives the same tokens always. It rounds differently in a batch than alone, and where two logits
#   nearly tie the other can win; `minibatch compare` checks for that. In float64, above, equality is exact to twelve
#   digits.
