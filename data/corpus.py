"""Turn files into documents: which files are read, in which order, and the split of each document.

All text is UTF-8. A document is a row of a table or of JSON, a part of a text between
<|endoftext|>, or any other file.
"""

import bz2
import codecs
import csv
import fnmatch
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import sysconfig
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import UserError, print_line
from data.tokenizers import END_OF_TEXT

NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
NOT_PYTHON |= {"encodings", "pydoc_data"}  # generated tables, with half of all duplicated text
ROW_FORMATS = (".jsonl", ".ndjson", ".csv", ".parquet")
OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MAX_UNREADABLE = 0.1  # the fraction of the text in a folder that may be left out
# Bytes read at once
BLOCK = 1 << 18
# The bytes that complete a UTF-8 character, or a number, that would be cut
CHARACTER = bytes(range(0x80, 0xC0))
NUMBER = b"0123456789"
# Text can be cut between a visible character and whitespace: no GPT-2 token spans the two
SAFE_CUT = re.compile(rb"(?s).*[!-~](?=\s)")

# An open file; packed ones are unpacked when read
Stream = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
# Of a document: its split, "train" or "val", True if the document starts with the piece, the bytes
Piece = tuple[str, bool, bytes]


class TextFile(NamedTuple):
    """A file, with the hash (64 bits) and the size in bytes of each of its documents."""

    path: Path
    hashes: array
    sizes: array


class Unreadable(UserError):
    """A file that cannot be read. Found inside a folder, it is skipped."""

    def __init__(self, path: Path, found: str, advice: str, is_text: bool = False):
        super().__init__(f"{path} {found}; {advice}")
        self.found = found
        self.text_size = path.stat().st_size if is_text else 0


# -----------------------------------------------------------------------------
# Which files, in which order, and the split of their documents


def files_under(folder: Path, is_unwanted: Callable[[str], bool]) -> list[Path]:
    """List the files in a folder and its subfolders, except those with unwanted names."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unwanted(name)]
        # Links to folders, which are not followed, are listed to be reported
        names += [name for name in folders if os.path.islink(os.path.join(root, name))]
        found += [Path(root, name) for name in names if not is_unwanted(name)]
    return found


def python_files() -> list[TextFile]:
    """Measure the Python files of this Python's standard library, without tests and tables."""
    paths = files_under(Path(sysconfig.get_path("stdlib")), NOT_PYTHON.__contains__)
    return sort_by_hash(measure(path, ()) for path in paths if path.suffix == ".py")


def sort_by_hash(files: Iterable[TextFile]) -> list[TextFile]:
    """Sort files by the hashes of their documents.

    The first tokens of a split are then a fair sample of it.
    """
    return sorted(files, key=lambda file: file.hashes)


def find_files(arguments: Sequence[str | Path], include: Sequence[str]) -> list[Path]:
    """List the files that arguments (files, folders) stand for. Raises UserError.

    Files inside folders are left out if they are hidden, made by prepare.py, or match no pattern
    of `include`.
    """
    paths: dict[str, Path] = {}
    for argument in map(Path, arguments):
        found = [argument]
        if argument.is_dir():
            found = files_under(argument, lambda name: name.startswith("."))
            found = [path for path in found if is_included(path, include)]
        elif not os.path.lexists(argument):
            raise UserError(f"there is no file or folder {argument}; check the path")
        paths |= {os.path.abspath(path): path for path in found}
    return [*paths.values()]


def is_included(path: Path, include: Sequence[str]) -> bool:
    """Return True for a file inside a folder that is read."""
    if (path.parent / "train_000000.bin").exists():
        return False
    name = path.name.lower()
    matches = [fnmatch.fnmatchcase(name, pattern.lower()) for pattern in include]
    return any(matches) or not include


