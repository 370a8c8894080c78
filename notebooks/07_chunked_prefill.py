# %% [markdown]
# # 07 · Chunked prefill
#
# **Question.** A long prompt arrives while others decode. Who waits for whom, and what does
# it cost to share the wait out?
#
# **You will be able to** work out how long a prompt stalls everybody else; say what a token
# budget divides and in which order; choose a budget from a promise on the time between
# tokens, and name what you pay for it.
#
# **Before this:** 02 (iterations), 06 (what an iteration costs) · **Minutes:** 25 ·
# **Runs:** toy model, simulated GPU

# %%
import pandas as pd
from matplotlib.ticker import AutoLocator

from minibatch import (
    ChunkedPrefill,
    ContinuousBatching,
    CostModel,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    metrics,
    player,
    plots,
)
from minibatch.arrival_processes import AllAtOnce, Poisson
from minibatch.contents import own
from minibatch.cost_model import Counts
from minibatch.distributions import Exponential, Fixed, LogNormal
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.notebook import explore, show
from minibatch.open_loop import simulated_request, synthetic
from minibatch.plot_style import SERIES, new_axes, sign, tidy
from minibatch.simulation import simulate
from minibatch.workloads import Workload

# %% [markdown]
# ## Three ways to let a prompt in
#
# Continuous batching lets a request join between two iterations. It does not say what
# becomes of those who are decoding while the newcomer's prompt is computed. Three answers:
#
# - **prefill first**: the next iteration holds the prompt and nothing else; decodes pause.
# - **mixed**: the prompt, whole, and all decodes share one iteration.
# - **chunked**: every iteration has a *token budget*. Each decode takes one token of it,
#   and what is left goes to the prompt, which is cut to fit. The next piece follows in the
#   next iteration.
#
# Here on the toy model: `a`, `b`, `c` decode, and `long` comes at 4 s with 24 tokens. With
# a budget of 8, in how many iterations is its prompt computed? (Three of the eight are
# taken.)

# %%
PROMPT, BUDGET = 24, 8

schedulers = {
    "prefill first": ContinuousBatching(phase_order="prefill-first"),
    "mixed": ContinuousBatching(),
    "chunked": ChunkedPrefill(token_budget=BUDGET),
}
toy, tokens = {}, {}
meta = {"workload": f"three answers of 14 tokens; a prompt of {PROMPT} at 4 s"}
for name, scheduler in schedulers.items():
    short, late = SamplingParams(max_tokens=14), SamplingParams(max_tokens=4)
    requests = [Request([i, 1], short, who, 0.0) for i, who in enumerate("abc")]
    requests.append(Request(range(PROMPT), late, "long", arrival_time=4.0))
    cache = PagedKVCache(num_blocks=32, block_size=4)
    engine = Engine(ToyModel(), scheduler, cache, meta=meta)
    tokens[name] = [result.tokens for result in engine.run(requests)]
    toy[name] = engine.trace

