"""Prepare token shards: `python data/prepare.py SOURCE`.

SOURCE: python, shakespeare, wikitext2, wikitext103, fineweb10B, or files PATH...

data/shards.py describes what a prepared folder holds, data/corpus.py how files become documents. A
complete folder is left as it is, and refused if it was made with other arguments or of other texts.
After a run that was stopped, the same command resumes its downloads.
"""

import argparse
import contextlib
import hashlib
import os
import platform
import secrets
import shlex
import shutil
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    # A script's first import path is its own folder, where it must be the repository's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from common.errors import NO_ROOM, RunError, UserError, command, is_bad_path, print_line
from common.files import sha256_of_file
from data import corpus
from data.download import DOWNLOADS, Progress, download, prepare_fineweb
from data.shards import DATA_DIR, PYTHON_VOCABULARY, load_meta, write_meta, write_shard
from data.stream import map_ahead
from data.tokenizers import (
    VOCABULARY_FILE,
    get_tokenizer,
    read_vocabulary,
    train_vocabulary,
)

# Source -> its default tokenizer, or a file with its vocabulary; None: chosen by size
SOURCES = {
    "python": str(PYTHON_VOCABULARY),
    "files": None,
    "shakespeare": "bytes",
    "wikitext2": "gpt2",
    "wikitext103": "gpt2",
}
WITHOUT_VOCABULARY = ("gpt2", "bytes", "integers")  # tokenizers without a file of their own
# For a small model that trains for minutes (docs/data.md): byte pairs from so much text on, and
# how many tokens
BPE_BYTES = 4 * 10**5
SMALL_VOCAB_SIZE = 512
LARGE_VOCAB_BYTES = 3 * 10**6
LARGE_VOCAB_SIZE = 1024
BPE_SAMPLE_BYTES = 16 << 20  # at most so much text trains a vocabulary
BATCH_BYTES = 1 << 20  # given to a thread at once


# -----------------------------------------------------------------------------
# Documents to shards


def _batches(documents):
    """Yield lists of pieces of about BATCH_BYTES in all."""
    batch = []
    n_bytes = 0
    for piece in documents:
        batch.append(piece)
        n_bytes += len(piece[-1])
        if n_bytes >= BATCH_BYTES:
            yield batch
            batch = []
            n_bytes = 0
    yield batch


def _encode(tokenizer, pieces):
    """Encode pieces of documents, with end-of-text before each document.

    Returns the split of each, its 1-D uint16 tokens, its bytes, and whether a document starts.
    """
    encoded = []
    for split, starts_document, piece in pieces:
        tokens = tokenizer.encode_raw(piece).astype(np.uint16)
        if starts_document:
            tokens = np.insert(tokens, 0, tokenizer.eot)
        encoded.append((split, tokens, memoryview(piece).nbytes, starts_document))
    return encoded


def encode_file(path, tokenizer):
    """Encode a text file as preparation does: 1-D uint16 tokens, and the number of bytes.

    Raises UserError if it is not UTF-8.
    """
    pieces = corpus.read_files([(path.name, path)], 0, ["text"])
    parts = [np.empty(0, dtype=np.uint16)]
    total = 0
    for _, tokens, n_bytes, _ in _encode(tokenizer, pieces):
        parts.append(tokens)
        total += n_bytes
    return np.concatenate(parts)[1:], total  # without the end-of-text before it


class SplitWriter:
    """Writes the tokens of one split to shards, and counts them."""

    def __init__(self, folder, split, shard_tokens):
        self.folder = folder
        self.split = split
        self.counts = Counter(tokens=0, bytes=0, documents=0)
        self.files = {}  # shard -> its entry in meta.json
        self.buffer = np.empty(shard_tokens, dtype=np.uint16)
        self.filled = 0

    def add(self, tokens, n_bytes, starts_document):
        """Append tokens, and write each shard that is full."""
        self.counts.update(tokens=tokens.size, bytes=n_bytes, documents=starts_document)
        while tokens.size:
            part = tokens[: self.buffer.size - self.filled]
            tokens = tokens[part.size :]
            self.buffer[self.filled : self.filled + part.size] = part
            self.filled += part.size
            if self.filled == self.buffer.size:
                self.write_shard()

    def write_shard(self):
        """Write the tokens in the buffer as a shard."""
        name = f"{self.split}_{len(self.files):06d}.bin"
        self.files[name] = write_shard(self.folder / name, self.buffer[: self.filled])
        self.filled = 0

    def close(self):
        """Write the last shard. Raises UserError if there is no text in the split."""
        if not self.counts["tokens"]:
            raise UserError(
                f"no text is in the {self.split} split: give more, a single text, --val PATH or "
                "another --val_fraction"
            )
        if self.filled:
            self.write_shard()