def find_texts(
    arguments: Sequence[str | Path], include: Sequence[str], keys: Sequence[str]
) -> list[TextFile]:
    """Find and measure the files that arguments stand for.

    Unreadable files inside folders are skipped and listed. Raises Unreadable for one that was
    given, and UserError if no text is left, or less than 1 - MAX_UNREADABLE of it.
    """
    given = set(map(Path, arguments))
    files = []
    skipped = []
    n_skipped_bytes = 0
    for path in find_files(arguments, include):
        try:
            files.append(measure(path, keys))
        except Unreadable as error:
            if path in given:
                raise
            skipped.append(f"{path} ({error.found})")
            n_skipped_bytes += error.text_size
    n_bytes = total_size(files)
    if skipped:
        share = n_skipped_bytes / max(1, n_skipped_bytes + n_bytes)
        examples = ", ".join(sorted(skipped)[:5])
        found = f"{len(skipped):,} files, with {share:.1%} of the text, cannot be read: {examples}"
        if share > MAX_UNREADABLE:
            raise UserError(f"{found}; convert or remove them, or choose others with --include")
        print_line(f"skipped {found}")
    if not n_bytes:
        raise UserError(
            f"there is no text in {[*map(str, arguments)]}; give PATHs of readable files or "
            "folders, or a different --include"
        )
    return sort_by_hash(files)


def measure(path: Path, keys: Sequence[str]) -> TextFile:
    """Read a file for the hashes and sizes of its documents. Raises Unreadable."""
    hashes = array("Q")
    sizes = array("Q")
    digest = hashlib.sha256()
    for starts_document, block in read_blocks(path, keys):
        if starts_document:
            digest = hashlib.sha256()
            hashes.append(0)
            sizes.append(0)
        digest.update(block)
        hashes[-1] = int.from_bytes(digest.digest()[:8])
        sizes[-1] += len(block)
    return TextFile(path, hashes, sizes)


def total_size(files: Iterable[TextFile]) -> int:
    """Add up the bytes of all documents."""
    return sum(sum(file.sizes) for file in files)


def describe_texts(files: Sequence[TextFile]) -> str:
    """Return the number of files, and a hash of their contents."""
    digest = hashlib.sha256(b"".join(file.hashes.tobytes() for file in files))
    return f"{len(files)} files, hash {digest.hexdigest()[:16]}"


def check_disjoint(files: Iterable[TextFile], val_files: Iterable[TextFile]) -> None:
    """Raise UserError if a text is among the files for training and those for validation."""
    paths = {file.hashes.tobytes(): file.path for file in files if file.hashes}
    for file in val_files:
        path = paths.get(file.hashes.tobytes())
        if path:
            raise UserError(f"{path} is given for training and as --val ({file.path}); remove one")


def choose_train_sizes(files: Sequence[TextFile], val_fraction: float) -> list[int]:
    """Choose how many bytes of each document are for training; the others are for validation.

    Documents are for validation in the order of their hashes, equal ones together, until their
    bytes reach val_fraction. Where they would be more than twice as much, or all, the document that
    reaches it is cut: its end is for validation.
    """
    hashes = np.concatenate([file.hashes for file in files])
    sizes = np.concatenate([file.sizes for file in files])
    distinct, index = np.unique(hashes, return_inverse=True)
    n_bytes = np.bincount(index, weights=sizes)
    ends = np.cumsum(n_bytes)
    wanted = val_fraction * ends[-1]
    reaching = np.searchsorted(ends, wanted)
    train_sizes = sizes * (index > reaching)
    if ends[reaching] > 2 * wanted or reaching == len(distinct) - 1:
        is_cut = index == reaching
        train_sizes[is_cut] = sizes[is_cut] * ((ends[reaching] - wanted) / n_bytes[reaching])
    return train_sizes.tolist()


# -----------------------------------------------------------------------------
# Documents, in blocks of bytes


def file_format(path: Path) -> str:
    """Return the suffix of a file's name in lower case, without .gz and the like: ".csv"."""
    name = Path(path.name.lower())
    if name.suffix in OPEN:
        name = name.with_suffix("")
    return name.suffix


def open_file(path: Path) -> Stream:
    """Open a file as a binary stream, unpack it, skip a byte order mark. Raises Unreadable."""
    # A pipe cannot be read twice, and opening one may block forever
    if not path.is_file():
        found = "is a link to a folder or to nothing, a pipe or a device"
        raise Unreadable(path, found, "give a file or folder")
    suffix = path.suffix.lower()
    if suffix in (".zst", ".zip"):
        raise Unreadable(path, f"is packed as {suffix}", "unpack it", is_text=True)
    stream = OPEN.get(suffix, open)(path, "rb")
    if stream.read(3) != codecs.BOM_UTF8:
        stream.seek(0)
    return stream


