"""Prepares token shards: `python data/prepare.py python|shakespeare|wikitext2|wikitext103|fineweb10B|files PATH...`

data/shards.py describes what a prepared folder holds, data/corpus.py how files become documents, data/text.py which
files are text. A folder that is complete is left as it is; after a run that was stopped, the same command resumes its
downloads (data/download.py) and makes the shards again.
"""

import argparse
import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: no lock against two processes that make the same folder
    fcntl = None

if __name__ == "__main__":  # a script's first import path is its own folder, whose tokenizers.py hides a package's name
    HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(HERE.parent), *(path for path in sys.path if path != str(HERE))]

from data import corpus
from data.bpe import MAX_SIZE, MIN_SIZE, VOCABULARY_FILE, read_vocabulary, train_vocabulary, vocabulary_hash
from data.choices import prepare_hellaswag
from data.download import DOWNLOADS, FINEWEB, FINEWEB_SHARDS, Progress, address_of, download, download_fineweb
from data.shards import (
    DATA_DIR,
    HEADER_BYTES,
    MAX_SHARD_TOKENS,
    SOURCES,
    TOKENIZER_SIZES,
    UNFINISHED,
    UserError,
    atomic_write,
    list_shards,
    load_meta,
    sha256_of_file,
    shard_header,
    sync_folder,
)
from data.text import ACCEPTED, check_encoding, marked_encoding, open_utf8
from data.tokenizers import BPETokenizer, get_tokenizer

# ---- Documents to shards --------------------------------------------------------------------------------------------

PIECE = 1 << 18  # bytes read at once; from pieces of 10^6 bytes on, tiktoken fails on long runs of whitespace
BATCH = 1 << 20  # bytes given to a thread at once
# GPT-2 never merges whitespace with a visible character before it. Surely visible: ASCII, and UTF-8 but the whitespace
# U+0085, U+00A0, U+1680, U+2000 to U+205F, U+3000.
SAFE_CUT = re.compile(rb"(?s).*(?:[!-~]|[\xc3-\xe0\xe4-\xf4][\x80-\xbf]+|\xe3[\x80-\xbf][\x81-\xbf])(?=[ \t\n\r])")


def pieces_of(stream, size):
    """Cuts `size` bytes of a binary stream so that the GPT-2 tokens of the pieces, joined, are those of the whole."""
    rest = b""
    while block := stream.read(min(size, PIECE)):
        size -= len(block)
        rest += block
        safe = SAFE_CUT.match(rest)
        cut = safe.end() if safe else 0
        if not safe and len(rest) >= 3 * PIECE:  # no safe place: between any two characters, to bound the memory
            cut = max((i for i in range(len(rest) - 4, len(rest)) if rest[i] & 0xC0 != 0x80), default=len(rest))
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _batches(documents):
    """(split, its next pieces), of about BATCH bytes; a piece is (whether a document starts, bytes)."""
    batches = {"train": [], "val": []}
    sizes = Counter()
    for split, stream, length in documents:
        for number, piece in enumerate(pieces_of(stream, length)):
            batches[split].append((number == 0, piece))
            sizes[split] += len(piece)
            if sizes[split] >= BATCH:
                yield split, batches[split]
                batches[split] = []
                sizes[split] = 0
    yield from batches.items()


def _encode(tokenizer, pieces):
    """Returns 1-D uint16 tokens, and how many tokens, bytes of text and documents they are, as in meta.json."""
    end_of_text = np.array([tokenizer.eot], dtype=np.uint16)
    parts, counts = [end_of_text[:0]], {"tokens": 0, "bytes": 0, "documents": 0}
    for starts, piece in pieces:
        parts += [end_of_text] * starts + [tokenizer.encode_raw(piece)]
        counts["bytes"] += tokenizer.text_bytes(piece)
        counts["documents"] += starts
    tokens = np.concatenate(parts, dtype=np.uint16)
    return tokens, counts | {"tokens": tokens.size}


def encode_file(path, tokenizer):
    """A text file's tokens, as preparation makes them, in a 1-D uint16 array, and the bytes of the text they stand for.

    Raises NotText when a byte order mark names an encoding in which it does not decode.
    """
    with open(path, "rb") as file:
        encoding = marked_encoding(file.read(4))
    with open_utf8(path, encoding) as (_, text):
        pieces = pieces_of(text, os.fstat(text.fileno()).st_size)
        tokens, counts = _encode(tokenizer, [(False, piece) for piece in pieces])
    return tokens, counts["bytes"]


