"""Prepare token shards: `python data/prepare.py SOURCE`.

SOURCE: python, shakespeare, wikitext2, wikitext103, fineweb10B, hellaswag, or files PATH...

data/corpus.py turns files into documents, and data/shards.py describes the folder that is made. A
complete folder is left unchanged (fineweb10B: missing shards are added); it is refused if it was
made with other options or from other texts. If a run was stopped, the same command resumes its
downloads.
"""

import argparse
import contextlib
import itertools
import os
import platform
import secrets
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    # Python puts the script's folder first on the import path; imports need the repository's root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.errors import RunError, UserError, is_bad_path, print_line, run_command
from common.files import sha256_of_file
from common.values import cpu_cores
from data import corpus
from data.download import DOWNLOADS, Progress, download, prepare_fineweb, prepare_hellaswag
from data.shards import DATA_DIR, PYTHON_VOCABULARY, meta_or_gpt2, write_meta, write_shard
from data.stream import map_ahead
from data.tokenizers import (
    MAX_SIZE,
    MIN_SIZE,
    VOCABULARY_FILE,
    Tokenizer,
    get_tokenizer,
    read_vocabulary,
    train_vocabulary,
)

# Each source's default tokenizer, or its vocabulary file; None: chosen by the size of the text
SOURCES = {
    "python": str(PYTHON_VOCABULARY),
    "files": None,
    "shakespeare": "bytes",
    "wikitext2": "gpt2",
    "wikitext103": "gpt2",
}
# The tokenizer for a small model that trains for minutes (docs/data.md): bytes below BPE_BYTES of
# text, then byte pairs, with the larger vocabulary from LARGE_VOCAB_BYTES on
BPE_BYTES = 4 * 10**5
SMALL_VOCAB_SIZE = 512
LARGE_VOCAB_BYTES = 3 * 10**6
LARGE_VOCAB_SIZE = 1024
BPE_SAMPLE_BYTES = 16 << 20  # a vocabulary is trained on at most this much text
SHARD_TOKENS = 10**8
DOWNLOAD_DIR = DATA_DIR / "downloads"
BATCH_PIECES = 16  # pieces of documents that a thread encodes at once


# -----------------------------------------------------------------------------
# Preparation


@dataclass
class Options:
    """Everything that decides the content of a folder, as meta.json records it."""

    source: str
    tokenizer: str | None
    vocab_size: int | None
    val_fraction: float
    text_key: list[str]
    include: list[str] | None
    texts: str  # the number of files, and a hash of their contents
    val: str


