"""``minibatch ...``: the command line. Exit codes that scripts can use:

0    done (and, for ``compare``, every configuration's tokens equal solo generation up to numerical ties)
1    anything that is not foreseen here, with its traceback
2    wrong usage, or a request that cannot run; the message says why
3    the model cannot be had or is not supported
4    ``compare``: some tokens differ from solo generation, and not by a numerical tie
5    a policy planned what cannot be carried out, or nothing although there was work; the message names it
6    ``lab check``: an exercise is not right, or not done
130  interrupted
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from minibatch import (
    __version__,
    bench,
    bench_planning,
    bench_scale,
    bench_simulation,
    bench_swap,
    cli_figures,
    cli_labs,
    cli_player,
    cli_simulation,
    compare,
    compare_report,
    explain,
    workload,
)
from minibatch.cli_options import add_command, check_writable, option
from minibatch.compare import Setup
from minibatch.configurations import CONFIGURATIONS
from minibatch.engine import Engine
from minibatch.llm import MOST_KV_TOKENS, load_model
from minibatch.models import Model, ModelUnavailable, UnsupportedModel
from minibatch.models.pretrained import DEFAULT_MODEL
from minibatch.plan import PlanError
from minibatch.policies import ADMISSIONS, ORDERS, PREEMPTIONS
from minibatch.request import EngineStalled, Request, RequestRefused, Result, SamplingParams
from minibatch.trace import Trace

USAGE, NO_MODEL, DIFFERS, BAD_PLAN, INTERRUPTED = 2, 3, 4, 5, 130
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    # How long an idle OpenMP thread spins before it sleeps, unless the user has decided. torch reads it when it is
    # imported, later. By default it spins for milliseconds, and with another process on a core that made a decode step
    # 3 to 6 times slower; for every engine alike, for they all run in this process.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = options.command(options)
        sys.stdout.flush()  # so that a reader who has gone is noticed here
        return code
    except (
        BrokenPipeError
    ):  # whoever read our output has gone (`| head`): nothing is left to say, nor anyone to hear it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ModelUnavailable, UnsupportedModel) as error:
        return _fail(error, NO_MODEL)
    except (RequestRefused, ValueError, OSError) as error:
        return _fail(error, USAGE)
    except (PlanError, EngineStalled) as error:
        return _fail(error, BAD_PLAN)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(error: Exception, code: int) -> int:
    print(f"minibatch: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minibatch", description="How LLM serving batches requests.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"minibatch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_generate(commands)
    _add_explain(commands)
    cli_player.add(commands)
    cli_simulation.add(commands)
    cli_figures.add(commands)
    cli_labs.add(commands)
    _add_bench(commands)
    return parser


def _load(options: argparse.Namespace) -> Model:
    model = load_model(options.model, options.dtype, options.device)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer, and prompts are text here")
    return model


def _add_model_command(
    commands: argparse._SubParsersAction, name: str, run: Callable, text: str
) -> argparse.ArgumentParser:
    command = add_command(commands, name, run, text)
    group = command.add_argument_group("model")
    names = "smollm2-135m, toy (no download, simulated time), a Hub id or a path"
    option(group, "--model", DEFAULT_MODEL, names, str)
    option(group, "--dtype", "float32", "of weights, K/V and computation", str, choices=DTYPES)
    option(group, "--device", "cpu", "cpu, or cuda for a GPU", str)
    return command


# ------------------------------------------------------------------------------------------------- minibatch compare


def _add_compare(commands: argparse._SubParsersAction) -> None:
    text = "The same requests through static, continuous, paged and chunked batching, side by side."
    command, default = _add_model_command(commands, "compare", _compare, text), Setup()
    group = command.add_argument_group("workload")
    option(group, "--workload", default.workload, "mixed, short or long prompts, or a text file with one a line", str)
    option(group, "--requests", default.num_requests, "how many", int)
    option(group, "--max-tokens", default.max_tokens, "most new tokens of one", int)
    load = "arrival rate, relative to this machine: 1 is what serving one request after the other just keeps up with"
    option(group, "--load", default.load, load, float)
    option(group, "--rate", default.rate, "arrival rate in requests a second, instead of --load", float)
    option(group, "--seed", default.seed, "of the order of the prompts and the gaps between arrivals", int)
    option(group, "--clients", default.clients, "how many; each has about half as many requests as the one before", int)
    option(group, "--priorities", default.priorities, "how many, 0 is the most urgent; all as likely", int)
    group = command.add_argument_group("budget")
    option(group, "--kv-tokens", default.kv_tokens, "KV cache in tokens (default: 4 times the longest request)", int)
    option(group, "--block-size", default.block_size, "tokens a block, of paged and chunked", int)
    option(group, "--max-num-seqs", default.max_num_seqs, "most active requests", int)
    option(group, "--token-budget", default.token_budget, "tokens an iteration, of chunked", int)
    group = command.add_argument_group("policies", "A name, or the dotted name of your own: mymodule:MyOrder.")
    option(group, "--order", default.order, f"who is next, of all four: {', '.join(ORDERS)}", str)
    but_static = "of all but static"
    option(group, "--admission", default.admission, f"does it fit, {but_static}: {', '.join(ADMISSIONS)}", str)
    option(group, "--preemption", default.preemption, f"who gives way, {but_static}: {', '.join(PREEMPTIONS)}", str)
    group.add_argument("--prefix-cache", action="store_true", help="paged and chunked find computed blocks again")
    group = command.add_argument_group("output")
    out = (
        f"directory for pictures, traces and numbers (default: compare, or compare-MODEL if it is not {DEFAULT_MODEL})"
    )
    option(group, "--out", None, out, Path)
    group.add_argument("--json", action="store_true", help="print all numbers as JSON, and nothing else, to stdout")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _compare(options: argparse.Namespace) -> int:
    setup = Setup(
        workload=options.workload,
        num_requests=options.requests,
        max_tokens=options.max_tokens,
        load=options.load,
        rate=options.rate,
        seed=options.seed,
        clients=options.clients,
        priorities=options.priorities,
        kv_tokens=options.kv_tokens,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        token_budget=options.token_budget,
        order=options.order,
        admission=options.admission,
        preemption=options.preemption,
        prefix_cache=options.prefix_cache,
    )
    own = "compare" if options.model == DEFAULT_MODEL else f"compare-{Path(options.model).name}"
    directory = options.out or Path(own)
    check_writable(directory)
    model = _load(options)
    result = compare.run(model, setup, progress=not options.quiet)
    paths = compare_report.save(result, directory)
    if options.json:
        print(json.dumps(compare_report.to_json(result), indent=2))
    else:
        print(compare_report.describe(result))
        print(f"\nwritten to {directory}/: {', '.join(path.name for path in paths)}")
    return 0 if result.holds else DIFFERS


# ------------------------------------------------------------------------------------------------ minibatch generate


def _add_generate(commands: argparse._SubParsersAction) -> None:
    text = (
        "Streams the answer to a prompt to the terminal. (Alone, a request gets the same answer from every scheduler.)"
    )
    command, default = _add_model_command(commands, "generate", _generate, text), SamplingParams()
    group = command.add_argument_group("prompt")
    group.add_argument("--prompt", required=True, help="what to ask")
    group.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    option(group, "--scheduler", "chunked", "which configuration answers", str, choices=CONFIGURATIONS)
    group = command.add_argument_group("sampling")
    option(group, "--max-tokens", 256, "most new tokens", int)
    option(group, "--temperature", default.temperature, "0 takes the most likely token", float)
    option(group, "--top-p", default.top_p, "share of the probability that is kept", float)
    option(group, "--top-k", default.top_k, "number of tokens that are kept, 0: all", int)
    option(group, "--seed", default.seed, "of the draws (default: another in every run)", int)
    group.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be repeated")


def _generate(options: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
    )
    model = _load(options)
    prompt = model.tokenizer.encode(options.prompt) if options.raw else workload.encode(model.tokenizer, options.prompt)
    size = min(len(prompt) + options.max_tokens, model.max_model_len or MOST_KV_TOKENS)
    scheduler, kv = Setup().configuration(options.scheduler, kv_tokens=size + 15, slot_size=size)
    with Engine(model, scheduler, kv).stream(Request(prompt, params)) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print()
    if stream.result.error is not None:
        raise ValueError(stream.result.error)
    print(_facts(options.scheduler, stream.result), file=sys.stderr)
    return 0


def _facts(name: str, result: Result) -> str:
    timeline = result.timeline
    facts = f"{name}: {timeline.num_prompt} prompt + {len(result.tokens)} new tokens, ended by {result.finish_reason}"
    first = timeline.token_times[0]
    facts += f"; first token after {first - timeline.arrival:.3g} s"
    if timeline.finish > first:
        facts += f", then {(len(result.tokens) - 1) / (timeline.finish - first):.3g} tokens/s"
    return f"[{facts}]"


# ------------------------------------------------------------------------------------------------- minibatch explain


def _add_explain(commands: argparse._SubParsersAction) -> None:
    text = "One request's story, from a trace: when it waited and for what, what was computed, who displaced it."
    more = (
        '"needs 6 blocks, 5 free, 1 promised": one of the free ones was promised to somebody else earlier in the same '
        "iteration. TTFT: arrival to first token. Traces are what `minibatch compare` and `trace.save()` write."
    )
    command = add_command(commands, "explain", _explain, text, epilog=more)
    command.add_argument("request", metavar="REQUEST", help="its id; of a request with several answers also id#0, ...")
    command.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a trace, *.jsonl")


def _explain(options: argparse.Namespace) -> int:
    print(explain.describe(Trace.load(options.trace), options.request))
    return 0


# --------------------------------------------------------------------------------------------------- minibatch bench


def _add_bench(commands: argparse._SubParsersAction) -> None:
    text = "What things cost on this machine. Choose a part, or several."
    command = _add_model_command(commands, "bench", _bench, text)
    command.set_defaults(fail=command.error)
    group = command.add_argument_group("parts")
    for name, (_, _, what) in BENCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=what)
    group, load = command.add_argument_group("planning"), bench_planning.Load()
    option(group, "--running", load.running, "active requests", int)
    option(group, "--waiting", load.waiting, "requests in the queue", int)
    option(group, "--plans", load.plans, "how often each plan is made", int)
    group = command.add_argument_group("swap")
    option(group, "--longest", 1024, "longest context, in tokens", int)
    option(group, "--repeats", 7, "how often each length is measured", int)
    group = command.add_argument_group("scale")
    option(
        group, "--azure", None, "a CSV file of the Azure LLM inference trace 2023, in place of requests like it", Path
    )
    group = command.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print all numbers as JSON, and nothing else, to stdout")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _bench(options: argparse.Namespace) -> int:
    wanted = {name: part for name, part in BENCHES.items() if getattr(options, name)}
    if not wanted:
        options.fail(f"choose a part: {', '.join(f'--{name}' for name in BENCHES)}")
    load = bench.load_average()
    found = {name: measure(options) for name, (measure, _, _) in wanted.items()}
    facts = bench.where(load)
    if options.json:
        print(json.dumps({**facts, **{name: _plain(numbers) for name, numbers in found.items()}}, indent=2))
    else:
        print(bench.describe_where(facts))
        for name, (_, describe, _) in wanted.items():
            print(f"\n{describe(found[name])}")
    return 0


def _plain(numbers: Any) -> Any:
    return asdict(numbers) if is_dataclass(numbers) else [asdict(each) for each in numbers]


def _bench_planning(options: argparse.Namespace) -> bench_planning.Planning:
    load = bench_planning.Load(options.running, options.waiting, options.plans)
    return bench_planning.run(load, progress=not options.quiet)


def _bench_swap(options: argparse.Namespace) -> bench_swap.Swapping:
    model = load_model(options.model, options.dtype, options.device)
    return bench_swap.run(model, options.longest, options.repeats, progress=not options.quiet)


def _bench_simulation(options: argparse.Namespace) -> bench_simulation.Fidelity:
    model = load_model(options.model, options.dtype, options.device)
    return bench_simulation.run(model, progress=not options.quiet)


def _bench_scale(options: argparse.Namespace) -> list[bench_scale.Size]:
    scenario = bench_scale.LIKE_AZURE
    if options.azure is not None:
        scenario = replace(bench_scale.HARDWARE, workload=f"azure:{options.azure}")
    return bench_scale.run(scenario)


# name -> what measures, what puts it into words, and what it is
BENCHES: dict[str, tuple[Callable, Callable, str]] = {
    "planning": (
        _bench_planning,
        bench_planning.describe,
        "what a plan costs, with every policy (a minute or two; quicker with --plans 8)",
    ),
    "swap": (
        _bench_swap,
        bench_swap.describe,
        "from which length on swapping is cheaper than recomputing (a minute; quicker with --longest 256)",
    ),
    "simulation": (
        _bench_simulation,
        bench_simulation.describe,
        "how far simulated runs are from measured ones, with a cost model calibrated here (three minutes)",
    ),
    "scale": (
        _bench_scale,
        bench_scale.describe,
        "what it costs to simulate 19,366 requests, and a half and a quarter of them (half a minute)",
    ),
}