def _append(tokens, position, folder, split, shard_tokens):
    """Appends a 1-D uint16 array to a split that has `position` tokens so far. Yields paths of shards that are full."""
    while tokens.size:
        number, filled = divmod(position, shard_tokens)
        part, tokens = np.split(tokens, [shard_tokens - filled])
        path = folder / f"{split}_{number:06d}.bin"
        with open(path, "ab") as file:
            file.write(b"" if filled else bytes(HEADER_BYTES))
            file.write(part.data)
        position += part.size
        if filled + part.size == shard_tokens:
            yield path


def _complete(path):
    """Writes the header of a shard and flushes it to the disk. Returns its entry in "files" of meta.json."""
    count = (path.stat().st_size - HEADER_BYTES) // 2
    with open(path, "rb+") as file:
        file.write(shard_header(np.uint16, count))
        file.flush()
        os.fsync(file.fileno())
    return {"tokens": count, "sha256": sha256_of_file(path)}


def _write_documents(documents, tokenizer, folder, shard_tokens, progress):
    """Encodes and completes shards on all cores, writes in order. Returns "splits" and "files" of meta.json."""
    splits = {split: Counter(tokens=0, bytes=0, documents=0) for split in ("train", "val")}
    files = {}
    threads = min(os.cpu_count() or 1, 16)  # tiktoken and numpy release the GIL while they work
    waiting = deque()

    def write_next():
        split, encoded = waiting.popleft()
        tokens, counts = encoded.result()
        for path in _append(tokens, splits[split]["tokens"], folder, split, shard_tokens):
            files[path.name] = pool.submit(_complete, path)
        splits[split].update(counts)  # adds them
        progress.add(counts["bytes"])

    with ThreadPoolExecutor(threads) as pool:
        for split, pieces in _batches(documents):
            waiting.append((split, pool.submit(_encode, tokenizer, pieces)))
            if len(waiting) > 2 * threads:
                write_next()
        while waiting:
            write_next()
        for split, counts in splits.items():
            if not counts["tokens"]:
                n_documents = sum(counts["documents"] for counts in splits.values())
                if not n_documents:
                    raise UserError("there is no text in the files that were given: expected some to learn from")
                raise UserError(
                    f"no text fell into the {split} split, by chance with {n_documents} documents: give more of it, "
                    "another --val_fraction, or one text file, which is cut in two"
                )
            name = f"{split}_{counts['tokens'] // shard_tokens:06d}.bin"
            if counts["tokens"] % shard_tokens:
                files[name] = pool.submit(_complete, folder / name)
    progress.add(0, finished=True)
    return splits, {name: files[name].result() for name in sorted(files)}


BPE_SAMPLE = 64 << 20  # the most bytes of text that a vocabulary is trained on


def _train(documents, vocab_size, say):
    """Trains a vocabulary on the training split, or on its first BPE_SAMPLE bytes, in hash order."""
    progress = Progress("training byte pairs", None, say)
    sampled = 0

    def texts():
        nonlocal sampled
        for split, stream, length in documents:
            if split != "train":
                _skip(stream, length)
                continue
            for piece in pieces_of(stream, length):
                sampled += len(piece)
                progress.add(len(piece))
                yield piece
                if sampled >= BPE_SAMPLE:
                    say(f"byte pairs are trained on the first {sampled / 1e6:,.0f} MB of the training split")
                    return

    vocabulary = train_vocabulary(texts(), vocab_size)
    progress.add(0, finished=True)
    found = BPETokenizer(vocabulary).vocab_size
    if found < vocab_size:
        say(f"the text gives {found:,} tokens, fewer than the --vocab_size of {vocab_size:,}")
    return vocabulary


def _skip(stream, length):
    """Reads past a document, as some streams hold the next one after it."""
    while length > 0:
        length -= len(stream.read(min(length, PIECE))) or length


# ---- The folder -----------------------------------------------------------------------------------------------------

