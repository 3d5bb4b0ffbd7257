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

from common import UserError, derive_seed, sha256_of_file
from data.shards import HEADER_BYTES, find_shards, load_meta, read_shard, recorded_hashes
from data.tokenizers import read_vocabulary


class TokenShards:
    """The shards of one split as one long token sequence, read when needed."""

    CHECKED = (
        1 << 28
    )  # first tokens, checked on opening against the vocabulary, and by hash where whole shards fit

    def __init__(self, folder: Path, split: str, vocab_size: int, sha256: dict[str, str | None]):
        """sha256: of the shards, by name, where it is known. Raises UserError for shards that are wrong."""
        self.paths, self.vocab_size, self.lengths, self.dtypes = (
            find_shards(folder, split),
            vocab_size,
            [],
            [],
        )
        unchecked = self.CHECKED
        for path in self.paths:  # none stays mapped: that takes a file handle
            tokens = read_shard(path)
            self.lengths.append(len(tokens))
            self.dtypes.append(tokens.dtype)
            if unchecked > 0:
                self.check_vocab(tokens[:unchecked], path)
            expected = sha256.get(path.name) if len(tokens) <= unchecked else None
            if expected and sha256_of_file(path) != expected:
                raise UserError(
                    f"{path} is not the shard whose hash meta.json holds; prepare the data again"
                )
            unchecked -= len(tokens)
        self.ends = np.cumsum(self.lengths)
        self.n_tokens = int(self.ends[-1])

    def read_tokens(self, i: int, begin: int, count: int) -> np.ndarray:
        """At most `count` tokens of shard i from its token `begin` on, of the file's own type. Raises UserError."""
        size, count = self.dtypes[i].itemsize, min(count, self.lengths[i] - begin)
        with open(
            self.paths[i], "rb", buffering=0
        ) as file:  # not mapped: that dies if the file is truncated
            file.seek(HEADER_BYTES + begin * size)
            raw = file.read(count * size)
        if len(raw) < count * size:
            raise UserError(
                f"{self.paths[i]} was truncated while in use; put the whole shard back and --resume"
            )
        tokens = np.frombuffer(raw, self.dtypes[i])
        self.check_vocab(tokens, self.paths[i])
        return tokens

    def samples(self) -> dict[str, str]:
        """By the shards' names: their tokens, and a hash of 16 chunks of 2,048, evenly spread: all of a small shard."""
        samples = {}
        for i, (path, length) in enumerate(zip(self.paths, self.lengths)):
            digest, count = hashlib.sha256(), min(2048, length)
            for k in range(16):
                digest.update(self.read_tokens(i, (length - count) * k // 15, count))
            samples[path.name] = f"{length} tokens, {digest.hexdigest()[:12]}"
        return samples

    def check_vocab(self, tokens: np.ndarray, path: Path) -> None:
        if (worst := int(tokens.max())) >= self.vocab_size:
            advice = (
                "make the data again with the tokenizer that meta.json names, or raise --vocab_size"
            )
            raise UserError(
                f"{path} holds token {worst}, but the vocabulary ends at {self.vocab_size - 1}; {advice}"
            )

    def read_sequences(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Sequences of `length` tokens from each start, int64 (len(starts), length)."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            filled, i = 0, int(np.searchsorted(self.ends, start, side="right"))
            while filled < length:  # a sequence may run over the end of a shard
                part = self.read_tokens(
                    i, start + filled - int(self.ends[i]) + self.lengths[i], length - filled
                )
                row[filled : filled + len(part)] = part
                filled, i = filled + len(part), i + 1
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
    firsts = shards.ends - shards.lengths
    starts = [
        np.flatnonzero(read_shard(path) == eot) + first for path, first in zip(shards.paths, firsts)
    ]
    starts = np.concatenate(starts)
    starts = starts[starts + seq_len < shards.n_tokens]
    following, chosen, i = np.searchsorted(starts, starts + seq_len).tolist(), [], 0
    while i < len(starts):
        chosen.append(i)
        i = following[i]
    return starts[chosen].astype(np.int64)


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
        self.train, self.val = (
            TokenShards(self.folder, split, vocab_size, hashes) for split in ("train", "val")
        )
        found = {
            path.name: n
            for split in (self.train, self.val)
            for path, n in zip(split.paths, split.lengths)
        }
        named = {name: shard["tokens"] for name, shard in self.meta["files"].items()} or found
        for name in sorted(name for name, _ in found.items() ^ named.items()):
            said = (
                f"{found.get(name, 'no')} tokens, where meta.json says {named.get(name, 'nothing')}"
            )
            raise UserError(f"{self.folder / name} has {said}; prepare the data again")
        least, name = min((self.train.n_tokens, "train"), (self.val.n_tokens, "val"))
        if least <= self.seq_len:
            found = (
                f"the {name} split of {self.folder} has {least} tokens, too few for one sequence"
            )
            advice = f"use more data, or --seq_len {1 << max(0, (least - 1).bit_length() - 1)}"
            raise UserError(f"{found} of --seq_len {self.seq_len} and a target; {advice}")
        self.aligned, self.seqs_per_epoch = None, max(1, self.train.n_tokens // seq_len - 1)
        if doc_align:
            self.aligned = document_sequences(self.train, self.meta["eot"], seq_len)
            self.seqs_per_epoch = len(self.aligned)
            if not self.seqs_per_epoch:
                wanted = f"document in {folder} with {seq_len} tokens after its start (token {self.meta['eot']})"
                raise UserError(
                    f"--doc_align finds no {wanted}; use a smaller --seq_len or remove it"
                )
        # Races evaluate the first tokens: those on FineWeb, and on llm.c's and the speedruns' shards without meta.json
        race = self.meta["source"].endswith("/fineweb10B-gpt2/resolve/main/") or self.meta.get(
            "assumed"
        )
        self.eval_subset = "first" if race else "spread"

    def sequence_starts(self, index: np.ndarray) -> np.ndarray:
        """Where the training sequences with these numbers start, int64 (len(index),).

        Each epoch cuts the stream into sequences of stride seq_len from its own offset, or takes document_sequences,
        and visits them in its own order.
        """
        n_offsets = min(self.seq_len, self.train.n_tokens - self.seqs_per_epoch * self.seq_len)
        starts = np.empty(len(index), dtype=np.int64)
        epochs = index // self.seqs_per_epoch
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = derive_seed(self.seed, epoch)
            order = feistel_permute(
                index[here] % self.seqs_per_epoch, self.seqs_per_epoch, key
            ).astype(np.int64)
            if self.aligned is not None:  # --doc_align
                starts[here] = self.aligned[order]
            else:
                offset = key % n_offsets  # each epoch cuts the stream elsewhere
                starts[here] = offset + self.seq_len * order
        return starts

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """This rank's part of step's global batch: inputs and one more target, int64 (sequences, seq_len + 1)."""
        per_rank = self.seqs_per_batch // world_size
        mine = step * self.seqs_per_batch + rank * per_rank + np.arange(per_rank, dtype=np.int64)
        return self.train.read_sequences(self.sequence_starts(mine), self.seq_len + 1)

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
        if self.eval_subset == "spread":
            index = index * self.num_eval_seqs(0) // n_seqs
        return index * self.seq_len

    def eval_batches(
        self, eval_tokens: int, micro_batch: int, rank: int = 0, world_size: int = 1
    ) -> Iterator:
        """This rank's part of an evaluation: yields inputs and targets, int64 (micro_batch, seq_len) each.

        Yields equally often on every rank; padding has targets of -1, so that there is one static shape to compile.
        """
        starts = self.eval_starts(eval_tokens)
        per_rank = -(-len(starts) // world_size)
        mine = starts[rank * per_rank : (rank + 1) * per_rank]
        for i in range(0, per_rank, micro_batch):
            part = mine[i : i + micro_batch]
            sequences = np.zeros((micro_batch, self.seq_len + 1), dtype=np.int64)
            sequences[: len(part)] = self.val.read_sequences(part, self.seq_len + 1)
            targets = sequences[:, 1:].copy()
            targets[len(part) :] = -1
            yield sequences[:, :-1], targets

    def eval_end(self, eval_tokens: int, length: int) -> np.ndarray:
        """The last tokens of those that are evaluated, int64 (1, length or seq_len if that is less)."""
        last = self.eval_starts(eval_tokens)[-1:]
        return self.val.read_sequences(last, self.seq_len)[:, -length:]

    def stream_state(self, step: int) -> dict:
        """Where in the stream the batch of `step` starts, and what decides which stream it is."""
        epoch, window = divmod(step * self.seqs_per_batch, self.seqs_per_epoch)
        return dict(
            seed=self.seed,
            seq_len=self.seq_len,
            windows=self.seqs_per_epoch,
            epoch=epoch,
            window=window,
        )

    @functools.cached_property
    def samples(self) -> dict[str, str]:
        return self.train.samples() | self.val.samples()

    def facts(self) -> dict[str, str]:
        """What names the data, by name, for ranks to compare: a sample of each shard, and what meta.json says."""
        facts = {str(self.folder / name): sample for name, sample in self.samples.items()}
        facts |= {f"meta.json on {name}": str(shard) for name, shard in self.meta["files"].items()}
        return facts | {
            f"meta.json's {key}": str(self.meta.get(key))
            for key in ("tokenizer", "vocabulary", "vocab_size", "eot")
        }

    def fingerprint(self) -> str:
        """Names the data in checkpoints: a hash of the samples of its shards and of those that meta.json records."""
        return hashlib.sha256(
            json.dumps([self.samples, self.meta["files"]], sort_keys=True).encode()
        ).hexdigest()


def map_ahead(function, items, depth: int, threads: int) -> Iterator:
    """function(item) of each item, in their order, computed up to `depth` items ahead by background threads."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="map_ahead")
    try:
        ahead = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def prefetch(load, first: int, depth: int) -> Iterator:
    """load(first), load(first + 1), ... without end, each prepared up to `depth` calls ahead by a background thread."""
    return map_ahead(load, itertools.count(first), depth, threads=1)
