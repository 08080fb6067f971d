"""Streaming text: pieces add up to the tokenizer's own decoding, and stop strings cut it anywhere."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, PythonBackend

from ddtree.engine.detokenizer import Detokenizer, bad_word_ids, find_stop, possible_stop
from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Stop when the user says stop. STOP means stop.",
    "naïve café – it’s €5",
]
MIXED = "Hi 👩‍👩‍👧! 你好，世界 — naïve café\n  🎉🎉 €5 の テスト ありがとう the end. "


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Few merges, so that most characters beyond ASCII are split over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens([AddedToken("<think>", special=False)])
    return fast


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's kind: spaces as ▁, unknown characters as byte tokens, the first space dropped."""
    words = ["▁", "▁the", "▁fox", "the", "fox", *"abstop", "▁stop", "。", "你", "\ufffd", ""]
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "[SEP]", "the", "fox", "##es", "##ly", "a", "b", "##c", ".", ","]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]", unk_token="[UNK]")


class SlowBytes(PythonBackend):
    """A slow tokenizer whose tokens are bytes."""

    vocab_size = 256

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(0x100 + byte): byte for byte in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(0x100 + byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) - 0x100

    def _convert_id_to_token(self, index: int) -> str:
        return chr(0x100 + index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (token.encode() if len(token) != 1 else bytes([ord(token) - 0x100]) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")


@cache
def slow_bytes() -> SlowBytes:
    return SlowBytes(eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "word piece": word_piece,
    "slow": slow_bytes,
}


def whole(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def make(tokenizer: Any, stop: Sequence[str] = (), **options: Any) -> Detokenizer:
    return Detokenizer(tokenizer, SamplingParams(stop=tuple(stop), **options))


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    pieces = []
    for token in ids:
        stopped = detokenizer.push(token)
        pieces.append(detokenizer.take())
        if stopped:
            break
    detokenizer.finish()
    pieces.append(detokenizer.take())
    return pieces


def encode(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


class Counted:
    """A tokenizer that counts how many ids it was asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_any_ids_add_up_to_the_whole(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    size = len(tokenizer)
    rng = random.Random(name)
    for length in [1, 2, 3, 5, 8, 13, 21, 60] * 12:
        special = rng.choice([0.0, 0.3])
        ids = [
            rng.choice(tokenizer.all_special_ids) if rng.random() < special else rng.randrange(size)
            for _ in range(length)
        ]
        detokenizer = make(tokenizer, skip_special_tokens=skip)
        pieces = stream(detokenizer, ids)
        assert "".join(pieces) == detokenizer.text == whole(tokenizer, ids, skip)
        assert detokenizer.kept == length


@pytest.mark.parametrize("name", ["byte level", "slow"])
def test_text_comes_as_soon_as_it_is_certain(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    detokenizer = make(tokenizer)
    shown = ""
    for index, token in enumerate(ids := encode(tokenizer, MIXED), start=1):
        detokenizer.push(token)
        shown += detokenizer.take()
        assert shown == whole(tokenizer, ids[:index]).rstrip("\ufffd")


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """The decoder shows a run that is invalid as a whole as one U+FFFD a byte, valid characters in it included."""
    tokenizer = byte_fallback()
    good, bad = "é".encode(), b"\xc3\xa9\xe4"
    for run, text in ((good, "é"), (bad, "\ufffd" * 3)):
        ids = [3 + byte for byte in run] + encode(tokenizer, "a")
        assert stream(make(tokenizer), ids) == [""] * len(run) + [text + "a", ""]
        assert stream(make(tokenizer), ids[:-1]) == [""] * len(run) + [text]


def test_tokens_without_text_between_words_do_not_eat_spaces() -> None:
    tokenizer = byte_fallback()
    the, fox, eos = (tokenizer.convert_tokens_to_ids(piece) for piece in ("▁the", "▁fox", "</s>"))
    for silent in (eos, tokenizer.convert_tokens_to_ids(""), len(tokenizer) + 5):
        for gap in (1, 3, 30):
            ids = [the] + [silent] * gap + [fox]
            assert "".join(stream(make(tokenizer), ids)) == "the fox" == whole(tokenizer, ids)


def test_a_stop_token_counts_and_has_no_text() -> None:
    tokenizer = byte_level()
    detokenizer = make(tokenizer, skip_special_tokens=False)
    for token in encode(tokenizer, "bye"):
        detokenizer.push(token)
    before = detokenizer.kept
    assert detokenizer.push(tokenizer.eos_token_id, visible=False) is False
    detokenizer.finish()
    assert detokenizer.text == "bye"
    assert detokenizer.kept == before + 1


PATTERNS: dict[str, Callable[[Any], list[int]]] = {
    "text": lambda tokenizer: encode(tokenizer, MIXED * 40),
    "invalid bytes": lambda tokenizer: encode(tokenizer, "é")[-1:] * 2000,
    "unfinished characters": lambda tokenizer: encode(tokenizer, "🎉")[:1] * 2000,
    "almost whole characters": lambda tokenizer: encode(tokenizer, "🎉")[:3] * 700,
    "replacement characters": lambda tokenizer: encode(tokenizer, "\ufffd" * 700),
    "special tokens": lambda tokenizer: [tokenizer.eos_token_id] * 2000,
    "one word": lambda tokenizer: encode(tokenizer, "a" * 2000),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["byte level", "byte fallback", "slow"])
@pytest.mark.parametrize("stop", [(), ("never seen", "\n\n\n")])
def test_work_is_linear_in_the_text(pattern: str, name: str, stop: tuple[str, ...]) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = PATTERNS[pattern](tokenizer)
    assert len(ids) >= 500
    counted = Counted(tokenizer)
    text = "".join(stream(make(counted, stop), ids))
    assert text == whole(tokenizer, ids)
    assert counted.decoded < 25 * len(ids)


def test_ids_without_a_token_have_no_text_and_cost_nothing() -> None:
    """A head may be padded beyond the tokenizer."""
    tokenizer = byte_level()
    counted = Counted(tokenizer)
    a, b = encode(tokenizer, "ab")
    assert "".join(stream(make(counted), [a] + [len(tokenizer) + 3] * 2000 + [b])) == "ab"
    assert counted.decoded < 50


# Stop strings


def reference_stop(
    tokenizer: Any, ids: list[int], stops: Sequence[str], least: int = 0
) -> tuple[str, int, str | None]:
    """(text before the stop string, tokens kept, stop string), decoding everything anew after each token."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = whole(tokenizer, ids[:count])
        if count < len(ids):
            text = text.rstrip("\ufffd")
        if count >= least:
            for end in range(len(before) + 1, len(text) + 1):
                for stop in sorted(stops, key=len, reverse=True):
                    if text[:end].endswith(stop):
                        return text[: end - len(stop)], count, stop
        before = text
    return before, len(ids), None


@pytest.mark.parametrize("least", [0, 12])
def test_stop_strings_equal_a_plain_search(least: int) -> None:
    tokenizer = byte_level()
    rng = random.Random(0)
    hits = 0
    for _ in range(150):
        text = "".join(rng.choice(["a", "b", "ab", "aab", "é", "你", " ", "ba", "the"]) for _ in range(30))
        stops = [
            "".join(rng.choice(["a", "b", "é", "你", " "]) for _ in range(rng.randint(2, 6)))
            for _ in range(rng.randint(1, 3))
        ]
        ids = encode(tokenizer, text)
        want, kept, stop = reference_stop(tokenizer, ids, stops, least)
        detokenizer = make(tokenizer, stops, min_tokens=least)
        pieces = stream(detokenizer, ids)
        assert "".join(pieces) == detokenizer.text == want
        assert (detokenizer.kept, detokenizer.stop_string) == (kept, stop)
        hits += stop is not None
        with_stop = make(tokenizer, stops, include_stop=True, min_tokens=least)
        stream(with_stop, ids)
        assert with_stop.text == want + (stop or "")
    assert 20 < hits < 150


@pytest.mark.parametrize(
    ("text", "stop", "least", "shown", "found", "kept"),
    [
        ("one ##END## two", ["##END##"], 0, "one ", "##END##", "one ##END##"),
        ("one ##ENE## two ##EN", ["##END##"], 0, "one ##ENE## two ##EN", None, "one ##ENE## two ##EN"),
        ("abcd", ["bcd", "c"], 0, "ab", "c", "abc"),
        ("abcd", ["c", "bc"], 0, "a", "bc", "abc"),
        ("再见 🎉 done", ["🎉"], 0, "再见 ", "🎉", "再见 🎉"),
        ("x x x x", ["x"], 0, "", "x", "x"),
        ("x x x x", ["x"], 3, "x ", "x", "x x"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_never_shown(text, stop, least, shown, found, kept) -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, text)
    detokenizer = make(tokenizer, stop, min_tokens=least)
    assert "".join(stream(detokenizer, ids)) == detokenizer.text == shown
    assert detokenizer.stop_string == found
    assert whole(tokenizer, ids[: detokenizer.kept]) == kept


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize(
    ("stop", "kept", "shown", "found"),
    [
        (["<s>"], "aé<s>", "aé", "<s>"),
        (["é<s>"], "aé<s>", "a", "é<s>"),
        (["<s>b"], "aé<s>b", "aé", "<s>b"),
        (["zz<s>", "b"], "aé<s>b", "aé", "b"),
        (["<s>z", "é<s>z"], "aé<s>b", "aéb", None),
    ],
)
def test_a_stop_string_of_special_tokens_fires_though_the_text_leaves_them_out(
    tokenizer, stop, kept, shown, found
) -> None:
    ids = [*encode(tokenizer, "aé"), tokenizer.bos_token_id, *encode(tokenizer, "b")]
    detokenizer = make(tokenizer, stop)
    assert "".join(stream(detokenizer, ids)) == detokenizer.text == shown
    text = tokenizer.decode(ids[: detokenizer.kept], clean_up_tokenization_spaces=False)
    assert (detokenizer.stop_string, text) == (found, kept)
    with_stop = make(tokenizer, stop, include_stop=True)
    stream(with_stop, ids)
    assert with_stop.text == shown + (found or "")


def test_a_stop_string_found_in_the_last_flush_is_there_for_the_caller() -> None:
    tokenizer = byte_level()
    detokenizer = make(tokenizer, ["\ufffd"])
    assert not detokenizer.push(encode(tokenizer, "你")[0]) and detokenizer.stop_string is None
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_string) == ("", "\ufffd")


def test_a_stop_string_inside_one_token_keeps_that_token() -> None:
    tokenizer = byte_level()
    token = tokenizer.convert_tokens_to_ids("Ġthe")
    assert isinstance(token, int) and token != tokenizer.unk_token_id
    detokenizer = make(tokenizer, ["h"])
    assert [detokenizer.push(token), detokenizer.push(token)] == [True, True]
    assert (detokenizer.text, detokenizer.kept) == (" t", 1)
    detokenizer = make(tokenizer, ["h"], include_stop=True)
    detokenizer.push(token)
    assert detokenizer.text == " th"


def test_a_stop_string_in_a_run_of_byte_tokens_ends_it_at_once() -> None:
    """Llama's newline is a byte token: it must stop there, not one token later."""
    tokenizer = byte_fallback()
    ids = encode(tokenizer, "a\nb")
    detokenizer = make(tokenizer, ["\n"])
    assert [detokenizer.push(token) for token in ids[:2]] == [False, True]
    assert (detokenizer.text, detokenizer.kept) == ("a", 2)
    detokenizer = make(tokenizer, ["aé\n"], include_stop=True)
    assert [detokenizer.push(token) for token in encode(tokenizer, "aé\nb")] == [False] * 3 + [True, True]
    assert detokenizer.text == "aé\n"


def test_a_stop_string_in_an_invalid_run_is_not_text() -> None:
    tokenizer = byte_fallback()
    ids = [3 + 0xE4, *encode(tokenizer, "\nb"), *encode(tokenizer, "\n")]
    detokenizer = make(tokenizer, ["\n"])
    assert [detokenizer.push(token) for token in ids] == [False, False, False, True]
    assert detokenizer.text == "\ufffd\ufffdb"


def test_stop_strings_do_not_depend_on_how_the_text_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice("ab") for _ in range(40))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 7))) for _ in range(2)]
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        want = (min(ends)[0], min(ends)[2]) if ends else None
        done, held, found = 0, "", None
        while done < len(text) and found is None:
            new = text[done : done + rng.randint(1, 5)]
            hit = find_stop(held + new, len(held), stops)
            found = (done - len(held) + hit[0], hit[1]) if hit else None
            done += len(new)
            if found is None:
                shown = text[:done]
                partial = max(n for stop in stops for n in range(len(stop)) if shown.endswith(stop[:n]))
                assert possible_stop(held + new, stops) == partial
                held = shown[done - partial :]
        assert found == want
    # A stop string that was passed over may begin the next.
    assert possible_stop("aba", ["aba"]) == 1 and find_stop("aba", 1, ["aba"]) == (3, "aba")


# Bad words


def test_bad_words_are_spelled_alone_and_after_a_space() -> None:
    tokenizer = byte_level()
    words = bad_word_ids(tokenizer, ["fox", "你"])
    assert set(words) == {tuple(encode(tokenizer, text)) for text in ("fox", " fox", "你", " 你")}


def test_what_is_no_string_stays_and_needs_no_tokenizer() -> None:
    assert bad_word_ids(None, [(1, 2), [3]]) == [(1, 2), [3]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "bad word '' is empty or holds half a character"),
        ([" "], "bad word ' ' is empty"),
        (["fox", "\ud800"], r"bad word '\\ud800' is empty or holds half a character"),
        (3, "bad_words must be a list of strings or token id lists, not 3"),
        (b"fox", "bad_words must be a list"),
    ],
)
def test_bad_words_that_are_no_words_are_refused(words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bad_word_ids(byte_level(), words)
