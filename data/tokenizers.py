"""Text to tokens and back: GPT-2's byte pairs, plain bytes, vocabularies of byte pairs of one's own, and integers.

The package `tokenizers` trains a vocabulary, which is kept as a plain file, and tiktoken uses it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from common import UserError
from data.shards import TOKENIZER_SIZES

VOCABULARY_FILE = "tokenizer.json"
PATTERNS = {
    # GPT-4's, but with digits in groups of two at most, as small vocabularies have no room for more, and whitespace as
    # in GPT-2: a line break and the next line's indentation are one run, whose last space goes to the word after it.
    "gpt4-digits2": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+",
}
PATTERN = "gpt4-digits2"
MIN_SIZE, MAX_SIZE = 258, 65536  # bytes, one pair and end-of-text; what uint16 shards hold


class Tokenizer:
    """Byte pairs by tiktoken, given its Encoding."""

    def __init__(self, name: str, encoding):
        self.name, self.tiktoken, self.vocab_size, self.eot = (
            name,
            encoding,
            encoding.n_vocab,
            encoding.eot_token,
        )

    def encode(self, text: str) -> np.ndarray:
        """str -> 1-D uint16 array. Special tokens are ordinary text, lone surrogates become "?"."""
        return self.encode_raw(text.encode("utf-8", errors="replace")).astype(np.uint16)

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """bytes -> 1-D uint32 array (of the tokenizer bytes: uint8). What is not UTF-8 becomes U+FFFD."""
        return self.tiktoken.encode_to_numpy(
            raw.decode("utf-8", errors="replace"), disallowed_special=()
        )

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
        return b"".join(
            b"<|endoftext|>" if token == self.eot else bytes([token]) for token in tokens
        )


class IntegerTokenizer(Tokenizer):
    """For data that are no text: tokens 0..size - 1 are written as numbers between blanks, `size` is end-of-text."""

    def __init__(self, size: int):
        if not 0 < size < MAX_SIZE:
            raise UserError(f"--vocab_size {size}: for integers it must be 1 to {MAX_SIZE - 1}")
        self.name, self.vocab_size, self.eot = f"integers:{size}", size + 1, size

    def encode_raw(self, raw: bytes | np.ndarray) -> np.ndarray:
        """Raises UserError for other numbers."""
        try:
            tokens = np.array(raw if isinstance(raw, np.ndarray) else raw.split(), dtype=np.int64)
        except (ValueError, OverflowError):
            raise UserError(
                f"{raw[:40]!r} is not text of integers between blanks, as this data needs"
            ) from None
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.eot:
            found = f"found integers from {tokens.min()} to {tokens.max()}, where tokens are 0 to {self.eot - 1}"
            raise UserError(
                f"{found}; correct them, or prepare the data with a larger --vocab_size"
            )
        return tokens.astype(np.uint16)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        return b"".join(
            b" <|endoftext|>" if token == self.eot else b" %d" % token for token in map(int, tokens)
        )


def get_tokenizer(
    name: str, vocabulary: str | None = None, where: str = "the vocabulary"
) -> Tokenizer:
    """The tokenizer called "gpt2", "bytes", "integers:N" or, with the content of its file, "bpe".

    Raises UserError for other names and for a vocabulary out of reach or damaged; `where` names its file.
    """
    if name == "bytes":
        return ByteTokenizer()
    if size := re.fullmatch(r"integers:(\d{1,9})", name):
        return IntegerTokenizer(int(size[1]))
    if name == "bpe" and vocabulary:
        pattern, ranks = parse_vocabulary(vocabulary, where)
    elif name != "gpt2":
        raise UserError(
            f"unknown tokenizer {name!r}: it must be gpt2, bytes, integers:N, or bpe with its vocabulary"
        )
    try:
        import tiktoken

        if name == "gpt2":
            return Tokenizer(name, tiktoken.get_encoding(name))
        special = {"<|endoftext|>": len(ranks)}  # the last token
        return Tokenizer(
            name,
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special),
        )
    except Exception as error:  # whatever went wrong in tiktoken's own download
        advice = "connect to the network, point TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it"
        failed = f"the {name} vocabulary could not be loaded ({type(error).__name__})"
        raise UserError(f"{failed}: {advice}, or use --tokenizer bytes") from error


def train_vocabulary(texts: Iterable[bytes], vocab_size: int) -> str:
    """The content of a vocabulary file with vocab_size tokens, or fewer if there is little text; end-of-text is last.

    texts: UTF-8; invalid bytes become U+FFFD here. The same texts give the same vocabulary, byte for byte. Raises
    UserError when the package is missing, or the texts hold no pair of bytes.
    """
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "--tokenizer bpe needs the package tokenizers: run `pip install tokenizers`"
        ) from None
    if not MIN_SIZE <= vocab_size <= MAX_SIZE:
        raise UserError(f"--vocab_size {vocab_size}: it must be {MIN_SIZE} to {MAX_SIZE}")
    pre, tokenizer = tokenizers.pre_tokenizers, tokenizers.Tokenizer(tokenizers.models.BPE())
    split = pre.Split(tokenizers.Regex(PATTERNS[PATTERN]), "isolated")
    tokenizer.pre_tokenizer = pre.Sequence(
        [split, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    options = dict(initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 1, **options)
    tokenizer.train_from_iterator(
        (text.decode("utf-8", errors="replace") for text in texts), trainer
    )
    byte_of = bytes_of_letters()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    if not merges:
        raise UserError(
            "the text has no pair of bytes to make a token of: give more, or --tokenizer bytes"
        )
    tokens = [bytes(byte_of[letter] for letter in first + second).hex() for first, second in merges]
    tokens = list(dict.fromkeys(tokens))  # different pairs can make the same token
    content = dict(format="byte pairs", pattern=PATTERN, tokens=tokens)
    return json.dumps(content, indent=0) + "\n"


def bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of GPT-2's byte-level alphabet stands for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def parse_vocabulary(text: str, where: str) -> tuple[str, dict[bytes, int]]:
    """The pattern that splits text and the rank of each token's bytes. Raises UserError, which says `where`."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    try:
        content = json.loads(text)
        pattern, tokens = (
            PATTERNS[content["pattern"]],
            [bytes.fromhex(token) for token in content["tokens"]],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        pattern, tokens = "", []
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    if (
        len(ranks) != 256 + len(tokens)
        or not MIN_SIZE <= len(ranks) + 1 <= MAX_SIZE
        or b"" in ranks
    ):
        raise UserError(
            f"{where} is not a vocabulary that `data/prepare.py --tokenizer bpe` made, or is damaged"
        )
    return pattern, ranks


def vocabulary_hash(text: str) -> str:
    """SHA-256 of a vocabulary file's content, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_vocabulary(path: str | Path, sha256: str | None = None) -> str:
    """The content of a vocabulary file, or of the one in a folder. Raises UserError if missing or of another hash."""
    path = Path(path)
    path = path / VOCABULARY_FILE if path.is_dir() else path
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"there is no vocabulary {path} ({error}): put it back, or prepare the data again"
        ) from None
    if sha256 and vocabulary_hash(text) != sha256:
        found = f"{path} has the hash {vocabulary_hash(text)[:12]}, and the data were made with {sha256[:12]}"
        raise UserError(f"{found}: put that back, or prepare the data again")
    return text
