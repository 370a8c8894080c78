"""Text as a stream: what is shown is never taken back, and adds up to the text of the whole.

Case numbers (SA-..) are those of faults reported against public engines.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minibatch.detokenizer import CONTEXT, TextStream
from minibatch.models.toy_model import ByteTokenizer
from minibatch.request import SamplingParams

BYTES = ByteTokenizer()
TEXTS = ["Hello, world! I don't stop. naïve café", "😀😃 👩‍👩‍👧 日本語の本 🇩🇪", "  indented\n\tcode(); x = [1, 2]"]


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE like those of GPT-2, Llama 3, Qwen and SmolLM2: tokens may begin and end within characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def sentencepiece():
    """A word vocabulary with the decoder of Llama 2: spaces belong to words, unknown characters are byte tokens."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "He", "llo", ",", "!", "▁日本", "é", "\n"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def play(tokenizer, tokens, stop_token_ids=(), every=1, **params):
    """Pushes until a stop string matches; returns (stream, deltas, tokens pushed)."""
    stream, deltas, pushed = TextStream(tokenizer, SamplingParams(max_tokens=None, **params), stop_token_ids), [], 0
    for token in tokens:
        pushed += 1
        stopped = stream.push(token)
        assert stopped == (stream.stop_reason is not None)
        if pushed % every == 0:
            deltas.append(stream.delta())
            assert stream.text == "".join(deltas)
        if stopped:
            break
    stream.finish()
    deltas.append(stream.delta())
    assert stream.delta() == ""
    assert "".join(deltas) == stream.text
    return stream, deltas, pushed


def text_of(tokenizer, tokens, **params):
    return play(tokenizer, tokens, **params)[0].text


# --- the twin: decodes everything, looks for the stop strings after each token ----------------------------------------


