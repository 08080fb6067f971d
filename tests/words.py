"""A tokenizer for tests whose tokens are short words, so that texts and stop strings can be read."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(size: int = 48) -> PreTrainedTokenizerFast:
    """`size` tokens: id k is the letter pair number k ("aa", "ab", ...); decoding joins them without spaces."""
    letters = "abcdefgh"
    vocab = {letters[k // 8] + letters[k % 8]: k for k in range(size)}
    built = Tokenizer(models.WordLevel(vocab, unk_token="aa"))
    built.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=built)
