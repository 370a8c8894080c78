"""One request's story: it says what the trace says, of every request, in words and within 100 columns."""

import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import ask, make_engine

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    StaticBatching,
    ToyModel,
    Trace,
    policies,
)
from minibatch.explain import UnknownRequest, describe, story
from minibatch.policies import Never, Optimistic, Priority, Recompute, Swap, by_priority, lowest_priority
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.trace import StepReport


def some_requests(shared=0, answers=(1,), count=12, seed=3):
    rng = random.Random(seed)
    beginning = [(5 * i) % 90 for i in range(shared)]
    requests = []
    for i in range(count):
        prompt = beginning + [rng.randrange(100) for _ in range(rng.randint(2, 9))]
        request = ask(f"r{i}", prompt, rng.randint(2, 12), at=0.7 * i, n=rng.choice(answers))
        requests.append(replace(request, priority=rng.choice((0, 1, 2)), client=rng.choice("xy")))
    return requests


def play(scheduler, kv, requests, **options):
    engine = Engine(ToyModel(), scheduler, kv, **options)
    engine.run(requests)
    return engine.trace


def paged(**decisions):
    return ContinuousBatching(4, 64, **decisions), PagedKVCache(8, 4), some_requests()


TRACES = {
    **{f"order {n}": lambda make=make: play(*paged(), order=make()) for n, make in policies.ORDERS.items()},
    **{
        f"admission {n}": lambda make=make: play(
            ChunkedPrefill(8, 4, admission=make()), PagedKVCache(8, 4), some_requests()
        )
        for n, make in policies.ADMISSIONS.items()
    },
    **{
        f"preemption {n}": lambda make=make: play(*paged(preemption=make()), order=Priority())
        for n, make in policies.PREEMPTIONS.items()
        if n != "never"
    },
    "prefix cache": lambda: play(
        ChunkedPrefill(8, 4, preemption=Swap()), PrefixCachedKVCache(10, 4), some_requests(shared=8)
    ),
    "answers": lambda: play(ContinuousBatching(6, 64), PagedKVCache(20, 4), some_requests(answers=(1, 3))),
    "static": lambda: play(StaticBatching(4, max_wait=2.0), ContiguousKVCache(4, 24), some_requests()),
    "prefill first": lambda: play(
        ContinuousBatching(4, 16, "prefill-first"), ContiguousKVCache(4, 24), some_requests()
    ),
}
VERBS = ("waited", "preempted", "admitted", "back", "forked from", "ended", "its row ran on", "kept its memory")


def texts(trace, request_id):
    return [event.text for event in story(trace, request_id)]


@pytest.fixture(params=TRACES)
def trace(request):
    return TRACES[request.param]()


def test_every_request_of_every_policy_has_its_story(trace):
    """Fault: an iteration is told twice or left out, a token is counted wrong, events are out of order."""
    for timeline in trace.timelines:
        name, events = timeline.request_id, story(trace, timeline.request_id)
        told = {verb: [e for e in events if e.text.startswith(verb)] for verb in VERBS}
        waits = [i for e in told["waited"] for i in range(e.iterations[0], e.iterations[1] + 1)]
        assert waits == waiting_in(trace.steps, name), f"{name} waited"
        dead = [i for e in told["its row ran on"] for i in range(e.iterations[0], e.iterations[1] + 1)]
        assert dead == [s.index for s in trace.steps if any(p.dead and p.request_id == name for p in s.padding)]
        assert len(told["preempted"]) == timeline.num_preemptions
        admissions = [a for s in trace.steps for a in s.admitted if a.request_id == name]
        assert len(told["admitted"]) + len(told["back"]) == len(admissions)
        assert len(told["forked from"]) == any(f.request_id == name for s in trace.steps for f in s.forked)
        assert len(told["ended"]) == 1 and events[0].text == "arrived"
        assert tokens_told(events) == list(range(1, len(timeline.token_times) + 1)), f"{name}: tokens"
        again = sum(m.recomputed for s in trace.steps for m in s.members if m.request_id == name)
        found = re.search(r"(\d+) tokens? computed again in all", told["ended"][0].text)
        assert int(found[1] if found else 0) == again
        for soon, late in pairwise(events):
            assert soon.time <= late.time, f"{name}: {soon} before {late}"


