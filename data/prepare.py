"""Prepares token shards: `python data/prepare.py python|shakespeare|wikitext2|wikitext103|fineweb10B|files PATH...`

data/shards.py describes what a prepared folder holds, data/corpus.py how files become documents. A complete folder is
left as it is; after a run that was stopped, the same command resumes its downloads.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np

if (
    __name__ == "__main__"
):  # a script's first import path is its own folder, whose tokenizers.py hides a package's name
    HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(HERE.parent), *(path for path in sys.path if path != str(HERE))]

from common import UserError, atomic_write
from data import corpus
from data.download import DOWNLOADS, Progress, download, prepare_fineweb
from data.shards import DATA_DIR, PYTHON_VOCABULARY, load_meta, write_shard
from data.stream import map_ahead
from data.tokenizers import (
    VOCABULARY_FILE,
    get_tokenizer,
    read_vocabulary,
    train_vocabulary,
    vocabulary_hash,
)

BATCH = 1 << 20  # bytes given to a thread at once
BPE_SAMPLE = 64 << 20  # the most bytes of text that a vocabulary is trained on


def _batches(documents):
    """(split, about BATCH bytes of its pieces), each piece with whether a document starts there."""
    batches, sizes = {"train": [], "val": []}, Counter()
    for split, starts, piece in documents:
        batches[split].append((starts, piece))
        sizes[split] += len(piece)
        if sizes[split] >= BATCH:
            yield split, batches[split]
            batches[split], sizes[split] = [], 0
    yield from batches.items()


def _encode(tokenizer, split, pieces):
    """The split, and of its pieces 1-D uint16 tokens, and how many tokens, bytes and documents they are."""
    end_of_text = np.array([tokenizer.eot], dtype=np.uint16)
    parts = [
        part
        for starts, piece in pieces
        for part in [end_of_text] * starts + [tokenizer.encode_raw(piece)]
    ]
    tokens = np.concatenate([end_of_text[:0], *parts], dtype=np.uint16)
    n_bytes, n_documents = (
        sum(memoryview(piece).nbytes for _, piece in pieces),
        sum(starts for starts, _ in pieces),
    )
    return split, tokens, dict(tokens=tokens.size, bytes=n_bytes, documents=n_documents)


def encode_file(path, tokenizer):
    """A text file's tokens, as preparation makes them, in a 1-D uint16 array, and the bytes of the text.

    Raises UserError where it is not UTF-8.
    """
    with open(path, "rb") as file:
        pieces = [piece for _, *piece in corpus.document("train", file, path)]
    _, tokens, counts = _encode(tokenizer, "train", pieces)
    return tokens[1:], counts["bytes"]  # without the end-of-text before it


def _write_documents(documents, tokenizer, folder, shard_tokens, progress):
    """Encodes on all cores and writes in order. Returns "splits" and "files" of meta.json."""
    splits = {split: Counter(tokens=0, bytes=0, documents=0) for split in ("train", "val")}
    shards, files = {split: np.empty(shard_tokens, dtype=np.uint16) for split in splits}, {}

    def write(split, n_tokens):
        name = f"{split}_{sum(name.startswith(split) for name in files):06d}.bin"
        files[name] = write_shard(folder / name, shards[split][:n_tokens])

    for path in folder.glob("*.bin"):  # of a run that was killed
        path.unlink()
    threads = min(os.cpu_count() or 1, 16)  # tiktoken and numpy release the GIL
    batches = map_ahead(
        lambda batch: _encode(tokenizer, *batch), _batches(documents), 2 * threads, threads
    )
    for split, tokens, counts in batches:
        filled = splits[split]["tokens"] % shard_tokens
        splits[split].update(counts)  # adds them
        progress.add(counts["bytes"])
        for part in np.split(tokens, range(shard_tokens - filled, tokens.size, shard_tokens)):
            shards[split][filled : filled + part.size] = part
            filled += part.size
            if filled == shard_tokens:
                write(split, filled)
                filled = 0
    for split, counts in splits.items():
        if not counts["tokens"]:
            raise UserError(
                f"no text is in the {split} split: give more, a single text, --val PATH or another --val_fraction"
            )
        if counts["tokens"] % shard_tokens:
            write(split, counts["tokens"] % shard_tokens)
    return splits, dict(sorted(files.items()))


# Source -> its default tokenizer, or a file with its vocabulary; None: chosen by size
SOURCES = {"python": str(PYTHON_VOCABULARY), "files": None, "shakespeare": "bytes"}
SOURCES |= {"wikitext2": "gpt2", "wikitext103": "gpt2"}
DEFAULT_SIZE = 1024  # tokens of a custom vocabulary
SMALL = (
    10**6
)  # bytes of text, below which a small model does better on bytes than on byte pairs (docs/data.md)


def prepare(
    source,  # a key of SOURCES
    paths=(),  # files, folders and globs, for "files"
    tokenizer=None,  # "gpt2", "bytes", "bpe" or a folder or file with a vocabulary (None: by source; of files, by size)
    out=None,  # the folder (None: beside this file)
    val_fraction=0.1,  # for validation: of documents, or of a single text's bytes
    shard_tokens=10**8,  # the most that one shard holds
    text_key=(
        "text",
    ),  # keys of .jsonl, columns of .csv and .parquet, whose texts are joined by newlines
    include=(),  # name patterns; files inside folders must match one of them
    vocab_size=None,  # of bpe, end-of-text included (None: DEFAULT_SIZE), or of the integers in .npy files
    val=(),  # like paths, for validation: instead of val_fraction
    say=print,  # gets each line of output
    command=None,  # recorded in meta.json
):
    """Makes a folder of token shards and returns its Path. A folder that has a meta.json is used as it is.

    It is made under another name and renamed, so that several processes may run this at once. Raises UserError.
    """
    own, integers = (
        SOURCES[source],
        any(os.fspath(path).endswith(".npy") for path in (*paths, *val)),
    )
    if integers:
        if tokenizer or vocab_size is None:
            raise UserError(
                "a .npy file holds tokens: give --vocab_size N, how many different ones, no --tokenizer"
            )
        tokenizer, vocab_size = f"integers:{vocab_size}", None
    tokenizer = tokenizer or (own if vocab_size is None else "bpe")
    kind = "integers" if integers else tokenizer if tokenizer in (None, "gpt2", "bytes") else "bpe"
    folder = Path(out or DATA_DIR / (source if tokenizer == own else f"{source}_{kind}"))
    if vocab_size is not None and tokenizer != "bpe":
        raise UserError(f"--vocab_size {vocab_size}: it is for --tokenizer bpe")
    if not 0 < val_fraction < 1 or not 0 < shard_tokens < 2**31:
        raise UserError(
            f"--val_fraction {val_fraction} --shard_tokens {shard_tokens}: expected a fraction and a count"
        )
    if (folder / "meta.json").exists():
        meta = load_meta(folder)
        say(
            f"already there: {folder} (of {meta['source']}); for other data remove it, or choose another --out"
        )
        return folder
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder} holds something else than prepared data: choose another --out")
    unique = (
        "" if source in DOWNLOADS else f"-{os.urandom(4).hex()}"
    )  # a download resumes where it was
    work = folder.with_name(f".tmp-{folder.name}{unique}")
    work.mkdir(parents=True, exist_ok=True)
    try:
        if source in DOWNLOADS:
            origin, sha256 = DOWNLOADS[source]
            files = [(source, work / origin.rpartition("/")[2])]
            download(origin, files[0][1], sha256, say)
        elif source == "python":
            origin, files = (
                f"standard library of Python {platform.python_version()}",
                corpus.python_files(),
            )
        else:
            origin, files = (
                f"files {' '.join(map(os.fspath, paths))}",
                corpus.given_files(paths, include, say),
            )
        val_files = corpus.given_files(val, include, say) if val else []
        if twice := sorted({str(path) for _, path in files} & {str(path) for _, path in val_files}):
            raise UserError(
                f"{twice[0]} is given for training and as --val; a text must be in one of them only"
            )
        origin += f" --val {' '.join(map(os.fspath, val))}" if val else ""
        n_bytes = sum(
            (3 if corpus.is_parquet(p) else 1) * p.stat().st_size for _, p in files + val_files
        )  # packed
        if not tokenizer:  # docs/data.md measures what suits a small model that trains for a minute
            tokenizer = (
                "bpe" if n_bytes >= SMALL and importlib.util.find_spec("tokenizers") else "bytes"
            )
            say(
                f"tokenizer {tokenizer}, for {n_bytes / 1e6:.1f} MB of text (for GPT-2's presets: --tokenizer gpt2)"
            )

        def documents():
            if source.startswith("wikitext"):
                return corpus.read_wikitext(files[0][1])
            parts = ((files, 0), (val_files, 1)) if val_files else ((files, val_fraction),)
            return itertools.chain.from_iterable(
                corpus.read_files(*part, text_key) for part in parts
            )

        vocabulary = None
        if tokenizer == "bpe":
            say(f"training byte pairs on the first {min(n_bytes, BPE_SAMPLE) / 1e6:.1f} MB")
            vocabulary = train_vocabulary(_sample(documents()), vocab_size or DEFAULT_SIZE)
        elif tokenizer not in ("gpt2", "bytes") and not integers:
            vocabulary = read_vocabulary(tokenizer)
        encoder = get_tokenizer("bpe" if vocabulary else tokenizer, vocabulary, tokenizer)
        meta = {"tokenizer": encoder.name, "vocab_size": encoder.vocab_size, "eot": encoder.eot}
        if vocabulary:
            (work / VOCABULARY_FILE).write_bytes(vocabulary.encode())
            meta["vocabulary"] = {"sha256": vocabulary_hash(vocabulary)}
        if len(files) > 1:
            meta["order"] = corpus.ORDER
        progress = Progress(f"preparing {source}", n_bytes, say)
        meta["splits"], shards = _write_documents(
            documents(), encoder, work, shard_tokens, progress
        )
        if integers:
            for counts in meta["splits"].values():
                counts["bytes"] = None
        meta |= {
            "source": origin,
            "files": shards,
            "command": command or f"python data/prepare.py {source}",
        }
        with atomic_write(work / "meta.json") as file:
            file.write(json.dumps(meta, indent=1).encode())
        with contextlib.suppress(OSError):  # another process was first
            os.rename(work, folder)
        load_meta(folder)
    finally:
        if source not in DOWNLOADS:
            shutil.rmtree(work, ignore_errors=True)
    for split, counts in meta["splits"].items():
        size = "" if integers else f", {counts['bytes'] / counts['tokens']:.2f} bytes each"
        say(f"{folder}: {counts['tokens']:,} tokens ({meta['tokenizer']}{size}) in {split}")
    return folder


def _sample(documents):
    """The first BPE_SAMPLE bytes of the training split."""
    size = 0
    for split, _, piece in documents:
        if split == "train":
            yield piece
            size += len(piece)
            if size >= BPE_SAMPLE:
                return


OPTIONS = ("tokenizer", "vocab_size", "val_fraction", "shard_tokens")
TAKES = {
    "hellaswag": (),
    "fineweb10B": ("shards",),
    "files": (*OPTIONS, "paths", "val", "text_key", "include"),
}


def main(argv=None):
    """The command line. Returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(
        description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    add, several = parser.add_argument, dict(nargs="+", action="extend")
    add(
        "source",
        choices=[*SOURCES, "fineweb10B", "hellaswag"],
        help="hellaswag: questions for sample.py --choices",
    )
    add(
        "paths",
        nargs="*",
        metavar="PATH",
        help="files: text; .jsonl, .csv, .parquet; .npy; folders, globs",
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
        help=f"tokens of --tokenizer bpe (default: {DEFAULT_SIZE}), or in .npy",
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
        help="files: .jsonl keys, .csv and .parquet columns to join (text)",
    )
    add(
        "--include",
        **several,
        metavar="PATTERN",
        help="files: names to read inside folders, such as '*.md' '*.txt'",
    )
    try:
        given = vars(parser.parse_intermixed_args(argv))
        source, command = (
            given.pop("source"),
            ["python", "data/prepare.py", *(sys.argv[1:] if argv is None else argv)],
        )
        if unused := given.keys() - {"out", *TAKES.get(source, OPTIONS)}:
            raise UserError(f"{source} does not take {min(unused)}: remove it")
        if {"val", "val_fraction"} <= given.keys():
            raise UserError("--val and --val_fraction contradict each other; give one of them")
        if source in SOURCES:
            prepare(source, **given, command=shlex.join(command))
        elif source == "fineweb10B":
            prepare_fineweb(**given, command=shlex.join(command))
        else:
            path = Path(given.get("out", DATA_DIR / source), "hellaswag_val.jsonl")
            download(DOWNLOADS[source][0], path, DOWNLOADS[source][1])
            print(f"next: python sample.py --run RUN --choices {path}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (
        OSError,
        KeyboardInterrupt,
    ) as error:  # a full disk, a folder without permission; Ctrl-C
        print(
            f"stopped: {str(error) or 'by Ctrl-C'}; run the same command again to resume",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
