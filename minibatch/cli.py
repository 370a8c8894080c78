"""``minibatch ...``: the command line. Exit codes that scripts can use:

0    done (and, for ``compare``, every configuration's tokens equal solo generation up to numerical ties)
1    anything that is not foreseen here, with its traceback
2    wrong usage, or a request that cannot run; the message says why
3    the model cannot be had or is not supported; ``bench``: an engine could not be started, or broke off
4    ``compare``, ``bench --floor``: some tokens differ from solo generation, and not by a numerical tie
5    a policy planned what cannot be carried out, or nothing although there was work; the message names it
6    ``lab check``: an exercise is not right, or not done
130  interrupted
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minibatch import (
    __version__,
    cli_bench,
    cli_figures,
    cli_labs,
    cli_player,
    cli_simulation,
    compare,
    compare_report,
    explain,
    workload,
)
from minibatch.bench_process import WorkerFailed
from minibatch.cli_options import DIFFERS, add_command, add_model_command, check_writable, option
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

USAGE, NO_MODEL, BAD_PLAN, INTERRUPTED = 2, 3, 5, 130


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
    except (ModelUnavailable, UnsupportedModel, WorkerFailed) as error:
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
    cli_bench.add(commands)
    return parser


def _load(options: argparse.Namespace) -> Model:
    model = load_model(options.model, options.dtype, options.device, options.fast)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer, and prompts are text here")
    return model


# ------------------------------------------------------------------------------------------------- minibatch compare


def _add_compare(commands: argparse._SubParsersAction) -> None:
    text = "The same requests through static, continuous, paged and chunked batching, side by side."
    command, default = add_model_command(commands, "compare", _compare, text, fast=True), Setup()
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
    command, default = add_model_command(commands, "generate", _generate, text, fast=True), SamplingParams()
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
