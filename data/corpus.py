"""Files to documents: which files are read, in which order, and to which split each document goes.

All text is UTF-8. Documents, which are files or rows of files, are read in pieces:
(split, whether a document starts with this piece, bytes).
"""

import codecs
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
from collections import defaultdict
from pathlib import Path

import numpy as np

from common.errors import UserError, print_line
from common.files import sha256_of_file
from data.tokenizers import END_OF_TEXT

# The order of several files: it makes the first tokens of a split a fair sample of the split
ORDER = "SHA-256 of the name"
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
ROW_FORMATS = (".jsonl", ".ndjson", ".csv", ".parquet")
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


class Unreadable(UserError):
    """Says what was found in a file that cannot be read; where nobody named it, it is skipped."""

    def __init__(self, path, found, advice):
        super().__init__(f"{path} {found}: {advice}")
        self.found = found


# -----------------------------------------------------------------------------
# Which files, in which order and split


def hash_bytes(raw):
    """Return the SHA-256 of bytes, an int below 2**256."""
    return int(hashlib.sha256(raw).hexdigest(), 16)


def name_hash(name):
    """Return the SHA-256 of a file's name, an int below 2**256."""
    return hash_bytes(name.encode("utf-8", errors="surrogateescape"))


def sort_by_hash(files):
    """Sort files, (name, path), by the hashes of their names, then by their paths."""
    return sorted(files, key=lambda file: (name_hash(file[0]), file[1].as_posix()))


def _files_under(folder, is_unwanted):
    """Return what is in a folder and its subfolders, without what has an unwanted name."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unwanted(name)]
        found += [Path(root, name) for name in names if not is_unwanted(name)]
    return found


def python_files():
    """Return the Python files of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = _files_under(root, NOT_PYTHON.__contains__)
    return sort_by_hash(
        (path.relative_to(root).as_posix(), path)
        for path in paths
        if path.suffix == ".py" and path.is_file()
    )


def find_files(arguments, include):
    """Return the files that the arguments (files, folders, globs) stand for: {path: name}.

    Hidden files in folders are left out, and so are what prepare.py made, and files that match no
    pattern of `include`, if it has any.
    """
    names = {}
    for argument in map(os.path.abspath, arguments):
        for name, path in _matching_files(argument, include):
            if str(path) == argument or not _is_prepared_data(path.parent):
                names.setdefault(path, name)
    if not names:
        raise UserError(
            f"there is no text in {list(map(str, arguments))}: give PATHs of files, folders or "
            "globs"
        )

    # Several files of one name are told apart by their folders
    paths_of = defaultdict(list)
    for path, name in names.items():
        paths_of[name].append(path)
    for paths in paths_of.values():
        if len(paths) > 1:
            root = os.path.commonpath(paths)
            names |= {path: path.relative_to(root).as_posix() for path in paths}
    return names


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
    name = name.lower()
    return not include or any(fnmatch.fnmatchcase(name, pattern.lower()) for pattern in include)


def _is_prepared_data(folder):
    return Path(folder, "meta.json").exists() and any(folder.glob("*train*.bin"))


def find_texts(arguments, include, keys, has_integers):
    """Return the files that the arguments stand for: (name, path, SHA-256), sorted by name_hash.

    Equal ones get the same name, so that they are in the same split. Those that cannot be read
    are skipped and listed. Raises Unreadable for one that is itself among the arguments.
    """
    names = find_files(arguments, include)
    named = set(map(os.path.abspath, arguments))
    files = []
    names_of = {}
    skipped = []
    for name, path in sort_by_hash((name, path) for path, name in names.items()):
        is_named = str(path) in named
        try:
            if file_format(path) == ".npy" and not (is_named or has_integers):
                raise Unreadable(path, "holds numbers", "name it")
            for _ in read_files([(name, path)], 0, keys):
                # An error further on in it ends the preparation anyway
                if is_named:
                    break
            sha256 = sha256_of_file(path)
            first_name = names_of.setdefault(sha256, name)
            files.append((first_name, path, sha256))
        except Unreadable as error:
            if is_named:
                raise
            skipped.append(f"{name} ({error.found})")
    if skipped:
        examples = ", ".join(sorted(skipped)[:5])
        print_line(f"skipped {len(skipped):,} files that cannot be read as text: {examples}")
    if not files:
        raise UserError(
            f"there is no text in {list(map(str, arguments))}: none of the files can be read"
        )
    return files