def waiting_in(steps: list[StepReport], name: str) -> list[int]:
    """The iterations in which it is in the queue, but for those in which it is preempted, which is told otherwise."""
    inside, waits = False, []
    for step in steps:
        out = any(p.request_id == name for p in step.preempted)
        inside = (inside or name in step.arrived or out) and not any(a.request_id == name for a in step.admitted)
        if inside and not out:
            waits.append(step.index)
    return waits


def tokens_told(events) -> list[int]:
    """The numbers of the tokens that the events tell of."""
    told = []
    for event in events:
        if "first token, " in event.text:
            told.append(1)
        elif many := re.search(r"decoded \d+ tokens \((\d+) to (\d+)\),", event.text):
            told += range(int(many[1]), int(many[2]) + 1)
        elif one := re.search(r"(?:; |decoded )token (\d+), ", event.text):
            told.append(int(one[1]))
    return told


def test_the_text_fits_a_terminal_and_changes_nothing(trace):
    """Fault: lines run over, or telling a story changes the trace, so that the second one is another."""
    before = pickle.dumps(trace)
    for timeline in trace.timelines:
        for name in {timeline.request_id, timeline.group} - {None}:
            text = describe(trace, name)
            assert all(len(line) <= 100 and line == line.rstrip() for line in text.splitlines())
            assert text == describe(trace, name) and text.startswith(f"{name}: prompt {timeline.num_prompt}, ")
            assert "Times are seconds, simulated" in text
    assert pickle.dumps(trace) == before


def test_the_whole_text_of_a_request_that_waits_is_preempted_and_comes_back():
    """Fault: anything at all in the text of an ordinary story."""
    engine = make_engine("paged", num_blocks=5, max_num_seqs=3, meta={"name": "short of memory"})
    engine.run([ask("a", 8, 8), ask("b", 6, 6, at=0.5), ask("c", 4, 2, at=1.5)])
    assert describe(engine.trace, "b") == WHOLE


WHOLE = """\
b: prompt 6, at most 6 new tokens, client default, priority 0

time  iteration  what happened
 0.5             arrived
   1          1  admitted after 0.5 s
   1          1  prefill of 6 tokens (6 of 6 computed); first token, 1.5 s after its arrival
   2        2-3  decoded 2 tokens (2 to 3), longest gap 1 s
   4          4  preempted itself: it needs memory that is not there, and is the one to give way;
                 the K/V of 8 tokens are lost
   5        5-7  waited 3 iterations for blocks: needs 3 blocks, 2 free, 1 promised ... needs 3
                 blocks, 1 free
   8          8  back after 4 s
   8          8  8 tokens computed again and a decode (9 of 9 computed); token 4, 5 s after the one
                 before
   9       9-10  decoded 2 tokens (5 to 6), longest gap 1 s
  11         10  ended by length with 6 tokens; TTFT 1.5 s, end to end 10.5 s; preempted 1 time; 8
                 tokens computed again in all

Times are seconds, simulated; iterations are numbered as in the pictures. Run: short of memory, toy,
ContinuousBatching(max_num_seqs=3, max_num_batched_tokens=64, phase_order='mixed', first='decode',
admission=Watermark(share=0.01, whole_prompt=True), preemption=Recompute(victim=newest,
displaces=None)), PagedKVCache(5 blocks of 4), FCFS()."""


def test_a_wait_says_its_own_reasons_with_their_first_and_last_numbers():
    """Fault: the reason is another request's, or only the first or the last numbers are told."""
    engine = make_engine("paged", num_blocks=6, max_num_seqs=4)
    engine.run([ask("a", 11, 5), ask("b", 3, 8), ask("c", 15, 2, at=0.5), ask("d", 3, 2, at=0.5)])
    first, last = (dict(engine.trace.steps[i].waiting)["c"].removeprefix("blocks: ") for i in (1, 4))
    assert first != last
    waits = [(e.iterations, e.text) for e in story(engine.trace, "c") if e.text.startswith("waited")]
    assert waits[0] == ((1, 4), f"waited 4 iterations for blocks: {first} ... {last}")
    assert texts(engine.trace, "d")[1] == "waited 4 iterations behind c, one of 1 there"


