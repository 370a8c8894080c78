# %% [markdown]
# # 08 · Policies
#
# **Question.** Every scheduler in this notebook may change its batch before each
# iteration. If the mechanism is the same, what do policies change - and who pays for it?
#
# **You will be able to** name the three decisions that are layered on iteration-level
# scheduling; predict what an order does to the waits of two clients, what an admission
# rule does to memory, and what a preemption costs in tokens; write an order of your own
# in five lines; and read a comparison of two schedulers for who got faster *and who got
# slower*.
#
# **Before this:** 02 (iterations), 03 and 04 (memory, blocks) · **Minutes:** 30 ·
# **Runs:** toy model, simulated GPU

# %%
import pandas as pd

from minibatch import (
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    metrics,
    plots,
)
from minibatch.notebook import explore, show
from minibatch.plot_style import SERIES, new_axes, tidy
from minibatch.policies import FCFS, Fair, Order, Priority, ReserveMaximum, ShortestFirst

# %% [markdown]
# ## Three decisions
#
# Before every iteration somebody has to decide three things. In this project each is one
# small object:
#
# | decision | asks | object | files |
# |---|---|---|---|
# | order | who is next? | `Engine(..., order=Fair())` | `policies/queueing.py` |
# | admission | does it fit? | `ContinuousBatching(admission=ReserveMaximum())` | `policies/admission.py` |
# | preemption | who gives way, and how? | `ContinuousBatching(preemption=Swap())` | `policies/preemption.py` |
#
# None of them changes which tokens a request gets; they change *when*. We take them one
# at a time, so that each difference has one cause.

# %% [markdown]
# ## Predict: the order of three requests
#
# One place in the batch, three requests that are there at time 0 and ask for 9, 3 and 1
# tokens. On the toy model an iteration takes one second, and a request of n tokens needs
# n iterations: the first one computes its prompt and emits its first token, each of the
# others emits one more.
#
# On paper, first come first served: the waits are 0, 9 and 9 + 3 = 12; mean 7. Shortest
# first: the waits are 0, 1 and 1 + 3 = 4; mean 5/3. Both finish all 13 tokens at t = 13.
# Who is better off, and who is not?

# %%
SIZES = (9, 3, 1)
predicted = {
    "FCFS": [0, 9, 12],
    "ShortestFirst": [4, 1, 0],
}  # waits in iterations, in the order of SIZES

for order in (FCFS(), ShortestFirst()):
    one_at_a_time, memory = (
        ContinuousBatching(max_num_seqs=1),
        PagedKVCache(num_blocks=8, block_size=4),
    )
    engine = Engine(ToyModel(), one_at_a_time, memory, order=order)
    engine.run(
        [
            Request([1, 2, 3], SamplingParams(max_tokens=size), f"of {size}")
            for size in SIZES
        ]
    )
    waits = metrics.requests_table(engine.trace)["queueing_delay"].tolist()
    name, mean, end = type(order).__name__, sum(waits) / len(waits), engine.clock.now()
    print(
        f"{name:14} predicted {predicted[name]}, observed {waits}, mean {mean:.2f}, all "
        f"done at {end:g}"
    )
    assert waits == predicted[name]

# %% [markdown]
# The mean wait falls from 7 to 1.67, the throughput is the same, and the request of 9
# tokens, which came first, pays 4 s for it. That is the pattern of everything that
# follows: *a policy distributes waiting; it rarely removes it*.

# %% [markdown]
# ## Predict: two clients, one asks twice as much
#
# Now a GPU that we do not have (simulated): Llama-2-7B on an A10G, 8,000 tokens of K/V
# memory. Client `calm` sends one request a second, client `eager` two, both with the same
# distribution of lengths, for two minutes. Together that is somewhat more than the GPU
# can serve, so a queue builds up. `calm` has priority 0, `eager` 1 (lower is more
# urgent).
#
# Admission is `ReserveMaximum` in all runs of this section: nobody is ever preempted, and
# only the order differs.

# %%
from minibatch import CostModel
from minibatch.arrival_processes import Poisson
from minibatch.distributions import LogNormal
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.open_loop import Client, clients
from minibatch.simulation import simulate