def _write_shards(documents, tokenizer, folder, shard_tokens, progress):
    """Encode on all cores and write in order. Returns "splits" and "files" of meta.json."""
    # Remove the shards of a run that was killed
    for path in folder.glob("*.bin"):
        path.unlink()
    writers = {split: SplitWriter(folder, split, shard_tokens) for split in ("train", "val")}
    # Threads suffice: tiktoken and numpy release the GIL
    threads = min(os.cpu_count() or 1, 16)
    encode = partial(_encode, tokenizer)
    for encoded in map_ahead(encode, _batches(documents), depth=2 * threads, threads=threads):
        for split, tokens, n_bytes, starts_document in encoded:
            writers[split].add(tokens, n_bytes, starts_document)
            progress.add(n_bytes)

    splits = {}
    files = {}
    for split, writer in writers.items():
        writer.close()
        splits[split] = writer.counts
        files |= writer.files
    return splits, files


# -----------------------------------------------------------------------------
# Tokenizers


def _resolve_tokenizer(source, tokenizer, vocab_size, has_integers):
    """Return what the arguments of prepare name: a tokenizer, a path, or None: by text size."""
    if has_integers:
        if tokenizer or vocab_size is None:
            raise UserError(
                "a .npy file holds tokens: give --vocab_size N, how many different ones, "
                "no --tokenizer"
            )
        return f"integers:{vocab_size}"
    if not tokenizer:
        tokenizer = SOURCES[source] if vocab_size is None else "bpe"
    if vocab_size is not None and tokenizer != "bpe":
        raise UserError(f"--vocab_size {vocab_size}: it is for --tokenizer bpe")
    return tokenizer


def _identify_tokenizer(tokenizer):
    """Return a tokenizer as prepare records it: a vocabulary's file by its content, not its path.

    Raises UserError.
    """
    if tokenizer in (None, "bpe") or tokenizer.split(":")[0] in WITHOUT_VOCABULARY:
        return tokenizer
    vocabulary = read_vocabulary(tokenizer)
    return f"vocabulary of SHA-256 {hashlib.sha256(vocabulary.encode()).hexdigest()}"


def _choose_tokenizer(train_bytes):
    """Return the tokenizer for a small model that trains for minutes (docs/data.md)."""
    tokenizer = "bpe" if train_bytes >= BPE_BYTES else "bytes"
    print_line(
        f"tokenizer {tokenizer}, for {train_bytes / 1e6:.1f} MB of text "
        "(for GPT-2's presets: --tokenizer gpt2)"
    )
    return tokenizer


def _sample(documents):
    """Yield the first BPE_SAMPLE_BYTES of the training split."""
    size = 0
    for split, _, piece in documents:
        if split == "train":
            yield piece
            size += len(piece)
            if size >= BPE_SAMPLE_BYTES:
                return


def _load_tokenizer(name, vocab_size, documents, n_bytes):
    """Return the tokenizer and the content of its vocabulary file, or None: trained, or read.

    name: "gpt2", "bytes", "integers:N", "bpe", or the path of a vocabulary.
    """
    if name.split(":")[0] in WITHOUT_VOCABULARY:
        return get_tokenizer(name), None
    if name == "bpe":
        sample_bytes = min(n_bytes, BPE_SAMPLE_BYTES)
        print_line(f"training {vocab_size} byte pairs on the first {sample_bytes / 1e6:.1f} MB")
        vocabulary = train_vocabulary(_sample(documents), vocab_size)
    else:
        vocabulary = read_vocabulary(name)
    return get_tokenizer("bpe", vocabulary, where=name), vocabulary


# -----------------------------------------------------------------------------
# Preparation