def test_a_wait_behind_changing_heads_names_the_first_and_the_last():
    """Fault: the head of the queue that is told is not the one of that time."""
    engine = make_engine("paged", max_num_seqs=1)
    engine.run([ask(name, 3, 2) for name in "abcde"])
    assert texts(engine.trace, "e")[1:3] == [
        "waited 6 iterations behind b, one of 3 there ... behind d, one of 1 there",
        "waited 2 iterations for places: 1 of 1 taken",
    ]


def test_a_chunk_says_how_much_was_found_cached_computed_again_and_padded():
    """Fault: a prefix hit, a recomputation or left padding is told as ordinary prefill."""
    swap = play(
        ChunkedPrefill(8, 4),
        PrefixCachedKVCache(20, 4),
        [ask("a", 12, 2), ask("b", [*ask("a", 12).prompt, 7], 2, at=4)],
    )
    assert texts(swap, "b")[1:3] == [
        "admitted at once; 12 of its 13 tokens found in the prefix cache",
        "prefill of 1 token (13 of 13 computed); first token, 1 s after its arrival",
    ]
    assert texts(swap, "a")[2:4] == [
        "prefill of 8 tokens (8 of 12 computed)",
        "prefill of 4 tokens (12 of 12 computed); first token, 2 s after its arrival",
    ]
    static = play(StaticBatching(2), ContiguousKVCache(2, 24), [ask("a", 6, 4), ask("b", 2, 2)])
    assert texts(static, "b")[2] == (
        "prefill of 2 tokens (2 of 2 computed), beside 4 left pads; first token, 1 s after its arrival"
    )
    assert texts(static, "b")[-1] == "its row ran on, dead, for 2 iterations: the batch was not over"


def test_a_prompt_in_many_chunks_is_one_event():
    """Fault: the story of a long prompt is a page of chunks."""
    trace = play(ChunkedPrefill(4, 2), PagedKVCache(40, 4), [ask("a", 41, 2)])
    assert texts(trace, "a")[2] == (
        "11 chunks of 1 to 4 tokens: prefill of 41 tokens (41 of 41 computed); first token, 11 s after its arrival"
    )


def displaced(preemption):
    engine = Engine(ToyModel(), ContinuousBatching(1, 64, preemption=preemption), PagedKVCache(8, 4), order=Priority())
    engine.run([replace(ask("low", 3, 6), priority=2), ask("high", 3, 3, at=1.5)])
    return engine.trace


def test_who_displaces_whom_and_what_becomes_of_the_kv():
    """Fault: the victim's story does not name the other, the other's does not name the victim, or swap is a loss."""
    rule = {"victim": lowest_priority, "displaces": by_priority}
    lost, swapped = displaced(Recompute(**rule)), displaced(Swap(**rule))
    assert "preempted, because high outranks it; the K/V of 4 tokens are lost" in texts(lost, "low")
    assert "4 tokens computed again and a decode (5 of 5 computed); token 3, 4 s after the one before" in texts(
        lost, "low"
    )
    assert "preempted, because high outranks it; the K/V of 4 tokens (4 B) go to the host" in texts(swapped, "low")
    assert "back after 3 s; the K/V of 4 tokens (4 B) come back from the host" in texts(swapped, "low")
    assert "decoded token 2, 1 s after the one before" in texts(swapped, "low")
    assert "decoded 4 tokens (3 to 6), longest gap 4 s" in texts(swapped, "low")  # its time on the host is in it
    assert texts(swapped, "low")[-1].endswith("preempted 1 time; 4 tokens (4 B) swapped to the host in all")
    for trace in (lost, swapped):
        assert "low had to give way to it" in texts(trace, "high")


