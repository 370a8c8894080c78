"""Published results and scenarios, rebuilt: ``minibatch reproduce [NAME]``. One module each, with a ``run``."""

from __future__ import annotations

from importlib import import_module

from minibatch.studies.study import Claim, Study

__all__ = ["STUDIES", "Claim", "Study", "run"]

# name -> the sentence that says what it is about
STUDIES = {
    "orca": "Orca (OSDI 2022): iteration-level against request-level scheduling",
    "vllm": "vLLM (SOSP 2023): how many requests fit, by how memory is reserved",
    "anyscale": "Anyscale (2023): the ladder from static batching to continuous batching",
    "sarathi": "Sarathi-Serve (OSDI 2024): capacity under a limit on the time between tokens",
    "vtc": "VTC (OSDI 2024): two clients, one of which asks for twice as much",
    "negative": "Where continuous batching gains nothing, and where chunking only moves the wait",
}


def run(name: str, seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    """Runs one study. ``quick``: fewer requests and seeds, to see that it works; verdicts may differ."""
    return import_module(f"minibatch.studies.{name}").run(seed=seed, quick=quick, progress=progress)
