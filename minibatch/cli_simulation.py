"""On a virtual clock: ``minibatch simulate``, ``sweep``, ``reproduce``. And ``calibrate``, which measures."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from minibatch import bench, bench_simulation, run_table, studies, sweep
from minibatch.checks import check_int
from minibatch.cli_options import add_command, check_writable, option
from minibatch.compare_report import plain, save_runs
from minibatch.configurations import CONFIGURATIONS, PHASE_ORDERS
from minibatch.gpus import GPUS
from minibatch.llm import load_model
from minibatch.model_shapes import MODELS
from minibatch.models.pretrained import DEFAULT_MODEL
from minibatch.policies import ADMISSIONS, ORDERS, PREEMPTIONS
from minibatch.scenario import Scenario, num_cut, numbers
from minibatch.trace import Trace, counted

SHOWN = ("throughput", "queueing_delay_p50", "ttft_p99", "tbt_p99", "e2e_p50", "kv_filled")
FORMS = "fixed:N, uniform:LOW,HIGH, lognormal:MEDIAN,P90[,CAP], exponential:MEAN[,CAP[,reject]], ..."

# Of a scenario: group -> field -> (type, help). In `simulate` each has one value, in `sweep` one or more.
OPTIONS: dict[str, dict[str, tuple[type, str]]] = {
    "hardware": {
        "model": (str, ", ".join(MODELS)),
        "gpu": (str, f"{', '.join(GPUS)}; or a file that `minibatch calibrate` wrote"),
        "tensor_parallel": (int, "GPUs that share the model"),
        "overhead": (float, "seconds an iteration beside the work on the GPU"),
    },
    "workload": {
        "workload": (str, "synthetic, or a file: azure:PATH, mooncake:PATH, lengths:PATH, saved:PATH"),
        "num_requests": (int, "how many (default: all of a file, 500 synthetic)"),
        "arrivals": (
            str,
            "poisson:RATE, gamma:RATE,CV, onoff:RATE,ON,OFF, uniform:RATE, all, closed:N (default: poisson:4)",
        ),
        "rate": (float, "mean arrivals a second, instead of that"),
        "prompts": (str, f"lengths: {FORMS}"),
        "outputs": (str, "the same of answers"),
        "max_tokens": (int, "what schedulers see of the length of an answer (default: exactly that)"),
    },
    "memory": {
        "kv_tokens": (int, "KV cache in tokens (default: what the memory has room for)"),
        "memory_share": (float, "share of the GPUs' memory for weights and KV cache"),
        "slot_size": (int, "tokens of a contiguous slot (default: the longest request)"),
        "block_size": (int, "tokens a block, of paged and chunked"),
    },
    "scheduling": {
        "max_num_seqs": (int, "most active requests"),
        "token_budget": (int, "tokens an iteration, of chunked"),
        "max_num_batched_tokens": (int, "the same of continuous and paged (default: the context, at least 2048)"),
        "phase_order": (str, f"of continuous and paged: {', '.join(PHASE_ORDERS)}"),
        "order": (str, f"who is next: {', '.join(ORDERS)}, or mymodule:MyOrder"),
        "admission": (str, f"does it fit: {', '.join(ADMISSIONS)}"),
        "preemption": (str, f"who gives way: {', '.join(PREEMPTIONS)}"),
    },
}


def add(commands: argparse._SubParsersAction) -> None:
    _add_simulate(commands)
    _add_sweep(commands)
    _add_calibrate(commands)
    _add_reproduce(commands)


def _add_scenario(command: argparse.ArgumentParser, schedulers: list[str], **several: Any) -> None:
    """The fields of a scenario as options; ``several``: ``nargs="+"`` where each may have more than one value."""
    default = Scenario()
    for title, names in OPTIONS.items():
        group = command.add_argument_group(title)
        for name, (kind, text) in names.items():
            value = getattr(default, name)
            option(
                group,
                f"--{name.replace('_', '-')}",
                [value] if several and value is not None else value,
                text,
                kind,
                **several,
            )
    scheduler = {"nargs": "+", "choices": CONFIGURATIONS}
    option(group, "--scheduler", schedulers, "which configurations", str, **scheduler)
    group.add_argument("--prefix-cache", action="store_true", help="paged and chunked find computed blocks again")


def _values(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for names in OPTIONS.values() for name in names}


# ------------------------------------------------------------------------------------------------ minibatch simulate


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    text = "A workload on a GPU that is not here: the same schedulers and caches, on a virtual clock."
    command = add_command(commands, "simulate", _simulate, text, allow_abbrev=False)
    _add_scenario(command, list(CONFIGURATIONS))
    group = command.add_argument_group("output")
    option(group, "--seed", 0, "of everything that is drawn", int)
    option(group, "--out", None, "directory for traces and pictures (default: none are written)", Path)
    group.add_argument("--json", action="store_true", help="print all numbers as JSON, and nothing else, to stdout")


def _simulate(options: argparse.Namespace) -> int:
    base = Scenario(**_values(options), prefix_cache=options.prefix_cache, seed=options.seed)
    if options.out is not None:
        check_writable(options.out)
    workload = base.load()
    runs = {name: replace(base, scheduler=name) for name in dict.fromkeys(options.scheduler)}
    traces = {name: run.run(workload, record_steps=options.out is not None) for name, run in runs.items()}
    paths = [] if options.out is None else save_runs(traces, options.out)
    if options.json:
        found = {name: {key: plain(value) for key, value in numbers(trace).items()} for name, trace in traces.items()}
        print(json.dumps(found, indent=2))
        return 0
    print(_describe(base, traces))
    if paths:
        print(f"\nwritten to {options.out}/: {', '.join(path.name for path in paths)}")
    return 0


def _describe(base: Scenario, traces: dict[str, Trace]) -> str:
    cost, meta = base.cost, next(iter(traces.values())).meta
    tokens = base.kv_budget
    gigabytes = tokens * cost.kv_bytes_per_token / 1e9
    lines = [
        f"model       {cost.name}, simulated: weights {cost.weight_bytes / 1e9:.3g} GB",
        *run_table.wrap(f"{'workload':<12}", f"{meta['workload']}, seed {meta['seed']}"),
        f"KV cache    {tokens:,} tokens = {gigabytes:.3g} GB for every configuration",
    ]
    for name, trace in traces.items():
        lines += run_table.wrap(f"{name:<12}", f"{trace.meta['scheduler']} on {trace.meta['kv_cache']}")
    lines += ["", run_table.render(traces, "simulated")]
    for name, trace in traces.items():
        if number := num_cut(trace):
            lines += ["", f"{name}: {counted(number, 'answer')} cut by max_tokens or by the context"]
        refused = [timeline for timeline in trace.timelines if timeline.finish_reason == "rejected"]
        if refused:
            lines += [
                "",
                *run_table.wrap(
                    "", f"{name}: {counted(len(refused), 'request')} refused, the first: {refused[0].error}"
                ),
            ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------- minibatch sweep


def _add_sweep(commands: argparse._SubParsersAction) -> None:
    text = "Every combination of the values given, over several seeds, on all cores, as a tidy table."
    command = add_command(commands, "sweep", _sweep, text, allow_abbrev=False)
    command.epilog = (
        "Every option of the scenario takes one or more values: --rate 2 4 8 --scheduler paged chunked. With --slo "
        "instead of a rate: the highest rate that meets it."
    )
    _add_scenario(command, [Scenario().scheduler], nargs="+")
    group = command.add_argument_group("capacity")
    option(
        group,
        "--slo",
        None,
        "bounds in seconds, such as tbt_p99=0.1 queueing_delay_p50=2; without one on the delay a queue may grow",
        str,
        nargs="+",
    )
    option(group, "--between", [0.1, 100.0], "lowest and highest rate to look at", float, nargs=2)
    option(group, "--seconds", 120.0, "for how long requests arrive", float)
    option(group, "--tolerance", 0.05, "how close the two rates have to be that it lies between", float)
    group = command.add_argument_group("running")
    option(group, "--seed", 0, "the first seed, of everything that is drawn", int)
    option(group, "--seeds", 3, "runs of each, with the seeds from --seed on; recorded workloads run once", int)
    option(group, "--jobs", None, "processes (default: one a core)", int)
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    group = command.add_argument_group("output")
    option(group, "--out", Path("sweep.csv"), "file for the table, one row a run", Path)


def _sweep(options: argparse.Namespace) -> int:
    given = {name: values for name, values in _values(options).items() if values is not None}
    first = {name: values[0] for name, values in given.items()}
    base = Scenario(**first, prefix_cache=options.prefix_cache, seed=options.seed)
    scenarios = sweep.grid(base, **given, scheduler=options.scheduler)
    check_writable(options.out.parent)
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a directory: give the name of a file")
    if options.jobs is not None:
        check_int("--jobs", options.jobs, 1)
    running = {"seeds": options.seeds, "jobs": options.jobs, "progress": not options.quiet}
    rows = _capacities(scenarios, options, running) if options.slo else sweep.sweep(scenarios, **running)
    rows.to_csv(options.out, index=False)
    print(_table(rows))
    units = (
        "seconds; throughput in tokens/s, capacity in requests/s, kv_filled as a share; ± is half of a 95 % interval"
    )
    print(f"\nsimulated; {units}\n{counted(len(rows), 'run')} written to {options.out}")
    return 0


def _capacities(scenarios: list[Scenario], options: argparse.Namespace, running: dict[str, Any]) -> pd.DataFrame:
    bounds = [_bound(text) for text in options.slo]
    if len(dict(bounds)) < len(bounds):
        raise ValueError(f"--slo {' '.join(options.slo)}: two bounds for one number")
    if options.rate is not None or options.num_requests is not None:
        raise ValueError("with --slo the rate is looked for, and how many requests come follows from --seconds")
    return sweep.capacity(
        scenarios, dict(bounds), *options.between, seconds=options.seconds, tolerance=options.tolerance, **running
    )


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.partition("=")
    try:
        return name, float(bound)
    except ValueError:
        raise ValueError(f"--slo {text!r}: give a number of a run and its bound, such as tbt_p99=0.1") from None


def _table(rows: pd.DataFrame) -> str:
    """What differs between the scenarios, and the most important numbers with their confidence intervals."""
    table = sweep.summarise(rows)
    shown = table[sweep.varied(table)].copy()
    if "capacity" in rows:
        names = [name for name in sweep.FIELDS if name != "seed"]
        shown["capacity"] = [_capacity(group) for _, group in rows.groupby(names, sort=False, dropna=False)]
    for name in (*SHOWN, *(name for name in ("rejected", "cut") if name in table and table[name].any())):
        if name in table:
            shown[name] = [_with_interval(*pair) for pair in zip(table[name], table[f"{name}_ci"], strict=True)]
    return shown.to_string(index=False)


def _capacity(rows: pd.DataFrame) -> str:
    """Mean and interval over the seeds; only their range, if one lies outside of what was looked at."""
    found, below = rows["capacity"], rows["capacity_below"]
    if (found > 0).all() and (below < math.inf).all():
        return _with_interval(*sweep.mean_and_half_width(found.to_numpy()))
    lowest = f"below {below.min():.4g}" if (found == 0).any() else f"{found.min():.4g}"
    highest = f"above {found.max():.4g}" if (below == math.inf).any() else f"{found.max():.4g}"
    return lowest if (found == 0).all() else highest if (below == math.inf).all() else f"{lowest} to {highest}"


def _with_interval(mean: float, half_width: float) -> str:
    return f"{mean:.4g}" + ("" if math.isnan(half_width) else f" ± {half_width:.2g}")


# ----------------------------------------------------------------------------------------------- minibatch calibrate


def _add_calibrate(commands: argparse._SubParsersAction) -> None:
    text = "Measures this machine with a model, and fits a cost model to it (three minutes)."
    command = add_command(commands, "calibrate", _calibrate, text, allow_abbrev=False)
    option(command, "--model", DEFAULT_MODEL, "smollm2-135m, a Hub id or a path", str)
    option(command, "--dtype", "float32", "of weights, K/V and computation", str)
    option(command, "--device", "cpu", "cpu, or cuda for a GPU", str)
    option(command, "--out", None, "file for the cost model, for `minibatch simulate --gpu FILE.json`", Path)
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _calibrate(options: argparse.Namespace) -> int:
    if options.out is not None:
        if options.out.suffix != ".json":
            raise ValueError(f"--out {options.out}: the file's name has to end in .json")
        check_writable(options.out.parent)
    load = bench.load_average()
    found = bench_simulation.run(load_model(options.model, options.dtype, options.device), progress=not options.quiet)
    print(bench.describe_where(bench.where(load)))
    print(f"\n{bench_simulation.describe(found)}")
    if options.out is not None:
        found.cost.save(options.out)
        print(f"\nwritten to {options.out}: minibatch simulate --gpu {options.out} --kv-tokens 2304")
    return 0


# ----------------------------------------------------------------------------------------------- minibatch reproduce


def _add_reproduce(commands: argparse._SubParsersAction) -> None:
    text = "Published results, simulated again: claim, conditions, ours, verdict, and a picture each."
    command = add_command(commands, "reproduce", _reproduce, text, allow_abbrev=False)
    command.epilog = "; ".join(f"{name}: {what}" for name, what in studies.STUDIES.items())
    command.add_argument("name", nargs="*", metavar="NAME", help=f"{', '.join(studies.STUDIES)} (default: all)")
    option(command, "--seed", 0, "of everything that is drawn", int)
    command.add_argument(
        "--quick", action="store_true", help="fewer requests and seeds: to see that it works, not to quote"
    )
    option(command, "--out", Path("reproduce"), "directory for texts, tables and pictures", Path)
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _reproduce(options: argparse.Namespace) -> int:
    names = options.name or list(studies.STUDIES)
    if unknown := set(names) - set(studies.STUDIES):
        raise ValueError(f"no study {', '.join(sorted(unknown))}: there are {', '.join(studies.STUDIES)}")
    check_writable(options.out)
    for name in names:
        study = studies.run(name, options.seed, options.quick, progress=not options.quiet)
        if options.quick:
            study = replace(study, name=f"{name}-quick", title=f"QUICK RUN, verdicts may differ. {study.title}")
        paths = study.save(options.out)
        print(
            f"{study.describe()}\n\nwritten to {options.out}/: {', '.join(path.name for path in paths)}\n", flush=True
        )
    return 0