def test_who_keeps_its_memory_and_gets_no_tokens_is_told():
    """Fault: iterations in which an active request does not run are missing from its story."""
    stalled = play(
        ContinuousBatching(4, 16, "prefill-first"), ContiguousKVCache(4, 16), [ask("a", 3, 3), ask("b", 3, 2, at=0.5)]
    )
    assert "kept its memory and got no tokens in 1 iteration: others ran, only prompts" in texts(stalled, "a")
    turns = play(ChunkedPrefill(3, 6), PagedKVCache(20, 4), [ask("a", 3, 7, n=5, temperature=1.0)])
    assert any(
        re.search(r"went without in \d of \d+ iterations: token budget: the others had all 3$", text)
        for text in texts(turns, "a#1")
    )
    never = ContinuousBatching(6, 64, admission=Optimistic(), preemption=Never())
    trace = play(never, PagedKVCache(6, 4), [ask("a", 7, 5), ask("b", 7, 9), ask("c", 2, 3, at=1.0)])
    assert (
        "went without in 2 of 10 iterations: blocks: needs 1 blocks, 1 free, 1 promised ... needs 1 blocks, 0 free"
        in (" ".join(texts(trace, "b")))
    )


def test_answers_of_one_prompt_are_told_together_and_alone():
    """Fault: a group's id is unknown, what the answers share is told of each, or a fork has no story."""
    trace = play(ContinuousBatching(4, 64), PagedKVCache(20, 4), [ask("q", 5, 3, n=3, temperature=1.0, seed=1)])
    assert texts(trace, "q") == [
        "arrived",
        "admitted at once",
        "prefill of 5 tokens (5 of 5 computed); first token, 1 s after its arrival",
        "q#1, q#2 fork off and share the K/V of the prompt",
        *[f"q#{i} ended by length with 3 tokens; TTFT 1 s, end to end 3 s" for i in range(3)],
    ]
    assert "3 answers" in describe(trace, "q") and "an answer of q" in describe(trace, "q#1")
    assert texts(trace, "q#2")[1:3] == [
        "forked from q#0, which has computed the prompt: shares the K/V of its 5 tokens; "
        "first token, 1 s after its arrival",
        "decoded 2 tokens (2 to 3), longest gap 1 s",
    ]


def test_those_who_do_not_finish_have_a_story_too():
    """Fault: the story of a refused, aborted or unfinished request is an error, or has no end."""
    engine = make_engine("paged", num_blocks=6, max_num_seqs=1, max_queue=2)
    engine.submit(ask("runs", 6, 9))
    engine.submit(ask("gone", 6, 5))
    engine.submit(ask("waits", 6, 5, at=0.5))
    engine.submit(ask("late", 6, 5, at=0.6))  # finds the queue full
    engine.submit(ask("future", 6, 5, at=99.0))
    for bad in (ask("empty", []), ask("huge", 400)):
        with pytest.raises(ValueError):
            engine.submit(bad)
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    engine.step()
    trace = engine.trace
    assert texts(trace, "runs")[-1] == "the trace ends: it runs, with 4 tokens of at most 9"
    assert texts(trace, "waits")[-1] == "the trace ends: it waits, with 0 tokens of at most 5"
    assert texts(trace, "future") == ["arrived", "the trace ends: it has not come yet, with 0 tokens of at most 5"]
    assert texts(trace, "gone")[-1] == "ended by abort with 0 tokens of at most 5"
    for name, why in (("late", "QueueFull: "), ("empty", "InvalidPrompt: "), ("huge", "NeverFits: ")):
        arrived, refused = texts(trace, name)
        assert arrived == "arrived" and refused.startswith(f"refused: {why}")
    assert describe(trace, "empty").startswith("empty: never accepted, ")
    assert Counter(e.time for e in story(trace, "gone"))[3.0] == 1


def test_an_aborted_member_of_a_static_batch_ends_before_its_row_runs_dead():
    """Fault: the end of a request is told after what came later."""
    engine = make_engine("static", max_num_seqs=2)
    engine.submit(ask("a", 3, 9))
    engine.submit(ask("b", 3, 4))
    engine.step()
    engine.abort("a")
    while engine.step():
        pass
    assert texts(engine.trace, "a")[-2:] == [
        "ended by abort with 1 token of at most 9",
        "its row ran on, dead, for 3 iterations: the batch was not over",
    ]


def test_waiting_in_an_idle_engine_is_told():
    """Fault: nothing says why a request waited while no iteration ran: a static batch waits for others."""
    trace = play(StaticBatching(2, max_wait=3.0), ContiguousKVCache(2, 16), [ask("a", 3, 2, at=1.0)])
    assert texts(trace, "a")[1] == "admitted after 3 s, in which nothing ran"