STAGING = ".tmp-new"  # folder inside a data folder: holds what is made or downloaded until everything is complete
MADE = re.compile(
    r"(\.tmp-)?((train|val)_\d{6}\.bin|meta\.json|tokenizer\.json)"
)  # names of what is made here, and not downloaded


@contextlib.contextmanager
def _locked(folder, say):
    """Makes a folder and keeps other processes out of it. After an error it is as it was before, see _clean_up."""
    made = []
    while True:
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process failed and removed the folder: retry
            lock = open(folder / ".lock", "w")
            try:
                if fcntl:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that prepares {folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / ".lock")):
                break
    with lock:
        try:
            yield
        except BaseException:
            _clean_up(folder, made)
            raise


def _is_done(folder, made_with, shards, files, say, unasked):
    """Whether the folder is complete; if so, reports it. Raises UserError if it holds anything but what this makes.

    unasked: keys of made_with that no option has set, so that whatever the folder was made with is right.
    """
    if not (folder / "meta.json").exists():
        found = [] if (folder / UNFINISHED).exists() else list_shards(folder, "train") + list_shards(folder, "val")
        if any(made_with["source"] != "fineweb10B" or not path.name.startswith("fineweb_") for path in found):
            raise UserError(f"{folder} has shards of another origin, without a meta.json: choose another --out")
        return False
    meta = load_meta(folder)
    old = meta["made_with"] if isinstance(meta.get("made_with"), dict) else {}
    others = [key for key in {**made_with, **old} if old.get(key) != made_with.get(key)]
    if not unasked.issuperset(others):
        names = ", ".join(others)
        raise UserError(f"{folder} was made from something else ({names} differs): choose another --out or delete it")
    sizes = {folder / name: HEADER_BYTES + 2 * shard["tokens"] for name, shard in meta["files"].items()}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    if not whole or not _has_vocabulary(folder, meta) or sum("train" in name for name in meta["files"]) < shards:
        if others:  # made again with another tokenizer, it would be other data under the old name
            raise UserError(
                f"{folder} has lost some of its files, and was made with tokenizer {meta['tokenizer']}: delete it"
                f"{_how_to_make_again(folder, old)}"
            )
        return False
    notes = []
    if others:
        notes.append(f"with tokenizer {meta['tokenizer']} ({meta['vocab_size']:,} tokens)")
    if _keeps_order_of_paths(folder, files):
        notes.append(
            "with its documents in the order of their paths, so that a part of the validation split is no fair sample"
        )
    remove = f", made {' and '.join(notes)}; remove it to make it again" if notes else ""
    say(f"already there: {folder}{remove}")
    return True


def _how_to_make_again(folder, made_with):
    """Advice on the flags that make a folder as it was; "" if its vocabulary came from elsewhere."""
    if "vocabulary" in made_with:
        return ""
    size = f" --vocab_size {made_with['vocab_size']}" if "vocab_size" in made_with else ""
    out = shlex.quote(str(folder))
    return f", or give --tokenizer {made_with['tokenizer']}{size} --out {out} to make it again as it was"


def _has_vocabulary(folder, meta):
    """Whether the folder has the vocabulary that its meta.json names, or none is named."""
    if "vocabulary" not in meta:
        return True
    try:
        read_vocabulary(folder, meta["vocabulary"]["sha256"])
    except UserError:
        return False
    return True


def _keeps_order_of_paths(folder, files):
    """Whether a folder of several files is an older one, which has them in the order of their paths."""
    return len(files) > 1 and (folder / "meta.json").exists() and not load_meta(folder).get("order")


def _remove_made(folder):
    """Removes what was made in a folder, and not downloaded to it."""
    for path in folder.iterdir():
        if MADE.fullmatch(path.name):
            path.unlink()


def _begin(folder, command):
    """Removes what a killed run has made, but keeps downloads; marks a folder that has no shards as unfinished."""
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    complete = (folder / "meta.json").exists()
    if not complete and (folder / UNFINISHED).exists():
        for path in {*list_shards(folder, "train"), *list_shards(folder, "val")}:
            os.replace(path, staging / path.name)
    _remove_made(staging)
    if not complete and not list_shards(folder, "train"):
        (folder / UNFINISHED).write_text(command, encoding="utf-8", errors="surrogateescape")