def prepare(
    source,
    paths=(),
    tokenizer=None,
    out=None,
    val_fraction=0.1,
    shard_tokens=10**8,
    text_key=("text",),
    include=(),
    vocab_size=None,
    val=(),
    command=None,
):
    """Make a folder of token shards and return its Path; one of the same arguments stays.

    source: a key of SOURCES.
    paths: files, folders and globs, for "files".
    tokenizer: "gpt2", "bytes", "bpe", or a folder or file with a vocabulary. None: by source, or
        by size for "files".
    out: the folder. None: beside this file.
    val_fraction: the part for validation, of the documents or of a single text's bytes.
    shard_tokens: at most so many tokens are in a shard.
    text_key: keys of .jsonl, columns of .csv and .parquet; their texts are joined by newlines.
    include: patterns of names; files in folders must match one of them.
    vocab_size: of "bpe", end-of-text included, or of the integers in .npy files.
    val: like paths, for validation instead of val_fraction.
    command: recorded in meta.json.

    The folder is made under another name and renamed, so several processes may run this at once.
    Raises UserError.
    """
    # What to prepare, and where
    has_integers = any(os.fspath(path).endswith(".npy") for path in (*paths, *val))
    tokenizer = _resolve_tokenizer(source, tokenizer, vocab_size, has_integers=has_integers)
    if not 0 < val_fraction < 1 or not 0 < shard_tokens < 2**31:
        raise UserError(
            f"--val_fraction {val_fraction} --shard_tokens {shard_tokens}: expected a fraction and "
            "a count"
        )
    folder = Path(out or _default_folder(source, tokenizer))
    arguments = {
        "source": source,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "val_fraction": val_fraction,
        "text_key": list(text_key),
        "include": list(include),
    }
    find_texts = partial(
        corpus.find_texts, include=include, keys=text_key, has_integers=has_integers
    )
    if _is_prepared(folder):
        _check_arguments(folder, arguments, find_texts, paths=paths, val=val)
        origin = load_meta(folder)["source"]
        print_line(
            f"already there: {folder} (of {origin}); for other data remove it, or give --out"
        )
        return folder

    with _temporary_folder(folder, keep=source in DOWNLOADS) as temporary:
        # The files for training and for validation: (name, path), and the SHA-256 of your own
        if source == "files":
            origin = f"files {' '.join(map(os.fspath, paths))}"
            files = find_texts(paths)
            arguments["texts"] = _identify_texts(files)
        else:
            origin, files = _find_source(source, folder=temporary)
        val_files = []
        split_rule = ()
        if val:
            origin += f" --val {' '.join(map(os.fspath, val))}"
            val_files = find_texts(val)
            _check_disjoint(files, val_files)
            val_fraction = 0
        else:
            split_rule = corpus.choose_split(files, val_fraction, text_key)
        arguments["val"] = _identify_texts(val_files)

        # Read from the beginning at each call: to train the vocabulary, and to encode
        def documents():
            if source.startswith("wikitext"):
                yield from corpus.read_wikitext(files[0][1])
            else:
                yield from corpus.read_files(files, val_fraction, text_key, *split_rule)
                yield from corpus.read_files(val_files, 1, text_key)

        # The tokenizer, whose vocabulary is trained or read
        train_bytes = corpus.total_size(files)
        tokenizer = tokenizer or _choose_tokenizer(train_bytes)
        if tokenizer == "bpe" and vocab_size is None:
            is_large = train_bytes >= LARGE_VOCAB_BYTES
            vocab_size = LARGE_VOCAB_SIZE if is_large else SMALL_VOCAB_SIZE
        arguments |= {"tokenizer": _identify_tokenizer(tokenizer), "vocab_size": vocab_size}
        encoder, vocabulary = _load_tokenizer(
            tokenizer, vocab_size, documents(), n_bytes=train_bytes
        )

        # The shards
        n_bytes = train_bytes + corpus.total_size(val_files)
        progress = Progress(f"preparing {source}", n_bytes)
        splits, shards = _write_shards(
            documents(), encoder, temporary, shard_tokens=shard_tokens, progress=progress
        )
        if has_integers:
            for counts in splits.values():
                counts["bytes"] = None
        meta = {
            "tokenizer": encoder.name,
            "vocab_size": encoder.vocab_size,
            "eot": encoder.eot,
            "splits": splits,
            "source": origin,
            "files": shards,
            "command": command or f"python data/prepare.py {source}",
            "made_from": arguments,
        }
        if vocabulary:
            path = temporary / VOCABULARY_FILE
            path.write_bytes(vocabulary.encode())
            meta["vocabulary"] = {"sha256": sha256_of_file(path)}
        if len(files) > 1:
            meta["order"] = corpus.ORDER
        write_meta(temporary, meta)

    load_meta(folder)
    for split, counts in splits.items():
        size = ""
        if not has_integers:
            size = f", {counts['bytes'] / counts['tokens']:.2f} bytes each"
        print_line(f"{folder}: {counts['tokens']:,} tokens ({encoder.name}{size}) in {split}")
    part = splits["val"]["tokens"] / (splits["val"]["tokens"] + splits["train"]["tokens"])
    if source == "files" and not (val or val_fraction / 2 < part < 2 * val_fraction):
        print_line(
            f"note: {part:.1%} of the tokens are for validation, as the documents are few or "
            "unequal; give others with --val PATH"
        )
    return folder


