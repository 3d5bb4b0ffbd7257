"""Files to documents: which files are read, in which order, and in which split each document is.

All text is UTF-8. Documents are pieces, (split, whether a document starts here, bytes): of a file, or of a row of one.
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

ORDER = "SHA-256 of the name"  # of several files, so that the first tokens of a split are a fair sample of it
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
CONTINUATION = bytes(range(0x80, 0xC0))  # the second to fourth bytes of characters
PIECE = (
    1 << 18
)  # bytes read at once; from pieces of 10^6 bytes on, tiktoken fails on long runs of whitespace
# GPT-2 never merges whitespace with a visible character before it. Surely visible: ASCII, and UTF-8 but the whitespace
# U+0085, U+00A0, U+1680, U+2000 to U+205F, U+3000.
SAFE_CUT = re.compile(
    rb"(?s).*(?:[!-~]|[\xc3-\xe0\xe4-\xf4][\x80-\xbf]+|\xe3[\x80-\xbf][\x81-\xbf])(?=[ \t\n\r])"
)


def _hash(name):
    return int(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).hexdigest(), 16)


def split_of(name, val_fraction):
    """The split, "train" or "val", of the document with this name: the same on every machine and in every run."""
    return "val" if _hash(name) < val_fraction * 2**256 else "train"


def by_hash(files):
    """Files in the order of the hashes of their names, and those of one name in the order of their paths."""
    return sorted(files, key=lambda file: (_hash(file[0]), file[1].as_posix()))


def _files_under(folder, unwanted):
    """Files in a folder, without those that have an unwanted name or lie in a folder that has."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not unwanted(name)]
        found += [Path(root, name) for name in names if not unwanted(name)]
    return [path for path in found if path.is_file()]


def python_files():
    """The Python files of the standard library that runs this, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = _files_under(root, NOT_PYTHON.__contains__)
    return by_hash(
        (path.relative_to(root).as_posix(), path) for path in paths if path.suffix == ".py"
    )


def given_files(arguments, include, say):
    """The files that the arguments match, without duplicates and hidden files.

    Of those in folders, only names that match a pattern of `include`, if there are any. Skips what is not text, unless
    an argument names it, and says so.
    """
    names, skipped = {}, set()
    for argument in map(os.path.abspath, arguments):
        matches = (
            [argument] if os.path.exists(argument) else sorted(glob.glob(argument, recursive=True))
        )
        if not matches:
            raise UserError(
                f"{argument} is not a file or folder, nor a glob that matches any: check the path"
            )
        for match in map(Path, matches):
            paths = [match]
            if match.is_dir():
                paths = _files_under(match, lambda name: name.startswith("."))
                paths = [
                    p
                    for p in paths
                    if any(fnmatch.fnmatchcase(p.name, like) for like in include or ["*"])
                ]
            for path in paths:
                if (
                    str(path) == argument
                    or is_parquet(path)
                    or argument.endswith(".npy")
                    or _begins_as_text(path)
                ):
                    names.setdefault(path, path.relative_to(match.parent).as_posix())
                else:
                    skipped.add(path.name)
    if skipped:
        say(
            f"skipped {len(skipped):,} files that are not text in UTF-8: {', '.join(sorted(skipped)[:10])}"
        )
    if not names:
        raise UserError(
            f"there is no text in {[*map(str, arguments)]}: give PATHs of files, folders or globs"
        )
    return by_hash((name, path) for path, name in names.items())


def is_parquet(path):
    return path.name.lower().endswith(".parquet")


def _begins_as_text(path):
    try:
        with open_file(path) as stream:
            io.TextIOWrapper(stream, "utf-8").read(PIECE)
    except (UnicodeDecodeError, *DAMAGED):
        return False
    return True


def open_file(path):
    """A binary stream of a file, unpacked if its name ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def document(split, stream, path, size=sys.maxsize):
    """The next `size` bytes of a binary stream, in pieces whose GPT-2 tokens, joined, are those of the whole.

    Raises UserError, which says the place in the file, where they are not UTF-8.
    """
    rest, block, begin = b"", True, stream.tell()
    first = begin
    while block:
        block = stream.read(min(size, PIECE))
        size -= len(block)
        rest += block
        safe = SAFE_CUT.match(rest)
        cut = len(rest) if not block else safe.end() if safe else 0
        if (
            not cut and len(rest) >= 3 * PIECE
        ):  # no safe place: before the last character, to bound the memory
            cut = max(0, len(rest.rstrip(CONTINUATION)) - 1)
        try:
            rest[:cut].decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 text at byte {begin + error.start:,}: convert or remove it"
            ) from None
        if cut:
            yield split, begin == first, rest[:cut]
        rest, begin = rest[cut:], begin + cut


