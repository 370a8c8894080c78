"""Sampling, stop conditions and text, as a request meets them in a running engine."""

import math
from itertools import islice

import pytest
from helpers import (
    CONFIGURATIONS,
    FixedLogitsModel,
    ScriptedModel,
    ask,
    check_drained,
    check_invariants,
    check_solo,
    drive,
    make_engine,
    names,
    read,
    run_checked,
    solo,
    timeline,
)

from minibatch import ToyModel
from minibatch.request import InvalidParams

A = ask("A", [1, 2, 3], 16, temperature=0.8, seed=42)


def tokens_of(engine, requests, request_id="A"):
    return {r.request_id: r.tokens for r in run_checked(engine, requests)}[request_id]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_01_a_seeded_request_does_not_depend_on_who_shares_the_batch(configuration):
    """SA-01. Fault: one random stream for the batch, or a seeded row that is drawn like its unseeded neighbours."""
    unseeded = ask("B", [4, 5], 12, temperature=1.0)
    seeded = ask("B", [4, 5], 12, temperature=1.0, seed=7)
    greedy = ask("B", [4, 5], 12)
    twin = ask("twin", [1, 2, 3], 16, temperature=0.8, seed=42)
    roomy = {"slot_size": 32, "num_blocks": 32}
    alone = tokens_of(make_engine(configuration, **roomy), [A])
    assert alone == solo(A) and len(set(alone)) > 3
    for company in ([A, unseeded], [A, seeded], [unseeded, A], [seeded, A], [greedy, A]):
        assert tokens_of(make_engine(configuration, **roomy), company) == alone
    for budget in (1, 2, 5):
        assert tokens_of(make_engine(configuration, token_budget=budget, **roomy), [seeded, A]) == alone
    engine = make_engine(configuration, **roomy)
    assert tokens_of(engine, [A, twin], "twin") == alone
    assert tokens_of(engine, [A]) == alone  # again, in the same engine


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_sa_01_a_seeded_request_does_not_depend_on_being_preempted(configuration):
    """SA-01. Fault: the random stream of a preempted request goes back to its start, or on without it."""
    engine = make_engine(configuration, num_blocks=8, token_budget=32)
    assert tokens_of(engine, [ask("B", [4, 5, 6, 7], 16, temperature=1.0), A]) == solo(A)
    assert timeline(engine, "A").num_preemptions == 1


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_01_the_seed_of_the_engine_makes_unseeded_requests_reproducible(configuration):
    """SA-01. Fault: two runs of the same engine seed differ, or two unseeded requests draw the same numbers."""
    twins = [ask(name, [1, 2, 3], 12, temperature=1.0) for name in "ab"]
    first, again, other = (
        [r.tokens for r in run_checked(make_engine(configuration, seed=s), twins)] for s in (3, 3, 4)
    )
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_03_greedy_rows_take_the_lowest_of_the_best_whatever_their_neighbours_do(configuration):
    """SA-03. Fault: greedy is a tiny temperature, so that ties are random; or T=0 is divided by."""
    engine = make_engine(configuration, FixedLogitsModel([1.0, 1.0, 0.0]))
    greedy = ask("greedy", [0, 1], 8)
    assert tokens_of(engine, [greedy], "greedy") == (0,) * 8
    hot = [ask(f"hot{i}", [1, i], 8, temperature=1.0, seed=i) for i in range(2)]
    assert tokens_of(engine, [hot[0], greedy, hot[1]], "greedy") == (0,) * 8
    assert {*engine.results["hot0"].tokens, *engine.results["hot1"].tokens} >= {0, 1}
    nucleus = ask("nucleus", [0, 1], 8, top_p=0.9)
    assert tokens_of(engine, [hot[0], nucleus], "nucleus") == (0,) * 8
    with pytest.raises(InvalidParams, match=r"-0\.1"):
        ask("negative", [0], temperature=-0.1)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_03_a_tiny_temperature_is_greedy_and_banned_ids_stay_banned(configuration):
    """SA-03. Fault: the division turns -inf into NaN, or a large logit into +inf."""
    model = FixedLogitsModel([0.0, 5.0, -math.inf])
    requests = [ask(f"t{i}", [1], 8, temperature=t, seed=i) for i, t in enumerate((1e-6, 1e-30, 1.0, 1000.0))]
    results = run_checked(make_engine(configuration, model), requests)
    assert results[0].tokens == results[1].tokens == (1,) * 8
    assert 2 not in {*results[2].tokens, *results[3].tokens}


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_03_logits_that_are_no_numbers_end_their_own_request_only(configuration, prompt_logprobs):
    """SA-03. Fault: one row of NaN raises out of the loop and takes the whole batch with it."""
    model = FixedLogitsModel([0.0, 2.0, 1.0], of={(2, 2): [math.nan] * 3, (2, 1): [-math.inf] * 3})
    requests = [
        ask("before", [1], 4, temperature=1.0, seed=1),
        ask("nan", [2, 2], 4, prompt_logprobs=prompt_logprobs),
        ask("banned", [2, 1], 4, temperature=1.0, seed=2),
        ask("after", [1], 4),
    ]
    engine = make_engine(configuration, model)
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "abort", "abort", "length"]
    assert "nan" in results[1].error and "banned" in results[2].error
    assert results[1].tokens == results[2].tokens == ()
    check_solo([requests[0], requests[3]], [results[0], results[3]], model)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_05_parameters_stay_with_their_request_when_a_row_leaves(configuration):
    """SA-05. Fault: lists of parameters, one entry a row, that are not compacted together with the rows."""
    a, b = ask("A", 3, 2), ask("B", 3, 6, logit_bias={7: 100.0})
    c, d = ask("C", 4, 5, at=2.0), ask("D", 2, 5, at=2.0, temperature=1.0, top_k=1)
    requests = [a, b, c, d]
    results = run_checked(make_engine(configuration), requests)
    assert results[1].tokens == (7,) * 6
    check_solo(requests, results)
    assert results[3].tokens == solo(ask("D", 2, 5))
    assert all(7 not in r.tokens for r in (results[0], results[2], results[3]))