def _default_folder(source, tokenizer):
    """Return data/<source>, with the kind of tokenizer if it is not the source's default."""
    if tokenizer == SOURCES[source]:
        return DATA_DIR / source
    kind = tokenizer.split(":")[0]
    if kind not in WITHOUT_VOCABULARY:
        kind = "bpe"
    return DATA_DIR / f"{source}_{kind}"


def _is_prepared(folder):
    """Return whether a folder is complete. Raises UserError if it holds something else."""
    if os.path.exists(folder / "meta.json"):
        return True
    is_free = not os.path.lexists(os.path.realpath(folder))
    if os.path.isdir(folder):
        # A preparation that was killed, or one in another process, may have left its own
        is_free = all(name.startswith(".tmp-") for name in os.listdir(folder))
    if not is_free:
        raise UserError(f"{folder} holds something else than prepared data: choose another --out")
    return False


def _check_arguments(folder, arguments, find_texts, paths, val):
    """Raise UserError if a complete folder was made with other arguments, or of other texts."""
    # What has gone since is not compared, nor what is not given
    tokenizer = arguments["tokenizer"]
    arguments = arguments | {"tokenizer": None}
    with contextlib.suppress(UserError):
        arguments["tokenizer"] = _identify_tokenizer(tokenizer)
    for name, given in (("texts", paths), ("val", val)):
        with contextlib.suppress(UserError):
            files = find_texts(given) if given else []
            arguments[name] = _identify_texts(files)
    # Folders of earlier versions, and those of others, have not recorded what they are made from
    recorded = load_meta(folder).get("made_from", {})
    for name, given in arguments.items():
        if given is not None and recorded.get(name, given) != given:
            before = str(recorded[name])[:200]
            now = str(given)[:200]
            raise UserError(
                f"{folder} was made with {name} {before}, which now is {now}: remove it, or "
                "choose another --out"
            )


def _identify_texts(files):
    """Say what files of find_texts hold: their number, size, and a hash of names and contents."""
    lines = [f"{name} {sha256}\n" for name, _, sha256 in files]
    n_bytes = sum(path.stat().st_size for _, path, _ in files)
    digest = corpus.name_hash("".join(lines))
    return f"{len(lines)} files of {n_bytes:,} bytes, hash {digest >> 192:016x}"


def _check_disjoint(files, val_files):
    """Raise UserError if a text is among the files for training and those for validation."""
    names = {sha256: name for name, _, sha256 in files}
    for val_name, path, sha256 in val_files:
        if sha256 in names and path.stat().st_size:
            raise UserError(
                f"{names[sha256]} is given for training and as --val ({val_name}); a text must be "
                "in one of them only"
            )


@contextlib.contextmanager
def _temporary_folder(folder, keep):
    """Make a folder in or beside `folder`, yield its path, and then move what it holds there.

    Raises UserError if it cannot be made, RunError if what it holds cannot be moved.
    keep: it stays if preparation fails, so that its downloads resume; else it has a name of its
    own and is removed.
    """
    folder = Path(os.path.realpath(folder))
    name = f".tmp-{folder.name}"
    if not keep:
        name += f"-{secrets.token_hex(4)}"
    # A folder that exists may be a disk of its own
    temporary = folder / name if os.path.isdir(folder) else folder.with_name(name)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}): choose another folder with --out, and "
            "give it to train_gpt.py as --data"
        ) from None
    try:
        yield temporary
    except BaseException:
        if not keep:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        _publish(temporary, folder)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be made ({error.strerror}): the data are complete in {temporary}, "
            "move them by hand"
        ) from None
    shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary, folder):
    """Give a temporary folder its name, unless another process was first."""
    with contextlib.suppress(OSError):
        os.rename(temporary, folder)
        return
    # Some systems cannot rename a folder, and none can if `folder` holds it
    if (folder / "meta.json").exists():
        return
    folder.mkdir(exist_ok=True)
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == "meta.json"):
        os.replace(path, folder / path.name)