def certain(tokenizer, tokens):
    """The decoded text without the characters at its end that may still change."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    bare = text.rstrip("\ufffd")
    return text[: max(len(bare), len(text) - 3)]


def twin(tokenizer, tokens, stop=(), min_tokens=0, include_stop_str_in_output=False):
    """(text, stop reason, number of tokens taken)."""
    for count in range(1, len(tokens) + 1):
        text = certain(tokenizer, tokens[:count])
        ignored = len(certain(tokenizer, tokens[: min(count, min_tokens)]))
        matches = [
            (start, order)
            for order, word in enumerate(stop)
            for start in range(len(text))
            if text.startswith(word, start) and start + len(word) > ignored
        ]
        if matches:
            start, order = min(matches)
            return text[: start + len(stop[order]) * include_stop_str_in_output], stop[order], count
    return tokenizer.decode(tokens, skip_special_tokens=True), None, len(tokens)


def check(tokenizer, tokens, every=1, **params):
    stream, _, pushed = play(tokenizer, tokens, every=every, **params)
    assert (stream.text, stream.stop_reason, pushed) == twin(tokenizer, tokens, **params)


nasty = st.sampled_from(
    [0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xA0, 0xEF, 0xBF]
)
bytes_and_text = st.lists(st.one_of(nasty.map(lambda b: [b]), st.text(max_size=3).map(BYTES.encode)), max_size=25).map(
    lambda parts: [token for part in parts for token in part]
)
ab = st.text("ab😀", min_size=1, max_size=4)
stopping = st.fixed_dictionaries(
    {
        "stop": st.lists(ab, max_size=3).map(tuple),
        "min_tokens": st.integers(0, 6),
        "include_stop_str_in_output": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(bytes_and_text)
def test_any_bytes_decode_as_the_whole_would(tokens):
    check(BYTES, tokens)


@settings(max_examples=200, deadline=None)
@given(st.text("ab😀", max_size=12), stopping, st.integers(1, 4))
def test_stop_strings_equal_the_twin(text, params, every):
    check(BYTES, BYTES.encode(text), every, **params)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), params=stopping)
def test_byte_level_bpe_equals_the_twin(bpe, data, params):
    """Any tokens, special ones and torn characters included; and the stop strings inside, across and between them."""
    tokens = data.draw(st.lists(st.integers(0, len(bpe) - 1), max_size=40))
    check(bpe, tokens)
    check(bpe, tokens, **params)
    check(bpe, bpe.encode(data.draw(st.text("ab😀", max_size=12))), **params)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_sentencepiece_spaces_and_byte_tokens(sentencepiece, data):
    """Of valid text every character arrives; of any tokens, what is shown adds up (``play`` asserts it)."""
    words = st.sampled_from([*range(258, len(sentencepiece)), 0, 1]).map(lambda token: [token])
    characters = st.text("é€😀a", min_size=1, max_size=3).map(lambda text: [2 + byte for byte in text.encode()])
    valid = [token for part in data.draw(st.lists(st.one_of(words, characters), max_size=30)) for token in part]
    assert text_of(sentencepiece, valid) == sentencepiece.decode(valid, skip_special_tokens=True)
    play(sentencepiece, data.draw(st.lists(st.integers(0, len(sentencepiece) - 1), max_size=60)))


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_arrives_whole_and_never_half_a_character(bpe, text):
    text = 3 * (text + " ß 🚀 中文")
    tokens = bpe.encode(text)
    assert any("\ufffd" in bpe.decode([token]) for token in tokens)  # torn characters
    stream, deltas, _ = play(bpe, tokens)
    assert stream.text == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert sum(map(bool, deltas)) > len(tokens) / 3  # and it does arrive along the way


# --- characters that arrive in pieces ---------------------------------------------------------------------------------


def test_a_character_is_shown_when_its_last_byte_is_there():
    deltas = play(BYTES, BYTES.encode("a😀b"))[1]
    assert deltas == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_at_the_end_is_shown_as_the_replacement_character():
    assert play(BYTES, BYTES.encode("a😀")[:-1])[1] == ["a", "", "", "", "\ufffd"]


def test_a_stray_byte_is_not_held_back_for_ever():
    assert play(BYTES, [0xFF, 65, 66])[1] == ["", "\ufffdA", "B", ""]
    deltas = play(BYTES, [0xFF] * 100)[1]
    assert "".join(deltas) == "\ufffd" * 100
    assert deltas[:5] == ["", "", "", "\ufffd", "\ufffd"]
    check(BYTES, [0xFF] * 50 + BYTES.encode("😀") + [0xE2, 0x82] * 40 + BYTES.encode("é"))


def test_sentencepiece_keeps_spaces_between_words_and_behind_special_tokens(sentencepiece):
    hello, world = sentencepiece.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert play(sentencepiece, [hello, world])[1] == ["Hello", " world", ""]
    assert text_of(sentencepiece, [hello] + [0] * 100 + [world]) == "Hello world"
    assert text_of(sentencepiece, [hello, world] * 40) == " ".join(["Hello world"] * 40)


@pytest.mark.parametrize("words_before", range(8))
def test_the_window_is_not_cut_within_a_character(sentencepiece, words_before):
    """A run of byte tokens that begins with half a character is U+FFFD from there on."""
    run = [2 + byte for byte in ("😀" + "a" * 40).encode()]
    tokens = sentencepiece.convert_tokens_to_ids(["▁Hello"]) * words_before + run
    assert text_of(sentencepiece, tokens) == sentencepiece.decode(tokens)


@pytest.mark.parametrize("num_special", [1, 100])
def test_skipped_tokens_do_not_lose_the_half_character_before_them(bpe, num_special):
    rocket = bpe.encode("🚀")
    assert len(rocket) > 2
    check(bpe, rocket[:-1] + [0] * num_special)
    check(bpe, rocket[:-1] + [0] * num_special + rocket[-1:])


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_sa_09_held_text_comes_out_at_the_end():
    stream, deltas, _ = play(BYTES, BYTES.encode("xab"), stop="abc")
    assert deltas == ["x", "", "", "ab"]
    assert stream.stop_reason is None


@pytest.mark.parametrize(("include", "text"), [(False, "<unk"), (True, "<unk><")])
def test_sa_09_a_match_that_straddles_tokens(include, text):
    class Tags:
        def decode(self, ids, skip_special_tokens=True):
            return "<unk>" * len(ids)

    stream, deltas, pushed = play(Tags(), [0, 0, 0], stop="><", include_stop_str_in_output=include)
    assert (stream.text, stream.stop_reason, pushed) == (text, "><", 2)
    assert deltas == ["<unk", text[4:], ""]


def test_sa_09_nothing_behind_a_match_leaks(bpe):
    token = bpe.encode("don't")  # " don't stop" was trained on; find a token with text on both sides of the stop string
    long = max(range(len(bpe)), key=lambda i: len(bpe.decode([i])))
    text = bpe.decode([long])
    assert len(text) >= 4
    stream, deltas, pushed = play(bpe, [*token, long, *token], stop=text[1:3])
    assert stream.text == "don't" + text[0] and pushed == len(token) + 1
    assert "".join(deltas) == stream.text
    with pytest.raises(RuntimeError, match="has ended"):
        stream.push(5)
    assert stream.delta() == "" and stream.text == "don't" + text[0]


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("xabcd", ("cd", "abc"), "x", "abc"),  # "abc" is complete first
        ("xabcd", ("abcd", "bc"), "xa", "bc"),  # so is "bc": a stream cannot wait for the longer one
        ("aab", ("ab",), "a", "ab"),
        ("aaab", ("aab",), "a", "aab"),
        ("ab", ("abc", "b"), "a", "b"),
        ("x\n\ny", ("\n\n", "\n"), "x", "\n"),
        ("hello", ("zzz",), "hello", None),
        ("é😀!", ("😀",), "é", "😀"),
    ],
)
def test_which_match_wins(text, stop, expected, reason):
    stream = play(BYTES, BYTES.encode(text), stop=stop)[0]
    assert (stream.text, stream.stop_reason) == (expected, reason)


def test_of_matches_in_one_token_the_first_in_the_text_wins_then_the_first_listed():
    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return "xabcd" * len(ids)

    for stop, expected in ((("cd", "ab"), "ab"), (("ab", "abc"), "ab"), (("abc", "ab"), "abc"), (("bcd", "cd"), "bcd")):
        assert play(Words(), [0], stop=stop)[0].stop_reason == expected


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [
        (0, 2, ""),
        (2, 4, "ab"),  # the first match ends with token 2, which is one of those that must be there
        (3, 4, "ab"),
        (4, 6, "abab"),
        (6, 6, "ababab"),
    ],
)
def test_sa_07_stop_strings_count_behind_the_first_min_tokens(min_tokens, num_tokens, text):
    stream, _, pushed = play(BYTES, BYTES.encode("ababab"), stop="ab", min_tokens=min_tokens)
    assert (stream.text, pushed) == (text, num_tokens)


def test_sa_07_a_match_may_begin_within_the_first_min_tokens():
    assert play(BYTES, BYTES.encode("xabcx"), stop="abc", min_tokens=3)[0].text == "x"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_no_text_unless_it_is_asked_for(include):
    """As in vLLM; and no stop string is looked for in it, because the request has ended by its id."""
    stream, _, _ = play(BYTES, BYTES.encode("hi!"), stop_token_ids=(33,), include_stop_str_in_output=include, stop="!")
    assert stream.stop_reason is None
    assert stream.text == ("hi!" if include else "hi")
    assert play(BYTES, BYTES.encode("hi!"))[0].text == "hi!"
    stream = TextStream(BYTES, SamplingParams(stop_token_ids=(33,)))
    assert not stream.push(33) and stream.text == ""


def test_special_tokens_are_text_only_if_asked_for(bpe):
    tokens = [*bpe.encode("Hello"), bpe.eos_token_id]
    assert text_of(bpe, tokens) == "Hello"
    assert text_of(bpe, tokens, skip_special_tokens=False) == "Hello<|end|>"
    assert text_of(bpe, tokens, skip_special_tokens=False, stop_token_ids={bpe.eos_token_id}) == "Hello"


def test_finishing_twice_and_finishing_nothing():
    stream = TextStream(BYTES, SamplingParams(stop="x"))
    stream.finish()
    stream.finish()
    assert (stream.text, stream.delta(), stream.stop_reason) == ("", "", None)
    with pytest.raises(RuntimeError, match="has ended"):
        stream.push(5)


# --- cost -------------------------------------------------------------------------------------------------------------


class Counting:
    def __init__(self, tokenizer):
        self.tokenizer, self.longest, self.total = tokenizer, 0, 0

    def decode(self, ids, skip_special_tokens=True):
        self.longest, self.total = max(self.longest, len(ids)), self.total + len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["text", "emoji", "stray bytes", "special", "half, then special", "noise"])
def test_a_token_costs_the_same_at_the_end_of_a_long_text(bpe, kind):
    emoji = BYTES.encode("😀")
    tokens, tokenizer = {
        "text": (BYTES.encode("hello world ") * 100, BYTES),
        "emoji": (emoji * 300, BYTES),
        "stray bytes": ([0xFF] * 1000, BYTES),
        "special": ([0] * 1000, bpe),
        "half, then special": ([*bpe.encode("a")] + [0] * 1000, bpe),
        "noise": ([random.Random(0).choice([0xE2, 0x82, 0xF0, 0x9F, 0xFF]) for _ in range(1000)], BYTES),
    }[kind]
    counting = Counting(tokenizer)
    stream = play(counting, tokens, stop=("never", "in the text"))[0]
    assert stream.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert counting.longest <= 2 * CONTEXT
    assert counting.total <= 3 * CONTEXT * len(tokens)