def prepare(
    source: str,
    *,
    paths: Sequence[str | Path] = (),
    out: str | Path | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    val: Sequence[str | Path] = (),
    text_key: Sequence[str] = ("text",),
    include: Sequence[str] = (),
) -> Path:
    """Make a folder of token shards, or find it complete, and return its path.

    source: a key of SOURCES. The others are described by --help. Several processes may make the
    same folder at once. Raises UserError.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction is {val_fraction}; expected between 0 and 1")
    if vocab_size is not None and not MIN_SIZE <= vocab_size <= MAX_SIZE:
        raise UserError(f"--vocab_size is {vocab_size}; expected {MIN_SIZE} to {MAX_SIZE}")

    # Your own texts, for training and for validation
    texts = []
    val_texts = []
    if source == "files":
        texts = corpus.find_texts(paths, include, text_key)
    if val:
        val_texts = corpus.find_texts(val, include, text_key)
        corpus.check_disjoint(texts, val_texts)

    # The folder; a complete one is not made again
    options = Options(
        source=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        text_key=[*text_key],
        include=[*include] or None,
        texts=corpus.describe_texts(texts),
        val=corpus.describe_texts(val_texts),
    )
    folder = Path(out or default_folder(options, paths))
    name, vocabulary = choose_tokenizer(options, texts)
    if is_prepared(folder, options):
        return folder

    with temporary_folder(folder) as temporary:
        unit = corpus.NUMBER if name.startswith("integers") else corpus.CHARACTER
        origin, read, n_bytes = open_source(options, texts, val_texts, unit)

        # Train a vocabulary, in a first pass over the documents
        if name == "bpe" and not vocabulary:
            vocabulary = train_on_sample(read(), vocab_size, n_bytes)
        encoder = get_tokenizer(name, vocabulary)

        # Write the shards in a second pass, then the vocabulary and meta.json
        progress = Progress(f"preparing {source}", n_bytes)
        meta = write_shards(read(), encoder, temporary, progress)
        meta |= {"source": origin, "options": asdict(options)}
        if vocabulary:
            path = temporary / VOCABULARY_FILE
            path.write_bytes(vocabulary.encode())
            meta["vocabulary"] = {"sha256": sha256_of_file(path)}
        write_meta(temporary, meta)

    print_summary(folder, meta)
    return folder


def default_folder(options: Options, paths: Sequence[str | Path]) -> Path:
    """Return data/<source>, or data/<name> for your own file or folder, or that of several.

    The tokenizer's name is added if it is not the source's default.
    """
    name = options.source
    if paths:
        common = Path(os.path.commonpath([os.path.abspath(path) for path in paths]))
        name = (common.name if common.is_dir() else common.stem) or "files"
        if name in SOURCES:
            name += "_files"
    if options.tokenizer not in (None, SOURCES[options.source]):
        name += f"_{Path(options.tokenizer).name.replace(':', '')}"
    return DATA_DIR / name


def is_prepared(folder: Path, options: Options) -> bool:
    """Return True if a folder is complete.

    Raises UserError if it was made with other options, or is something else.
    """
    if not (folder / "meta.json").exists():
        # A preparation that was killed leaves a hidden folder
        if folder.is_file() or any(folder.glob("[!.]*")):
            raise UserError(f"{folder} is not a folder of prepared data; choose a different --out")
        return False

    # Folders made by other programs record no options, and are refused
    recorded = meta_or_gpt2(folder).get("options", {})
    for name, now in asdict(options).items():
        before = recorded.get(name)
        if before != now:
            raise UserError(
                f"{folder} was made with {name} {before}, not {now}; remove it, or choose a "
                "different --out"
            )
    print_line(f"already there: {folder}; to make it again, remove it")
    return True


def open_source(
    options: Options,
    texts: list[corpus.TextFile],
    val_texts: list[corpus.TextFile],
    unit: bytes,
) -> tuple[str, Callable[[], Iterator[corpus.Piece]], int]:
    """Return the origin of a source, a function that reads its documents, and their bytes."""
    origin = options.texts
    if options.source == "python":
        origin = f"standard library of Python {platform.python_version()}"
        texts = corpus.python_files()
    elif options.source != "files":
        origin, sha256 = DOWNLOADS[options.source]
        path = DOWNLOAD_DIR / origin.rpartition("/")[2]
        download(origin, path, sha256)
        if options.source.startswith("wikitext"):
            n_bytes = 3 * path.stat().st_size  # unpacked, about
            return origin, lambda: corpus.cut_pieces(corpus.read_wikitext(path)), n_bytes
        texts = [corpus.measure(path, ())]

    val_fraction = 0 if val_texts else options.val_fraction
    train_sizes = corpus.choose_train_sizes(texts, val_fraction)
    paths = [file.path for file in [*texts, *val_texts]]

    def read():
        sizes = itertools.chain(train_sizes, itertools.repeat(0))
        return corpus.cut_pieces(corpus.split_documents(paths, options.text_key, sizes, unit))

    return origin, read, corpus.total_size([*texts, *val_texts])


def print_summary(folder: Path, meta: dict) -> None:
    """Print the size of each split, and the bytes per token of text."""
    total = sum(counts["tokens"] for counts in meta["splits"].values())
    for split, counts in meta["splits"].items():
        share = counts["tokens"] / total
        details = f"{share:.1%} of all, {meta['tokenizer']}, {counts['documents']:,} documents"
        if counts["bytes"]:
            details += f", {counts['bytes'] / counts['tokens']:.2f} bytes each"
        print_line(f"{folder}: {counts['tokens']:,} tokens in {split} ({details})")


# -----------------------------------------------------------------------------
# Tokenizers


def choose_tokenizer(options: Options, texts: list) -> tuple[str, str | None]:
    """Return the tokenizer's name, and the content of its vocabulary file or None.

    The name is "gpt2", "bytes", "integers:N" or "bpe", whose vocabulary is None if it is to be
    trained. Raises UserError.
    """
    name = options.tokenizer
    vocab_size = options.vocab_size
    if not name:
        name = SOURCES[options.source] if vocab_size is None else "bpe"
    if not name:
        n_bytes = corpus.total_size(texts)
        name = "bpe" if n_bytes >= BPE_BYTES else "bytes"
        print_line(
            f"tokenizer {name}, for {n_bytes / 1e6:.1f} MB of text (GPT-2's presets are meant for "
            "--tokenizer gpt2)"
        )
    if vocab_size is not None and name != "bpe":
        raise UserError(f"--vocab_size {vocab_size} needs --tokenizer bpe, not {name}")
    if name in ("gpt2", "bytes", "bpe") or name.startswith("integers:"):
        return name, None
    return "bpe", read_vocabulary(name)


def train_on_sample(documents: Iterable[corpus.Piece], vocab_size: int | None, n_bytes: int) -> str:
    """Train a vocabulary on BPE_SAMPLE_BYTES at most, spread over the training split; return it.

    n_bytes: of all documents.
    """
    if vocab_size is None:
        vocab_size = LARGE_VOCAB_SIZE if n_bytes >= LARGE_VOCAB_BYTES else SMALL_VOCAB_SIZE
    sample_bytes = min(n_bytes, BPE_SAMPLE_BYTES)
    print_line(f"training {vocab_size} byte pairs on a sample of {sample_bytes / 1e6:.1f} MB")

    def sample():
        seen = 0
        taken = 0
        for split, _, piece in documents:
            if split == "train":
                # Always the same share of all that has been seen
                if taken * n_bytes <= seen * sample_bytes:
                    yield piece
                    taken += len(piece)
                seen += len(piece)

    return train_vocabulary(sample(), vocab_size)


# -----------------------------------------------------------------------------
# Documents to shards


def write_shards(
    documents: Iterable[corpus.Piece], tokenizer: Tokenizer, folder: Path, progress: Progress
) -> dict:
    """Encode pieces of documents on all cores, and write them in order.

    Returns the entries of meta.json about the tokenizer and the shards. Raises UserError if a split
    is empty.
    """
    waiting = {"train": array("H"), "val": array("H")}  # tokens that are in no shard yet
    counts = {split: Counter(tokens=0, bytes=0, documents=0) for split in waiting}
    files = {}

    def write(split):
        number = (counts[split]["tokens"] - len(waiting[split])) // SHARD_TOKENS
        name = f"{split}_{number:06d}.bin"
        files[name] = write_shard(folder / name, np.array(waiting[split][:SHARD_TOKENS]))
        del waiting[split][:SHARD_TOKENS]

    # Threads suffice: tiktoken and numpy release the GIL
    threads = min(cpu_cores(), 16)
    encode = partial(encode_pieces, tokenizer)
    for encoded in map_ahead(encode, batches(documents), depth=2 * threads, threads=threads):
        for split, tokens, n_bytes, starts_document in encoded:
            counts[split].update(tokens=tokens.size, bytes=n_bytes, documents=starts_document)
            waiting[split].frombytes(tokens.tobytes())
            while len(waiting[split]) >= SHARD_TOKENS:
                write(split)
            progress.add(n_bytes)

    for split in waiting:
        if not counts[split]["tokens"]:
            raise UserError(
                f"the {split} split has no text; give more text, give it as a single file, or "
                "change --val or --val_fraction"
            )
        if waiting[split]:
            write(split)
        if tokenizer.name.startswith("integers"):
            counts[split]["bytes"] = None  # they are not text
    return dict(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        splits=counts,
        files=files,
    )


def batches(pieces: Iterable[corpus.Piece]) -> Iterator[list[corpus.Piece]]:
    """Yield lists of BATCH_PIECES pieces."""
    pieces = iter(pieces)
    while batch := list(itertools.islice(pieces, BATCH_PIECES)):
        yield batch


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[corpus.Piece]
) -> list[tuple[str, np.ndarray, int, bool]]:
    """Encode pieces of documents, with an end-of-text token before each document.

    Returns, for each piece, its split, its tokens (1-D uint16), its size in bytes, and True if a
    document starts with it.
    """
    encoded = []
    for split, starts_document, piece in pieces:
        tokens = tokenizer.encode_raw(piece).astype(np.uint16)
        if starts_document:
            tokens = np.insert(tokens, 0, tokenizer.eot)
        encoded.append((split, tokens, len(piece), starts_document))
    return encoded


def encode_file(path: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Encode a text file like a training text: returns 1-D uint16 tokens, and its size in bytes.

    Raises UserError if it is not UTF-8, or holds no text.
    """
    documents = corpus.split_documents([path], ["text"], itertools.repeat(sys.maxsize))
    encoded = encode_pieces(tokenizer, corpus.cut_pieces(documents))
    if not encoded:
        raise UserError(f"there is no text in {path}; give a different file")
    _, tokens, sizes, _ = zip(*encoded)
    return np.concatenate(tokens)[1:], sum(sizes)  # without the end-of-text token before it