def _find_source(source, folder):
    """Find the text of a source, or download it to `folder`.

    Returns where it comes from, and its files, (name, path).
    """
    if source in DOWNLOADS:
        url, sha256 = DOWNLOADS[source]
        path = folder / url.rpartition("/")[2]
        download(url, path, sha256)
        return url, [(source, path)]
    return f"standard library of Python {platform.python_version()}", corpus.python_files()


# -----------------------------------------------------------------------------
# Command line

ALL_SOURCES = [*SOURCES, "fineweb10B", "hellaswag"]
# The options of a source, besides --out
OPTIONS = {"tokenizer", "vocab_size", "val_fraction", "shard_tokens"}
OPTIONS_OF = {
    "hellaswag": set(),
    "fineweb10B": {"shards"},
    "files": OPTIONS | {"paths", "val", "text_key", "include"},
}


def make_parser():
    parser = argparse.ArgumentParser(
        description="Prepare token shards.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    several = dict(nargs="+", action="extend")
    add(
        "source",
        metavar="SOURCE",
        help=f"{', '.join(ALL_SOURCES)} (questions for sample.py --choices)",
    )
    add(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files: text; JSON, .csv, .parquet; .npy; folders, globs",
    )
    add(
        "--tokenizer",
        metavar="NAME|PATH",
        help="gpt2, bytes, bpe (trained on it), or a folder with a vocabulary",
    )
    add(
        "--vocab_size",
        type=int,
        metavar="N",
        help=f"tokens of --tokenizer bpe (default: {SMALL_VOCAB_SIZE}, for much text "
        f"{LARGE_VOCAB_SIZE}), or in .npy",
    )
    add("--out", metavar="DIR", help="the folder to make (default: data/<source>)")
    add(
        "--val",
        **several,
        metavar="PATH",
        help="files: texts for validation, instead of a fraction of PATHs",
    )
    add("--val_fraction", type=float, help="fraction for validation (default: 0.1)")
    add("--shard_tokens", type=int, help="max tokens per shard (default: 100000000)")
    add(
        "--shards",
        type=int,
        help="fineweb10B: training shards, 200 MB each (default: 103, which is all)",
    )
    add(
        "--text_key",
        **several,
        metavar="KEY",
        help="files: JSON keys, .csv and .parquet columns to join (text)",
    )
    add(
        "--include",
        **several,
        metavar="PATTERN",
        help="files: names to read inside folders, such as '*.md' '*.txt'",
    )
    return parser


def run_source(source, options, command):
    """Prepare or download a source. Raises UserError."""
    unused = options.keys() - OPTIONS_OF.get(source, OPTIONS) - {"out"}
    if unused:
        raise UserError(f"{source} does not take {min(unused)}: remove it")
    if {"val", "val_fraction"} <= options.keys():
        raise UserError("--val and --val_fraction contradict each other; give one of them")
    if source == "hellaswag":
        path = Path(options.get("out", DATA_DIR / source), "hellaswag_val.jsonl")
        url, sha256 = DOWNLOADS[source]
        download(url, path, sha256)
        print_line(f"next: python sample.py --run RUN --choices {path}")
    elif source == "fineweb10B":
        prepare_fineweb(**options, command=command)
    else:
        prepare(source, **options, command=command)


@command
def main(argv):
    """Run the command line; return the exit code: 0 done, 2 a user's mistake, 1 anything else."""
    parser = make_parser()
    options = vars(parser.parse_intermixed_args(argv))
    source = options.pop("source")
    if source not in ALL_SOURCES:
        parser.error(
            f"there is no source {source}; expected {', '.join(ALL_SOURCES)}, or for your own "
            f"text: files {source}"
        )
    try:
        run_source(source, options, shlex.join(["python", "data/prepare.py", *argv]))
    except KeyboardInterrupt:
        print("stopped: by Ctrl-C; run the same command again to resume", file=sys.stderr)
        return 1
    except OSError as error:
        if is_bad_path(error):
            raise
        found = f"{error.filename or 'a file'} could not be read or written ({error.strerror})"
        advice = "make room and " if error.errno in NO_ROOM else ""
        raise RunError(f"{found}: {advice}run the same command again to resume") from None
    return 0


def end_by_signal(number, _frame):
    """End as the system expects it, after removing the temporary folder."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in signal.Signals:
        # nohup has set SIGHUP to be ignored
        if number.name in ("SIGTERM", "SIGHUP") and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end_by_signal)
    sys.exit(main(sys.argv[1:]))