def text_size(path):
    """Return about how many bytes of text a file holds."""
    n_bytes = path.stat().st_size
    if path.name.lower().endswith((".parquet", ".gz")):  # compressed
        n_bytes *= 3
    return n_bytes


def total_size(files):
    """Return about how many bytes of text files, (name, path, ...), hold."""
    return sum(text_size(path) for _, path, *_ in files)


def choose_split(files, val_fraction, keys):
    """Return the last two arguments of read_files, threshold and largest.

    So much of all hashes is below the threshold, and so much of all text is `largest`, but such
    that each split has a document.
    """
    threshold = int(val_fraction * 2**256)
    largest = val_fraction * total_size(files)
    lowest = 2**256
    highest = -1
    for digest, n_bytes, _, _ in _read_documents(files, keys):
        if n_bytes > largest:
            continue
        lowest = min(lowest, digest)
        highest = max(highest, digest)
        if lowest < threshold <= highest:
            break
    # Fewer than two different documents would be whole
    if lowest >= highest:
        return 0, -1
    return max(lowest + 1, min(threshold, highest)), largest


def file_format(path):
    """Return the last part of a file's name, without .gz and in lower case, such as ".csv"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_file(path):
    """Open a file as a binary stream, after its byte order mark; unpacked if its name ends in .gz.

    Raises Unreadable.
    """
    # To read a pipe twice is not possible, and to open one may take forever
    if not path.is_file():
        found = "is a pipe or a device" if path.exists() else "is a broken link"
        raise Unreadable(path, found, "give a file, which can be read several times")
    try:
        stream = gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")
    except OSError as error:
        raise Unreadable(path, f"cannot be read ({error.strerror})", "give another") from None
    if stream.read(3) != codecs.BOM_UTF8:
        stream.seek(0)
    return stream


# -----------------------------------------------------------------------------
# Documents, in pieces


def read_document(split, stream, path, size=sys.maxsize):
    """Yield the next `size` bytes of a binary stream as the pieces of one document.

    The GPT-2 tokens of the pieces, joined, are those of the whole. Raises Unreadable, which names
    the place in the file `path`, if the bytes are not UTF-8 or hold a zero.
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
        _check_text(rest[:cut], begin, path)
        if cut:
            yield split, begin == first, rest[:cut]
        rest = rest[cut:]
        begin += cut


def _check_text(raw, begin, path):
    """Raise Unreadable if bytes, from `begin` on in the file `path`, are not UTF-8 text."""
    try:
        raw.decode()
        wrong = raw.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        found = f"is not UTF-8 text at byte {begin + wrong:,}"
        raise Unreadable(path, found, "convert or remove it")


def _find_cut(raw):
    """Return where to cut bytes of text, or 0 if more must be read to find a place."""
    safe = SAFE_CUT.match(raw)
    if safe:
        return safe.end()
    # Without a safe place, cut before the last character, to bound the memory
    if len(raw) >= 3 * PIECE:
        return max(0, len(raw.rstrip(CONTINUATION)) - 1)
    return 0


def read_files(files, val_fraction, keys, threshold=0, largest=-1):
    """Yield the pieces of all documents of files, (name, path, ...).

    A row of a file with rows is a document, and so is what <|endoftext|> separates in a text or
    row. Any other file is one.

    val_fraction: so much of each document is for validation, at its end; 0: nothing.
    keys: of the texts of a row, joined by newlines.
    threshold, largest: documents are not cut, but for validation if their hashes are below the
        threshold, except for files of more than `largest` bytes.
    Raises UserError, which names the place, for what cannot be read.
    """
    for digest, n_bytes, path, stream in _read_documents(files, keys):
        train_fraction = 1 - val_fraction
        if n_bytes <= largest:
            train_fraction = int(digest >= threshold)
        if file_format(path) == ".npy":
            yield from _read_integers(path, train_fraction)
        else:
            yield from _read_text(stream, path, train_fraction)


