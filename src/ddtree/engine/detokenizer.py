"""Turn token ids into text: streamed pieces that never change again, and stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character has at most four bytes, so the tokens before the last four cannot change what follows.
_CONTEXT = 4
_WINDOW = 8


def find_stop(text: str, known: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find the stop string that is completed first after the first `known` characters of a text.

    Of two strings completed by the same character the longer is found, so the result does not depend on how the text
    is cut into pieces.

    Returns:
        The index after the stop string, and the stop string; None where none is complete.
    """
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, known + 1 - len(stop)))
        if at >= 0:
            ends.append((at + len(stop), -len(stop), stop))
    if not ends:
        return None
    end, _, stop = min(ends)
    return end, stop


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
        while 0 <= at < len(text) - longest:
            if stop.startswith(text[at:]):
                longest = len(text) - at
            at = text.find(stop[0], at + 1)
    return longest


def _special_tokens(tokenizer: Any) -> set[str]:
    """Return the texts of the tokens that decoding without special tokens leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)}


class Detokenizer:
    """The text of one sequence, token by token.

    Text is final once it is given out: bytes that do not yet make a character wait for the rest of it, a run
    of byte-fallback tokens waits for its end (tokenizers decode it as a whole), and text that may become a
    stop string waits until it is decided. All pieces together are `tokenizer.decode(ids,
    clean_up_tokenization_spaces=False)`, cut at the stop string. Only a short window of tokens is decoded
    each time, so time is linear in the text. Where a stop string holds a special token, such as "<user>", stop strings
    are looked for in the text with the special tokens that are skipped.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or slow.
        params: says which strings end the text (the one completed first counts), whether the stop string and special
            tokens are left in it, and before how many tokens (`min_tokens`) a stop string is ordinary text.

    Attributes:
        kept: tokens pushed, the last being the one that completed the stop string; ids and logprobs are cut
            there.
        stop_string: the stop string found, or None.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.kept = 0
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._stops = sorted(set(params.stop))
        special = _special_tokens(tokenizer) if params.stop and params.skip_special_tokens else ()
        self._stops_at_special = any(token in stop for token in special for stop in self._stops)
        self._run_bytes: codecs.IncrementalDecoder | None = None
        self._run_text = ""
        self._in_run = False
        self._kinds: dict[int, tuple[bool, int | None]] = {}
        # `_read` characters of the decoded window are settled; text before the window is settled too.
        self._window: list[int] = []
        self._read = 0
        # Text not given out, and of each character whether it will be: skipped tokens are only there for stop strings.
        self._held = ""
        self._shown: list[bool] = []
        self._pieces: list[str] = []
        self._taken = 0

    @property
    def text(self) -> str:
        """All text that is final so far."""
        return "".join(self._pieces)

    def take(self) -> str:
        """Return the text that has become final since the last call."""
        piece = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return piece

    def push(self, token: int, visible: bool = True) -> bool:
        """Append a token; True when a stop string is complete. Tokens after that are ignored.

        A token that is not `visible` (a stop token) counts and has no text.
        """
        if self.stop_string is not None:
            return True
        self.kept += 1
        hidden, byte = self._kind(token)
        if hidden and visible and self._stops_at_special:
            return self._skip(token)
        if hidden or not visible:
            return False
        self._window.append(token)
        if byte is not None:
            return self._extend_run(byte)
        self._in_run = False
        return self._settle()

    def finish(self) -> None:
        """Make all text final, as no token follows: incomplete characters become U+FFFD."""
        if self.stop_string is not None:
            return
        self._settle(last=True)
        if self.stop_string is None:
            self._give(len(self._held))

    def _skip(self, token: int) -> bool:
        """Append a special token that the text leaves out and that may be part of a stop string."""
        if not self._decode(self._window).endswith(_REPLACEMENT):
            self._in_run = False
            if self._settle():
                return True
        return self._feed(self._decode([token], skip_special=False), shown=False)

    def _settle(self, last: bool = False) -> bool:
        text = self._decode(self._window)
        # Bytes that are the beginning of a character are shown as one U+FFFD at the end.
        stable = len(text) - (text.endswith(_REPLACEMENT) and not last)
        new = text[self._read : stable]
        self._read = max(self._read, stable)
        if self._feed(new):
            return True
        if len(self._window) >= _WINDOW:
            self._shorten(text)
        return False

    def _shorten(self, text: str) -> None:
        """Drop tokens from the front of the window; what stays is context for those to come."""
        rest = self._decode(self._window[-_CONTEXT:])
        # Decoders strip a space at the start, so without text before it the next token would lose its own; and
        # the rest must not start within a character or a run of bytes.
        if rest and text.endswith(rest):
            del self._window[:-_CONTEXT]
            self._read += len(rest) - len(text)

    def _feed(self, text: str, shown: bool = True) -> bool:
        known = len(self._held)
        self._held += text
        self._shown += [shown] * len(text)
        hit = find_stop(self._held, known, self._stops) if self.kept >= self._params.min_tokens else None
        if hit is None:
            self._give(len(self._held) - possible_stop(self._held, self._stops))
            return False
        end, self.stop_string = hit
        if self._params.include_stop:
            self._shown[end - len(self.stop_string) : end] = [True] * len(self.stop_string)
            self._give(end)
        else:
            self._give(end - len(self.stop_string))
        self._held = ""
        return True

    def _give(self, count: int) -> None:
        """Give out the first characters of the held text."""
        self._pieces.append("".join(compress(self._held[:count], self._shown)))
        self._held = self._held[count:]
        del self._shown[:count]

    def _extend_run(self, byte: int) -> bool:
        """Append to a run of byte tokens: its text is not final, yet a stop string in it ends it at once."""
        if not self._in_run:
            self._in_run = True
            self._run_bytes = codecs.getincrementaldecoder("utf-8")()
            self._run_text = self._held
        if self._run_bytes is None:
            return False
        try:
            text = self._run_bytes.decode(bytes([byte]))
        except UnicodeDecodeError:
            # The run as a whole is invalid, and no character of it will be shown.
            self._run_bytes = None
            return False
        known, held = len(self._run_text), self._run_text + text
        self._run_text = held[len(held) - possible_stop(held, self._stops) :]
        if self.kept < self._params.min_tokens or find_stop(held, known, self._stops) is None:
            return False
        return self._settle()

    def _kind(self, token: int) -> tuple[bool, int | None]:
        """Return whether decoding leaves a token out, and the value of a byte-fallback token such as <0x0A>.

        Skipped special tokens and ids without a token are left out.
        """
        if token not in self._kinds:
            name, text = self._tokenizer.convert_ids_to_tokens(token), self._decode([token])
            hidden = text == "" and (name is None or self._decode([token], skip_special=False) != "")
            match = _BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
            # Byte-level vocabularies may hold the same string as ordinary text.
            self._kinds[token] = hidden, int(match[1], 16) if match and text != name else None
        return self._kinds[token]

    def _decode(self, ids: list[int], skip_special: bool | None = None) -> str:
        skip = self._params.skip_special_tokens if skip_special is None else skip_special
        text = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def bad_word_ids(tokenizer: Any, words: str | Sequence[Any]) -> list[Any]:
    """Return token id sequences of words, for `SamplingParams.bad_words`: each word by itself and after a space.

    A word that the model spells with other tokens is not banned by this, and a longer word that ends in the
    same tokens is.

    Args:
        tokenizer: the model's; None refuses strings.
        words: one string, or a list of strings; items that are no strings, such as token id sequences, stay.

    Raises:
        ConfigError: `words` is no list, or a string is empty or no valid Unicode.
    """
    if isinstance(words, bytes | Mapping) or not isinstance(words, Iterable):
        raise ConfigError(f"bad_words must be a list of strings or token id lists, not {words!r}")
    found: list[Any] = []
    for word in [words] if isinstance(words, str) else words:
        if not isinstance(word, str):
            found.append(word)
            continue
        if tokenizer is None:
            raise ConfigError(
                "bad_words as strings need a tokenizer: give token ids, or load with tokenizer=..."
            )
        if not word.strip() or any("\ud800" <= char <= "\udfff" for char in word):
            raise ConfigError(f"bad word {word!r} is empty or holds half a character: give valid Unicode")
        for spelling in dict.fromkeys((word, " " + word.lstrip())):
            if ids := tuple(tokenizer.encode(spelling, add_special_tokens=False)):
                found.append(ids)
    return found
