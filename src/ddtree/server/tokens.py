"""The text and the bytes of single tokens, as log-probabilities, details and drawn trees name them."""

from __future__ import annotations

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself where it is one (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level()


class TokenTexts:
    """Texts of a tokenizer's tokens, each looked up once. Any thread may ask.

    Args:
        tokenizer: a Hugging Face tokenizer; without one a token's text is its id, and it has no bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of a token. The text of bytes that are no whole character is `bytes:\\xe2\\x82`."""
        if self._tokenizer is None:
            return str(token), b""
        if token not in self._known:
            data = self._bytes(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._known[token] = (text, data)
        return self._known[token]

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte and text != name:
            return bytes([int(byte[1], 16)])
        if "\ufffd" in text and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        # Decoders of sentencepiece vocabularies strip the space before the first word.
        if name.startswith("▁") and not text.startswith(" "):
            text = " " + text
        return str(text).encode(errors="replace")