# -----------------------------------------------------------------------------
# A folder that appears only when it is complete


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder`, yield its path, then give it the name of `folder`.

    If another process was first, or if preparation fails, it is removed. Raises OSError if it
    cannot be made, RunError if it cannot be renamed.
    """
    folder = folder.resolve()
    temporary = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        os.rename(temporary, folder)
    except OSError as error:
        if not (folder / "meta.json").exists():
            raise RunError(
                f"{folder} cannot be made ({error.strerror}); the data are complete in "
                f"{temporary}, move it by hand"
            ) from None
        # Another process was first
        shutil.rmtree(temporary, ignore_errors=True)


# -----------------------------------------------------------------------------
# Command line

# The options of each source
OPTIONS = {"out", "tokenizer", "vocab_size", "val_fraction"}
OPTIONS_OF = {
    **dict.fromkeys(SOURCES, OPTIONS),
    "files": OPTIONS | {"paths", "val", "text_key", "include"},
    "fineweb10B": {"out", "shards"},
    "hellaswag": {"out"},
}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line. Options that are not given are left out."""
    parser = argparse.ArgumentParser(
        description="Prepare token shards.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    several: dict[str, Any] = dict(nargs="+", action="extend")
    add("source", metavar="SOURCE", help=f"one of {', '.join(OPTIONS_OF)}")
    add(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files: your own text, JSON, .csv or .parquet files; folders",
    )
    add(
        "--out",
        help="the folder to make (default: data/NAME of the source or file, and _TOKENIZER if it "
        "is not the source's)",
    )
    add(
        "--tokenizer",
        help="gpt2, bytes, bpe (trained on the text), integers:N, or a folder with a vocabulary "
        "(default: of files by size, bytes or bpe; otherwise the source's)",
    )
    add(
        "--vocab_size",
        type=int,
        help=f"tokens of bpe (default: {SMALL_VOCAB_SIZE}, for much text {LARGE_VOCAB_SIZE})",
    )
    split = parser.add_mutually_exclusive_group().add_argument
    split("--val_fraction", type=float, help="fraction for validation (default: 0.1)")
    split("--val", **several, help="files: validation texts, instead of a fraction")
    add(
        "--text_key",
        **several,
        help="files: JSON keys, or .csv and .parquet columns, to join (default: text)",
    )
    add(
        "--include",
        **several,
        help="files: names to read inside folders, such as '*.md' '*.txt'",
    )
    add(
        "--shards",
        type=int,
        help="fineweb10B: training shards, 200 MB each (default: all 103)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Run the command line. Raises UserError, also for options that the source does not take."""
    options = vars(make_parser().parse_intermixed_args(argv))
    source = options.pop("source")
    if source not in OPTIONS_OF:
        raise UserError(
            f"{source} is not one of {', '.join(OPTIONS_OF)}; for your own texts, type `python "
            f"data/prepare.py files {source}`"
        )
    for name in options.keys() - OPTIONS_OF[source]:
        raise UserError(f"{source} does not take {name}; remove it")
    others = {"fineweb10B": prepare_fineweb, "hellaswag": prepare_hellaswag}
    try:
        others.get(source, partial(prepare, source))(**options)
    except KeyboardInterrupt:
        raise RunError("stopped; run the same command again") from None
    except OSError as error:
        if is_bad_path(error):
            raise
        raise RunError(f"{error}; run the same command again") from None


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
