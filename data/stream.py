"""Read batches from shards: the training stream is a pure function of (seed, step).

Only numpy is needed, and no trainer:

stream = TokenStream("data/python", seq_len=256)
stream.set_batch_tokens(4096)
stream.batch(step=0)  # int64 (16, 257): the inputs and one more target
"""

import functools
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.values import derive_seed
from data.shards import HEADER_BYTES, check_shard, is_fineweb, meta_or_gpt2, shard_paths
from data.tokenizers import Tokenizer, read_vocabulary


class TokenShards:
    """The shards of one split as one long token sequence, read when needed.

    They stay open: a network file system takes longer to open a file than to read a sequence.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int, files: dict[str, dict]):
        """Open the shards of a split, "train" or "val". Raises UserError for wrong shards.

        vocab_size: the model's; all tokens must be smaller.
        files: the entries of shards in meta.json, by name; shards without one are not compared.
        """
        self.split = split
        self.vocab_size = vocab_size
        self.paths = shard_paths(folder, split)
        self.lengths = []
        self.dtypes = []
        self.files = []
        self.beginnings = ""  # each shard's name, length and first tokens
        for i, path in enumerate(self.paths):
            try:
                length, dtype = check_shard(path)
                self.files.append(open(path, "rb", buffering=0))
            except OSError as error:
                raise UserError(
                    f"{path} cannot be opened ({error.strerror}); all {len(self.paths)} shards "
                    "stay open, which `ulimit -n` must allow"
                ) from None
            if files.get(path.name, {}).get("tokens", length) != length:
                raise UserError(
                    f"{path} is not the shard that meta.json describes; prepare the data again"
                )
            self.lengths.append(length)
            self.dtypes.append(dtype)
            self.beginnings += f"{path.name} {length} {self.read_tokens(i, 0, 2048).tolist()}"
        self.n_tokens = sum(self.lengths)
        # The position of each shard's first token in the whole sequence
        self.offsets = np.cumsum([0, *self.lengths[:-1]])

    def read_tokens(self, i: int, begin: int, count: int) -> np.ndarray:
        """Read at most `count` tokens of shard i, beginning at its token `begin`.

        The dtype is the file's. Raises UserError for damage, or a token outside the vocabulary.
        """
        path = self.paths[i]
        itemsize = self.dtypes[i].itemsize
        n_bytes = min(count, self.lengths[i] - begin) * itemsize
        # Not a memory map: some systems have none, and if the file is truncated, reading one kills
        # the process
        try:
            raw = self.read_bytes(i, n_bytes, HEADER_BYTES + begin * itemsize)
        except OSError:
            raw = b""
        if len(raw) < n_bytes:
            raise UserError(
                f"{path} can no longer be read whole; put the whole shard back and --resume"
            )
        tokens = np.frombuffer(raw, self.dtypes[i])
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise UserError(
                f"{path} holds token {largest}, but the vocabulary ends at {self.vocab_size - 1}; "
                "prepare the data again with the tokenizer in meta.json, or raise --vocab_size"
            )
        return tokens

    def read_bytes(self, i: int, n_bytes: int, begin: int) -> bytes:
        """Read bytes of shard i; open it again if its server has lost it. Raises OSError."""
        file = self.files[i]
        try:
            return os.pread(file.fileno(), n_bytes, begin)
        except OSError:
            self.files[i] = open(self.paths[i], "rb", buffering=0)
            return os.pread(self.files[i].fileno(), n_bytes, begin)

    def read_sequences(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read a sequence of `length` tokens from each start: int64 (len(starts), length)."""
        rows = [self.read_sequence(start, length) for start in starts.tolist()]
        return np.array(rows, dtype=np.int64).reshape(len(starts), length)

    def read_sequence(self, start: int, length: int) -> np.ndarray:
        """Read tokens of the whole sequence, which may run over the ends of shards."""
        # The shard that holds the first token
        i = int(np.searchsorted(self.offsets, start, side="right")) - 1
        parts = []
        while length > 0:
            tokens = self.read_tokens(i, start - int(self.offsets[i]), length)
            parts.append(tokens)
            start += len(tokens)
            length -= len(tokens)
            i += 1
        return np.concatenate(parts)