def _read_documents(files, keys):
    """Yield (hash, bytes, path, binary stream) of each document that is not empty.

    The hash is that of a file's name, or of the text of a document inside a file, for which the
    bytes are 0.
    """
    for name, path, *_ in files:
        try:
            with open_file(path) as stream:
                texts = []
                if _has_rows(stream, path, keys):
                    texts = _read_rows(stream, path, keys)
                elif _has_separator(stream, path):
                    texts = _split_text(stream, path)
                elif stream.peek(1):
                    yield name_hash(name), text_size(path), path, stream
                for text in texts:
                    if text:
                        yield hash_bytes(text), 0, path, io.BytesIO(text)
        except DAMAGED_GZIP as error:
            found = f"is a damaged gzip file ({error})"
            raise Unreadable(path, found, "fetch it again") from error


def _has_separator(stream, path):
    """Return whether a text holds <|endoftext|>."""
    if file_format(path) == ".npy":
        return False
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


def _split_text(stream, path):
    """Yield the documents of a text, bytes, without the line breaks beside <|endoftext|>."""
    position = stream.tell()
    parts = []
    for line in stream:
        _check_text(line, position, path)
        position += len(line)
        *ends, rest = line.split(END_OF_TEXT)
        for end in ends:
            yield b"".join([*parts, end]).strip(b"\r\n")
            parts = []
        parts.append(rest)
    yield b"".join(parts).strip(b"\r\n")


def _read_text(stream, path, train_fraction):
    """Yield the pieces of a text file as one document in each split, cut between characters."""
    begin = stream.tell()
    n_bytes = stream.seek(0, os.SEEK_END) - begin
    size = int(n_bytes * train_fraction)
    # Complete the last character: at most three bytes of it follow
    stream.seek(begin + size)
    following = stream.read(3)
    size += len(following) - len(following.lstrip(CONTINUATION))
    stream.seek(begin)
    yield from read_document("train", stream, path, size)
    yield from read_document("val", stream, path)


def _read_integers(path, train_fraction):
    """Yield the integers of a .npy file as one document in each split; the pieces are arrays."""
    try:
        # "c" maps privately, which more file systems can do than "r"
        tokens = np.load(path, mmap_mode="c", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{tokens.dtype} of shape {tokens.shape}")
    except ValueError as error:
        found = f"is not a .npy file of integers, 1-D ({error})"
        raise Unreadable(path, found, "save it with numpy.save") from None
    n_train = int(train_fraction * len(tokens))
    for split, part in (("train", tokens[:n_train]), ("val", tokens[n_train:])):
        for begin in range(0, len(part), PIECE):
            yield split, begin == 0, part[begin : begin + PIECE]


# -----------------------------------------------------------------------------
# Rows of JSON, .csv and Parquet files


def _has_rows(stream, path, keys):
    """Return whether a file has rows.

    A .json may be a text, such as settings: it has rows if its first object has a "text", or if
    other keys are asked for.
    """
    if file_format(path) != ".json":
        return file_format(path) in ROW_FORMATS
    begin = stream.tell()
    try:
        first_row = next(filter(None, _json_rows(stream)), None)
    except (ValueError, RecursionError):
        first_row = None
    stream.seek(begin)
    return isinstance(first_row, dict) and ("text" in first_row or tuple(keys) != ("text",))


def _read_rows(stream, path, keys):
    """Yield the texts of a file's rows, bytes: several of a row with <|endoftext|>."""
    if file_format(path) == ".parquet":
        rows = _parquet_rows(stream, path, keys)
    elif file_format(path) == ".csv":
        csv.field_size_limit(1 << 26)
        text = io.TextIOWrapper(stream, "utf-8", newline="")
        # More cells than columns make a list of the first text, which is an error below
        rows = csv.DictReader(text, restkey=keys[0], strict=True)
    else:
        rows = _json_rows(stream)
    number = 0
    try:
        for row in rows:
            text = ""
            if row is not None:
                text = "\n".join([row[key] for key in keys])
            if "\0" in text and file_format(path) == ".csv":
                raise ValueError("a NUL byte")
            number += 1
            raw = text.replace("\0", "").encode("utf-8", errors="replace")
            yield from raw.split(END_OF_TEXT)
    except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        expected = ", ".join(f'"{key}": TEXT' for key in keys)
        reason = f"{type(error).__name__}: {error}"
        found = f"after row {number}: expected {{{expected}}} ({reason})"
        raise Unreadable(path, found, "correct it, or give --text_key") from None


def _json_rows(stream):
    """Yield the objects of an array or of lines of JSON, None for blank lines."""
    begin = stream.tell()
    is_array = stream.read(PIECE).lstrip().startswith(b"[")
    stream.seek(begin)
    if is_array:
        yield from json.load(stream)
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