COST = CostModel(MODELS["llama-2-7b"], GPUS["a10g"])
PROMPTS, ANSWERS = (
    LogNormal(median=200, p90=500, cap=1000),
    LogNormal(median=100, p90=300, cap=800),
)
CALM, EAGER, SECONDS, SEED = 1.0, 2.0, 120, 1  # requests/s, and for how long they are sent

WORKLOAD = clients(
    [
        Client("calm", Poisson(CALM), PROMPTS, ANSWERS, duration=SECONDS, priority=0),
        Client("eager", Poisson(EAGER), PROMPTS, ANSWERS, duration=SECONDS, priority=1),
    ],
    SEED,
)


def serve(order, workload=WORKLOAD):
    scheduler = ContinuousBatching(
        max_num_seqs=32, max_num_batched_tokens=4096, admission=ReserveMaximum()
    )
    return simulate(
        workload, scheduler, PagedKVCache(num_blocks=500, block_size=16), COST, order=order
    )


fcfs = serve(FCFS())
by_client = metrics.split(fcfs, by="client")[["completed", "queueing_delay_mean"]]
print(
    f"{len(WORKLOAD)} requests, throughput {metrics.summary(fcfs)['throughput']:.0f} "
    "tokens/s (simulated)"
)
by_client.round(2)

# %% [markdown]
# Under first come, first served both clients wait about equally long: `calm` pays for
# what `eager` asks.
#
# **What do you expect** if `calm` always goes first? Write two numbers down: its mean
# wait, and `eager`'s.
#
# A strict priority sets `calm`'s wait to almost nothing: it waits only until somebody
# leaves. For `eager` there is a conservation law. As long as the order does not look at
# lengths, and the machine is kept just as busy, the mean wait over *all* requests does
# not depend on the order (Kleinrock, 1965, for one server). So what `calm` no longer
# waits, `eager` has to:

# %%
wait, number = by_client["queueing_delay_mean"], by_client["completed"]
total_wait = (wait * number).sum()
eager_if_calm_waits_nothing = total_wait / number["eager"]
print(
    f"predicted: calm near 0 s, eager up to {eager_if_calm_waits_nothing:.1f} s (was "
    f"{wait['eager']:.1f})"
)

RUNS = {"FCFS": fcfs, "Priority": serve(Priority())}
observed = metrics.split(RUNS["Priority"], by="client")["queueing_delay_mean"]
print(f"observed:  calm {observed['calm']:.1f} s, eager {observed['eager']:.1f} s")

# %% [markdown]
# Now all four orders, with percentiles.

# %%
RUNS |= {"Fair": serve(Fair()), "ShortestFirst": serve(ShortestFirst())}


def who_waits(runs):
    """Throughput, and the queueing delay of all and of each client in seconds
    (simulated)."""
    rows = {}
    for name, trace in runs.items():
        groups = metrics.split(trace, by="client").T.to_dict()
        rows[name] = {"tokens/s": metrics.summary(trace)["throughput"]}
        for group, numbers in {"all": metrics.summary(trace), **groups}.items():
            for statistic in ("mean", "p50", "p99"):
                rows[name][f"{group} {statistic}"] = numbers[f"queueing_delay_{statistic}"]
    return pd.DataFrame(rows).T.round(1)


who_waits(RUNS)

# %%
show(
    plots.latencies(RUNS),
    "A row an order: dots of queueing delay, TTFT, TBT and end-to-end time, with P50 "
    "and P99.",
)

# %% [markdown]
# Read the table once as each of the three people who pay for this machine.
#
# * **`calm`**: FCFS makes it wait 10.8 s on average for what another client asks.
#   Priority and Fair bring that to 0.8 and 1.8 s.
# * **`eager`**: under both it waits 13 to 14 s instead of 9. Nothing was gained; the wait
#   was moved, as predicted.
# * **the operator**: the column *tokens/s* of the first three rows is the same within 1
#   %. It does not tell them apart.
#
# `ShortestFirst` looks at lengths, so the conservation law does not hold for it: the mean
# falls to about a third. Its P50 is the best of all, *and its P99 is the worst*: 52 s
# against 27 s. It also finishes later (its tokens/s are 4 % lower: the long answers are
# left for the end, when the batch is no longer full). Here it knows the length of every
# answer, which no server does.
#
# Priority and Fair look alike here, but promise different things: see what happens when
# the *calm* client starts to flood (in "Try").

