"""Read batches from shards: the training stream is a pure function of (seed, step).

Only numpy is needed, and no trainer:

stream = TokenStream("data/python", seq_len=256, batch_tokens=4096)
stream.batch(step=0)  # int64 (16, 257): the inputs and one more target
"""

import functools
import hashlib
import itertools
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import sha256_of_file
from common.values import derive_seed
from data.shards import HEADER_BYTES, check_shard, find_shards, is_fineweb, load_meta
from data.tokenizers import read_vocabulary


class TokenShards:
    """The shards of one split as one long token sequence, read when needed."""

    # On opening, at most this many tokens are compared with the hash of their shard and with the
    # vocabulary. Every token is compared with the vocabulary when it is read.
    CHECKED = 1 << 28

    def __init__(self, folder, split, vocab_size, files):
        """Open the shards of a split, "train" or "val". Raises UserError for wrong shards.

        vocab_size: the model's; all tokens must be smaller.
        files: the entries of shards in meta.json, by name; shards without one are not compared.
        """
        self.split = split
        self.vocab_size = vocab_size
        self.paths = find_shards(folder, split)
        self.lengths = []
        self.dtypes = []
        unchecked = self.CHECKED
        for i, path in enumerate(self.paths):
            length, dtype = check_shard(path)
            self.lengths.append(length)
            self.dtypes.append(dtype)
            if unchecked > 0:
                self.read_tokens(i, 0, unchecked)
            recorded = files.get(path.name, {})
            is_same = recorded.get("tokens", length) == length
            if recorded.get("sha256") and length <= unchecked:
                is_same = recorded["sha256"] == sha256_of_file(path)
            if not is_same:
                raise UserError(
                    f"{path} is not the shard that meta.json describes: prepare the data again"
                )
            unchecked -= length
        self.n_tokens = sum(self.lengths)
        # The position of each shard's first token in the whole sequence
        self.offsets = np.cumsum([0, *self.lengths[:-1]])

    def read_tokens(self, i, begin, count):
        """Read at most `count` tokens of shard i, beginning at its token `begin`.

        The dtype is the file's. Raises UserError for damage, or a token outside the vocabulary.
        """
        path = self.paths[i]
        itemsize = self.dtypes[i].itemsize
        n_bytes = min(count, self.lengths[i] - begin) * itemsize
        # Not a memory map: some systems have none, and if the file is truncated, reading one kills
        # the process
        try:
            with open(path, "rb") as file:
                file.seek(HEADER_BYTES + begin * itemsize)
                raw = file.read(n_bytes)
        except OSError:
            raw = b""
        if len(raw) < n_bytes:
            raise UserError(
                f"{path} can no longer be read whole: put the whole shard back and --resume"
            )
        tokens = np.frombuffer(raw, self.dtypes[i])
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise UserError(
                f"{path} holds token {largest}, but the vocabulary ends at {self.vocab_size - 1}: "
                "prepare the data again with the tokenizer in meta.json, or raise --vocab_size"
            )
        return tokens

    def read_sequences(self, starts, length):
        """Read a sequence of `length` tokens from each start: int64 (len(starts), length)."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            # i: the shard that holds the first token
            i = int(np.searchsorted(self.offsets, start, side="right")) - 1
            filled = 0
            # The sequence may run over the end of a shard
            while filled < length:
                begin = start + filled - int(self.offsets[i])
                tokens = self.read_tokens(i, begin, length - filled)
                row[filled : filled + len(tokens)] = tokens
                filled += len(tokens)
                i += 1
        return out

    def hash_shards(self):
        """Hash 16 chunks of 2,048 tokens, spread evenly over each shard.

        Returns the number of tokens and the hash of each shard, by its name.
        """
        hashes = {}
        for i, (path, length) in enumerate(zip(self.paths, self.lengths)):
            digest = hashlib.sha256()
            count = min(2048, length)
            for k in range(16):
                digest.update(self.read_tokens(i, (length - count) * k // 15, count))
            hashes[path.name] = f"{length} tokens, {digest.hexdigest()[:12]}"
        return hashes


def feistel_permute(index, n, key):
    """Apply the pseudo-random permutation of range(n) with this key to each index; return uint64.

    A Feistel network permutes range(m), where m is a power of four and at least n. It is applied
    until the result is below n (cycle walking, Black and Rogaway 2002). Nothing is stored.
    """
    # The number of bits in each half of an index
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    round_keys = np.frombuffer(hashlib.sha256(str(key).encode()).digest(), dtype=np.uint64)
    # Apply the network until every index is below n
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    while todo.any():
        left = out[todo] >> half_bits
        right = out[todo] & mask
        for round_key in round_keys:
            mixed = (right + round_key) * 0x9E3779B97F4A7C15
            mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9
            left, right = right, left ^ ((mixed >> 32) & mask)
        out[todo] = (left << half_bits) | right
        todo = out >= n
    return out


def document_sequences(shards, eot, seq_len):
    """Find sequences that begin a document and do not overlap; return their starts, int64 (n,).

    The remainders of documents are dropped.
    """
    # The positions of documents in the whole sequence
    starts = []
    for i, offset in enumerate(shards.offsets):
        tokens = shards.read_tokens(i, 0, shards.lengths[i])
        starts.append(np.flatnonzero(tokens == eot) + offset)
    starts = np.concatenate(starts)
    starts = starts[starts + seq_len < shards.n_tokens]
    # For a sequence at each document: the first document that starts after it
    following = np.searchsorted(starts, starts + seq_len).tolist()
    chosen = []
    i = 0
    while i < len(starts):
        chosen.append(i)
        i = following[i]
    return starts[chosen].astype(np.int64)


class TokenStream:
    """A prepared folder as batches, by step in training and in order in an evaluation."""

    def __init__(
        self,
        folder,
        seq_len,
        seed=0,
        vocab_size=None,
        doc_align=False,
    ):
        """Open a prepared folder.

        vocab_size: the model's, if it is larger than the tokenizer's.
        doc_align: start sequences at document boundaries, and drop the remainders.
        Raises UserError if the folder differs from meta.json, or is too small for a sequence.
        """
        self.folder = Path(folder)
        self.seq_len = seq_len
        self.seed = seed
        self.seqs_per_batch = 0  # until set_batch_tokens
        self.tokenizer = None
        self.meta = load_meta(self.folder)
        # The content of the vocabulary file, if the tokenizer has one
        self.vocabulary = None
        if self.meta["tokenizer"] == "bpe":
            self.vocabulary = read_vocabulary(self.folder, self.meta["vocabulary"]["sha256"])
        if vocab_size and vocab_size < self.meta["vocab_size"]:
            needed = f"the {self.meta['vocab_size']} of the tokenizer of {folder}"
            raise UserError(f"--vocab_size {vocab_size} is less than {needed}: raise it")

        # Open the shards of both splits
        vocab_size = max(vocab_size or 0, self.meta["vocab_size"])
        files = self.meta["files"]
        self.train = TokenShards(self.folder, "train", vocab_size, files)
        self.val = TokenShards(self.folder, "val", vocab_size, files)
        found = {path.name for path in self.train.paths + self.val.paths}
        if files and found != files.keys():
            raise UserError(
                f"{self.folder} has other shards than its meta.json names "
                f"({min(found ^ files.keys())}): prepare the data again"
            )
        for shards in (self.train, self.val):
            if shards.n_tokens <= seq_len:
                raise UserError(
                    f"the {shards.split} split of {folder} has {shards.n_tokens} tokens, too few "
                    f"for --seq_len {seq_len} and a target: use more data or a smaller --seq_len"
                )

        # One less than there are, so that an epoch can begin at any of seq_len offsets
        self.seqs_per_epoch = max(1, self.train.n_tokens // seq_len - 1)
        # The starts of all sequences with doc_align, int64 (seqs_per_epoch,)
        self.aligned = None
        if doc_align:
            self.aligned = document_sequences(self.train, self.meta["eot"], seq_len)
            self.seqs_per_epoch = len(self.aligned)
            if not self.seqs_per_epoch:
                raise UserError(
                    f"--doc_align finds no document in {folder} with {seq_len} tokens after its "
                    f"start (token {self.meta['eot']}): use a smaller --seq_len, or remove it"
                )

        # Speedruns evaluate the first tokens, on FineWeb and on shards without meta.json
        is_race = is_fineweb(self.meta) or "assumed" in self.meta
        self.eval_subset = "first" if is_race else "spread"

    @property
    def vocab_size(self):
        return self.meta["vocab_size"]

    @property
    def eot(self):
        return self.meta["eot"]

    def set_batch_tokens(self, batch_tokens):
        self.seqs_per_batch = batch_tokens // self.seq_len

    def sequence_starts(self, index):
        """Return the starts of the training sequences with these numbers, int64 (len(index),).

        Each epoch cuts the stream into sequences of seq_len tokens from its own offset, or uses
        document_sequences. Each epoch has its own order.
        """
        n_offsets = min(self.seq_len, self.train.n_tokens - self.seqs_per_epoch * self.seq_len)
        starts = np.empty(len(index), dtype=np.int64)
        epochs = index // self.seqs_per_epoch
        for epoch in np.unique(epochs):
            here = epochs == epoch
            # The order of the epoch is a function of (seed, epoch)
            key = derive_seed(self.seed, epoch)
            order = feistel_permute(index[here] % self.seqs_per_epoch, self.seqs_per_epoch, key)
            order = order.astype(np.int64)
            if self.aligned is not None:  # --doc_align
                starts[here] = self.aligned[order]
            else:
                offset = key % n_offsets
                starts[here] = offset + self.seq_len * order
        return starts

    def batch(self, step, rank=0, world_size=1):
        """Return this rank's part of the global batch of `step`: int64 (sequences, seq_len + 1).

        A sequence holds the inputs and one more target.
        """
        # The number of this rank's first sequence since the beginning of the run
        per_rank = self.seqs_per_batch // world_size
        first = step * self.seqs_per_batch + rank * per_rank
        starts = self.sequence_starts(first + np.arange(per_rank, dtype=np.int64))
        return self.train.read_sequences(starts, self.seq_len + 1)

    def num_eval_seqs(self, eval_tokens):
        """Return the number of sequences in an evaluation of so many tokens, or "all"."""
        available = (self.val.n_tokens - 1) // self.seq_len
        if eval_tokens == "all":
            return available
        return min(available, max(1, eval_tokens // self.seq_len))

    def eval_starts(self, eval_tokens):
        """Return the starts of the sequences in an evaluation, int64 (n,), ascending.

        They are spread evenly over the validation split, or its first ones if eval_subset is
        "first".
        """
        n_seqs = self.num_eval_seqs(eval_tokens)
        index = np.arange(n_seqs, dtype=np.int64)
        if self.eval_subset == "spread":
            index = index * self.num_eval_seqs("all") // n_seqs
        return index * self.seq_len

    def eval_batches(self, eval_tokens, micro_batch, rank=0, world_size=1):
        """Yield this rank's part of an evaluation: inputs, targets, int64 (micro_batch, seq_len).

        Every rank gets the same number of batches. Incomplete ones are padded with targets of -1,
        so that there is one static shape to compile.
        """
        # Each rank takes the same number of consecutive sequences, except that there may be too few
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

    def eval_end(self, eval_tokens, length):
        """Return the final tokens of an evaluation, int64, at most `length` and seq_len of them."""
        final = self.eval_starts(eval_tokens)[-1:]
        return self.val.read_sequences(final, self.seq_len)[0, -length:]

    def stream_state(self, step):
        """Identify the stream, and the position of `step` in it, for checkpoints.

        Their keys call a sequence a window.
        """
        epoch, window = divmod(step * self.seqs_per_batch, self.seqs_per_epoch)
        return dict(
            seed=self.seed,
            seq_len=self.seq_len,
            windows=self.seqs_per_epoch,
            epoch=epoch,
            window=window,
        )

    @functools.cached_property
    def shard_hashes(self):
        return self.train.hash_shards() | self.val.hash_shards()

    def fingerprint(self):
        """Return a hash of the shards and of meta.json's entries, for checkpoints."""
        text = json.dumps([self.shard_hashes, self.meta["files"]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def map_ahead(function, items, depth, threads):
    """Yield function(item) for each item, in order; threads compute up to `depth` items ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="map_ahead")
    try:
        # The results that are started but not yielded, in order
        ahead = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def prefetch(load, first, depth):
    """Yield load(first), load(first + 1), ... endlessly; a thread works `depth` calls ahead."""
    return map_ahead(load, itertools.count(first), depth=depth, threads=1)
