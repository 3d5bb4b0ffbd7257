"""Text to tokens and back: GPT-2's vocabulary, bytes, vocabularies of your own, and integers.

A byte-pair vocabulary is stored as a plain file; tiktoken encodes and decodes with it.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import sha256_of_file
from data.shards import TOKENIZER_SIZES

VOCABULARY_FILE = "tokenizer.json"
PATTERNS = {
    # GPT-4's, with two differences. Digits are in groups of two at most, as small vocabularies have
    # no room for more. Whitespace is as in GPT-2: a line break and the next line's indentation are
    # one run, whose last space goes to the word after it.
    "gpt4-digits2": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"
    ),
}
PATTERN = "gpt4-digits2"
END_OF_TEXT = b"<|endoftext|>"
MIN_SIZE = 258  # bytes, one pair and end-of-text
MAX_SIZE = 65536  # uint16 shards hold no more
LONGEST_WORD = 256  # letters, when a vocabulary is trained: time is quadratic in it


class Tokenizer:
    """Byte pairs by tiktoken, given its Encoding."""

    def __init__(self, name, encoding):
        self.name = name
        self.tiktoken = encoding
        self.vocab_size = encoding.n_vocab
        self.eot = encoding.eot_token

    def encode(self, text):
        """Encode a str as a 1-D uint16 array.

        Special tokens are encoded as ordinary text, lone surrogates become "?".
        """
        return self.encode_raw(text.encode("utf-8", errors="replace")).astype(np.uint16)

    def encode_raw(self, raw):
        """Encode UTF-8 bytes as a 1-D array of unsigned integers. Invalid ones become U+FFFD."""
        text = raw.decode("utf-8", errors="replace")
        return self.tiktoken.encode_to_numpy(text, disallowed_special=())

    def decode_bytes(self, tokens):
        """Decode a sequence or array of tokens to bytes. End-of-text becomes b"<|endoftext|>"."""
        return self.tiktoken.decode_bytes(np.asarray(tokens).tolist())


class ByteTokenizer(Tokenizer):
    """Tokens 0..255 are the bytes of the UTF-8 text, 256 is end-of-text."""

    def __init__(self):
        self.name = "bytes"
        self.vocab_size, self.eot = TOKENIZER_SIZES["bytes"]

    def encode_raw(self, raw):
        return np.frombuffer(raw, dtype=np.uint8)

    def decode_bytes(self, tokens):
        tokens = np.asarray(tokens).tolist()
        parts = [END_OF_TEXT if token == self.eot else bytes([token]) for token in tokens]
        return b"".join(parts)


class IntegerTokenizer(Tokenizer):
    """For data that are not text: tokens 0..size - 1, written as numbers; `size` is end-of-text."""

    def __init__(self, size):
        if not 0 < size < MAX_SIZE:
            raise UserError(f"--vocab_size {size}: for integers it must be 1 to {MAX_SIZE - 1}")
        self.name = f"integers:{size}"
        self.vocab_size = size + 1
        self.eot = size

    def encode_raw(self, raw):
        """Encode numbers, in an array or as text with blanks between. Raises UserError."""
        numbers = raw if isinstance(raw, np.ndarray) else raw.split()
        try:
            tokens = np.array(numbers, dtype=np.int64)
        except (ValueError, OverflowError):
            raise UserError(
                f"{raw[:40]!r} is not text of integers between blanks, as this data needs"
            ) from None
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.eot:
            raise UserError(
                f"found integers from {tokens.min()} to {tokens.max()}, where tokens are 0 to "
                f"{self.eot - 1}; correct them, or prepare the data with a larger --vocab_size"
            )
        return tokens.astype(np.uint16)

    def decode_bytes(self, tokens):
        tokens = np.asarray(tokens).tolist()
        parts = [END_OF_TEXT if token == self.eot else b"%d" % token for token in tokens]
        return b"".join(b" " + part for part in parts)


def get_tokenizer(name, vocabulary=None, where="the vocabulary"):
    """Return the Tokenizer called "gpt2", "bytes", "integers:N" or "bpe".

    vocabulary: the content of its file, for "bpe".
    where: the path of that file, for errors.
    Raises UserError for other names, and for a vocabulary that cannot be loaded or is damaged.
    """
    if name == "bytes":
        return ByteTokenizer()
    integers = re.fullmatch(r"integers:(\d{1,9})", name)
    if integers:
        return IntegerTokenizer(int(integers[1]))
    if name == "bpe" and vocabulary:
        pattern, ranks = parse_vocabulary(vocabulary, where)
    elif name != "gpt2":
        raise UserError(
            f"unknown tokenizer {name!r}: it must be gpt2, bytes, integers:N, or bpe with its "
            "vocabulary"
        )
    try:
        import tiktoken

        if name == "gpt2":
            encoding = tiktoken.get_encoding(name)
        else:
            encoding = tiktoken.Encoding(
                name,
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens={END_OF_TEXT.decode(): len(ranks)},  # the last token
            )
    except Exception as error:
        # Anything may go wrong in tiktoken's own download
        raise UserError(
            f"the {name} vocabulary could not be loaded ({type(error).__name__}): connect to the "
            "network, point TIKTOKEN_CACHE_DIR to a folder where tiktoken has stored it, or use "
            "--tokenizer bytes"
        ) from error
    return Tokenizer(name, encoding)


def train_vocabulary(texts, vocab_size):
    """Train a byte-pair vocabulary on texts, and return the content of its file, a str.

    texts: an iterable of UTF-8 bytes.
    vocab_size: its tokens, end-of-text included, which is the last; little text may give fewer.
    The same texts give the same vocabulary. Invalid bytes become U+FFFD.
    Raises UserError if the texts hold no pair of bytes.
    """
    import regex  # tiktoken requires it

    if not MIN_SIZE <= vocab_size <= MAX_SIZE:
        raise UserError(f"--vocab_size {vocab_size}: it must be {MIN_SIZE} to {MAX_SIZE}")

    # The different words of the text, which merges do not cross, and how often each occurs
    words = Counter()
    for text in texts:
        decoded = text.decode("utf-8", errors="replace")
        words.update(match[0] for match in regex.finditer(PATTERNS[PATTERN], decoded))
    cut_words = Counter()
    for word, count in words.items():
        for first in range(0, len(word), LONGEST_WORD):
            cut_words[word[first : first + LONGEST_WORD].encode()] += count

    tokens = merge_pairs(cut_words, vocab_size - 257)
    if not tokens:
        raise UserError(
            "the text has no pair of bytes to make a token of: give more, or --tokenizer bytes"
        )
    content = dict(format="byte pairs", pattern=PATTERN, tokens=[token.hex() for token in tokens])
    return json.dumps(content, indent=0) + "\n"


def merge_pairs(words, n_tokens):
    """Make tokens by merging the most frequent pair of tokens, again and again, in all words.

    Byte-pair encoding (Sennrich et al. 2016). words: a dict from the bytes of each to how often it
    occurs. Returns at most n_tokens byte strings, in the order in which they were made.
    """
    word_counts = list(words.values())
    word_tokens = [[bytes([byte]) for byte in word] for word in words]
    pair_counts = Counter()
    words_with = defaultdict(set)  # pair -> indices of words that have had it
    for i, tokens in enumerate(word_tokens):
        for pair in pairwise(tokens):
            pair_counts[pair] += word_counts[i]
            words_with[pair].add(i)

    # Of pairs that are equally frequent, the first in the order of bytes
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    made = {}  # a dict, as an ordered set: different pairs can make the same token
    while heap and len(made) < n_tokens:
        negative_count, pair = heapq.heappop(heap)
        if -negative_count != pair_counts[pair]:
            continue  # an older count
        first, second = pair
        merged = first + second
        made[merged] = None

        changes = Counter()
        for i in words_with.pop(pair):
            tokens = []
            for token in word_tokens[i]:
                if token == second and tokens[-1:] == [first]:
                    tokens[-1] = merged
                else:
                    tokens.append(token)
            if len(tokens) == len(word_tokens[i]):
                continue  # an earlier merge took the pair apart
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


def parse_vocabulary(text, where):
    """Return the pattern that splits text, and the rank of each token's bytes.

    Raises UserError, which says `where` the vocabulary comes from, if it is damaged.
    """
    try:
        content = json.loads(text)
        pattern = PATTERNS[content["pattern"]]
        tokens = [bytes.fromhex(token) for token in content["tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        pattern = ""
        tokens = []
    # Bytes are the first tokens, then the merges follow in their order
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    is_distinct = len(ranks) == 256 + len(tokens)
    if not is_distinct or not MIN_SIZE <= len(ranks) + 1 <= MAX_SIZE or b"" in ranks:
        raise UserError(
            f"{where} is not a vocabulary that `data/prepare.py --tokenizer bpe` made, or is "
            "damaged"
        )
    return pattern, ranks


def read_vocabulary(path, sha256=None):
    """Return the content of a vocabulary file, or of the one in a folder, a str.

    Raises UserError if it is missing or has another hash than sha256.
    """
    path = Path(path)
    if path.is_dir():
        path = path / VOCABULARY_FILE
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        advice = "put it back, or prepare the data again"
        if not sha256:
            advice = "data and runs in bytes or GPT-2's have none: give --tokenizer bytes or gpt2"
        raise UserError(f"there is no vocabulary {path} ({error}): {advice}") from None
    digest = sha256_of_file(path)
    if sha256 and digest != sha256:
        raise UserError(
            f"{path} has the hash {digest[:12]}, and the data were made with {sha256[:12]}: put "
            "that back, or prepare the data again"
        )
    return text
