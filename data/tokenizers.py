"""Text to tokens and back: GPT-2's BPE, custom BPE vocabularies, and plain bytes."""

from collections.abc import Sequence

import numpy as np

from data.bpe import parse_vocabulary
from data.shards import TOKENIZER_SIZES
from runtime.errors import UserError


class Tokenizer:
    """Byte pairs by tiktoken, given its Encoding."""

    def __init__(self, name: str, encoding):
        self.name, self.tiktoken, self.vocab_size, self.eot = name, encoding, encoding.n_vocab, encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        """str -> 1-D uint16 array. Special tokens are ordinary text, lone surrogates become "?"."""
        return self.encode_raw(text.encode("utf-8", errors="replace")).astype(np.uint16)

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """bytes -> 1-D uint32 array (of the tokenizer bytes: uint8). What is not UTF-8 becomes U+FFFD."""
        return self.tiktoken.encode_to_numpy(raw.decode("utf-8", errors="replace"), disallowed_special=())

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Sequence of tokens -> bytes. End-of-text becomes b"<|endoftext|>"."""
        return self.tiktoken.decode_bytes(np.asarray(tokens).tolist())


class ByteTokenizer(Tokenizer):
    """Tokens 0..255 are the bytes of the UTF-8 text, 256 is end-of-text."""

    def __init__(self):
        self.name, (self.vocab_size, self.eot) = "bytes", TOKENIZER_SIZES["bytes"]

    def encode_raw(self, raw: bytes) -> np.ndarray:
        return np.frombuffer(raw, dtype=np.uint8)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        tokens = np.asarray(tokens).tolist()
        return b"".join(b"<|endoftext|>" if token == self.eot else bytes([token]) for token in tokens)


def get_tokenizer(name: str, vocabulary: str | None = None, where: str = "the vocabulary") -> Tokenizer:
    """The tokenizer called "gpt2", "bytes" or, with the content of its file, "bpe".

    Raises UserError for other names and for a vocabulary out of reach or damaged; `where` names its file.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name != "gpt2" and (name != "bpe" or not vocabulary):
        raise UserError(f"unknown tokenizer {name!r}: it must be gpt2 or bytes, or bpe with its vocabulary")
    try:
        import tiktoken

        if name == "bpe":
            pattern, ranks = parse_vocabulary(vocabulary, where)
            special = {"<|endoftext|>": len(ranks)}  # the last token
            encoding = dict(pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
            return Tokenizer(name, tiktoken.Encoding(name, **encoding))
        return Tokenizer(name, tiktoken.get_encoding(name))
    except UserError:
        raise
    except Exception as error:  # whatever went wrong in tiktoken's own download
        advice = "connect to the network, point TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it"
        failed = f"the {name} vocabulary could not be loaded ({type(error).__name__})"
        raise UserError(f"{failed}: {advice}, or use --tokenizer bytes") from error
