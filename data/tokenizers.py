"""Turn text into tokens and back, with GPT-2's vocabulary, bytes, your own vocabulary, or integers.

A vocabulary of byte pairs is a plain file; tiktoken encodes and decodes with it.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.files import sha256_of_file

if TYPE_CHECKING:
    import tiktoken

VOCABULARY_FILE = "tokenizer.json"
PATTERNS = {
    # GPT-4's, with two differences. Groups of digits have at most two, because small vocabularies
    # have no room for more. Whitespace is split like GPT-2's: a line break and the next line's
    # indentation are one run, whose final space belongs to the next word.
    "gpt4-digits2": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"
    ),
}
PATTERN = "gpt4-digits2"
END_OF_TEXT = b"<|endoftext|>"
MIN_SIZE = 258  # bytes, one pair and end-of-text
MAX_SIZE = 65536  # the limit of uint16 shards
LONGEST_WORD = 256  # letters, in training a vocabulary: the time is quadratic in it
Pair = tuple[bytes, bytes]


class Tokenizer:
    """Encodes and decodes byte pairs with a tiktoken Encoding."""

    def __init__(self, name: str, encoding: "tiktoken.Encoding"):
        self.name = name
        self.tiktoken = encoding
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        """Encode a str as a 1-D uint16 array.

        Special tokens are encoded as ordinary text. Lone surrogates become "?".
        """
        return self.encode_raw(text.encode("utf-8", errors="replace")).astype(np.uint16)

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """Encode UTF-8 bytes as a 1-D array of unsigned integers. Invalid bytes become U+FFFD."""
        text = raw.decode("utf-8", errors="replace")
        return self.tiktoken.encode_to_numpy(text, disallowed_special=())

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """Decode a sequence or array of tokens to bytes. End-of-text becomes b"<|endoftext|>"."""
        return self.tiktoken.decode_bytes(np.asarray(tokens).tolist())

    def bytes_per_token(self) -> np.ndarray:
        """Count the bytes of each token's text: float64 (vocab_size,). End-of-text has none."""
        counts = [len(self.decode_bytes([token])) for token in range(self.vocab_size)]
        counts[self.eot] = 0
        return np.array(counts, dtype=np.float64)