def _publish(folder, meta):
    """Replaces a folder's data by what `meta` describes, of which the new files are in STAGING."""
    staging = folder / STAGING
    with atomic_write(staging / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode())
    (folder / UNFINISHED).write_text(meta["command"], encoding="utf-8", errors="surrogateescape")
    (folder / "meta.json").unlink(missing_ok=True)
    _remove_made(folder)
    for name in [*meta["files"], VOCABULARY_FILE, "meta.json"]:
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
    sync_folder(folder)
    (folder / UNFINISHED).unlink()
    with contextlib.suppress(OSError):  # downloads of another source may be left
        staging.rmdir()


def _clean_up(folder, made):
    """After an error: restores the folder, except for downloads, which the next run resumes; removes the folders in
    `made` that are empty.
    """
    with contextlib.suppress(OSError):
        _remove_made(folder / STAGING)
        (folder / STAGING).rmdir()  # unless it holds downloads
    with contextlib.suppress(OSError):
        complete = (folder / "meta.json").exists()
        if complete or {*folder.glob(".tmp-*"), *folder.glob("*.bin")} == {folder / UNFINISHED}:
            (folder / UNFINISHED).unlink(missing_ok=True)
        if not complete:
            (folder / ".lock").unlink()
    for path in made:
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


# ---- The whole job --------------------------------------------------------------------------------------------------

TOKENIZERS = ("gpt2", "bytes", "bpe")
DEFAULT_SIZE = 1024  # tokens of a custom vocabulary
SMALL = 10**6  # bytes of text, below which a small model does better on bytes than on byte pairs
DEFAULTS = {"val_fraction": 0.1, "shard_tokens": 10**8, "shards": None}
DEFAULTS_OF_FILES = {"encoding": "utf-8", "text_key": "text", "include": []}  # of the source "files" alone


def choose_tokenizer(files):
    """The best tokenizer for a small model that trains on this text for a minute, and why (docs/data.md)."""
    sizes = [file.path.stat().st_size * (3 if file.path.suffix == ".gz" else 1) for file in files]
    if sum(sizes) < SMALL:
        return "bytes", f"tokenizer bytes, as byte pairs overfit on less than {SMALL / 1e6:.0f} MB of text"
    if importlib.util.find_spec("tokenizers"):
        return "bpe", f"tokenizer bpe, {DEFAULT_SIZE:,} tokens of this text (for GPT-2's presets: --tokenizer gpt2)"
    return "bytes", (
        "tokenizer bytes, as the package tokenizers is missing: with byte pairs a small model learns more in the same "
        "time (`pip install tokenizers`)"
    )


def check_arguments(source, paths, tokenizer, vocab_size, folder, val_fraction, shard_tokens, shards, given):
    """Raises UserError for what prepare() cannot work with. given: the options not at their default."""
    if source not in SOURCES:
        known = [*SOURCES, "hellaswag"]  # the command line's alone
        closest = difflib.get_close_matches(str(source), known, 1, 0)[0]
        raise UserError(f"unknown source {source!r}: did you mean {closest}? (there are {', '.join(known)})")
    if tokenizer not in (None, *TOKENIZERS) and not Path(tokenizer).exists():
        raise UserError(
            f"unknown tokenizer {tokenizer!r}: it must be gpt2, bytes, bpe, or a data folder or run whose "
            "vocabulary is used"
        )
    if source == "fineweb10B" and tokenizer != "gpt2":
        flags = ["--vocab_size"] if vocab_size is not None else []
        flags += ["--tokenizer"] if not flags or tokenizer != "bpe" else []
        raise UserError(f"fineweb10B comes tokenized with gpt2 and not otherwise: remove {' and '.join(flags)}")
    if vocab_size is not None and tokenizer != "bpe":
        raise UserError(f"--vocab_size is for --tokenizer bpe, not for {tokenizer}: remove it")
    if vocab_size is not None and not MIN_SIZE <= vocab_size <= MAX_SIZE:
        raise UserError(f"--vocab_size is {vocab_size} and must be {MIN_SIZE} to {MAX_SIZE}: {DEFAULT_SIZE} is usual")
    if source == "files" and not paths:
        several = [f"--{name}" for name in ("text_key", "include") if name in given]  # took the path too
        place = f" before {' and '.join(several)}" if several else ""
        raise UserError(f"files needs at least one PATH{place}: give {ACCEPTED} files, folders or globs")
    if source != "files" and paths:
        raise UserError(f"{source} takes no PATH but got {paths[0]}: for your own text use the source files")
    for name in DEFAULTS_OF_FILES:
        if source != "files" and name in given:
            raise UserError(f"--{name} is for the source files, not for {source}: remove it")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction is {val_fraction} and must lie between 0 and 1: 0.1 is usual")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard_tokens is {shard_tokens} and must be 1 to {MAX_SHARD_TOKENS}: 100000000 is usual")
    if shards is not None and (source != "fineweb10B" or not 1 <= shards <= FINEWEB_SHARDS):
        raise UserError(f"--shards is {shards} for {source}: it is for fineweb10B, and must be 1 to {FINEWEB_SHARDS}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where a folder was expected: choose another --out")