# %% [markdown]
# ## Predict: how unequal can a fair order be?
#
# `Fair` counts service: 1 for a prompt token, 2 for a generated token. The client with
# the lowest count is next (VTC, Sheng et al., OSDI 2024). It cannot be exact, because it
# does not preempt: a request that is in, stays in. With a cache of M tokens, the counts
# of two clients who both wait differ by at most 2 M, plus one input token in this engine
# (where the newest token is not yet in the cache).
#
# A toy with M = 64 tokens: the bound is 2 x 64 + 1 = 129. Every three seconds client `a`
# sends one request and `b` two, of 8 prompt tokens and 4, 8 or 12 new ones: each costs 8
# + 2 x 8 = 24 on average, and together they are more than the toy can serve. Under FCFS
# the difference has no bound: of three requests served two are `b`'s, so while both wait
# `b` gets ahead by one request, 24, with every three that are served.

# %%
TOKENS = 64  # of K/V, in blocks of one token
BOUND = 2 * TOKENS + 1


def lead_of_b(order):
    """Service of b minus service of a after every iteration in which both have requests
    waiting."""
    scheduler = ContinuousBatching(max_num_seqs=8, admission=ReserveMaximum())
    engine = Engine(
        ToyModel(), scheduler, PagedKVCache(num_blocks=TOKENS, block_size=1), order=order
    )
    for i in range(60):
        params = SamplingParams(max_tokens=(4, 8, 12)[i % 3])
        for name in "abb":
            engine.submit(Request(range(8), params, arrival_time=3.0 * i, client=name))
    client = {t.request_id: t.client for t in engine.trace.timelines}
    service, leads = {"a": 0, "b": 0}, []
    while (step := engine.step()) is not None:
        for member in step.members:
            service[client[member.request_id]] += member.prefill + 2 * (
                member.emitted is not None
            )
        if {request.client for request in engine.queue} == {"a", "b"}:
            leads.append(service["b"] - service["a"])
    return leads


leads = {"FCFS": lead_of_b(FCFS()), "Fair": lead_of_b(Fair())}
worst = {name: max(map(abs, values)) for name, values in leads.items()}
print(
    f"largest difference while both wait: FCFS {worst['FCFS']}, Fair {worst['Fair']} "
    f"(bound {BOUND})"
)
assert worst["Fair"] <= BOUND < worst["FCFS"]

# %%
ax = new_axes(2.8)
for (name, values), look in zip(leads.items(), SERIES[-2:], strict=True):
    ax.plot(range(len(values)), values, label=name, **look | {"marker": None})
ax.axhspan(-BOUND, BOUND, color="#999999", alpha=0.25, label=f"bound of Fair, {BOUND}")
title = "How far client b is ahead (simulated: toy, 64 tokens of K/V, no randomness)"
tidy(ax, title, "iterations in which both wait", "service of b - a")
ax.legend(fontsize=8, frameon=False)
show(
    ax,
    "The lead of client b keeps growing under FCFS and stays within the band of 129 "
    "under Fair.",
)

# %% [markdown]
# A bound is a promise about *service*, not about time: Fair says nothing about how long
# one request takes. And 2 M is large on a real GPU: with 10,000 tokens of K/V it is
# 20,000, which is 26 requests of 256 + 256 tokens.
#
# ## Predict: does it fit?
#
# The next request brings K/V that will grow. Four requests of 4 prompt tokens and 16 new
# ones; a pool of 8 blocks of 4 tokens. A request ends with 4 + 16 - 1 = 19 tokens in the
# cache (the last one is never fed back), so 5 blocks.
#
# * **ReserveMaximum** sets 5 of 8 blocks aside: one request at a time. 4 x 16 = **64
#   iterations**, no preemption.
# * **Optimistic** admits all four, with a block each. They fill 8 blocks with 2 each, 8
#   tokens each. Iteration k computes the token number k + 3 of each, so in iteration 6
#   all four need a ninth row, and no block is free. Two have to go, so that the other two
#   can have theirs: **2 victims in iteration 6, 16 tokens lost**. (And again later.)
# * **Forecast** admits if the *peak* fits: not everybody is at their longest at the same
#   time. No preemption, and better than 64.
#
# With **Swap** instead of **Recompute** the K/V of a victim goes to the host and comes
# back: nothing is computed twice.

# %%
from minibatch.policies import Forecast, Optimistic, Recompute, Swap

