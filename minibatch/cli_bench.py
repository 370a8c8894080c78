"""``minibatch bench``: what things cost on this machine, a part at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from minibatch import (
    bench,
    bench_engines,
    bench_engines_report,
    bench_floor,
    bench_planning,
    bench_scale,
    bench_simulation,
    bench_swap,
)
from minibatch.checks import check_int
from minibatch.cli_options import DIFFERS, add_model_command, option
from minibatch.llm import load_model
from minibatch.models import pretrained


def add(commands: argparse._SubParsersAction) -> None:
    text = "What things cost on this machine. Without a part: this engine beside those of transformers."
    command = add_model_command(commands, "bench", _bench, text)
    group = command.add_argument_group("parts")
    for name, (_, _, what) in BENCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=what)
    group = command.add_argument_group("engines")
    option(group, "--rounds", 3, "how often each engine does each work, in turns", int)
    works = ["mixed", "static"]
    option(group, "--works", works, f"of {', '.join(bench_engines.WORKS)}", str, nargs="+", choices=bench_engines.WORKS)
    option(group, "--requests", None, "how many (default: 32, of long prompts 16)", int)
    option(group, "--threads", None, "of every engine (default: what torch chooses)", int)
    option(group, "--against", None, "one more engine", str, choices=["vllm"])
    option(group, "--vllm-python", None, "the Python that vllm is installed for (default: this one)", Path)
    group = command.add_argument_group("floor")
    shapes = list(bench_floor.SHAPES)
    what = "what to build on a GPU, with random weights, unless --model says what to load"
    option(group, "--shapes", shapes, what, str, nargs="+", choices=shapes)
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
    usual = "engines" if options.device == "cpu" else "floor"
    wanted = {name: part for name, part in BENCHES.items() if getattr(options, name)} or {usual: BENCHES[usual]}
    load = bench.load_average()
    found = {name: measure(options) for name, (measure, _, _) in wanted.items()}
    facts = bench.where(load)
    if options.json:
        print(json.dumps({**facts, **{name: _plain(numbers) for name, numbers in found.items()}}, indent=2))
    else:
        print(bench.describe_where(facts))
        for name, (_, describe, _) in wanted.items():
            print(f"\n{describe(found[name])}")
    return 0 if all(floor.holds for floor in found.get("floor", [])) else DIFFERS


def _plain(numbers: Any) -> Any:
    return asdict(numbers) if is_dataclass(numbers) else [asdict(each) for each in numbers]


def _bench_engines(options: argparse.Namespace) -> bench_engines.Engines:
    for name in ("rounds", "requests", "threads"):
        if getattr(options, name) is not None:
            check_int(f"--{name}", getattr(options, name), 1)
    from transformers import AutoTokenizer  # seconds, which the other parts can do without

    location = _resolve(options)
    tokenizer = AutoTokenizer.from_pretrained(location)
    works = [bench_engines.make_work(name, tokenizer, options.requests) for name in dict.fromkeys(options.works)]
    contenders = list(bench_engines.CONTENDERS)
    if options.against:
        contenders.append(bench_engines.vllm(options.vllm_python, works))
    return bench_engines.run(
        location, options.dtype, options.device, contenders, works, options.rounds, options.threads, not options.quiet
    )


def _resolve(options: argparse.Namespace) -> str:
    """Where the model is; raises what is wrong with model or device now, rather than in another process."""
    if options.model == "toy":
        raise ValueError("toy computes nothing: there is no other engine that runs it")
    _check_device(options)
    return pretrained.resolve(options.model).location


def _check_device(options: argparse.Namespace) -> None:
    from minibatch.models.transformers_model import check_device

    check_device(options.device)


def _bench_floor(options: argparse.Namespace) -> list[bench_floor.Floor]:
    on_cpu, dtype = options.device == "cpu", options.dtype
    if not on_cpu and dtype == "float32":
        dtype = "bfloat16"  # tokens are checked in float32 anyway; times there are of interest to nobody
    if not on_cpu and options.model == pretrained.DEFAULT_MODEL:
        _check_device(options)
        return bench_floor.measure(options.shapes, options.device, dtype, progress=not options.quiet)
    build = partial(bench_floor.loaded, _resolve(options), options.device)
    return [bench_floor.run(options.model, build, options.device, dtype, progress=not options.quiet)]


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
    "floor": (
        _bench_floor,
        bench_floor.describe,
        "decode iterations beside the memory's bandwidth (two minutes; with --device cuda the default, in bfloat16)",
    ),
    "engines": (
        _bench_engines,
        bench_engines_report.describe,
        "this engine beside transformers' generate and continuous batching (five to ten minutes; this is the default)",
    ),
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