def _inputs(source, paths, folder, encoding, include, skipped):
    """(origin as recorded in meta.json, TextFiles to read). A download may not exist yet."""
    if source == "fineweb10B":
        return address_of(FINEWEB), []
    if source in DOWNLOADS:
        url = DOWNLOADS[source][0]
        return address_of(url), [corpus.TextFile(source, folder / url.rpartition("/")[2])]
    if source == "python":
        return f"standard library of Python {platform.python_version()}", corpus.python_files()
    files = corpus.given_files(paths, folder, encoding, include, skipped)
    return f"files {' '.join(map(os.fspath, paths))}", files


def _made_with(source, tokenizer, val_fraction, shard_tokens, files, encoding, given):
    """What a folder must have been made with to count as this command's, as recorded in meta.json."""
    made_with = {"source": source, "tokenizer": tokenizer}
    if source != "fineweb10B":
        made_with |= {"val_fraction": val_fraction, "shard_tokens": shard_tokens}
    if source == "files":  # not for "python": an update of Python must not ask for the data to be deleted
        facts = []
        for file in files:
            stat = file.path.stat()
            marks = [file.encoding] * (file.encoding != encoding) + ["csv"] * corpus.is_csv(file.path)  # once one text
            facts.append([file.name, stat.st_size, stat.st_mtime_ns, *marks])
        made_with["inputs"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return made_with | {name: given[name] for name in DEFAULTS_OF_FILES if name in given}


def _documents(source, origin, files, val_fraction, keys, skipped, say):
    """A source's documents, after a download if it has one, and the Progress that is to count their bytes."""
    if source in DOWNLOADS:
        download(origin, files[0].path, DOWNLOADS[source][1], say)
    if source.startswith("wikitext"):
        return corpus.read_wikitext(files[0].path), Progress(f"preparing {source}", None, say)  # of unknown size
    progress = Progress(f"preparing {source}", sum(file.path.stat().st_size for file in files), say)
    return corpus.read_files(files, val_fraction, keys, progress, skipped), progress


def _command(source, paths, given):
    """The command line with the options that are given."""
    flags = []
    for name, value in given.items():
        flags += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return shlex.join(["python", "data/prepare.py", source, *map(str, paths), *flags])


def prepare(
    source,  # a key of SOURCES
    paths=(),  # files, folders and globs, for "files"
    tokenizer=None,  # "gpt2", "bytes", "bpe" or a folder or file with a vocabulary (None: by source; of files, by size)
    out=None,  # the folder (None: beside this file)
    val_fraction=0.1,  # for validation: of documents, or of a single text's bytes
    shard_tokens=10**8,  # the most that one shard holds
    shards=None,  # training shards of fineweb10B (None: all)
    encoding="utf-8",  # of all files given ("utf-8": or what a byte order mark says)
    text_key="text",  # key of .jsonl and column of .csv with the text; a list: their texts are joined by newlines
    include=(),  # name patterns; files inside folders must match one of them
    vocab_size=None,  # of bpe, end-of-text included (None: DEFAULT_SIZE)
    say=print,  # gets each line of output
):
    """Makes a folder of token shards and returns its Path. A folder that is already complete is left as it is.

    Several processes may run it at once: one works, the others wait. After an error the folder is restored, except for
    downloads, which resume later. Raises UserError.
    """
    began = time.monotonic()
    own_tokenizer = SOURCES.get(source)
    unasked = set() if vocab_size else {"vocab_size"} if tokenizer else {"tokenizer", "vocab_size", "vocabulary"}
    tokenizer = tokenizer or (own_tokenizer if vocab_size is None else "bpe")
    default = DATA_DIR / (source if tokenizer == own_tokenizer else f"{source}_{_kind(tokenizer)}")
    folder = Path(out or default)
    encoding, keys, text_key, include = _of_files(encoding, text_key, include)
    options = dict(tokenizer=tokenizer, vocab_size=vocab_size, out=folder, val_fraction=val_fraction)
    options |= dict(shard_tokens=shard_tokens, shards=shards, encoding=encoding, text_key=text_key, include=include)
    defaults = DEFAULTS | DEFAULTS_OF_FILES | {"tokenizer": own_tokenizer, "vocab_size": None, "out": default}
    given = {name: value for name, value in options.items() if value != defaults[name]}
    check_arguments(source, paths, tokenizer, vocab_size, folder, val_fraction, shard_tokens, shards, given)
    fineweb, skipped = source == "fineweb10B", []
    shards = (shards or FINEWEB_SHARDS) if fineweb else 0
    origin, files = _inputs(source, paths, folder, encoding, include, skipped)
    tokenizer, why = (tokenizer, "") if tokenizer else choose_tokenizer(files)
    vocabulary = None if tokenizer in TOKENIZERS else read_vocabulary(tokenizer)
    made_with = _made_with(source, _kind(tokenizer), val_fraction, shard_tokens, files, encoding, given)
    vocab_size = vocab_size or DEFAULT_SIZE
    made_with |= _made_of_pairs(tokenizer, vocab_size, vocabulary)
    if _is_done(folder, made_with, shards, files, say, unasked):  # checked before locking: it may be read-only
        return folder
    if why:
        say(why)
        given |= {"tokenizer": tokenizer, "out": folder}  # for the command that makes the same again
    if tokenizer == "bpe":
        given["vocab_size"] = vocab_size
    known = not fineweb and tokenizer != "bpe"
    encoder = get_tokenizer(_kind(tokenizer), vocabulary, tokenizer) if known else None  # may fail: nothing is changed
    if "text_key" in given and not any(corpus.row_reader(file.path) for file in files):
        say("--text_key has no effect: there is no .jsonl or .csv file among those given")
    with _locked(folder, say):
        if _is_done(folder, made_with, shards, files, say, unasked):
            return folder
        order = {"order": corpus.ORDER} if len(files) > 1 and not _keeps_order_of_paths(folder, files) else {}
        command = _command(source, paths, given)
        _begin(folder, command)
        if fineweb:
            splits, made = download_fineweb(folder, folder / STAGING, shards, say)
        else:
            files = corpus.by_hash(files) if order else files
            if tokenizer == "bpe":
                vocabulary = _train(_documents(source, origin, files, val_fraction, keys, [], say)[0], vocab_size, say)
                encoder = BPETokenizer(vocabulary)
            documents, progress = _documents(source, origin, files, val_fraction, keys, skipped, say)
            splits, made = _write_documents(documents, encoder, folder / STAGING, shard_tokens, progress)
        meta = _tokenizer_facts(_kind(tokenizer), encoder, vocabulary, folder / STAGING) | order
        meta |= {"splits": splits, "source": origin, "files": made, "made_with": made_with, "command": command}
        _publish(folder, meta)
    _tell(folder, meta, len(made), time.monotonic() - began, skipped, say)
    return folder


def _kind(tokenizer):
    """The tokenizer's name in meta.json: "bpe" for one that is given by its vocabulary."""
    return tokenizer if tokenizer in TOKENIZERS else "bpe"


def _of_files(encoding, text_key, include):
    """Options of "files", normalized: encoding, keys as a list and as recorded (one as a string), sorted patterns."""
    keys = [text_key] if isinstance(text_key, str) else list(text_key) or ["text"]
    patterns = sorted({include} if isinstance(include, str) else set(include))
    return check_encoding(encoding), keys, keys[0] if len(keys) == 1 else keys, patterns


def _made_of_pairs(tokenizer, vocab_size, vocabulary):
    """What else a folder with a custom BPE vocabulary must have been made with."""
    if tokenizer == "bpe":
        return {"vocab_size": vocab_size}
    return {"vocabulary": vocabulary_hash(vocabulary)} if vocabulary else {}


def _tokenizer_facts(kind, encoder, vocabulary, staging):
    """What meta.json says of the tokenizer; its vocabulary's file, if it has one, is written to `staging`."""
    vocab_size, eot = (encoder.vocab_size, encoder.eot) if encoder else TOKENIZER_SIZES["gpt2"]
    facts = {"tokenizer": kind, "vocab_size": vocab_size, "eot": eot}
    if vocabulary:
        (staging / VOCABULARY_FILE).write_bytes(vocabulary.encode())
        facts["vocabulary"] = {"sha256": vocabulary_hash(vocabulary)}
    return facts


def _tell(folder, meta, n_shards, seconds, skipped, say):
    """Reports what was made, what was skipped, and what else is in the folder."""
    kind, train, val = meta["tokenizer"], meta["splits"]["train"], meta["splits"]["val"]
    n_tokens = f"{train['tokens']:,} tokens for training, {val['tokens']:,} for validation"
    say(f"{folder}: {n_tokens} ({kind}) in {n_shards} shards")
    if kind == "bpe":
        per_token = [f"{counts['bytes'] / counts['tokens']:.2f}" for counts in (train, val)]
        say(
            f"vocabulary of {meta['vocab_size']:,} tokens, {per_token[0]} bytes per token for training and "
            f"{per_token[1]} for validation; {seconds:.1f} s in all"
        )
    if skipped:
        say(corpus.list_skipped(skipped))
    if left := sorted(path.name for path in folder.glob(".tmp-*")):
        say(f"{folder} still has {', '.join(left)} from a run that was stopped: delete what you do not need")


def main(argv=None):
    """The command line. Returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("source", help=f"{', '.join(SOURCES)}; or hellaswag, questions for sample.py --choices")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"for files: {ACCEPTED}, folders, globs")
    how = "gpt2, bytes, bpe (trained on this text), or a folder with a vocabulary; default: by source and size"
    parser.add_argument("--tokenizer", metavar="NAME|PATH", help=how)
    how = f"vocabulary size for --tokenizer bpe, {MIN_SIZE} to {MAX_SIZE} (default: {DEFAULT_SIZE})"
    parser.add_argument("--vocab_size", type=int, metavar="N", help=how)
    parser.add_argument("--out", metavar="DIR", help="the folder to make; default: data/<source>")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="fraction for validation (default: 0.1)")
    parser.add_argument("--shard_tokens", type=int, default=10**8, help="max tokens per shard (default: 100000000)")
    parser.add_argument("--shards", type=int, help="fineweb10B: number of training shards, 200 MB each (default: 103)")
    how = "files: their encoding (default: by the byte order mark, else utf-8)"
    parser.add_argument("--encoding", metavar="NAME", default="utf-8", help=how)
    several = dict(nargs="+", action="extend", default=[])
    how = "files: .jsonl keys or .csv columns that hold the text; several are joined by newlines (default: text)"
    parser.add_argument("--text_key", metavar="KEY", help=how, **several)
    how = "files: inside folders, read only files whose name matches one of these, such as '*.md' '*.txt'"
    parser.add_argument("--include", metavar="PATTERN", help=how, **several)

    def refuse(message):
        raise UserError(f"{message}: see `python data/prepare.py --help`")

    parser.error = refuse
    try:
        options, unknown = parser.parse_known_intermixed_args(argv)
        if unknown:
            flags = [f"--{name}" for name in vars(options) if name not in ("source", "paths")]
            closest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1, 0)[0]
            raise UserError(f"unknown flag {unknown[0]}: did you mean {closest}?")
        if options.source == "hellaswag":
            if vars(options) != {**vars(parser.parse_intermixed_args(["hellaswag"])), "out": options.out}:
                raise UserError("hellaswag takes --out alone, and is read as it comes: remove the rest")
            prepare_hellaswag(options.out or DATA_DIR / "hellaswag")
        else:
            prepare(**vars(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder without permission
        print(f"error: {error}: change that and run the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: run the same command again to resume", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
