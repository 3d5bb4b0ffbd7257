"""Files to documents: which files are read, in which order, and to which split each document goes.

All text is UTF-8. Documents, which are files or rows of files, are read in pieces:
(split, whether a document starts with this piece, bytes).
"""

import csv
import fnmatch
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import zipfile
import zlib
from pathlib import Path

import numpy as np

from common import UserError

# The order of several files: it makes the first tokens of a split a fair sample of the split
ORDER = "SHA-256 of the name"
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
# Bytes read at once. From pieces of 10^6 bytes on, tiktoken fails on long runs of whitespace.
PIECE = 1 << 18
# The second to fourth bytes of UTF-8 characters
CONTINUATION = bytes(range(0x80, 0xC0))
# Text can be cut before whitespace that follows a visible character: GPT-2 never merges the two.
# Visible for sure are those of ASCII, and those of UTF-8 except for its whitespace U+0085, U+00A0,
# U+1680, U+2000 to U+205F and U+3000.
SAFE_CUT = re.compile(
    rb"(?s).*(?:[!-~]|[\xc3-\xe0\xe4-\xf4][\x80-\xbf]+|\xe3[\x80-\xbf][\x81-\xbf])(?=[ \t\n\r])"
)


# -----------------------------------------------------------------------------
# Which files, in which order and split


def _hash(name):
    return int(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).hexdigest(), 16)


def split_of(name, val_fraction):
    """Return the split, "train" or "val", of the document with this name: always the same."""
    return "val" if _hash(name) < val_fraction * 2**256 else "train"


def sort_by_hash(files):
    """Sort files, (name, path), by the hashes of their names, then by their paths."""
    return sorted(files, key=lambda file: (_hash(file[0]), file[1].as_posix()))


def _files_under(folder, is_unwanted):
    """Return the files in a folder and its subfolders, without those with unwanted names."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unwanted(name)]
        found += [Path(root, name) for name in names if not is_unwanted(name)]
    return [path for path in found if path.is_file()]


def python_files():
    """Return the Python files of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = _files_under(root, NOT_PYTHON.__contains__)
    return sort_by_hash(
        (path.relative_to(root).as_posix(), path) for path in paths if path.suffix == ".py"
    )


def find_files(arguments, include, say):
    """Return the files, (name, path), that the arguments (files, folders, globs) stand for.

    Hidden files in folders are left out, and so are files that match no pattern of `include`, if
    it has any. Files that are not text are skipped, unless an argument names them, and listed.
    """
    names = {}
    skipped = set()
    for argument in map(os.path.abspath, arguments):
        for name, path in _matching_files(argument, include):
            is_named = str(path) == argument or argument.endswith(".npy")
            if is_named or file_format(path) == ".parquet" or _begins_as_text(path):
                names.setdefault(path, name)
            else:
                skipped.add(path.name)
    if skipped:
        examples = ", ".join(sorted(skipped)[:10])
        say(f"skipped {len(skipped):,} files that are not text in UTF-8: {examples}")
    if not names:
        raise UserError(
            f"there is no text in {list(map(str, arguments))}: give PATHs of files, folders or "
            "globs"
        )
    return sort_by_hash((name, path) for path, name in names.items())


def _matching_files(argument, include):
    """Yield the files, (name, path), that one argument stands for."""
    matches = [argument]
    if not os.path.exists(argument):
        matches = sorted(glob.glob(argument, recursive=True))
    if not matches:
        raise UserError(
            f"{argument} is not a file or folder, nor a glob that matches any: check the path"
        )
    for match in map(Path, matches):
        paths = [match]
        if match.is_dir():
            paths = _files_under(match, lambda name: name.startswith("."))
            paths = [path for path in paths if _is_included(path.name, include)]
        for path in paths:
            yield path.relative_to(match.parent).as_posix(), path


def _is_included(name, include):
    return not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)


def file_format(path):
    """Return the last part of a file's name, without .gz and in lower case, such as ".csv"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _begins_as_text(path):
    try:
        with open_file(path) as stream:
            io.TextIOWrapper(stream, "utf-8").read(PIECE)
    except (UnicodeDecodeError, *DAMAGED_GZIP):
        return False
    return True


def open_file(path):
    """Open a file as a binary stream, unpacked if its name ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


# -----------------------------------------------------------------------------
# Documents, in pieces


def read_document(split, stream, path, size=sys.maxsize):
    """Yield the next `size` bytes of a binary stream as the pieces of one document.

    The GPT-2 tokens of the pieces, joined, are those of the whole. Raises UserError, which names
    the place in the file `path`, if the bytes are not UTF-8.
    """
    first = stream.tell()
    # What was read but not yielded yet, and where it begins in the file
    rest = b""
    begin = first
    at_end = False
    while not at_end:
        block = stream.read(min(size, PIECE))
        at_end = not block
        size -= len(block)
        rest += block
        cut = len(rest) if at_end else _find_cut(rest)
        try:
            rest[:cut].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text at byte {begin + error.start:,}: convert or remove it"
            ) from None
        if cut:
            yield split, begin == first, rest[:cut]
        rest = rest[cut:]
        begin += cut