def read_files(files, val_fraction, keys):
    """The documents of files: one per row, named `<name>:<number>`; else one per file, but of a single file two.

    val_fraction: 0 or 1 puts all into one split.
    keys: of the texts of a row, joined by newlines. Raises UserError, which says the place, for what cannot be read.
    """
    for name, path in files:
        try:
            with open_file(path) as stream:
                if path.suffix == ".npy":
                    alone = len(files) == 1
                    yield from _integers(
                        path, 1 - val_fraction if alone else split_of(name, val_fraction) == "train"
                    )
                elif is_parquet(path) or path.name.lower().removesuffix(".gz").endswith(
                    (".jsonl", ".csv")
                ):
                    for number, text in _texts_of_rows(stream, path, keys):
                        raw = io.BytesIO(text.encode("utf-8", errors="replace"))
                        yield from document(split_of(f"{name}:{number}", val_fraction), raw, path)
                elif len(files) > 1:
                    yield from document(split_of(name, val_fraction), stream, path)
                else:
                    cut = stream.seek(int(stream.seek(0, os.SEEK_END) * (1 - val_fraction)))
                    after = stream.read(3)
                    cut += len(after) - len(after.lstrip(CONTINUATION))
                    stream.seek(0)
                    yield from document("train", stream, path, cut)
                    yield from document("val", stream, path)
        except DAMAGED as error:
            raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again") from error


def _integers(path, train_fraction):
    """The integers of a .npy file, cut in two documents; their pieces are arrays."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{tokens.dtype} of shape {tokens.shape}")
    except ValueError as error:
        raise UserError(
            f"{path}: expected a .npy file of integers, 1-D ({error}); save it with numpy.save"
        ) from None
    cut = int(train_fraction * len(tokens))
    for split, part in (("train", tokens[:cut]), ("val", tokens[cut:])):
        for begin in range(0, len(part), PIECE):
            yield split, not begin, part[begin : begin + PIECE]


def _rows_of_parquet(stream, path, keys):
    """The rows of a Parquet file, with these columns only, a few in memory at a time; nothing in a cell is ""."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: run `pip install pyarrow`") from None
    file = ParquetFile(stream)
    for key in keys:
        if key not in file.schema_arrow.names:
            raise KeyError(f"{key}; its columns are {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=256, columns=[*keys]):
        yield from (
            {key: "" if cell is None else cell for key, cell in row.items()}
            for row in batch.to_pylist()
        )


def _texts_of_rows(stream, path, keys):
    """(number, text) of the lines of a .jsonl file, "" of blank ones, or of the rows of a .csv or Parquet file."""
    rows = (json.loads(line) if line.strip() else None for line in stream)
    if path.name.lower().endswith((".csv", ".csv.gz")):
        csv.field_size_limit(1 << 26)
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.DictReader(
            text, restkey=keys[0], strict=True
        )  # more cells than columns: a list instead of a text
    if is_parquet(path):
        rows = _rows_of_parquet(stream, path, keys)
    texts, number = (
        ("" if row is None else "\n".join([row[key] for key in keys]) for row in rows),
        0,
    )
    try:
        for number, text in enumerate(texts, start=1):
            yield number, text
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        expected = ", ".join(f'"{key}": TEXT' for key in keys)
        found = (
            f"{path}, after row {number}: expected {{{expected}}} ({type(error).__name__}: {error})"
        )
        raise UserError(f"{found}; correct it, or give --text_key") from None


def read_wikitext(archive):
    """The archive's own splits, a document for each article."""
    with zipfile.ZipFile(archive) as members:
        for split, member in (("train", "wiki.train.raw"), ("val", "wiki.valid.raw")):
            (name,) = [name for name in members.namelist() if name.endswith(member)]
            article = bytearray()
            for line in members.open(name):
                heading = (
                    line.startswith(b" = ")
                    and not line.startswith(b" = =")
                    and line.endswith(b" = \n")
                )
                if (
                    heading and article.strip() and not article.rsplit(b"\n", 2)[-2].strip()
                ):  # after a blank line
                    yield from document(split, io.BytesIO(article), archive)
                    article = bytearray()
                article += line
            yield from document(split, io.BytesIO(article), archive)