PAIRS = {
    "reserve the maximum": (ReserveMaximum(), Recompute()),
    "forecast of the peak": (Forecast(), Recompute()),
    "optimistic, recompute": (Optimistic(), Recompute()),
    "optimistic, swap": (Optimistic(), Swap()),
}


def four_requests(admission, preemption, blocks=8):
    scheduler = ContinuousBatching(
        max_num_seqs=4, admission=admission, preemption=preemption
    )
    engine = Engine(ToyModel(), scheduler, PagedKVCache(num_blocks=blocks, block_size=4))
    results = engine.run(
        [Request([i] * 4, SamplingParams(max_tokens=16), f"R{i}") for i in (1, 2, 3, 4)]
    )
    return engine.trace, [result.tokens for result in results]


traces, answers = {}, []
for name, pair in PAIRS.items():
    traces[name], tokens = four_requests(*pair)
    answers.append(tokens)
assert all(tokens == answers[0] for tokens in answers)  # policies change when, never which

first = next(step for step in traces["optimistic, recompute"].steps if step.preempted)
victims = {p.request_id: p.num_tokens for p in first.preempted}
print(f"first preemption: iteration {first.index + 1}, victims and their tokens: {victims}")
assert first.index + 1 == 6 and len(victims) == 2 and sum(victims.values()) == 16
assert len(traces["reserve the maximum"].steps) == 64

# %%
from minibatch import accounting


def costs(traces):
    rows = {}
    for name, trace in traces.items():
        numbers, work, memory = (
            metrics.summary(trace),
            accounting.work(trace),
            accounting.memory(trace),
        )
        rows[name] = {
            "iterations": len(trace.steps),
            "preemptions": memory.preemptions,
            "recomputed tokens": work.recomputed,
            "swapped tokens": numbers["swapped_tokens"],
            "memory filled": f"{memory.mean_filled:.0%}",
            "reserved, unused": f"{memory.mean_reserved:.0%}",
            "P50 end to end": numbers["e2e_p50"],
        }
    return pd.DataFrame(rows).T


costs(traces)

# %%
show(
    plots.compare_figures(traces)["membership"],
    "Batch membership: one request at a time; two at a time without a preemption; four "
    "at first, "
    "with preemptions, recomputed or swapped.",
)

# %% [markdown]
# The careful policy takes twice the iterations and leaves most of its memory unused; the
# careless one is done in 33 and pays a **recompute tax**: 45 tokens go through the model
# twice. Swap turns the tax into a transfer of the same 45 tokens, out and in again. (Both
# take 33 iterations, because a whole recomputation fits into one iteration; what that
# iteration costs, a toy clock does not say.) No rule is best for every workload: if
# answers end early, what `ReserveMaximum` sets aside is never used; where memory is
# always short, `Optimistic` computes much of its work twice.
#
# What is the cheaper way back on a GPU? The cost model can say it for one victim that
# holds n tokens:

# %%
from minibatch.cost_model import Counts

