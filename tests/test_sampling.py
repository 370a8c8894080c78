"""Sampling: each row alone, whatever the company; every step against a slow and obvious twin.

Case numbers (SA-..) are those of faults reported against public engines.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minibatch.request import InvalidParams, Request, RequestState, SamplingParams
from minibatch.sampling import (
    Sample,
    SamplingError,
    _greedy,
    _process,
    prompt_logprobs,
    sample,
    uniform,
    weights_to_draw,
)

VOCAB = 12
INF = math.inf


def state(name="r", prompt=(1, 2, 3), generated=(), stop=(), seed=0, **params):
    request = Request(prompt, SamplingParams(**params), request_id=name)
    return RequestState(
        request=request,
        request_id=name,
        label=name,
        prompt=prompt,
        arrival_time=0.0,
        max_new_tokens=64,
        stop_token_ids=frozenset(stop),
        seed=seed,
        timeline=None,
        generated=list(generated),
    )


def one(row, request):
    return sample(np.array([row], dtype=float), [request])[0].token


# --- the twin: dictionaries and loops ---------------------------------------------------------------------------------


def twin_process(row, request):
    p, prompt, generated = request.params, list(request.prompt), request.generated
    logits = dict(enumerate(row))
    for token in logits:
        logits[token] += p.logit_bias.get(token, 0.0)
        if len(generated) < p.min_tokens and token in request.stop_token_ids:
            logits[token] = -INF
        if token in prompt + generated:
            factor = p.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if token in generated:
            logits[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    return logits


def twin_kept(logits, p):
    """{id: probability} of what may be drawn, best first; None if a boundary is too close to call in floating point."""
    best = max(logits.values())
    weights = {t: math.exp((x - best) / p.temperature) for t, x in logits.items()}
    order = sorted(weights, key=lambda t: (-logits[t], t))
    if p.min_p and any(abs(w - p.min_p) < 1e-9 for w in weights.values()):
        return None
    order = [t for t in order if weights[t] > 0 and weights[t] >= p.min_p]
    if p.top_k > 0:
        order = order[: p.top_k]
    total, kept, mass = sum(weights[t] for t in order), [], 0.0
    for token in order:
        if abs(mass - p.top_p * total) < 1e-9:
            return None
        if mass >= p.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return {t: weights[t] / mass for t in kept}


def twin_sample(row, request):
    logits = twin_process(row, request)
    if request.params.temperature == 0:
        return min(t for t in logits if logits[t] == max(logits.values()))
    kept = twin_kept(logits, request.params)
    if kept is None:
        return None
    point, mass = uniform(request.seed, len(request.generated)), 0.0
    for token in sorted(kept):
        mass += kept[token]
        if abs(mass - point) < 1e-9:
            return None
        if mass > point:
            return token
    return None


logit = st.one_of(st.integers(-6, 6).map(lambda i: i / 2), st.floats(-30, 30), st.just(-INF))  # with ties and bans
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 100]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 2.0, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
        "min_tokens": st.integers(0, 4),
    }
)
requests = st.builds(
    lambda p, prompt, generated, stop, seed: state("r", prompt or [0], generated, stop, seed, **p),
    *(params, tokens, tokens, st.sets(st.integers(0, VOCAB - 1), max_size=2), st.integers(0, 2**70)),
)


@settings(max_examples=250, deadline=None)
@given(rows, requests)
def test_equals_the_twin(row, request):
    processed = twin_process(row, request)
    assume(max(row) > -INF and max(processed.values()) > -INF)
    expected = twin_sample(row, request)
    assume(expected is not None)
    token = one(row, request)
    assert token == expected
    assert processed[token] > -INF


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rows, requests), min_size=1, max_size=5))
def test_a_row_is_sampled_as_if_it_were_alone(batch):
    batch = [(row, r) for row, r in batch if max(twin_process(row, r).values()) > -INF and max(row) > -INF]
    assume(batch)
    together = sample(np.array([row for row, _ in batch]), [r for _, r in batch])
    assert [s.token for s in together] == [one(row, r) for row, r in batch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numpy_and_torch_agree_and_are_left_as_they_were(dtype):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    batch = [
        state("plain"),
        state("drawn", temperature=0.7, top_p=0.9, seed=3),
        state("biased", logit_bias={7: 100.0}),
        state("scored", logprobs=2),
        state("penalised", generated=[5, 5], frequency_penalty=1.0, repetition_penalty=1.2, temperature=1.0),
        state("plain too"),
    ]
    before = logits.clone()
    as_numpy = logits.double().numpy().copy()
    assert sample(logits, batch) == sample(as_numpy, batch)
    assert torch.equal(logits, before) and np.array_equal(as_numpy, before.double().numpy())
    assert prompt_logprobs(logits, [1] * 6, 2) == prompt_logprobs(as_numpy, [1] * 6, 2)
    assert _greedy(logits) == _greedy(as_numpy)  # the first is what a tensor on another device goes through


def test_nothing_to_sample():
    assert sample(np.zeros((0, VOCAB)), []) == []
    assert prompt_logprobs(torch.zeros(0, VOCAB), [], 3) == []


def test_rows_must_match_requests():
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(np.zeros((2, VOCAB)), [state()])
    with pytest.raises(ValueError, match="2 rows of logits for 1 tokens"):
        prompt_logprobs(np.zeros((2, VOCAB)), [1], 0)


# --- SA-01: seeds -----------------------------------------------------------------------------------------------------


def model(request):
    """Logits that depend on all tokens of the request, like those of a real model."""
    return np.random.default_rng([*request.prompt, 99, *request.generated]).standard_normal(VOCAB) * 2


def generate(batches):
    """One iteration for each list of requests; returns when all have been carried out."""
    for members in batches:
        for member, drawn in zip(members, sample(np.array([model(m) for m in members]), members), strict=True):
            member.generated.append(drawn.token)


def test_sa_01_seeded_tokens_do_not_depend_on_the_company():
    def a(name="a"):
        return state(name, seed=42, temperature=0.8)

    alone, again, first, last, twin, b, gaps = a(), a(), a(), a(), a("twin"), state("b", seed=7, temperature=0.8), a()
    generate([[alone]] * 16)
    generate([[again]] * 16)
    generate([[first, state("greedy"), b]] * 16)
    generate([[b, state("c", seed=1, temperature=2.0, top_k=3), last, twin]] * 16)
    generate([[gaps], [b, gaps], [b], [b, b], [gaps]] * 6)  # iterations without it, as after a preemption
    assert len(set(alone.generated)) > 3
    for other in (again, first, last, twin):
        assert other.generated == alone.generated
    assert gaps.generated[:16] == alone.generated


def test_the_uniform_numbers_of_a_seed_never_change():
    """They are part of what a recorded run means. Philox with (key, counter) = (seed, index)."""
    assert uniform(5, 7) == 0.8046818380857231
    assert uniform(5, 8) == 0.2811420827285851
    assert uniform(2**200 + 5, 7) == uniform(5 + 2**200 % 2**128, 7)  # no seed is too long
    assert len({uniform(seed, index) for seed in range(30) for index in range(30)}) == 900
    drawn = np.array([uniform(3, i) for i in range(4000)])
    assert abs(drawn.mean() - 0.5) < 0.02 and abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("by", ["seed", "index"])
def test_frequencies_are_the_probabilities(by):
    probabilities = np.array([0.4, 0.05, 0.25, 0.0, 0.2, 0.1])
    with np.errstate(divide="ignore"):
        row = np.log(probabilities)
    counts, n = Counter(), 4000
    for i in range(n):
        request = state(temperature=1.0, seed=i) if by == "seed" else state(temperature=1.0, seed=1, generated=[0] * i)
        counts[one(row, request)] += 1
    possible = probabilities > 0
    assert counts[3] == 0
    observed = np.array([counts[i] for i in range(6)])[possible]
    chi_square = ((observed - n * probabilities[possible]) ** 2 / (n * probabilities[possible])).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in a thousand seeds


@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_distribution_belong_to_ids_that_are_not_banned(monkeypatch, point):
    monkeypatch.setattr("minibatch.sampling.uniform", lambda seed, index: point)
    for width in range(1, 40):
        row = [-INF] + [0.1 * i for i in range(width)] + [-INF]
        for extra in ({}, {"top_k": 100}, {"top_p": 0.999}):
            assert 1 <= one(row, state(temperature=0.7, **extra)) <= width
    assert one([0.0, 0.0], state(temperature=1.0)) == (point >= 0.5)  # half of [0, 1) each


# --- SA-03: greedy, tiny temperatures, banned ids ---------------------------------------------------------------------


@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
def test_sa_03_greedy_takes_the_lowest_id_on_a_tie(as_array):
    tie = [1.0, 1.0, 0.0]
    assert sample(as_array([tie]), [state()]) == [Sample(0)]
    assert sample(as_array([tie]), [state(top_p=0.9)]) == [Sample(0)]
    for seed in range(20):
        mixed = sample(as_array([tie, tie, tie]), [state(), state(temperature=1.0, seed=seed), state(top_p=0.9)])
        assert (mixed[0].token, mixed[2].token) == (0, 0)
    assert {one(tie, state(temperature=1.0, seed=seed)) for seed in range(20)} >= {0, 1}
    assert one(tie, state(presence_penalty=1.0)) == one(tie, state(logprobs=0)) == 0  # the path of single rows


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_sa_03_tiny_temperatures_do_not_overflow(temperature, extra):
    with np.errstate(all="raise", over="ignore", under="ignore"):
        for seed in range(10):
            assert one([0.0, 5.0, -INF], state(temperature=temperature, seed=seed, **extra)) == 1
            assert one([-1e308, 1e308, -INF], state(temperature=temperature, seed=seed, **extra)) == 1


def test_sa_03_banned_ids_are_never_drawn_and_a_negative_temperature_is_refused():
    drawn = {one([0.0, 0.1, -INF], state(temperature=1e6, seed=seed)) for seed in range(100)}
    assert drawn == {0, 1}
    with pytest.raises(InvalidParams, match="temperature"):
        SamplingParams(temperature=-1.0)


# --- SA-05: parameters stay with their request ------------------------------------------------------------------------


def test_sa_05_parameters_do_not_move_to_another_row():
    def fresh():
        a, b = state("a", prompt=(1,)), state("b", prompt=(2,), logit_bias={7: 100.0})
        return a, b, state("c", prompt=(3,)), state("d", prompt=(4,), temperature=1.0, top_k=1, seed=5)

    a, b, c, d = fresh()
    generate([[a, b]] * 2 + [[c, b, d]] * 4 + [[d, c]] * 2)
    assert b.generated == [7] * 6
    solo_a, _, solo_c, solo_d = fresh()
    generate([[solo_a]] * 2 + [[solo_c]] * 6 + [[solo_d]] * 6)
    assert (a.generated, c.generated, d.generated) == (solo_a.generated, solo_c.generated, solo_d.generated)
    assert c.generated != [7] * 6


# --- SA-07: min_tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [3, 100])
@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 2), (4, 5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sa_07_min_tokens_counts_generated_tokens(num_prompt, min_tokens, length, temperature):
    end = 9
    row = np.zeros(VOCAB)
    row[end] = 1000.0
    request = state(prompt=[1] * num_prompt, stop={end}, min_tokens=min_tokens, temperature=temperature, max_tokens=20)
    while end not in request.generated:
        request.generated.append(one(row, request))
    assert len(request.generated) == length


def test_sa_07_every_stop_id_is_masked_and_the_rest_is_not():
    row = [5.0, 4.0, 3.0, 2.0]
    assert one(row, state(stop={0, 1}, min_tokens=1)) == 2
    assert one(row, state(stop={0, 1}, min_tokens=1, generated=[3])) == 0
    assert one(row, state(stop={0, 1}, min_tokens=1, logit_bias={0: 1e6})) == 2  # a bias does not lift the mask
    with pytest.raises(InvalidParams, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


# --- SA-11: penalties -------------------------------------------------------------------------------------------------


def test_sa_11_only_repetition_penalty_sees_the_prompt():
    row = [0.0, 3.0, 2.0]
    assert one(row, state(prompt=[1], presence_penalty=2.0)) == 1
    assert one(row, state(prompt=[1], frequency_penalty=2.0)) == 1
    assert one(row, state(prompt=[1], repetition_penalty=2.0)) == 2
    assert one(row, state(prompt=[0], generated=[1], presence_penalty=2.0)) == 2


def test_penalties_by_hand():
    request = state(
        prompt=[0, 0, 1],
        generated=[2, 2, 0],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={1: 1.0, 3: 10.0},
    )
    row = np.array([4.0, -4.0, 4.0, 4.0])
    _process(row, request)
    assert row.tolist() == [
        4 / 2 - 0.5 - 0.25,  # seen three times, divided once; one occurrence in the output
        (-4 + 1) * 2,  # after the bias; away from zero, not towards it; in the prompt only
        4 / 2 - 2 * 0.5 - 0.25,
        4 + 10,  # not seen at all
    ]
    assert one([1.0, 0.5], state(prompt=[1], generated=[0] * 3, frequency_penalty=0.2)) == 1  # 1 - 3*0.2 = 0.4
    assert one([1.0, 0.5], state(prompt=[1], generated=[0] * 3, presence_penalty=0.2)) == 0  # 1 - 0.2 = 0.8
    assert one([0.0, 0.5], state(prompt=[1], generated=[0], presence_penalty=-1.0)) == 0  # a negative one rewards


# --- top-k, top-p, min-p ----------------------------------------------------------------------------------------------


def kept(probabilities, **params):
    with np.errstate(divide="ignore"):
        weights = weights_to_draw(np.log(probabilities), SamplingParams(temperature=1.0, **params))
    assert weights.shape == (len(probabilities),) and weights.max() == 1
    return np.flatnonzero(weights).tolist()


P = [0.1, 0.4, 0.05, 0.3, 0.15]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-12}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.86}, [0, 1, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.56}, [1]),  # the two hold 0.571 and 0.429 of their own mass
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"min_p": 0.3, "top_p": 0.47}, [1]),  # likewise 0.4 / 0.85 = 0.4706
        ({"min_p": 0.3, "top_p": 0.48}, [1, 3]),
    ],
)
def test_exactly_these_ids_can_be_drawn(params, expected):
    assert kept(P, **params) == expected
    drawn = {one(np.log(P), state(temperature=1.0, seed=seed, **params)) for seed in range(300)}
    assert drawn == set(expected)


def test_ties_at_the_boundary_go_to_the_lowest_ids():
    assert kept([0.2] * 5, top_k=2) == [0, 1]
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]
    assert kept([0.1, 0.2, 0.2, 0.5], top_k=2) == [1, 3]
    assert kept([0.5, 0.0, 0.5], top_k=3) == [0, 2]
    assert kept([0.1, 0.1, 0.6, 0.1, 0.1], top_k=3) == [0, 1, 2]
    assert one([1.0, 2.0, 2.0], state(temperature=1e300, top_k=1)) == 1  # still the best, where all weights are equal


@settings(max_examples=200, deadline=None)
@given(st.lists(logit, min_size=1, max_size=40), params)
def test_kept_ids_and_probabilities_equal_the_twin(row, given_params):
    p = SamplingParams(**{**given_params, "temperature": given_params["temperature"] or 1.0})
    assume(max(row) > -INF)
    expected = twin_kept(dict(enumerate(row)), p)
    assume(expected is not None)
    weights = weights_to_draw(np.array(row), p)
    shares = {i: share for i, share in enumerate(weights / weights.sum()) if share > 0}
    assert shares == pytest.approx(expected, abs=1e-9)


def test_the_nucleus_of_a_large_vocabulary():
    rng = np.random.default_rng(0)
    for scale, top_p in (0.0, 0.5), (0.01, 0.999999), (1.0, 0.9), (3.0, 0.95), (3.0, 1e-6), (9.0, 0.9999999):
        row = rng.standard_normal(20_000) * scale
        ids = np.flatnonzero(weights_to_draw(row, SamplingParams(temperature=1.0, top_p=top_p)))
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(np.exp(row[order] - row.max()))
        count = 1 + int((mass < top_p * mass[-1]).sum())
        assert abs(len(ids) - count) <= 1  # the sums are rounded differently
        assert ids.tolist() == sorted(order[: len(ids)].tolist())


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_before_any_processing():
    row = np.array([2.0, 1.0, 0.0, 1.0])
    exact = row - math.log(sum(math.exp(x) for x in row))
    changed = {"logit_bias": {2: 50.0}, "temperature": 0.1, "top_k": 1, "presence_penalty": 2.0}
    drawn = sample(row[None], [state(logprobs=2, generated=[0], **changed)])[0]
    assert drawn.token == 2
    assert drawn.logprob == pytest.approx(exact[2], abs=1e-12)
    assert drawn.top == pytest.approx({0: exact[0], 1: exact[1], 2: exact[2]}, abs=1e-12)
    assert list(drawn.top) == [0, 1, 2]  # most likely first, the lower id on a tie, then the token itself
    greedy = sample(row[None], [state(logprobs=2)])[0]
    assert list(greedy.top) == [0, 1] and greedy.logprob == greedy.top[0]


def test_number_of_logprobs():
    row = np.array([[2.0, 1.0, 0.0, -INF]])
    assert sample(row, [state()])[0] == Sample(0, None, None)
    assert list(sample(row, [state(logprobs=0)])[0].top) == [0]
    assert list(sample(np.zeros((1, 100)), [state(logprobs=60)])[0].top) == list(range(60))
    everything = sample(row, [state(logprobs=99)])[0].top
    assert list(everything) == [0, 1, 2, 3] and everything[3] == -INF
    assert sum(math.exp(x) for x in everything.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_prompt_logprobs(offset):
    logits = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]) + offset
    scored = prompt_logprobs(logits, [0, 0], 1)
    total = math.log(sum(math.exp(x) for x in (1, 2, 3)))
    assert [s.token for s in scored] == [0, 0]
    assert scored[0].top == pytest.approx({2: 3 - total, 0: 1 - total}, abs=1e-9)
    assert scored[1].top == pytest.approx({0: 3 - total}, abs=1e-9)
    assert torch.log_softmax(torch.tensor(logits), -1)[:, 0].tolist() == pytest.approx([s.logprob for s in scored])


# --- rows from which nothing can be taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[1.0, math.nan, 2.0], [-INF, -INF, -INF], [1.0, INF, 2.0], [math.nan, -INF, INF]])
@pytest.mark.parametrize("extra", [{}, {"temperature": 1.0}, {"logprobs": 1}, {"top_p": 0.5, "temperature": 0.5}])
@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
def test_a_bad_row_is_an_error_that_names_its_request(bad, extra, as_array):
    good = [0.0, 1.0, 0.5]
    batch = [state("good"), state("bad", **extra), state("drawn", temperature=1.0)]
    with pytest.raises(SamplingError, match="request bad: no token") as error:
        sample(as_array([good, bad, good]), batch)
    assert error.value.request_id == "bad"
    sample(as_array([good, good]), [batch[0], batch[2]])  # the others go on


def test_scoring_refuses_nothing():
    """A bad row gives NaN, and only for itself."""
    for bad in ([1.0, math.nan, 2.0], [-INF] * 3, [1.0, INF, 2.0]):
        first, second = prompt_logprobs(np.array([[0.0, 1.0, 0.5], bad]), [0, 1], 2)
        assert math.isfinite(first.logprob) and math.isnan(second.logprob)
        assert list(first.top) == [1, 2, 0] and 1 in second.top


def test_when_every_id_is_masked_the_error_says_so():
    with pytest.raises(SamplingError, match=r"request r: .*every id is banned"):
        one([1.0, 2.0], state(stop={0, 1}, min_tokens=1))
    with pytest.raises(SamplingError, match="largest logit is inf"):
        one([1.0, 2.0], state(prompt=[1], repetition_penalty=1e-320))