class ByteTokenizer(Tokenizer):
    """Tokens 0 to 255 are the bytes of the UTF-8 text, 256 is end-of-text."""

    def __init__(self):
        self.name = "bytes"
        self.vocab_size = 257
        self.eot = 256

    def encode_raw(self, raw: bytes) -> np.ndarray:
        return np.frombuffer(raw, dtype=np.uint8)

    def decode_bytes(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        tokens = np.asarray(tokens).tolist()
        return b"".join(self.token_bytes(token) for token in tokens)

    def token_bytes(self, token: int) -> bytes:
        """Decode one token."""
        return END_OF_TEXT if token == self.eot else bytes([token])


class IntegerTokenizer(ByteTokenizer):
    """For data that are not text: tokens 0 to size - 1 are numbers, and `size` is end-of-text."""

    def __init__(self, size: int):
        if not 0 < size < MAX_SIZE:
            raise UserError(f"the tokenizer is integers:{size}; expected 1 to {MAX_SIZE - 1}")
        self.name = f"integers:{size}"
        self.vocab_size = size + 1
        self.eot = size

    def encode_raw(self, raw: bytes) -> np.ndarray:
        """Encode numbers, text with spaces between. Raises UserError."""
        try:
            tokens = np.array(raw.split(), dtype=np.int64)
        except (ValueError, OverflowError):
            tokens = np.array([-1])
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.eot:
            raise UserError(
                f"{raw[:40]!r} must be integers from 0 to {self.eot - 1} with spaces between; "
                "correct it, or prepare the data with a larger integers:N"
            )
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return b" " + END_OF_TEXT if token == self.eot else b" %d" % token


def get_tokenizer(name: str, vocabulary: str | None = None) -> Tokenizer:
    """Make the Tokenizer called "gpt2", "bytes", "integers:N" or "bpe".

    vocabulary: the content of its file, for "bpe".
    Raises UserError for other names, and for a vocabulary that is damaged or cannot be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    integers = re.fullmatch(r"integers:(\d{1,9})", name)
    if integers:
        return IntegerTokenizer(int(integers[1]))
    if name == "bpe" and vocabulary:
        import tiktoken

        pattern, ranks = parse_vocabulary(vocabulary)
        special_tokens = {END_OF_TEXT.decode(): len(ranks)}  # the last token
        return Tokenizer(
            name,
            tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            ),
        )
    if name != "gpt2":
        raise UserError(
            f"unknown tokenizer {name!r}; expected gpt2, bytes, integers:N, or bpe with its "
            "vocabulary"
        )
    try:
        import tiktoken

        return Tokenizer(name, tiktoken.get_encoding(name))
    except Exception as error:
        # tiktoken's download can fail in any way
        raise UserError(
            f"the {name} vocabulary could not be loaded ({type(error).__name__}); connect to the "
            "network, set TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it, or use "
            "--tokenizer bytes"
        ) from error


def train_vocabulary(texts: Iterable[bytes], vocab_size: int) -> str:
    """Train a byte-pair vocabulary on texts, and return the content of its file.

    texts: in UTF-8. Invalid bytes become U+FFFD.
    vocab_size: the number of tokens, including end-of-text, the last; a short text may give fewer.
    The result is deterministic.
    """
    import regex  # which tiktoken requires

    # The frequency of each distinct word; merges do not cross word boundaries
    words: Counter[str] = Counter()
    for text in texts:
        decoded = text.decode("utf-8", errors="replace")
        words.update(match[0] for match in regex.finditer(PATTERNS[PATTERN], decoded))
    cut_words: Counter[bytes] = Counter()
    for word, count in words.items():
        for first in range(0, len(word), LONGEST_WORD):
            cut_words[word[first : first + LONGEST_WORD].encode()] += count

    tokens = merge_pairs(cut_words, vocab_size - 257)
    content = dict(format="byte pairs", pattern=PATTERN, tokens=[token.hex() for token in tokens])
    return json.dumps(content, indent=0) + "\n"


def merge_pairs(words: dict[bytes, int], n_tokens: int) -> list[bytes]:
    """Merge the most frequent pair of tokens in all words, repeatedly: byte-pair encoding.

    words: the frequency of each word. Returns at most n_tokens tokens, in the order in which they
    were made. (Sennrich et al. 2016)
    """
    word_counts = list(words.values())
    word_tokens = [[bytes([byte]) for byte in word] for word in words]
    pair_counts: Counter[Pair] = Counter()
    # The indices of the words that contain or contained a pair
    words_with: defaultdict[Pair, set[int]] = defaultdict(set)
    for i, tokens in enumerate(word_tokens):
        for pair in pairwise(tokens):
            pair_counts[pair] += word_counts[i]
            words_with[pair].add(i)

    # Equally frequent pairs are merged in the order of their bytes
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    # An ordered set, because different pairs can make the same token
    made: dict[bytes, None] = {}
    while heap and len(made) < n_tokens:
        negative_count, pair = heapq.heappop(heap)
        if -negative_count != pair_counts[pair]:
            continue  # an outdated count
        first, second = pair
        merged = first + second
        made[merged] = None

        changes: Counter[Pair] = Counter()
        for i in words_with.pop(pair):
            tokens = []
            for token in word_tokens[i]:
                if token == second and tokens[-1:] == [first]:
                    tokens[-1] = merged
                else:
                    tokens.append(token)
            for old_pair in pairwise(word_tokens[i]):
                changes[old_pair] -= word_counts[i]
            for new_pair in pairwise(tokens):
                changes[new_pair] += word_counts[i]
                if merged in new_pair:
                    words_with[new_pair].add(i)
            word_tokens[i] = tokens
        for changed_pair, change in changes.items():
            pair_counts[changed_pair] += change
            if change and pair_counts[changed_pair]:
                heapq.heappush(heap, (-pair_counts[changed_pair], changed_pair))
    return list(made)


def parse_vocabulary(text: str) -> tuple[str, dict[bytes, int]]:
    """Return the pattern that splits text, and the rank of each token.

    Raises UserError if the vocabulary is damaged.
    """
    # The first 256 tokens are the bytes, then come the merges in their order
    ranks = {bytes([byte]): byte for byte in range(256)}
    try:
        content = json.loads(text)
        pattern = PATTERNS[content["pattern"]]
        for token in content["tokens"]:
            ranks[bytes.fromhex(token)] = len(ranks)
        if len(ranks) != 256 + len(content["tokens"]) or b"" in ranks:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(
            "the vocabulary is damaged, or not made by `data/prepare.py --tokenizer bpe`; give a "
            "different one"
        ) from None
    return pattern, ranks


def read_vocabulary(path: str | Path, sha256: str | None = None) -> str:
    """Read a vocabulary file, or the one in a folder.

    Raises UserError if it is missing, or if its hash is not sha256.
    """
    path = Path(path)
    if path.is_dir():
        path = path / VOCABULARY_FILE
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"there is no vocabulary {path} ({error}); put it back and prepare the data again, or "
            "give --tokenizer gpt2 or bytes (only byte pairs have a file; a run's log.txt names "
            "its tokenizer)"
        ) from None
    digest = sha256_of_file(path)
    if sha256 and digest != sha256:
        raise UserError(
            f"{path} has the hash {digest[:12]}, but the data were made with {sha256[:12]}; put "
            "that file back, or prepare the data again"
        )
    return text
