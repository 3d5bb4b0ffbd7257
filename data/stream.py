"""Shards to batches: the training stream is a pure function of (seed, step). numpy only, and usable alone:

stream = TokenStream("data/python", seq_len=256, batch_tokens=4096)
stream.batch(step=0)  # int64 (16, 257): the inputs and one more target
"""

import functools
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.bpe import read_vocabulary, vocabulary_hash
from data.shards import HEADER_BYTES, find_shards, load_meta, read_shard, recorded_hashes, sha256_of_file
from runtime.errors import UserError


def derive_seed(*names) -> int:
    """A 64-bit pseudo-random seed, a function of the names."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, names)).encode()).digest()[:8], "little")


class TokenShards:
    """The shards of one split as one long token sequence, read when needed."""

    CHECKED = 1 << 28  # first tokens, checked on opening against the vocabulary, and by hash where whole shards fit

    def __init__(self, folder: Path, split: str, vocab_size: int, sha256: dict[str, str] | None = None):
        """sha256: the hashes of shards by name, where they are known. Raises UserError for shards that are wrong."""
        self.paths, self.vocab_size = find_shards(folder, split), vocab_size
        shards = map(read_shard, self.paths)  # one after the other: each that is mapped takes a file handle
        self.lengths, self.dtypes = zip(*((len(shard), shard.dtype) for shard in shards))
        self.ends = np.cumsum(self.lengths)
        self.n_tokens = int(self.ends[-1])
        for path, length, end in zip(self.paths, self.lengths, self.ends.tolist()):
            unchecked = self.CHECKED - (end - length)
            if unchecked > 0:
                self.check_vocab(read_shard(path)[:unchecked], path)
            expected = (sha256 or {}).get(path.name) if length <= unchecked else None
            if expected and sha256_of_file(path) != expected:
                raise UserError(f"{path} is not the shard whose hash meta.json holds; prepare the data again")

    def read_tokens(self, i: int, begin: int, count: int) -> np.ndarray:
        """At most `count` tokens of shard i from its token `begin` on, of the file's own type. Raises UserError."""
        size, count = self.dtypes[i].itemsize, min(count, self.lengths[i] - begin)
        with open(self.paths[i], "rb", buffering=0) as file:  # not mapped: that dies if the file is truncated
            file.seek(HEADER_BYTES + begin * size)
            raw = file.read(count * size)
        if len(raw) < count * size:
            raise UserError(f"{self.paths[i]} was truncated while in use; put the whole shard back and --resume")
        return np.frombuffer(raw, self.dtypes[i])

    def sample_hash(self, i: int) -> str:
        """SHA-256 over 16 chunks of 2,048 tokens of shard i, evenly spread: all of a small shard."""
        digest, count = hashlib.sha256(str(self.lengths[i]).encode()), min(2048, self.lengths[i])
        for k in range(16):
            digest.update(self.read_tokens(i, (self.lengths[i] - count) * k // 15, count))
        return digest.hexdigest()

    def check_vocab(self, tokens: np.ndarray, path: Path) -> None:
        if (worst := int(tokens.max())) >= self.vocab_size:
            advice = "make the data again with the tokenizer that meta.json names, or raise --vocab_size"
            raise UserError(f"{path} holds token {worst}, but the vocabulary ends at {self.vocab_size - 1}; {advice}")

    def read_sequences(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Sequences of `length` tokens from each start, int64 (len(starts), length)."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            filled, i = 0, int(np.searchsorted(self.ends, start, side="right"))
            while filled < length:  # a sequence may run over the end of a shard
                part = self.read_tokens(i, start + filled - int(self.ends[i]) + self.lengths[i], length - filled)
                row[filled : filled + len(part)] = part
                filled, i = filled + len(part), i + 1
        if len(starts) and out.max() >= self.vocab_size:
            first = starts[out.max(axis=1).argmax()]
            self.check_vocab(out, self.paths[np.searchsorted(self.ends, first, side="right")])
        return out


def feistel_permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(n) sends each index, uint64; computed, never stored.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.frombuffer(hashlib.sha256(str(key).encode()).digest(), dtype=np.uint64)
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left, right = out[todo] >> half, out[todo] & mask
        for k in keys:
            mixed = (right + k) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        out[todo] = (left << half) | right
        todo = out >= n
    return out


def document_sequences(shards: TokenShards, eot: int, seq_len: int) -> np.ndarray:
    """Starts of sequences that begin a document and do not overlap, int64 (n,); the rests of documents are dropped."""
    firsts = [end - length for end, length in zip(shards.ends.tolist(), shards.lengths)]
    starts = [np.flatnonzero(read_shard(path) == eot) + first for path, first in zip(shards.paths, firsts)]
    starts = np.concatenate(starts)
    starts = starts[starts + seq_len < shards.n_tokens]
    following, chosen, i = np.searchsorted(starts, starts + seq_len).tolist(), [], 0
    while i < len(starts):
        chosen.append(i)
        i = following[i]
    return starts[chosen].astype(np.int64)


def sequences_per_epoch(n_tokens: int, seq_len: int, aligned: np.ndarray | None = None) -> int:
    return max(1, (n_tokens - seq_len) // seq_len) if aligned is None else len(aligned)


def sequence_starts(index: np.ndarray, n_tokens: int, seq_len: int, seed: int, aligned=None) -> np.ndarray:
    """Where the training sequences with these numbers start, int64 (len(index),).

    Each epoch cuts the stream into sequences of stride seq_len from its own offset and visits them in its own order;
    with `aligned`, the sequences are those of document_sequences.
    """
    per_epoch = sequences_per_epoch(n_tokens, seq_len, aligned)
    offsets = min(seq_len, n_tokens - per_epoch * seq_len)
    starts = np.empty(len(index), dtype=np.int64)
    epochs = index // per_epoch
    for epoch in np.unique(epochs):
        here = epochs == epoch
        key = derive_seed(seed, epoch)
        order = feistel_permute(index[here] % per_epoch, per_epoch, key)
        starts[here] = key % offsets + seq_len * order.astype(np.int64) if aligned is None else aligned[order]
    return starts


def eval_part_of(meta: dict) -> str:
    """Which part of the validation split is evaluated: "spread" over it, or the "first" tokens, as in races.

    Races are on FineWeb, and on shards of llm.c and the speedruns, which have no meta.json.
    """
    fineweb = meta["source"].endswith("/fineweb10B-gpt2/resolve/main/")
    return "first" if fineweb or meta.get("assumed") else "spread"


class TokenStream:
    """A prepared folder as batches: training batches by step, evaluation batches in order, position and fingerprint.

    Raises UserError for a folder that is not as meta.json says, or is too small for one sequence.
    """

    def __init__(
        self,
        folder: str | Path,
        seq_len: int,
        batch_tokens: int,
        seed: int = 0,
        vocab_size: int = 0,  # of the model, where it is larger than the tokenizer's
        doc_align: bool = False,  # sequences start at document boundaries, and what does not fit is dropped
    ):
        self.folder, self.seq_len, self.seed = Path(folder), seq_len, seed
        self.seqs_per_batch = batch_tokens // seq_len
        self.meta = load_meta(self.folder)
        self.vocabulary = None  # the content of the vocabulary file of a custom tokenizer
        if self.meta["tokenizer"] == "bpe":
            self.vocabulary = read_vocabulary(self.folder, self.meta["vocabulary"]["sha256"])
        if 0 < vocab_size < self.meta["vocab_size"]:
            needed = f"the {self.meta['vocab_size']} of the tokenizer of {folder}"
            raise UserError(f"--vocab_size {vocab_size} is less than {needed}; raise it")
        vocab_size, hashes = max(vocab_size, self.meta["vocab_size"]), recorded_hashes(self.meta)
        self.train, self.val = (TokenShards(self.folder, split, vocab_size, hashes) for split in ("train", "val"))
        self.check_shards()
        self.aligned = None
        if doc_align:
            self.aligned = document_sequences(self.train, self.meta["eot"], seq_len)
            if not len(self.aligned):
                wanted = f"document in {folder} with {seq_len} tokens after its start (token {self.meta['eot']})"
                raise UserError(f"--doc_align finds no {wanted}; use a smaller --seq_len or remove it")
        self.per_epoch = sequences_per_epoch(self.train.n_tokens, seq_len, self.aligned)
        self.eval_part = eval_part_of(self.meta)

    def check_shards(self) -> None:
        """Raises UserError when the shards are not those of meta.json, or too small."""
        found = {path.name: n for split in (self.train, self.val) for path, n in zip(split.paths, split.lengths)}
        named = {name: shard["tokens"] for name, shard in self.meta["files"].items()} or found
        for name in found | named:
            if found.get(name) != named.get(name):
                counts = [f"{n} tokens" if n else "no such shard" for n in (found.get(name), named.get(name))]
                found = f"{self.folder / name}: {counts[0]}, where meta.json says {counts[1]}"
                raise UserError(f"{found}; prepare the data again")
        for name, split in (("train", self.train), ("val", self.val)):
            if split.n_tokens <= self.seq_len:
                found = f"the {name} split of {self.folder} has {split.n_tokens} tokens, too few for one sequence"
                advice = "use a smaller --seq_len or more data"
                raise UserError(f"{found} of --seq_len {self.seq_len} and a target; {advice}")

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """This rank's part of step's global batch: inputs and one more target, int64 (sequences, seq_len + 1)."""
        per_rank = self.seqs_per_batch // world_size
        mine = step * self.seqs_per_batch + rank * per_rank + np.arange(per_rank, dtype=np.int64)
        starts = sequence_starts(mine, self.train.n_tokens, self.seq_len, self.seed, self.aligned)
        return self.train.read_sequences(starts, self.seq_len + 1)

    def num_eval_seqs(self, eval_tokens: int) -> int:
        """Validation sequences in one evaluation: whole ones, at least one; eval_tokens 0 is all."""
        available = (self.val.n_tokens - 1) // self.seq_len
        return min(available, max(1, eval_tokens // self.seq_len)) if eval_tokens else available

    def eval_starts(self, eval_tokens: int) -> np.ndarray:
        """Where the sequences of an evaluation start, int64 (n,), ascending.

        If only a part of the split is evaluated, its sequences are spread evenly over the split, or are the first ones
        if eval_part is "first".
        """
        n_seqs = self.num_eval_seqs(eval_tokens)
        index = np.arange(n_seqs, dtype=np.int64)
        if self.eval_part == "spread":
            index = index * self.num_eval_seqs(0) // n_seqs
        return index * self.seq_len

    def eval_batches(self, eval_tokens: int, micro_batch: int, rank: int = 0, world_size: int = 1) -> Iterator:
        """This rank's part of an evaluation: yields inputs and targets, int64 (micro_batch, seq_len) each.

        Yields equally often on every rank; padding has targets of -1, so that there is one static shape to compile.
        """
        all_starts = self.eval_starts(eval_tokens)
        n_seqs = len(all_starts)
        per_rank = -(-n_seqs // world_size)
        mine = np.arange(rank * per_rank, min(n_seqs, (rank + 1) * per_rank))
        for i in range(0, per_rank, micro_batch):
            starts = all_starts[mine[i : i + micro_batch]]
            sequences = np.zeros((micro_batch, self.seq_len + 1), dtype=np.int64)
            sequences[: len(starts)] = self.val.read_sequences(starts, self.seq_len + 1)
            targets = sequences[:, 1:].copy()
            targets[len(starts) :] = -1
            yield sequences[:, :-1], targets

    def eval_end(self, eval_tokens: int, length: int) -> np.ndarray:
        """The last tokens of those that are evaluated, int64 (1, length or seq_len if that is less)."""
        last = self.eval_starts(eval_tokens)[-1:]
        return self.val.read_sequences(last, self.seq_len)[:, -length:]

    def position(self, step: int) -> dict:
        """Where in the stream the batch of `step` starts, and what decides which stream it is."""
        epoch, window = divmod(step * self.seqs_per_batch, self.per_epoch)
        return dict(seed=self.seed, seq_len=self.seq_len, windows=self.per_epoch, epoch=epoch, window=window)

    @functools.cached_property
    def shard_samples(self) -> list[list[tuple[str, int, str]]]:
        """Name, tokens and hash of a sample of each shard, of the training and of the validation split."""
        splits = (self.train, self.val)
        return [
            [(p.name, split.lengths[i], split.sample_hash(i)) for i, p in enumerate(split.paths)] for split in splits
        ]

    def facts(self) -> dict[str, str]:
        """What fingerprint sums up, and the tokenizer: a hash of each shard and what meta.json says, by name."""
        facts = {str(self.folder / name): f"{n} tokens, {h[:12]}" for name, n, h in sum(self.shard_samples, [])}
        facts |= {f"meta.json on {name}": str(shard) for name, shard in self.meta["files"].items()}
        facts |= {f"meta.json's {key}": self.meta[key] for key in ("tokenizer", "vocab_size", "eot")}
        return facts | ({"the vocabulary's hash": vocabulary_hash(self.vocabulary)} if self.vocabulary else {})

    def fingerprint(self) -> str:
        """Names the data: its shards and the hashes that meta.json records. A checkpoint keeps it."""
        return hashlib.sha256(json.dumps([self.shard_samples, self.meta["files"]], sort_keys=True).encode()).hexdigest()


def prefetch(load, first: int, depth: int):
    """load(first), load(first + 1), ... without end, each prepared up to `depth` calls ahead by a background thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque()
        for following in itertools.count(first):
            ahead.append(pool.submit(load, following))
            if len(ahead) > depth:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