def feistel_permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
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


def document_sequences(shards: TokenShards, eot: int, seq_len: int) -> np.ndarray:
    """Find sequences that begin a document and do not overlap; return their starts, int64 (n,).

    The remainders of documents are dropped.
    """
    # The positions of documents in the whole sequence
    found = []
    for i, offset in enumerate(shards.offsets):
        tokens = shards.read_tokens(i, 0, shards.lengths[i])
        found.append(np.flatnonzero(tokens == eot) + offset)
    starts = np.concatenate(found)
    starts = starts[starts + seq_len < shards.n_tokens]
    # For a sequence at each document: the first document that starts after it
    following = np.searchsorted(starts, starts + seq_len).tolist()
    chosen = []
    i = 0
    while i < len(starts):
        chosen.append(i)
        i = following[i]
    return starts[chosen]


class TokenStream:
    """A prepared folder as batches, by step in training and in order in an evaluation."""

    def __init__(
        self,
        folder: str | Path,
        seq_len: int,
        seed: int = 0,
        vocab_size: int | None = None,
        doc_align: bool = False,
        may_shorten: bool = False,
    ):
        """Open a prepared folder.

        vocab_size: the model's, if it is larger than the tokenizer's.
        doc_align: start sequences at document boundaries, and drop the remainders.
        may_shorten: where a split has fewer than seq_len tokens, make seq_len a quarter of them.
        Raises UserError if the folder differs from meta.json, or is too small for a sequence.
        """
        self.folder = Path(folder)
        self.seq_len = seq_len
        self.seed = seed
        self.seqs_per_batch = 0  # until set_batch_tokens
        self.tokenizer: Tokenizer | None = None  # open_stream sets it where one can be loaded
        self.meta = meta_or_gpt2(self.folder)
        self.vocab_size = self.meta["vocab_size"]
        self.eot = self.meta["eot"]
        # The content of the vocabulary file, if the tokenizer has one
        self.vocabulary = None
        if self.meta["tokenizer"] == "bpe":
            self.vocabulary = read_vocabulary(self.folder, self.meta["vocabulary"]["sha256"])
        if vocab_size and vocab_size < self.vocab_size:
            needed = f"the {self.vocab_size} of the tokenizer of {folder}"
            raise UserError(f"--vocab_size {vocab_size} is less than {needed}: raise it")

        # Open the shards of both splits
        vocab_size = max(vocab_size or 0, self.vocab_size)
        files = self.meta["files"]
        self.train = TokenShards(self.folder, "train", vocab_size, files)
        self.val = TokenShards(self.folder, "val", vocab_size, files)
        found = {path.name for path in self.train.paths + self.val.paths}
        if files and found != files.keys():
            raise UserError(
                f"{self.folder} has other shards than its meta.json names "
                f"({min(found ^ files.keys())}); prepare the data again"
            )
        for shards in (self.train, self.val):
            if may_shorten and 4 < shards.n_tokens <= seq_len:
                seq_len = 2 ** int(math.log2(shards.n_tokens / 4))
                self.seq_len = seq_len
            if shards.n_tokens <= seq_len:
                raise UserError(
                    f"the {shards.split} split of {folder} has {shards.n_tokens} tokens, too few "
                    f"for --seq_len {seq_len} and a target; use more data or a smaller --seq_len"
                )

        # One less than there are, so that an epoch can begin at any of seq_len offsets
        self.seqs_per_epoch = max(1, self.train.n_tokens // seq_len - 1)
        # The starts of all sequences with doc_align, int64 (seqs_per_epoch,)
        self.aligned = None
        if doc_align:
            self.aligned = document_sequences(self.train, self.eot, seq_len)
            self.seqs_per_epoch = len(self.aligned)
            if not self.seqs_per_epoch:
                raise UserError(
                    f"--doc_align finds no document in {folder} with {seq_len} tokens after its "
                    f"start (token {self.eot}); use a smaller --seq_len, or remove it"
                )

        # Speedruns evaluate the first tokens, on FineWeb and on shards without meta.json
        is_race = is_fineweb(self.meta) or "assumed" in self.meta
        self.eval_part = "first" if is_race else "spread"

    def set_batch_tokens(self, batch_tokens: int) -> None:
        """Set the size of the global batch, which batch() needs."""
        self.seqs_per_batch = batch_tokens // self.seq_len

    def sequence_starts(self, index: np.ndarray) -> np.ndarray:
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

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Return this rank's part of the global batch of `step`: int64 (sequences, seq_len + 1).

        A sequence holds the inputs and one more target.
        """
        # The number of this rank's first sequence since the beginning of the run
        per_rank = self.seqs_per_batch // world_size
        first = step * self.seqs_per_batch + rank * per_rank
        starts = self.sequence_starts(first + np.arange(per_rank, dtype=np.int64))
        return self.train.read_sequences(starts, self.seq_len + 1)

    def num_eval_seqs(self, eval_tokens: int | str) -> int:
        """Return the number of sequences in an evaluation of so many tokens, or of "all"."""
        available = (self.val.n_tokens - 1) // self.seq_len
        if eval_tokens == "all":
            return available
        return min(available, max(1, eval_tokens // self.seq_len))

    def eval_starts(self, eval_tokens: int | str) -> np.ndarray:
        """Return the starts of the sequences in an evaluation, int64 (n,), ascending.

        They are spread evenly over the validation split, or its first ones if eval_part is
        "first".
        """
        n_seqs = self.num_eval_seqs(eval_tokens)
        index = np.arange(n_seqs, dtype=np.int64)
        if self.eval_part == "spread":
            index = index * self.num_eval_seqs("all") // n_seqs
        return index * self.seq_len

    def eval_batches(
        self, eval_tokens: int | str, micro_batch: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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
            sequences = np.full((micro_batch, self.seq_len + 1), -1)
            sequences[: len(part)] = self.val.read_sequences(part, self.seq_len + 1)
            yield sequences[:, :-1].clip(0), sequences[:, 1:]

    @functools.cached_property
    def bytes_per_token(self) -> np.ndarray:
        """Bytes of each token's text: float64 (vocab_size,), nan without a tokenizer."""
        if self.tokenizer is None:
            return np.full(self.vocab_size, np.nan)
        return self.tokenizer.bytes_per_token()

    def count_bytes(self, tokens: np.ndarray) -> float:
        """Count the bytes of the text of tokens, integer (N,); nan without a tokenizer."""
        return float(self.bytes_per_token[tokens].sum())

    def eval_end(self, eval_tokens: int | str, length: int) -> np.ndarray:
        """Return the final tokens of an evaluation, int64, at most `length` and seq_len of them."""
        final = self.eval_starts(eval_tokens)[-1:]
        return self.val.read_sequences(final, self.seq_len)[0, -length:]

    def stream_state(self, step: int) -> dict[str, int]:
        """Identify the stream, and the position of `step` in it, for checkpoints."""
        epoch, sequence = divmod(step * self.seqs_per_batch, self.seqs_per_epoch)
        return dict(
            seed=self.seed,
            seq_len=self.seq_len,
            seqs_per_epoch=self.seqs_per_epoch,
            epoch=epoch,
            sequence=sequence,
        )

    def fingerprint(self) -> str:
        """Hash meta.json's entries of shards, and each shard's name, length and first tokens."""
        text = json.dumps(self.meta["files"], sort_keys=True)
        text += self.train.beginnings + self.val.beginnings
        return hashlib.sha256(text.encode()).hexdigest()


def map_ahead(
    function: Callable[[Any], Any], items: Iterable[Any], depth: int, threads: int
) -> Iterator[Any]:
    """Yield function(item) for each item, in order; threads compute up to `depth` items ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="map_ahead")
    try:
        # The results that are started but not yielded, in order
        ahead: deque[Future] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