def read_blocks(path: Path, keys: Sequence[str]) -> Iterator[tuple[bool, bytes]]:
    """Yield the documents of a file that are not empty, in blocks.

    Of each block, yields True if a document starts with it, and its bytes.
    keys: of the texts in a row, which are joined by newlines.
    Raises UserError, with the position, for a file that cannot be read.
    """
    try:
        with open_file(path) as stream:
            if has_rows(stream, path, keys):
                for text in read_rows(stream, path, keys):
                    if text:
                        yield True, text
            else:
                yield from split_text(read_text(stream, path))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error  # of a damaged .gz
        found = f"cannot be read ({reason})"
        raise Unreadable(path, found, "repair or remove it", is_text=True) from None


def read_text(stream: Stream, path: Path) -> Iterator[bytes]:
    """Yield the bytes of a text. Raises Unreadable if they are not UTF-8 or contain a zero."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    block = None
    while block != b"":
        block = stream.read(BLOCK)
        raw = block
        bad = block.find(b"\0")
        is_text = True
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            if bad >= 0:  # images and the like also have zeros
                is_text = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            else:
                raw = error.object
                bad = error.start
        if bad >= 0:
            line += raw.count(b"\n", 0, bad)
            found = f"is not UTF-8 text: byte 0x{raw[bad]:02x} in line {line:,}"
            raise Unreadable(path, found, "convert or remove it", is_text)
        line += block.count(b"\n")
        yield block


def split_text(blocks: Iterable[bytes]) -> Iterator[tuple[bool, bytes]]:
    """Split a text into the documents between <|endoftext|>, without the line breaks around it."""
    starts_document = True
    line_breaks = b""  # to strip, once there has been an <|endoftext|>
    rest = b""
    for block in blocks:
        *ends, rest = (rest + block).split(END_OF_TEXT)
        texts = [end.rstrip(b"\r\n") for end in ends]
        # What may belong to the next <|endoftext|> waits for the next block
        body = rest[: -len(END_OF_TEXT)].rstrip(b"\r\n")
        if not block:
            body = rest.rstrip(line_breaks)
        rest = rest[len(body) :]
        for number, text in enumerate([*texts, body]):
            if number > 0:
                starts_document = True
                line_breaks = b"\r\n"
            if starts_document:
                text = text.lstrip(line_breaks)
            if text:
                yield starts_document, text
                starts_document = False


# -----------------------------------------------------------------------------
# Documents, split and in pieces


def split_documents(
    paths: Iterable[Path],
    keys: Sequence[str],
    train_sizes: Iterable[int],
    unit: bytes = CHARACTER,
) -> Iterator[Piece]:
    """Yield the blocks of all documents with their splits.

    keys: of the texts in a row.
    train_sizes: of each document, the bytes for training; the others are for validation.
    unit: CHARACTER or NUMBER: none is cut between the splits.
    """
    sizes = iter(train_sizes)
    left = 0  # bytes of a document that are left for training
    split = "train"
    for path in paths:
        for starts_document, block in read_blocks(path, keys):
            if starts_document:
                left = next(sizes)
                split = "train" if left else "val"
            if split == "train":
                cut = len(block)
                if left < cut:
                    cut -= len(block[left:].lstrip(unit))
                yield split, starts_document, block[:cut]
                left = max(0, left - cut)
                block = block[cut:]
                starts_document = True
            if block:
                split = "val"
                yield split, starts_document, block


def cut_pieces(blocks: Iterable[Piece]) -> Iterator[Piece]:
    """Join the blocks of each document, and cut long ones where no GPT-2 token is cut.

    Pieces have less than 10^6 bytes, from which on tiktoken fails on long runs of whitespace.
    """
    piece_split = ""
    starts_piece = True
    rest = b""
    for split, starts_document, block in itertools.chain(blocks, [("", True, b"")]):
        if starts_document:
            if rest:
                yield piece_split, starts_piece, rest
            piece_split = split
            starts_piece = True
            rest = b""
        rest += block
        while cut := find_cut(rest):
            yield piece_split, starts_piece, rest[:cut]
            starts_piece = False
            rest = rest[cut:]


def find_cut(raw: bytes) -> int:
    """Return a position where a text of at least BLOCK bytes can be cut, or 0 if there is none."""
    if len(raw) < BLOCK:
        return 0
    raw = raw[: 3 * BLOCK]
    safe = SAFE_CUT.match(raw)
    if safe:
        return safe.end()
    # Where no position is safe, bound the memory: cut before the last character
    if len(raw) < 3 * BLOCK:
        return 0
    return len(raw.rstrip(CHARACTER)) - 1


# -----------------------------------------------------------------------------
# Rows of JSON, .csv and Parquet files


def has_rows(stream: Stream, path: Path, keys: Sequence[str]) -> bool:
    """Return True if a file has rows. A .json file may be plain text, such as settings."""
    if file_format(path) == ".json":
        return is_json_array(stream) or begins_with_row(stream, keys)
    return file_format(path) in ROW_FORMATS


def is_json_array(stream: Stream) -> bool:
    return stream.peek(1).lstrip().startswith(b"[")


def begins_with_row(stream: Stream, keys: Sequence[str]) -> bool:
    """Return True if the first line is a JSON object with these keys."""
    start = stream.tell()
    line = stream.readline(BLOCK)
    stream.seek(start)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and {*keys} <= row.keys()


def read_rows(stream: Stream, path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the texts of a file's rows as bytes, split at <|endoftext|>. Raises UserError."""
    number = 0  # of rows that have been read
    row = {}
    try:
        if file_format(path) == ".parquet":
            rows = parquet_rows(stream, path, keys)
        elif file_format(path) == ".csv":
            for _ in read_text(stream, path):  # finds the line of a byte that is not UTF-8
                pass
            stream.seek(0)
            csv.field_size_limit(1 << 26)
            text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
            # Surplus cells turn the first text into a list, which is an error below
            rows = csv.DictReader(text, restkey=keys[0], strict=True)
        elif is_json_array(stream):
            rows = json.load(stream)
        else:
            rows = (json.loads(line) for line in stream if line.strip())
        for row in rows:
            cells = [cell_text(row[key]) for key in keys]
            number += 1
            if any(cells):
                raw = "\n".join(cells).replace("\0", "").encode("utf-8", errors="replace")
                yield from raw.split(END_OF_TEXT)
    except KeyError as error:
        found = f"has no {error} in row {number + 1:,}, which has {', '.join(map(repr, row))}"
        raise Unreadable(path, found, "give --text_key", is_text=True) from None
    except (ValueError, TypeError, RecursionError, csv.Error) as error:
        expected = ", ".join(f'"{key}": TEXT' for key in keys)
        reason = f"{type(error).__name__}: {error}"
        found = f"after row {number:,}: expected {{{expected}}} ({reason})"
        raise Unreadable(path, found, "correct it", is_text=True) from None