def test_a_trace_without_step_reports_tells_what_the_timelines_know():
    """Fault: a long simulation, which leaves them out, has no stories."""
    for make in TRACES.values():
        full = make()
        short = Trace(full.meta, [], full.timelines)
        for timeline in full.timelines:
            told = texts(short, timeline.request_id)
            stays = [int(re.search(r"(\d+) tokens? in this stay", text)[1]) for text in told if "in this stay" in text]
            assert len(stays) == len(timeline.runs) and sum(stays) == len(timeline.token_times)
            assert told.count("preempted") == timeline.num_preemptions
            assert told[-1].startswith(f"ended by {timeline.finish_reason} with ")
        text = describe(short, full.timelines[0].request_id)
        assert "without step reports" in text and all(len(line) <= 100 for line in text.splitlines())
    assert "without step reports" not in describe(full, full.timelines[0].request_id)


def test_a_wait_for_ever_changing_reasons_stays_short():
    """Fault: a request whose reason changes with every iteration has a story of hundreds of lines."""
    trace = play(*paged(), order=None)
    (arrived, *_) = (s.index for s in trace.steps if "r11" in s.arrived)
    trace.steps = [
        replace(s, waiting=(("r11", f"{('slots', 'blocks')[s.index % 2]}: {s.index} taken"),)) if s.index < 20 else s
        for s in trace.steps
    ]
    event = next(e for e in story(trace, "r11") if e.text.startswith("waited"))
    assert event.text.startswith(f"waited {event.iterations[1] - arrived + 1} iterations, for changing reasons: ")
    assert re.search(r"\d+ times slots: \d+ taken ... \d+ taken; \d+ times blocks: ", event.text)


def test_an_unknown_request_is_answered_with_close_names():
    """Fault: a typing error ends in a traceback, or in a message that does not help."""
    trace = TRACES["answers"]()
    with pytest.raises(UnknownRequest, match="no request 'r10x' in this trace; close to it: r10"):
        story(trace, "r10x")
    with pytest.raises(UnknownRequest, match=r"no request 'zzz' in this trace, which has \d+: r0, .*, \.\.\."):
        story(trace, "zzz")
    with pytest.raises(UnknownRequest, match="which has 0"):
        describe(Trace(), "a")


def test_an_id_that_was_used_again_is_pointed_out():
    """Fault: the story of the first one is taken for that of the second."""
    engine = make_engine("paged")
    engine.run([ask("a", 3, 2)])
    engine.run([ask("a", 3, 4, at=None)])
    assert "the same id again: a~2" in describe(engine.trace, "a")
    assert texts(engine.trace, "a~2")[-1].startswith("ended by length with 4 tokens")


def test_a_saved_trace_tells_the_same_story(tmp_path):
    """Fault: something that a story needs is not in the file."""
    trace = TRACES["prefix cache"]()
    trace.save(tmp_path / "t.jsonl")
    loaded = Trace.load(tmp_path / "t.jsonl")
    for timeline in trace.timelines:
        assert describe(loaded, timeline.request_id) == describe(trace, timeline.request_id)


def test_measured_times_are_called_measured_and_short_ones_are_in_milliseconds():
    """Fault: a simulated number is taken for a measured one; small latencies are all 0."""
    trace = TRACES["order fcfs"]()
    trace.meta["clock"] = "real"
    for timeline in trace.timelines:
        timeline.arrival, timeline.finish = timeline.arrival / 1000, timeline.finish / 1000
        timeline.token_times = [time / 1000 for time in timeline.token_times]
    text = describe(trace, "r0")
    assert "Times are seconds, measured" in text and "first token, 1 ms after its arrival" in text


def test_a_trace_with_an_empty_header_has_a_story_without_holes():
    """Fault: facts that a trace does not have are told as None, or fail."""
    engine = make_engine("paged", num_blocks=5)
    engine.run([ask("a", 8, None), ask("b", 6, 6)])
    engine.trace.meta = {}
    text = describe(engine.trace, "b")
    assert "None" not in text and "Run:" not in text