EOS = 5


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("num_prompt", [3, 100])
def test_sa_07_min_tokens_counts_generated_tokens_and_masks_the_end(configuration, num_prompt):
    """SA-07. Fault: it is off by one, counts the prompt, or compares with a position."""
    engine = make_engine(configuration, ToyModel(eos_token_id=EOS), slot_size=128, token_limit=512)
    forced = {"max_tokens": 9, "logit_bias": {EOS: 100.0}}
    requests = [ask(f"min{n}", num_prompt, min_tokens=n, **forced) for n in (0, 1, 4)]
    results = run_checked(engine, requests)
    assert [len(r.tokens) for r in results] == [1, 2, 5]
    assert all(r.tokens.index(EOS) == len(r.tokens) - 1 and r.finish_reason == "stop" for r in results)
    assert all(r.stop_reason is None for r in results)
    check_solo(requests, results, ToyModel(eos_token_id=EOS))


def says(text, prompt=(1, 2), **options):
    return ScriptedModel({prompt: list(text.encode())}, **options)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "abxx"), (4, "abxx"), (6, "abxxabzz")])
def test_sa_07_a_stop_string_is_tested_behind_min_tokens(configuration, min_tokens, text):
    """SA-07. Fault: only end-of-sequence is held back, and a stop string ends the request before min_tokens."""
    request = ask("a", [1, 2], 8, stop=("ab",), min_tokens=min_tokens)
    (result,) = run_checked(make_engine(configuration, says("abxxabzz")), [request])
    assert len(result.tokens) >= min_tokens
    assert (result.text, result.stop_reason) == (text, None if min_tokens == 6 else "ab")
    assert result.finish_reason == ("length" if min_tokens == 6 else "stop")


