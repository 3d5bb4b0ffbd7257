"""Turn files into documents: which files are read, in which order, and the split of each document.

All text is UTF-8. A document is a file or a part of one. It is read in pieces.
"""

import codecs
import csv
import fnmatch
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError, print_line
from common.files import sha256_of_file
from data.tokenizers import END_OF_TEXT

NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
ROW_FORMATS = (".jsonl", ".ndjson", ".csv", ".parquet")
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
# What choose_split returns for files that are used whole, for training or for validation
ALL_TRAIN = (0, 0, -1)
ALL_VAL = (1, 0, -1)
# Bytes read at once. In pieces of 10^6 bytes or more, tiktoken fails on long runs of whitespace.
PIECE = 1 << 18
# The second to fourth bytes of UTF-8 characters
CONTINUATION = bytes(range(0x80, 0xC0))
# Text can be cut between a visible character and whitespace: no GPT-2 token spans the two
SAFE_CUT = re.compile(rb"(?s).*[!-~](?=\s)")

# Of a document: its split, True if the document starts with the piece, and the bytes
Piece = tuple[str, bool, bytes]
# The rule for splitting files, as choose_split returns it
Rule = tuple[float, int, float]
# A file's name and path, and perhaps its SHA-256
File = tuple[str, Path] | tuple[str, Path, str]


class Unreadable(UserError):
    """A file that cannot be read. Found inside a folder, it is skipped."""

    def __init__(self, path: Path, found: str, advice: str):
        super().__init__(f"{path} {found}; {advice}")
        self.found = found


# -----------------------------------------------------------------------------
# Which files, in which order and split


def hash_bytes(raw: bytes) -> int:
    """Return the SHA-256 of bytes, an int below 2**256."""
    return int(hashlib.sha256(raw).hexdigest(), 16)


def name_hash(name: str) -> int:
    """Return the SHA-256 of a file's name, an int below 2**256."""
    return hash_bytes(name.encode("utf-8", errors="surrogateescape"))