def cell_text(cell: str | bytes | None) -> str:
    """Return the text of a cell, "" if it is empty. Raises TypeError, UnicodeDecodeError."""
    if isinstance(cell, bytes):  # as older programs write text to Parquet
        cell = cell.decode()
    return "" if cell is None else cell + ""


def parquet_rows(stream: Stream, path: Path, keys: Sequence[str]) -> Iterator[dict]:
    """Yield the rows of a Parquet file, of which only a few are in memory at a time."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow; run `pip install pyarrow`") from None
    file = ParquetFile(stream)
    columns = [*keys] if {*keys} <= {*file.schema_arrow.names} else None
    for batch in file.iter_batches(batch_size=256, columns=columns):
        yield from batch.to_pylist()


# -----------------------------------------------------------------------------
# WikiText

TITLE = re.compile(rb" = (?!=).* = \n")  # a heading of the first level


def read_wikitext(archive: Path) -> Iterator[Piece]:
    """Yield the lines of a WikiText archive in its own splits. Each article is a document."""
    with zipfile.ZipFile(archive) as members:
        for split, member in (("train", "wiki.train.raw"), ("val", "wiki.valid.raw")):
            # Archives differ in the name of their folder
            (name,) = [name for name in members.namelist() if name.endswith(member)]
            starts_document = True
            has_text = False
            previous = b""
            for line in members.open(name):
                # A heading after a blank line starts the next article
                if TITLE.fullmatch(line) and has_text and not previous.strip():
                    starts_document = True
                yield split, starts_document, line
                starts_document = False
                has_text = has_text or bool(line.strip())
                previous = line