def test_sa_07_min_tokens_above_max_tokens_is_refused():
    """SA-07. Fault: a contradiction that makes a request end never, or at once."""
    with pytest.raises(InvalidParams, match="min_tokens 9 is above max_tokens 8"):
        ask("a", 3, 8, min_tokens=9)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_stop_ids_end_a_request_and_ignore_eos_does_not_hide_them(configuration):
    """Fault: stop ids and end-of-sequence are confused, or a stop id of one request ends another."""
    model = ScriptedModel({(1,): [8, EOS, 9, 8], (2,): [8, EOS, 9, 8], (3,): [8, EOS, 9, 8]}, eos_token_id=EOS)
    requests = [
        ask("eos", [1], 4),
        ask("id", [2], 4, stop_token_ids=(9,), ignore_eos=True),
        ask("none", [3], 4, ignore_eos=True),
    ]
    results = run_checked(make_engine(configuration, model), requests)
    assert [r.tokens for r in results] == [(8, EOS), (8, EOS, 9), (8, EOS, 9, 8)]
    assert [(r.finish_reason, r.stop_reason) for r in results] == [("stop", None), ("stop", 9), ("length", None)]


class PieceTokenizer:
    """Tokens are the given pieces of text, so that one token can hold more than a stop string."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids)


STREAMED = {
    # name: (pieces, stop, include_stop, text, finish reason, number of tokens)
    "held back, then the end": (["x", "a", "b"], "abc", False, "xab", "length", 3),
    "held back, then no match": (["a", "b", "d", "a"], "abc", False, "abda", "length", 4),
    "match across two tokens": (["<unk>", "<unk>", "more"], "><", False, "<unk", "stop", 2),
    "more text behind the match": (["one ", "two. Th", "ree"], ". ", False, "one two", "stop", 2),
    "the match is kept if asked for": (["one ", "two. Th", "ree"], ". ", True, "one two. ", "stop", 2),
    "the match is the whole text": (["stop", "x"], "stop", False, "", "stop", 1),
    "the first of two matches": (["a", "b", "cab", "c"], ("ca", "bc"), False, "a", "stop", 3),
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", STREAMED)
def test_sa_09_what_is_streamed_is_what_is_returned(configuration, name):
    """SA-09. Fault: held-back text is lost, text behind the stop leaks, or something is sent twice."""
    pieces, stop, include, text, reason, num_tokens = STREAMED[name]
    model = ScriptedModel({(1, 2): list(range(len(pieces)))}, vocab_size=256)
    model.tokenizer = PieceTokenizer(*pieces, *["?"] * 256)
    request = ask("a", [1, 2], len(pieces), stop=stop, include_stop_str_in_output=include)
    engine = make_engine(configuration, model)
    engine.submit(ask("other", [9, 9], 5))
    stream = engine.stream(request)
    deltas = []
    for delta in islice(stream, 100):
        check_invariants(engine)
        deltas.append(delta)
    assert "".join(delta.text for delta in deltas) == text == stream.result.text
    assert tuple(t for delta in deltas for t in delta.tokens) == stream.result.tokens == tuple(range(num_tokens))
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
    drive(engine)
    again = make_engine(configuration, model)
    (result,) = run_checked(again, [request])
    assert (result.text, result.finish_reason, len(result.tokens)) == (text, reason, num_tokens)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("text", ["xab", "héllo", "日本語", "a😀b", "plain text"])
def test_sa_09_characters_of_several_tokens_are_streamed_whole(configuration, text):
    """SA-09. Fault: half a character is shown as U+FFFD and repeated when its other half arrives."""
    size = len(text.encode())
    stream = make_engine(configuration, says(text)).stream(ask("a", [1, 2], size, stop="abc"))
    deltas = read(stream)
    assert "".join(delta.text for delta in deltas) == text == stream.result.text
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert len(stream.result.tokens) == size


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_09_an_abort_gives_out_the_text_that_was_held_back(configuration):
    """SA-09. Fault: text held back for a stop string is lost when the request is aborted."""
    engine = make_engine(configuration, says("xabcd"))
    stream = engine.stream(ask("a", [1, 2], 5, stop="abd"))
    deltas = [next(stream) for _ in range(3)]
    assert [delta.text for delta in deltas] == ["x", "", ""]
    engine.abort("a")
    (last,) = stream
    assert (last.text, last.finish_reason, stream.result.text) == ("ab", "abort", "xab")
    check_drained(engine)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("include", [False, True])
def test_sa_09_the_text_of_the_token_that_ends_a_request_is_left_out(configuration, include):
    """SA-09. Fault: end-of-sequence and stop ids are treated differently, and one of them shows in the text."""
    model = ScriptedModel({(1,): list(b"hi!"), (2,): list(b"hi?")}, eos_token_id=ord("!"))
    requests = [
        ask("eos", [1], 9, include_stop_str_in_output=include),
        ask("id", [2], 9, stop_token_ids=(ord("?"),), include_stop_str_in_output=include),
    ]
    results = run_checked(make_engine(configuration, model), requests)
    assert [r.tokens for r in results] == [tuple(b"hi!"), tuple(b"hi?")]
    assert [r.text for r in results] == (["hi!", "hi?"] if include else ["hi", "hi"])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("bias", "num_tokens"), [(3.0, 7), (-100.0, 8)], ids=["stops", "goes on"])
@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_sa_11_penalties_min_tokens_and_usage_survive_a_preemption(configuration, bias, num_tokens, sampling):
    """SA-11. Fault: the second prefill takes prompt + output for a new prompt."""
    model = ToyModel(vocab_size=8, eos_token_id=EOS)  # few ids, so that penalties matter at every token
    penalties = {"presence_penalty": 2.0, "repetition_penalty": 1.5, "min_tokens": 6, "logit_bias": {EOS: bias}}
    request = ask("A", [1, 2, 3, 4], 8, **penalties, **sampling)
    older = ask("B", [6, 6, 6, 6, 6], 12, ignore_eos=True)  # needs its third block in step 5
    engine = make_engine(configuration, model, num_blocks=4, token_budget=16)
    results = run_checked(engine, [older, request])
    check_solo([older, request], results, model)
    (preempted,) = (s for s in engine.trace.steps if s.preempted)
    emitted_before = sum(t <= preempted.start for t in results[1].timeline.token_times)
    assert (names(preempted.preempted), emitted_before) == (("A",), 4)
    assert results[1].timeline.num_prompt == 4
    assert len(results[1].tokens) == num_tokens and EOS not in results[1].tokens[:6]
    assert results[1].tokens != solo(ask("A", [1, 2, 3, 4], 8), ToyModel(vocab_size=8, eos_token_id=EOS))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_sa_11_repetition_sees_the_prompt_and_presence_does_not(configuration):
    """SA-11. Fault: prompt and output are mixed up by a penalty."""
    model = FixedLogitsModel([3.0, 2.9, 2.8, 0.1])  # of ids 0 and 1, 0 stands in the prompt
    plain, presence = ask("plain", [0], 3), ask("presence", [0], 3, presence_penalty=2.0)
    repetition = ask("repetition", [0], 3, repetition_penalty=1.5)
    results = run_checked(make_engine(configuration, model), [plain, presence, repetition])
    assert [r.tokens for r in results] == [(0, 0, 0), (0, 1, 2), (1, 2, 0)]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_logprobs_are_the_same_for_every_configuration(configuration):
    """Fault: log-probabilities that come out of step with tokens after chunks or a preemption, or come twice."""
    requests = [ask("old", 4, 9), ask("a", 6, 8, logprobs=2, prompt_logprobs=1), ask("b", 3, 4, logprobs=0)]
    engine = make_engine(configuration, num_blocks=5, token_budget=3)
    results = run_checked(engine, requests)
    check_solo(requests, results)
    alone = run_checked(make_engine("continuous"), requests[1:2])[0]
    assert results[1].logprobs == alone.logprobs and results[1].prompt_logprobs == alone.prompt_logprobs
    assert len(alone.logprobs) == 8 and len(alone.prompt_logprobs) == 6 and alone.prompt_logprobs[0] is None
    assert tuple(sample.token for sample in alone.logprobs) == alone.tokens
    assert tuple(sample.token for sample in alone.prompt_logprobs[1:]) == tuple(requests[1].prompt[1:])
    assert results[0].logprobs is None and len(results[2].logprobs) == 4
    assert (timeline(engine, "a").num_preemptions > 0) == (configuration in ("paged", "chunked"))