def sort_by_hash(files: Iterable[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Sort files by the hashes of their names, then by their paths.

    The first tokens of a split are then a fair sample of it.
    """
    return sorted(files, key=lambda file: (name_hash(file[0]), file[1].as_posix()))


def files_under(folder: Path, is_unwanted: Callable[[str], bool]) -> list[Path]:
    """Return the files in a folder and its subfolders, except those with unwanted names."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unwanted(name)]
        found += [Path(root, name) for name in names if not is_unwanted(name)]
    return found


def python_files() -> list[tuple[str, Path]]:
    """Return the Python files of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = files_under(root, NOT_PYTHON.__contains__)
    return sort_by_hash(
        (path.relative_to(root).as_posix(), path) for path in paths if path.suffix == ".py"
    )


def find_files(
    arguments: Iterable[str | Path], include: Sequence[str]
) -> tuple[dict[Path, str], set[Path]]:
    """Return the files that arguments (files, folders) stand for, with their names.

    Also returns the set of paths that were given directly. Files inside folders are left out if
    they are hidden, made by prepare.py, or match no pattern of `include`.
    """
    names = {}
    given = set()
    for argument in map(Path, map(os.path.abspath, arguments)):
        if argument.is_dir():
            paths = files_under(argument, lambda name: name.startswith("."))
            paths = [path for path in paths if is_included(path, include)]
        elif os.path.lexists(argument):
            paths = [argument]
            given.add(argument)
        else:
            raise UserError(f"there is no file or folder {argument}; check the path")
        for path in paths:
            names.setdefault(path, path.relative_to(argument.parent).as_posix())

    # Distinguish several files of one name by their folders
    paths_of = defaultdict(list)
    for path, name in names.items():
        paths_of[name].append(path)
    for paths in paths_of.values():
        if len(paths) > 1:
            root = os.path.commonpath(paths)
            names |= {path: path.relative_to(root).as_posix() for path in paths}
    return names, given


def is_included(path: Path, include: Sequence[str]) -> bool:
    """Return True for a file inside a folder that is read."""
    is_prepared = (path.parent / "meta.json").exists() and any(path.parent.glob("*train*.bin"))
    name = path.name.lower()
    patterns = include or ["*"]
    return not is_prepared and any(fnmatch.fnmatchcase(name, text.lower()) for text in patterns)


def find_texts(
    arguments: Sequence[str | Path], include: Sequence[str], keys: Sequence[str]
) -> list[tuple[str, Path, str]]:
    """Return the files that arguments stand for, (name, path, SHA-256), sorted by name_hash.

    Equal files get the same name, so that they are in the same split. Unreadable files inside
    folders are skipped and listed. Raises Unreadable for one that was given, and UserError if none
    is left.
    """
    names, given = find_files(arguments, include)
    files = []
    names_of = {}
    skipped = []
    for name, path in sort_by_hash((name, path) for path, name in names.items()):
        try:
            for _ in read_files([(name, path)], keys, ALL_TRAIN):
                # An error further on in a given file ends the preparation anyway
                if path in given:
                    break
            sha256 = sha256_of_file(path)
            first_name = names_of.setdefault(sha256, name)
            files.append((first_name, path, sha256))
        except Unreadable as error:
            if path in given:
                raise
            skipped.append(f"{name} ({error.found})")
    if skipped:
        examples = ", ".join(sorted(skipped)[:5])
        print_line(f"skipped {len(skipped):,} files that cannot be read as text: {examples}")
    if not files:
        raise UserError(
            f"there is no text in {list(map(str, arguments))}; give PATHs of readable files "
            "or folders"
        )
    return files


def describe_texts(files: Iterable[tuple[str, Path, str]]) -> str:
    """Return the number of files from find_texts, and a hash of their names and contents."""
    lines = [f"{name} {sha256}\n" for name, _, sha256 in files]
    digest = name_hash("".join(lines))
    return f"{len(files)} files, hash {digest >> 192:016x}"


def check_disjoint(
    files: Iterable[tuple[str, Path, str]], val_files: Iterable[tuple[str, Path, str]]
) -> None:
    """Raise UserError if a text is among the files for training and those for validation."""
    names = {sha256: name for name, path, sha256 in files if path.stat().st_size}
    for val_name, _, sha256 in val_files:
        if sha256 in names:
            raise UserError(
                f"{names[sha256]} is given for training and as --val ({val_name}); remove one"
            )


def text_size(path: Path) -> int:
    """Estimate the bytes of text in a file."""
    n_bytes = path.stat().st_size
    if path.name.lower().endswith((".parquet", ".gz")):  # compressed
        n_bytes *= 3
    return n_bytes


def total_size(files: Iterable[File]) -> int:
    """Estimate the bytes of text in files."""
    return sum(text_size(path) for _, path, *_ in files)


def choose_split(files: Sequence[File], val_fraction: float, keys: Sequence[str]) -> Rule:
    """Choose the rule for splitting files: (val_fraction, threshold, largest).

    A document is for validation if its hash is below the threshold. A file of more than `largest`
    bytes is cut in two. Both follow from val_fraction, but the threshold is moved so that each
    split has a document; if that is impossible, every document is cut.
    """
    threshold = int(val_fraction * 2**256)
    largest = val_fraction * total_size(files)
    lowest = 2**256
    highest = -1
    for digest, n_bytes, _, _ in read_documents(files, keys):
        if n_bytes > largest:
            continue
        lowest = min(lowest, digest)
        highest = max(highest, digest)
        if lowest < threshold <= highest:
            break
    # Fewer than two different documents
    if lowest >= highest:
        return val_fraction, 0, -1
    return val_fraction, max(lowest + 1, min(threshold, highest)), largest


def file_format(path: Path) -> str:
    """Return the suffix of a file's name in lower case, without .gz, such as ".csv"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_file(path: Path) -> BinaryIO:
    """Open a file as a binary stream, unpack .gz, and skip a byte order mark. Raises Unreadable."""
    # A pipe cannot be read twice, and opening one may block forever
    if not path.is_file():
        raise Unreadable(path, "is a broken link, a pipe or a device", "give a file")
    try:
        stream = gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
        raise Unreadable(path, found, "give a different file") from None
    if stream.read(3) != codecs.BOM_UTF8:
        stream.seek(0)
    return stream


# -----------------------------------------------------------------------------
# Documents, in pieces


def read_document(
    split: str, stream: BinaryIO, path: Path, size: int = sys.maxsize
) -> Iterator[Piece]:
    """Yield the next `size` bytes of a binary stream as the pieces of one document.

    The pieces have the same GPT-2 tokens as the whole. Raises Unreadable, with the path, if the
    bytes are not UTF-8 or contain a zero.
    """
    starts_document = True
    rest = b""  # read but not yielded yet
    at_end = False
    while not at_end:
        block = stream.read(min(size, PIECE))
        at_end = not block
        size -= len(block)
        rest += block
        cut = len(rest) if at_end else find_cut(rest)
        piece = rest[:cut]
        rest = rest[cut:]
        if piece:
            try:
                is_text = "\0" not in piece.decode()
            except UnicodeDecodeError:
                is_text = False
            if not is_text:
                raise Unreadable(path, "is not UTF-8 text", "convert or remove it")
            yield split, starts_document, piece
            starts_document = False


def find_cut(raw: bytes) -> int:
    """Return a position where bytes of text can be cut, or 0 if more must be read."""
    safe = SAFE_CUT.match(raw)
    if safe:
        return safe.end()
    # Where no position is safe, bound the memory: cut before the last character
    if len(raw) >= 3 * PIECE:
        return max(0, len(raw.rstrip(CONTINUATION)) - 1)
    return 0


def read_files(files: Iterable[File], keys: Sequence[str], split: Rule) -> Iterator[Piece]:
    """Yield the pieces of all documents of files.

    A row of a table or of JSON is a document, and so is each part of a text or row between
    <|endoftext|>. Any other file is one document.

    keys: of the texts in a row, which are joined by newlines.
    split: as returned by choose_split.
    Raises UserError, with the position, for a file that cannot be read.
    """
    val_fraction, threshold, largest = split
    for digest, n_bytes, path, stream in read_documents(files, keys):
        train_fraction = 1 - val_fraction
        if n_bytes <= largest:
            train_fraction = int(digest >= threshold)
        yield from read_text(stream, path, train_fraction)


def read_documents(
    files: Iterable[File], keys: Sequence[str]
) -> Iterator[tuple[int, int, Path, BinaryIO]]:
    """Yield (hash, bytes, path, binary stream) of each document that is not empty.

    For a whole file, the hash is that of its name. For a document inside a file, it is that of its
    text, and the bytes are 0.
    """
    for name, path, *_ in files:
        try:
            with open_file(path) as stream:
                texts = []
                if has_rows(stream, path):
                    texts = read_rows(stream, path, keys)
                elif has_separator(stream):
                    texts = split_text(stream)
                elif stream.peek(1):
                    yield name_hash(name), text_size(path), path, stream
                for text in texts:
                    if text:
                        yield hash_bytes(text), 0, path, io.BytesIO(text)
        except DAMAGED_GZIP as error:
            found = f"is a damaged gzip file ({error})"
            raise Unreadable(path, found, "fetch it again") from error


def has_separator(stream: BinaryIO) -> bool:
    """Return True if a text file contains <|endoftext|>."""
    begin = stream.tell()
    end = b""
    is_found = False
    block = stream.read(PIECE)
    while block and not is_found and b"\0" not in block:  # a zero is not in a text
        is_found = END_OF_TEXT in end + block
        end = block[-len(END_OF_TEXT) :]
        block = stream.read(PIECE)
    stream.seek(begin)
    return is_found


def split_text(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the documents of a text as bytes, without the line breaks around <|endoftext|>."""
    parts = []
    for line in stream:
        *ends, rest = line.split(END_OF_TEXT)
        for end in ends:
            yield b"".join([*parts, end]).strip(b"\r\n")
            parts = []
        parts.append(rest)
    yield b"".join(parts).strip(b"\r\n")


def read_text(stream: BinaryIO, path: Path, train_fraction: float) -> Iterator[Piece]:
    """Yield the pieces of a text, one document per split, cut between characters."""
    begin = stream.tell()
    n_bytes = stream.seek(0, os.SEEK_END) - begin
    size = int(n_bytes * train_fraction)
    # Complete a character that is cut: at most three more bytes belong to it
    stream.seek(begin + size)
    following = stream.read(3)
    size += len(following) - len(following.lstrip(CONTINUATION))
    stream.seek(begin)
    yield from read_document("train", stream, path, size)
    yield from read_document("val", stream, path)


# -----------------------------------------------------------------------------
# Rows of JSON, .csv and Parquet files


def has_rows(stream: BinaryIO, path: Path) -> bool:
    """Return True if a file has rows. A .json file may be plain text, such as settings."""
    if file_format(path) == ".json":
        return stream.peek(PIECE).lstrip().startswith(b"[")
    return file_format(path) in ROW_FORMATS


def read_rows(stream: BinaryIO, path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the texts of a file's rows as bytes, split at <|endoftext|>."""
    if file_format(path) == ".parquet":
        rows = parquet_rows(stream, path, keys)
    elif file_format(path) == ".csv":
        csv.field_size_limit(1 << 26)
        text = io.TextIOWrapper(stream, "utf-8", newline="")
        # Surplus cells turn the first text into a list, which is an error below
        rows = csv.DictReader(text, restkey=keys[0], strict=True)
    else:
        rows = json_rows(stream)
    number = 0
    try:
        for row in rows:
            text = ""
            if row is not None:
                text = "\n".join([row[key] for key in keys])
            number += 1
            raw = text.replace("\0", "").encode("utf-8", errors="replace")
            yield from raw.split(END_OF_TEXT)
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        expected = ", ".join(f'"{key}": TEXT' for key in keys)
        reason = f"{type(error).__name__}: {error}"
        found = f"after row {number}: expected {{{expected}}} ({reason})"
        raise Unreadable(path, found, "correct it, or give --text_key") from None


def json_rows(stream: BinaryIO) -> Iterator[dict | None]:
    """Yield the objects of a JSON array or of JSON lines, None for blank lines."""
    begin = stream.tell()
    is_array = stream.read(PIECE).lstrip().startswith(b"[")
    stream.seek(begin)
    if is_array:
        yield from json.load(stream)
    for line in stream:
        yield json.loads(line) if line.strip() else None


def parquet_rows(stream: BinaryIO, path: Path, keys: Sequence[str]) -> Iterator[dict]:
    """Yield these columns of a Parquet file row by row, with "" for empty cells.

    Only a few rows are in memory at a time.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow; run `pip install pyarrow`") from None
    file = ParquetFile(stream)
    for batch in file.iter_batches(batch_size=256, columns=[*keys]):
        for row in batch.to_pylist():
            yield {key: "" if cell is None else cell for key, cell in row.items()}


# -----------------------------------------------------------------------------
# WikiText


def read_wikitext(archive: Path) -> Iterator[Piece]:
    """Yield the pieces of a WikiText archive in its own splits. Each article is a document."""
    with zipfile.ZipFile(archive) as members:
        for split, member in (("train", "wiki.train.raw"), ("val", "wiki.valid.raw")):
            # Archives differ in the name of their folder
            (name,) = [name for name in members.namelist() if name.endswith(member)]
            article = bytearray()
            previous = b""
            for line in members.open(name):
                # A heading after a blank line starts the next article
                if is_title(line) and article.strip() and not previous.strip():
                    yield from read_document(split, io.BytesIO(article), archive)
                    article = bytearray()
                article += line
                previous = line
            yield from read_document(split, io.BytesIO(article), archive)


def is_title(line: bytes) -> bool:
    """Return True for a heading of the first level, such as ` = Title = `."""
    return line.startswith(b" = ") and not line.startswith(b" = =") and line.endswith(b" = \n")
