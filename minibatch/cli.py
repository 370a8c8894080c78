"""``minibatch ...``: the command line. Exit codes that scripts can use:

0    done (and, for ``compare``, every configuration's tokens equal solo generation up to numerical ties)
1    ``compare``: some tokens differ from solo generation
2    wrong usage, or a request that cannot run; the message says why
3    the model cannot be had or is not supported
130  interrupted
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minibatch import __version__, compare, workload
from minibatch.compare import Setup
from minibatch.engine import Engine
from minibatch.llm import load_model
from minibatch.models import ModelUnavailable, UnsupportedModel
from minibatch.request import Request, RequestRefused, Result, SamplingParams

DIFFERS, USAGE, NO_MODEL, INTERRUPTED = 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    # How long an idle OpenMP thread spins before it sleeps, unless the user has decided. torch reads it when it is
    # imported, later. By default it spins for milliseconds, and with another process on a core that made a decode step
    # 3 to 6 times slower; for every engine alike, for they all run in this process.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        return options.command(options)
    except (ModelUnavailable, UnsupportedModel) as error:
        return _fail(error, NO_MODEL)
    except (RequestRefused, ValueError, OSError) as error:
        return _fail(error, USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(error: Exception, code: int) -> int:
    print(f"minibatch: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minibatch", description="How LLM serving batches requests.")
    parser.add_argument("--version", action="version", version=f"minibatch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_generate(commands)
    return parser


def _add_command(commands: argparse._SubParsersAction, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.set_defaults(command=run)
    model = command.add_argument_group("model")
    model.add_argument(
        "--model", default="smollm2-135m", help="smollm2-135m, toy (no download, simulated time), a Hub id or a path"
    )
    model.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    model.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU")
    return command


# ------------------------------------------------------------------------------------------------- minibatch compare


def _add_compare(commands: argparse._SubParsersAction) -> None:
    text = "The same requests through static, continuous, paged and chunked batching, side by side."
    command = _add_command(commands, "compare", _compare, text)
    what, default = command.add_argument_group("workload"), Setup()
    what.add_argument(
        "--workload", default=default.workload, help="mixed, short or long prompts, or a text file with one a line"
    )
    what.add_argument("--requests", type=int, default=default.num_requests, metavar="N", help="how many")
    what.add_argument("--max-tokens", type=int, default=default.max_tokens, metavar="N", help="most new tokens of one")
    what.add_argument(
        "--load",
        type=float,
        default=default.load,
        help="arrival rate; 1: what serving one after the other keeps up with",
    )
    what.add_argument("--seed", type=int, default=default.seed, help="of the order and of the arrival times")
    budget = command.add_argument_group("budget")
    budget.add_argument("--kv-tokens", type=int, metavar="N", help="KV cache, in tokens (default: 4 times the longest)")
    budget.add_argument("--block-size", type=int, default=default.block_size, metavar="N", help="tokens a block")
    budget.add_argument(
        "--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N", help="most active requests"
    )
    budget.add_argument(
        "--token-budget", type=int, default=default.token_budget, metavar="N", help="tokens an iteration of chunked"
    )
    output = command.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("compare"), help="directory for pictures and traces")
    output.add_argument("--json", action="store_true", help="print all numbers as JSON, and nothing else, to stdout")
    output.add_argument("--quiet", action="store_true", help="no progress bar")


def _compare(options: argparse.Namespace) -> int:
    setup = Setup(
        workload=options.workload,
        num_requests=options.requests,
        max_tokens=options.max_tokens,
        load=options.load,
        seed=options.seed,
        kv_tokens=options.kv_tokens,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        token_budget=options.token_budget,
    )
    model = load_model(options.model, options.dtype, options.device)
    result = compare.run(model, setup, progress=not options.quiet)
    paths = compare.save(result, options.out)
    if options.json:
        print(json.dumps(compare.to_json(result), indent=2))
    else:
        print(compare.describe(result))
        print(f"\nwritten: {options.out}/ ({', '.join(path.name for path in paths)})")
    return 0 if result.holds else DIFFERS


# ------------------------------------------------------------------------------------------------ minibatch generate


def _add_generate(commands: argparse._SubParsersAction) -> None:
    command = _add_command(commands, "generate", _generate, "Streams the answer to a prompt to the terminal.")
    command.add_argument("--prompt", required=True, help="what to ask")
    command.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    command.add_argument("--scheduler", default="chunked", choices=["static", "continuous", "paged", "chunked"])
    sampling, default = command.add_argument_group("sampling"), SamplingParams()
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=default.temperature)
    sampling.add_argument("--top-p", type=float, default=default.top_p)
    sampling.add_argument("--top-k", type=int, default=default.top_k)
    sampling.add_argument("--seed", type=int, default=default.seed)
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends the answer; may be repeated")


def _generate(options: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
    )
    model = load_model(options.model, options.dtype, options.device)
    prompt = model.tokenizer.encode(options.prompt) if options.raw else workload.encode(model.tokenizer, options.prompt)
    size = len(prompt) + options.max_tokens
    scheduler, kv = compare.configurations(Setup(), kv_tokens=size + 15, slot_size=size)[options.scheduler]
    with Engine(model, scheduler, kv).stream(Request(prompt, params)) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print()
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