def _find_cut(raw):
    """Return where to cut bytes of text, or 0 if more must be read to find a place."""
    safe = SAFE_CUT.match(raw)
    if safe:
        return safe.end()
    # Without a safe place, cut before the last character, to bound the memory
    if len(raw) >= 3 * PIECE:
        return max(0, len(raw.rstrip(CONTINUATION)) - 1)
    return 0


def read_files(files, val_fraction, keys):
    """Yield the pieces of all documents of files, (name, path).

    A row of a file with rows is a document, named `<name>:<number>`. Any other file is one, but a
    single file is cut in two, for training and validation.

    val_fraction: of the documents, or of the single file; 0 or 1 puts all into one split.
    keys: of the texts of a row, joined by newlines.
    Raises UserError, which names the place, for what cannot be read.
    """
    for name, path in files:
        # Of a single file, one part is for training; of several, each is for one split as a whole
        if len(files) == 1:
            train_fraction = 1 - val_fraction
        else:
            train_fraction = 1 if split_of(name, val_fraction) == "train" else 0
        try:
            with open_file(path) as stream:
                if path.suffix == ".npy":
                    yield from _read_integers(path, train_fraction)
                elif file_format(path) in (".jsonl", ".csv", ".parquet"):
                    for number, text in _read_rows(stream, path, keys):
                        row = io.BytesIO(text.encode("utf-8", errors="replace"))
                        split = split_of(f"{name}:{number}", val_fraction)
                        yield from read_document(split, row, path)
                else:
                    yield from _read_text(stream, path, train_fraction)
        except DAMAGED_GZIP as error:
            raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again") from error


def _read_text(stream, path, train_fraction):
    """Yield the pieces of a text file as one document in each split, cut between characters."""
    n_bytes = stream.seek(0, os.SEEK_END)
    size = stream.seek(int(n_bytes * train_fraction))
    # Complete the last character: at most three bytes of it follow
    following = stream.read(3)
    size += len(following) - len(following.lstrip(CONTINUATION))
    stream.seek(0)
    yield from read_document("train", stream, path, size)
    yield from read_document("val", stream, path)


def _read_integers(path, train_fraction):
    """Yield the integers of a .npy file as one document in each split; the pieces are arrays."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{tokens.dtype} of shape {tokens.shape}")
    except ValueError as error:
        raise UserError(
            f"{path}: expected a .npy file of integers, 1-D ({error}); save it with numpy.save"
        ) from None
    n_train = int(train_fraction * len(tokens))
    for split, part in (("train", tokens[:n_train]), ("val", tokens[n_train:])):
        for begin in range(0, len(part), PIECE):
            yield split, begin == 0, part[begin : begin + PIECE]


# -----------------------------------------------------------------------------
# Rows of .jsonl, .csv and Parquet files


def _read_rows(stream, path, keys):
    """Yield (number, text) of each row of a file; the text of a blank line of .jsonl is ""."""
    if file_format(path) == ".parquet":
        rows = _parquet_rows(stream, path, keys)
    elif file_format(path) == ".csv":
        csv.field_size_limit(1 << 26)
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        # More cells than columns make a list of the first text, which is an error below
        rows = csv.DictReader(text, restkey=keys[0], strict=True)
    else:
        rows = _jsonl_rows(stream)
    number = 0
    try:
        for row in rows:
            text = ""
            if row is not None:
                text = "\n".join([row[key] for key in keys])
            number += 1
            yield number, text
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        expected = ", ".join(f'"{key}": TEXT' for key in keys)
        raise UserError(
            f"{path}, after row {number}: expected {{{expected}}} "
            f"({type(error).__name__}: {error}); correct it, or give --text_key"
        ) from None


def _jsonl_rows(stream):
    """Yield the rows of a .jsonl file, None for blank lines."""
    for line in stream:
        yield json.loads(line) if line.strip() else None


def _parquet_rows(stream, path, keys):
    """Yield the rows of a Parquet file, with these columns only and "" for empty cells.

    Only a few rows are in memory at a time.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: run `pip install pyarrow`") from None
    file = ParquetFile(stream)
    columns = file.schema_arrow.names
    for key in keys:
        if key not in columns:
            raise KeyError(f"{key}; its columns are {', '.join(columns)}")
    for batch in file.iter_batches(batch_size=256, columns=[*keys]):
        for row in batch.to_pylist():
            yield {key: "" if cell is None else cell for key, cell in row.items()}


# -----------------------------------------------------------------------------
# WikiText


def read_wikitext(archive):
    """Yield the pieces of a WikiText archive: its own splits, with a document for each article."""
    with zipfile.ZipFile(archive) as members:
        for split, member in (("train", "wiki.train.raw"), ("val", "wiki.valid.raw")):
            # The folder in the archive is not always the same
            (name,) = [name for name in members.namelist() if name.endswith(member)]
            article = bytearray()
            previous = b""
            for line in members.open(name):
                # A heading after a blank line starts the next article
                if _is_title(line) and article.strip() and not previous.strip():
                    yield from read_document(split, io.BytesIO(article), archive)
                    article = bytearray()
                article += line
                previous = line
            yield from read_document(split, io.BytesIO(article), archive)


def _is_title(line):
    """Return whether a line is a heading of the first level, such as ` = Title = `."""
    return line.startswith(b" = ") and not line.startswith(b" = =") and line.endswith(b" = \n")
