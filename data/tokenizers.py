"""Text to tokens and back: GPT-2's BPE, custom BPE vocabularies, and plain bytes."""

import re
from collections.abc import Sequence

import numpy as np

from data.bpe import parse_vocabulary
from data.shards import TOKENIZER_SIZES, UserError

INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as surrogateescape shows them


class Tokenizer:
    """Base class: encodes by the subclass's encode_raw, and decodes by `tiktoken`, its Encoding, unless overridden."""

    def encode(self, text: str) -> np.ndarray:
        """str -> 1-D uint16 array. Special tokens are ordinary text, lone surrogates become "?"."""
        return self.encode_raw(text.encode("utf-8", errors="replace")).astype(np.uint16)

    def text_bytes(self, raw: bytes) -> int:
        """How many bytes of text the tokens of encode_raw(raw) stand for."""
        return len(raw)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Sequence of tokens -> bytes. End-of-text becomes b"<|endoftext|>"."""
        return self.tiktoken.decode_bytes(np.asarray(tokens).tolist())


class ByteTokenizer(Tokenizer):
    """Tokens 0..255 are the bytes of the UTF-8 text, 256 is end-of-text."""

    name = "bytes"
    vocab_size, eot = TOKENIZER_SIZES[name]

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """bytes -> 1-D uint8 array that shares their memory."""
        return np.frombuffer(raw, dtype=np.uint8)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Sequence of tokens -> bytes. End-of-text becomes b"<|endoftext|>"."""
        tokens = np.asarray(tokens).tolist()
        return b"".join(b"<|endoftext|>" if token == self.eot else bytes([token]) for token in tokens)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, by tiktoken. Raises UserError when its vocabulary is not available."""

    name = "gpt2"
    vocab_size, eot = TOKENIZER_SIZES[name]

    def __init__(self):
        try:
            import tiktoken

            self.tiktoken = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever went wrong in tiktoken's own download
            raise UserError(
                f"the gpt2 vocabulary could not be loaded ({type(error).__name__}): connect to the network, point "
                "TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it, or use --tokenizer bytes"
            ) from error

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """bytes -> 1-D uint32 array. What is not UTF-8 becomes U+FFFD."""
        return self.tiktoken.encode_to_numpy(raw.decode("utf-8", errors="replace"), disallowed_special=())

    def text_bytes(self, raw: bytes) -> int:
        """How many bytes of text the tokens of encode_raw(raw) stand for: U+FFFD has three."""
        return len(raw.decode("utf-8", errors="replace").encode())


class BPETokenizer(Tokenizer):
    """Byte pairs of a vocabulary file (data/bpe.py), by tiktoken: any bytes round-trip exactly.

    The last token is end-of-text. Raises UserError for a file that is damaged; `where` names it.
    """

    name = "bpe"

    def __init__(self, vocabulary: str, where: str = "the vocabulary"):
        try:
            import tiktoken
        except ImportError:
            raise UserError("byte pairs are read by the package tiktoken: run `pip install tiktoken`") from None

        pattern, ranks = parse_vocabulary(vocabulary, where)
        self.eot = len(ranks)
        self.vocab_size = self.eot + 1
        self.tiktoken = tiktoken.Encoding(
            "bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eot}
        )

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """bytes -> 1-D uint32 array. A byte that is not UTF-8 is a token of its own."""
        try:
            return self.tiktoken.encode_to_numpy(raw.decode("utf-8"), disallowed_special=())
        except UnicodeDecodeError:
            parts = INVALID.split(raw.decode("utf-8", errors="surrogateescape"))
        tokens = [np.empty(0, dtype=np.uint32)]
        for i, part in enumerate(parts):
            if i % 2:
                tokens.append(np.frombuffer(part.encode("utf-8", errors="surrogateescape"), dtype=np.uint8))
            else:
                tokens.append(self.tiktoken.encode_to_numpy(part, disallowed_special=()))
        return np.concatenate(tokens, dtype=np.uint32)


def get_tokenizer(name: str, vocabulary: str | None = None, where: str = "the vocabulary") -> Tokenizer:
    """The tokenizer called "gpt2", "bytes" or, with the content of its file, "bpe".

    Raises UserError for other names and for a vocabulary out of reach or damaged; `where` names its file.
    """
    if name == "bpe" and vocabulary:
        return BPETokenizer(vocabulary, where)
    if name not in ("gpt2", "bytes"):
        raise UserError(f"unknown tokenizer {name!r}: it must be gpt2 or bytes, or bpe with its vocabulary")
    return GPT2Tokenizer() if name == "gpt2" else ByteTokenizer()