# %%
members = [member for step in toy["chunked"].steps for member in step.members]
pieces = [m.stop - m.start for m in members if m.request_id == "long" and m.prefill]
predicted = -(-PROMPT // (BUDGET - 3))
print(f"pieces of the prompt: {pieces}; predicted: {predicted} of them")
assert len(pieces) == predicted
assert tokens["prefill first"] == tokens["mixed"] == tokens["chunked"]
alt = "Membership of three schedulers: decodes pause, share one iteration, or share five"
show(plots.compare_figures(toy)["membership"], alt)

# %% [markdown]
# The blue cells in the row of `long` are its prompt. Under *prefill first* the orange rows
# have a hole; under *mixed* they have none, and one of their tokens shares an iteration
# with 24 others; under *chunked* that is spread over five.
#
# All three generate the same tokens (the second `assert`): only *when* differs. That needs
# care in the attention of a later piece: its queries see all keys before the piece too, so
# the causal mask has to be aligned at the bottom right. PyTorch's `is_causal=True` aligns
# it at the top left, which is right for the first piece only, and wrong for all others
# without an error.
#
# What the picture cannot show is time: on the toy's clock each iteration takes one second,
# whatever is in it. So now with a clock that counts what an iteration costs.

# %% [markdown]
# ## Predict
#
# Llama-2-7B on an A100, simulated: eight requests decode, with about 520 tokens of context
# each, and a prompt of 4,000 tokens arrives. `CostModel` gives the seconds of an iteration
# from what is in it (see 06), so the stall can be worked out before anything runs.
#
# How many times their usual time between tokens (TBT) will those who decode wait, at worst,
# under each of the three? Write three numbers down.

# %%
cost = CostModel(MODELS["llama-2-7b"], GPUS["a100-80"])
PROMPT, BUDGET, DECODES, CONTEXT = 4000, 512, 8, 520


def counts(chunks, sampled):
    """Of computing tokens `start` to `stop` of each request, and so many logits."""
    computed = sum(stop - start for start, stop in chunks)
    seen = sum(sum(range(start + 1, stop + 1)) for start, stop in chunks)
    read = sum(stop for start, stop in chunks)
    return Counts(computed, sampled, read, computed, seen)


def iteration(chunks, sampled):
    """Seconds of it."""
    return cost.seconds(counts(chunks, sampled))


def pieces_of(prompt, size):
    return [(start, min(start + size, prompt)) for start in range(0, prompt, size)]


# %%
decodes = [(CONTEXT, CONTEXT + 1)] * DECODES
pieces = pieces_of(PROMPT, BUDGET - DECODES)
usual = iteration(decodes, DECODES)
pause = iteration([(0, PROMPT)], 1)  # and then the next token has to be made
predicted = {
    "prefill first": pause + iteration([*decodes, (PROMPT, PROMPT + 1)], DECODES + 1),
    "mixed": iteration([*decodes, (0, PROMPT)], DECODES + 1),
    "chunked": max(iteration([*decodes, piece], DECODES) for piece in pieces),
}
print(f"the prompt is cut into {len(pieces)} pieces, of {BUDGET - DECODES} tokens at most")
print(f"usual TBT {1000 * usual:.1f} ms")
for name, seconds in predicted.items():
    print(f"{name:13} longest TBT {1000 * seconds:5.1f} ms: {seconds / usual:4.1f} times")

# %% [markdown]
# ## The stall, seen

# %%
schedulers = {
    "prefill first": ContinuousBatching(64, 8192, "prefill-first"),
    "mixed": ContinuousBatching(64, 8192),
    "chunked": ChunkedPrefill(BUDGET, 64),
}
arrivals = [simulated_request(f"d{i}", own(i, 500), 40, 0.0) for i in range(DECODES)]
arrivals.append(simulated_request("long", own(DECODES, PROMPT), 10, 0.45))
workload = Workload(arrivals, f"{DECODES} requests that decode and a prompt of {PROMPT:,}")


def serve(scheduler, workload, **options):
    cache = PagedKVCache(cost.kv_tokens() // 16, 16)
    return simulate(workload, scheduler, cache, cost, **options)


traces = {}
for name, scheduler in schedulers.items():
    traces[name] = serve(scheduler, workload, record_steps=True, meta={"name": name})

# %%
for name, trace in traces.items():
    requests = metrics.requests_table(trace).set_index("request_id")
    worst, ttft = requests.loc["d0", "max_tbt"], requests.loc["long", "ttft"]
    ms = 1000 * predicted[name]
    print(f"{name:13} longest TBT of d0: predicted {ms:5.1f} ms,", end=" ")
    print(f"observed {1000 * worst:5.1f}; TTFT of long {1000 * ttft:3.0f} ms")
    assert abs(worst / predicted[name] - 1) < 0.01

for name, trace in traces.items():
    d0 = trace.timelines[0]
    ends = zip(metrics.gaps(d0), d0.token_times[1:], strict=True)
    gaps = [gap for gap, end in ends if end > 0.45 and gap > 2 * usual]
    lost = 1000 * (sum(gaps) - len(gaps) * usual)
    print(f"{name:13} long gaps of d0: {len(gaps)}, together {lost:3.0f} ms over the usual")

# %%
ax = new_axes(3.4)
for (name, trace), look in zip(traces.items(), SERIES[-3:], strict=True):
    d0 = trace.timelines[0]
    gaps, line = 1000 * metrics.gaps(d0), look | {"marker": ".", "drawstyle": "steps-pre"}
    ax.plot(d0.token_times[1:], gaps, label=name, **line)
ax.axvline(0.45, color="#999999", linewidth=1)
ax.text(0.447, 200, "long arrives", fontsize=8, ha="right")
title = f"TBT of d0 (simulated: {cost.name}; {workload.description})"
tidy(ax, title, "time, s (a dot is a token)", "TBT, ms")
ax.xaxis.set_major_locator(AutoLocator())
ax.set_xlim(0.35, 1.0)
ax.set_ylim(bottom=0)
ax.legend(fontsize=8, frameon=False)
show(ax, "The gaps between d0's tokens over time: one of 250 ms or more, or eight of 40 ms")

# %% [markdown]
# Prefill first and mixed make one gap of a quarter of a second, which a reader of the
# answer sees as a freeze. Chunked makes eight gaps of about 40 ms. In sum, those who decode
# even lose less, because they get a token with each piece. Who pays is `long`: it waits
# longer for its first token (TTFT, printed above), since all the pieces carry decodes, and
# pieces have a price of their own, of which more below. (That `d0` of chunked ends 0.1 s
# before the others has another reason too: the prompts of the eight were cut as well, so it
# had its own first token at 0.04 s, not at 0.24.)
#
# The same by tokens an iteration: the budget is a ceiling, decodes at the bottom of each
# column, what is left for prompts on top.

# %%
alt = "Tokens in each iteration: columns of 4,000, or columns cut to the budget of 512"
show(plots.compare_figures(traces)["token_budget"], alt)

# %% [markdown]
# Step through both runs on a common clock: when the first run gives `d0` the token after
# the pause, how many has the second given it since `long` came? (The picture here counts
# iterations, not seconds. Without the stepper, count dots in that of the TBT, up to 0.73 s.)

# %%
pair = traces["prefill first"], traces["chunked"]
stepper = player.show(*pair, names=["prefill first", "chunked"])

# %% [markdown]
# ## What a budget costs
#
# Each piece is an iteration, and each iteration reads all weights, the K/V of all pieces
# before it, and pays a fixed overhead. For one prompt alone: predict its prefill for some
# budgets, then run it. At which budget is the price 10 %? And which of the three causes is
# the largest part of it?


# %%
def parts_of(pieces):
    """Seconds by cause, of the prompt in these pieces; only its end is sampled from."""
    parts = [cost.parts(counts([piece], piece[1] == PROMPT)) for piece in pieces]
    return pd.DataFrame(parts).sum()


alone = Workload([simulated_request("long", own(0, PROMPT), 1, 0.0)])
whole = parts_of([(0, PROMPT)])
rows = []
for budget in (128, 256, 512, 1024, 2048, 4096):
    pieces = pieces_of(PROMPT, budget)
    parts = parts_of(pieces)
    observed = serve(ChunkedPrefill(budget), alone).timelines[0].token_times[0]
    assert abs(parts.sum() - observed) < 1e-9
    more = 100 * (parts - whole) / whole.sum()
    causes = more["linear"], more["overhead"], more["attention"], more.sum()
    rows.append((budget, len(pieces), 1000 * parts.sum(), 1000 * observed, *causes))
columns = ["budget", "iterations", "predicted, ms", "observed, ms"]
columns += ["linear, %", "overhead, %", "attention, %", "all, %"]
pd.DataFrame(rows, columns=columns).set_index("budget").round(1)

# %% [markdown]
# The last four columns say how much more than whole, and why (`linear`: the matrices of the
# layers). At 512 nearly half of the price is the fixed 2 ms of each of seven more
# iterations, and half that reading and computing do not overlap wholly: with a hard maximum
# in place of the smooth one of 06, `linear` would be 0. At 128, a little left of the ridge,
# reading the weights 32 times dominates (with a hard maximum `linear` would still be 10 %).
# Large pieces pay hardly anything.
#
# Now many requests. All are there at time 0, so nothing but work counts for throughput; or
# they arrive by and by, and we look at who waits. Two seeds; whiskers are their range.

# %%
PROMPTS, OUTPUTS = LogNormal(1500, 3200, 3800), Exponential(100, 200)
REQUESTS, RATE, SEEDS = 160, 3, (0, 1)
BUDGETS = (128, 256, 512, 1024, 2048)


def measure(scheduler, arrivals, seed, n=REQUESTS):
    workload = synthetic(n, arrivals, PROMPTS, OUTPUTS, seed)
    trace = serve(scheduler, workload, check_plans=False)  # ours are tested
    found = metrics.summary(trace)
    return {
        "tokens/s": found["throughput"],
        "P99 TBT, ms": 1000 * found["tbt_p99"],
        "P50 TTFT, ms": 1000 * found["ttft_p50"],
        "P50 delay, s": found["queueing_delay_p50"],
    }


# %%
shares, waits = [], []
for seed in SEEDS:
    whole = {
        name: measure(schedulers[name], AllAtOnce(), seed)["tokens/s"]
        for name in ("prefill first", "mixed")
    }
    for budget in BUDGETS:
        scheduler = ChunkedPrefill(budget, 64)
        found = measure(scheduler, AllAtOnce(), seed)["tokens/s"]
        for name, rate in whole.items():
            shares.append((budget, name, seed, 100 * found / rate))
        waits.append(
            {"budget": budget, **measure(scheduler, Poisson(RATE), seed, REQUESTS // 2)}
        )
shares = pd.DataFrame(shares, columns=["budget", "% of", "seed", "throughput, %"])
waits = pd.DataFrame(waits)

print("throughput of chunked when all wait, in % of that of whole prompts:")
print(shares.pivot(index="budget", columns=["% of", "seed"]).round(1).to_string())

# %%
axes = new_axes(3.2, 1, 3)
plots.curves(shares, "budget", "throughput, %", by="% of", ax=axes[0])
plots.curves(waits, "budget", "P99 TBT, ms", ax=axes[1])
plots.curves(waits, "budget", "P50 TTFT, ms", ax=axes[2])
rate = f"{RATE} requests/s"
for ax, title in zip(axes, ("all at once", rate, rate), strict=True):
    ax.set_title(title, loc="left", fontsize=9)
    ax.set_xlabel("token budget", fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks(BUDGETS, BUDGETS)
    ax.set_ylim(bottom=0)
axes[0].axhline(100, color="#999999", linestyle="--", linewidth=1)
axes[0].set_ylim(0, 115)
note = f"simulated: {cost.name}, {REQUESTS} requests at once, {REQUESTS // 2} at {rate}"
sign(axes[0].figure, f"{note}, mean and range of seeds 0 and 1")
alt = "Against the budget: throughput and P99 of the TBT grow, P50 of the TTFT falls"
show(axes, alt)

# %% [markdown]
# Read the three panels together. A larger budget gives more throughput and an earlier first
# token; it also makes every gap longer. So there is no best budget, only one that fits a
# promise: *the largest one whose iterations are shorter than the TBT that you promise*.
#
# **Against whole prompts in mixed iterations, chunking does not raise throughput**: small
# budgets cost a lot, 512 about 5 %, large ones nothing. Against prefill first a large budget
# gains 2 to 4 % here, because its prompts share the weights with decodes; so do those of
# mixed. On real GPUs small pieces cost more than here, because kernels are less efficient
# on them.
#
# ## What it is for
#
# Then why do it? Because of a promise. Let nobody's next token take longer than 100 ms, in
# 99 of 100 cases; and let the median request be begun within 2 s, so that nobody keeps the
# promise by letting others wait outside. (Both limits are Sarathi-Serve's, OSDI 2024.) How
# many requests a second can each scheduler take?

# %%
PROMISE, DELAY = 100, 2  # ms between tokens, s of queueing
rows = []
for name, scheduler in schedulers.items():
    for seed in SEEDS:
        for rate in (0.5, 1, 1.5, 2, 4, 6, 8):
            n = max(40, int(30 * rate))  # 30 s of arrivals or more
            found = measure(scheduler, Poisson(rate), seed, n)
            rows.append({"scheduler": name, "seed": seed, "requests/s": rate, **found})
table = pd.DataFrame(rows)

kept = table[(table["P99 TBT, ms"] <= PROMISE) & (table["P50 delay, s"] <= DELAY)]
highest = kept.groupby(["scheduler", "seed"], sort=False)["requests/s"].max()
print("highest rate at which both are kept:")
print(highest.unstack().to_string())
print("at 6 requests/s, mean of the seeds:")
at_six = table[table["requests/s"] == 6].groupby("scheduler", sort=False)
print(at_six[["P99 TBT, ms", "P50 TTFT, ms"]].mean().round(0).to_string())

# %%
axes = new_axes(3.4, 1, 2)
for ax, number in zip(axes, ("P99 TBT, ms", "P50 TTFT, ms"), strict=True):
    plots.curves(table, "requests/s", number, by="scheduler", ax=ax)
    ax.set_title(number, loc="left", fontsize=9)
    ax.set_ylim(bottom=0)
axes[0].axhline(PROMISE, color="#999999", linestyle="--", linewidth=1)
axes[0].text(8, PROMISE + 10, "the promise", fontsize=8, ha="right")
note = f"simulated: {cost.name}, 30 s of arrivals (40 requests at least), budget {BUDGET}"
sign(axes[0].figure, f"{note}, mean and range of seeds 0 and 1")
alt = "P99 TBT and P50 TTFT by rate: chunked stays below 100 ms, the others cross it"
show(axes, alt)

# %% [markdown]
# The tail of chunked is the duration of a full iteration, at any rate: the limit on the TBT
# never binds it, that on the delay does, where the GPU can do no more. The others break the
# promise on the TBT already between 1 and 2 requests/s, at which rate depends on the seed.
# The price is the first token: at 6 requests/s, near its limit, chunked lets the median
# request wait three to four times as long for it (printed above).
#
# At 0.5 requests/s chunked is the *worst* of the three on the left. There stalls are so
# rare that one long gap is less than 1 of 100, and P99 does not see it; the pieces of a
# prompt make several gaps, and those it sees. A percentile tells how many wait, not how
# long the worst.
#
# How much more can be carried under such promises is what Sarathi-Serve calls capacity. Its
# abstract says 2.6 times that of vLLM, which in 2023 did prefill first, and its figure 12
# 3.5 times (Mistral-7B on an A100-80GB, the two limits above). `minibatch/studies/sarathi.py`
# (simulated, prompts with a median of 1,730 tokens) finds 3.05, by seed 2.85 to 3.33; over
# mixed, which was Orca's way, about as much. (The factors printed above, 4 to 6, are larger:
# another model, shorter answers, and few rates to choose from.)

# %% [markdown]
# ## A budget below the number of decodes
#
# Decodes first, says the rule. What if they need the whole budget? On the toy, with a
# budget of 4: six requests of 24 tokens come at once, and a seventh, `late`, at 6 s. Then
# the same with one request that asks for six answers (`n=6`); they share its prompt and
# decode as six.
#
# Predict for both: how long does one of the six wait for its next token, on average, and
# when is the first token of `late` computed? Memory and places are free all the time. (Of
# the decodes who ran longest ago is first, and of equals who came first.)

# %%
SMALL, OUTPUT = 4, 24
one, six = SamplingParams(max_tokens=OUTPUT), SamplingParams(max_tokens=OUTPUT, n=6)
cases = {
    "six requests": [Request([i], one, name, 0.0) for i, name in enumerate("abcdef")],
    "six answers": [Request([0], six, "a", 0.0)],
}
predicted = {"six requests": OUTPUT, "six answers": 1 + 6 * (OUTPUT - 1) // SMALL}
between = {"six requests": 1, "six answers": (2 * 1 + 4 * 1.5) / 6}
crowded, meta = {}, {"workload": f"six answers of {OUTPUT} tokens at 0 s, late at 6 s"}
for name, requests in cases.items():
    late = Request(range(8), SamplingParams(max_tokens=4), "late", arrival_time=6.0)
    cache = PagedKVCache(num_blocks=64, block_size=4)
    engine = Engine(ToyModel(), ChunkedPrefill(token_budget=SMALL), cache, meta=meta)
    engine.run([*requests, late])
    crowded[name] = engine.trace
    found = metrics.requests_table(engine.trace).set_index("request_id")
    observed, tpot = found.loc["late", "scheduled"], found["tpot"].drop("late").mean()
    print(f"{name}: mean TBT {tpot:.2f} s, predicted {between[name]:.2f};", end=" ")
    print(f"late from {observed:.0f} s, predicted {predicted[name]}")
    assert observed == predicted[name] and abs(tpot - between[name]) < 1e-9
alt = "Two panels: four rows run, the others wait; six take turns; late waits in both"
show(plots.compare_figures(crowded)["membership"], alt)

# %% [markdown]
# Six requests cannot decode at once with a budget of 4: when decodes have used it up,
# nobody gets a prompt computed. Four run; `e`, `f` and `late` wait for 24 iterations. So
# the budget is also a cap on the batch, whatever `max_num_seqs` says.
#
# Answers that fork off one prompt can outnumber the budget. Six answers and four tokens an
# iteration would be a TBT of 6 / 4 = 1.5 s if they shared evenly. They do not: in each
# iteration the two that went without are first, and of the four equals the same two come
# next. So two of the six run always, and four every second time until the two have ended,
# then always: 1.5 s on average for the four, 1.33 for all. Nobody starves among them. But
# for `late` nothing is left until they end. Either way: a budget has to be larger than the
# number of requests that are to decode at once, with room for prompts on top.

# %% [markdown]
# ## Try
#
# - Move the sliders. At a budget of 2048, is chunked still different from mixed? At which
#   rate does the queueing delay of the small budget run away? And prompts of 250 tokens: is
#   there anything left to gain?
# - In *Predict*, change `DECODES` to 64 and run that section only: the longest TBT of
#   *mixed* hardly moves, and is far fewer times the usual one. Why?
# - `ChunkedPrefill(max_chunk=...)` limits what one request may have of an iteration. Give
#   it half of the budget. Who gains?


# %%
def compare(budget=512, rate=3, prompt=2000):
    three = {
        "prefill first": schedulers["prefill first"],
        "mixed": schedulers["mixed"],
        f"chunked {budget}": ChunkedPrefill(budget, 64),
    }
    workload = synthetic(30, Poisson(rate), Fixed(prompt), Exponential(100, 200), seed=0)
    return plots.latencies({name: serve(each, workload) for name, each in three.items()})


sizes = [64, 128, 256, 512, 1024, 2048]
prompts = [250, 500, 1000, 2000, 3800]
sliders = explore(compare, budget=sizes, rate=[1, 2, 3, 4, 6], prompt=prompts)

# %% [markdown]
# ## Where it is in the code
#
# `minibatch/chunked_prefill.py` (decodes, then prompts that were begun, then new ones),
# `minibatch/continuous_batching.py` (the two other orders), `minibatch/plan_draft.py` (how
# a budget is spent), `minibatch/studies/sarathi.py` and `negative.py` (capacity, and what
# is not gained). Next: `08_policies`.

# %% [markdown]
# ## What this does not show
#
# - The GPU is simulated. A roofline does not know that kernels are less efficient on small
#   pieces (Sarathi-Serve measures up to 25 % of the prefill time at 512), and takes the
#   attention of a mixed iteration for one piece of work (a few percent in favour of mixed
#   and chunked).
# - Short runs and two seeds: curves that are a few percent apart are not told apart here,
#   and where a queue grows, a longer run shows a longer wait. P99 of the TBT is over all
#   gaps of all requests, so long answers weigh more.
# - Memory is ample in these runs; nobody is preempted. With tight memory a half-computed
#   prompt holds blocks, and may lose them.
# - Another way out of the tension is to compute prompts on other GPUs (DistServe,
#   Splitwise). It is not built here.
