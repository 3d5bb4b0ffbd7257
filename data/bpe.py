"""Custom BPE vocabularies: trained with the package `tokenizers`, stored as a plain file, used by tiktoken."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import UserError

VOCABULARY_FILE = "tokenizer.json"
PATTERNS = {
    # GPT-4's, but with digits in groups of two at most, as small vocabularies have no room for more, and whitespace as
    # in GPT-2: a line break and the next line's indentation are one run, whose last space goes to the word after it.
    "gpt4-digits2": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+",
}
PATTERN = "gpt4-digits2"
MIN_SIZE, MAX_SIZE = 258, 65536  # bytes, one pair and end-of-text; what uint16 shards hold


def train_vocabulary(texts: Iterable[bytes], vocab_size: int) -> str:
    """The content of a vocabulary file with vocab_size tokens, or fewer if there is little text; end-of-text is last.

    texts: UTF-8; invalid bytes become U+FFFD here. The same texts give the same vocabulary, byte for byte. Raises
    UserError when the package is missing, or the texts hold no pair of bytes.
    """
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("--tokenizer bpe needs the package tokenizers: run `pip install tokenizers`") from None
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[PATTERN]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text.decode("utf-8", errors="replace") for text in texts), trainer)
    byte_of = bytes_of_letters()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    if not merges:
        raise UserError("the text has no pair of bytes to make a token of: give more, or --tokenizer bytes")
    tokens = [bytes(byte_of[letter] for letter in first + second).hex() for first, second in merges]
    tokens = list(dict.fromkeys(tokens))  # different pairs can make the same token
    content = dict(format="byte pairs", pattern=PATTERN, tokens=tokens)
    return json.dumps(content, indent=0) + "\n"


def bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of GPT-2's byte-level alphabet stands for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


def parse_vocabulary(text: str, where: str) -> tuple[str, dict[bytes, int]]:
    """The pattern that splits text and the rank of each token's bytes. Raises UserError, which says `where`."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    try:
        content = json.loads(text)
        pattern, tokens = PATTERNS[content["pattern"]], [bytes.fromhex(token) for token in content["tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        pattern, tokens = "", []
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    if len(ranks) != 256 + len(tokens) or not MIN_SIZE <= len(ranks) + 1 <= MAX_SIZE or b"" in ranks:
        raise UserError(f"{where} is not a vocabulary that `data/prepare.py --tokenizer bpe` made, or is damaged")
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
        raise UserError(f"there is no vocabulary {path} ({error}): put it back, or prepare the data again") from None
    if sha256 and vocabulary_hash(text) != sha256:
        found = f"{path} has the hash {vocabulary_hash(text)[:12]}, and the data were made with {sha256[:12]}"
        raise UserError(f"{found}: put that back, or prepare the data again")
    return text