for n in (128, 512, 2048):
    again = COST.seconds(
        Counts(tokens=n, logits=1, kv_read=n, kv_written=n, attended=n * (n + 1) // 2)
    )
    copies = 2 * COST.parts(Counts(0, 0, 0, 0, 0, swapped=n)).swap
    print(
        f"{n:5,} tokens: computed again {1e3 * again:4.0f} ms, copied out and in again "
        f"{1e3 * copies:4.0f} ms"
    )

# %% [markdown]
# (Simulated, Llama-2-7B on A10G, each in an iteration of its own. A recomputation that
# shares an iteration with decodes costs less, because the weights are read anyway. A copy
# is bytes over bandwidth here: many small copies are slower. The vLLM paper (SOSP 2023)
# finds the two comparable at blocks of 16 to 64, and swapping worse at smaller ones. So
# measure it on the machine that you have: `minibatch bench --swap`.)
#
# ## An order of your own
#
# `ShortestFirst` may let a long request wait for ever, FCFS lets short ones wait for long
# ones. A *deadline* lies between: whoever asks for more tokens accepts a later one. An
# order is usually one method, `key`: the smallest is next.


# %%
class Deadline(Order):
    """Due 0.1 s after its arrival for each token that it asks for."""

    def key(self, request):
        return request.arrival_time + 0.1 * request.max_new_tokens


RUNS["Deadline"] = serve(Deadline())
who_waits({name: RUNS[name] for name in ("FCFS", "Deadline", "ShortestFirst")})

# %% [markdown]
# With 0 s a token this is FCFS, with very many it is ShortestFirst. At 0.1 s it has
# nearly all of ShortestFirst's gain in the mean, and its P99 is about a third lower. And
# it comes with a promise that can be read off the key: nobody is overtaken by a request
# that arrives more than 0.1 s x 800 = 80 s later, so nobody starves.
#
# ## All three at once
#
# Twelve requests on the toy model, every other one more urgent (priority 0). Before you
# move a slider, say what should happen to the number of iterations and to the dashed
# lines (preempted). Two of the four controls can make preemption disappear: which?

# %%
ORDERS = {"FCFS": FCFS, "shortest first": ShortestFirst, "priority": Priority}
WAYS = {"recompute": Recompute, "swap": Swap}


def twelve(order, preemption, num_blocks, max_num_seqs):
    scheduler = ContinuousBatching(
        max_num_seqs, admission=Optimistic(), preemption=WAYS[preemption]()
    )
    engine = Engine(
        ToyModel(), scheduler, PagedKVCache(num_blocks, block_size=4), order=ORDERS[order]()
    )
    for i in range(12):
        params = SamplingParams(max_tokens=(12, 4, 20)[i % 3])
        engine.submit(
            Request(range(5), params, f"r{i}", arrival_time=2.0 * (i // 3), priority=i % 2)
        )
    engine.run([])
    return engine.trace


def draw(order="FCFS", preemption="recompute", num_blocks=12, max_num_seqs=6):
    """Membership of twelve requests under the policies that are chosen."""
    return plots.membership(twelve(order, preemption, num_blocks, max_num_seqs))


POOLS, PLACES = [8, 10, 12, 16, 24, 40], [1, 2, 4, 6, 12]
sliders = explore(
    draw, order=list(ORDERS), preemption=list(WAYS), num_blocks=POOLS, max_num_seqs=PLACES
)

# %% [markdown]
# Two orders side by side on a common clock. Step through them, and watch one long request
# (r2, r5, r8 and r11 ask for 20 tokens): when does it start, and who gives way to whom?
# (Both runs take 50 iterations; what differs is who waits.)

# %%
from minibatch import player

two = [twelve(order, "recompute", 12, 6) for order in ("FCFS", "shortest first")]
stepper = player.show(*two, names=["FCFS", "shortest first"])

# %% [markdown]
# ## Try
#
# 1. Let the calm client flood (the cell below): it asks four times as much as the other
#    one. Which of Priority and Fair still protects the other client, and why?
# 2. Change the 0.1 in `Deadline` to 0.01 and to 1. Which end is FCFS? Draw mean against
#    P99.
# 3. Give `four_requests` the pools `blocks=12` and `blocks=20`. From which size on do all
#    four policies make the same plan?

# %%
calm = Client(
    "calm", Poisson(4.0), PROMPTS, ANSWERS, duration=60, priority=0
)  # no longer calm
eager = Client("eager", Poisson(1.0), PROMPTS, ANSWERS, duration=60, priority=1)
FLOOD = clients([calm, eager], SEED)
flooded = {"Priority": serve(Priority(), FLOOD), "Fair": serve(Fair(), FLOOD)}
who_waits(flooded)  # look at "eager mean": it asks for one request a second in both runs

# %% [markdown]
# ## What this does not show
#
# * Times are simulated by a roofline, and deciding takes no time. One seed and 365
#   requests: the P99 of a client with 116 requests is nearly its maximum (notebook 09
#   says what that is worth).
# * `ShortestFirst` and `Deadline` see `max_tokens`, which here is the exact length. With
#   a guess they are worse; with clients that understate it, unfair.
#   `policies/predictors.py` has worse guesses to try.
# * The conservation law is exact for one server and an order that does not look at
#   lengths; here a batch is served, so it holds nearly. Fair's bound holds where the
#   maximum is reserved and nobody is preempted.
# * A toy iteration takes a second whatever is in it: recomputing is free there in time,
#   and only the tokens count.
#
# ## Where it is in the code
#
# `minibatch/policies/` (each docstring says what its policy promises, and a test of that
# name shows it); `minibatch/studies/vtc.py` has Fair at the paper's scale (`minibatch
# reproduce vtc`). Next: 09, how to measure this.
