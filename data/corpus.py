"""Files to documents: which files are read, the order and the split of their documents, and rows of .jsonl and .csv.

A document is (split, binary stream of UTF-8, bytes to read from it): a file, a part of one, or a row.
"""

import csv
import fnmatch
import glob
import hashlib
import io
import json
import os
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

from data.text import ACCEPTED, NotText, check_text, open_utf8
from runtime.errors import UserError

ORDER = "SHA-256 of the name"  # of several files, so that the first tokens of a split are a fair sample of it
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LONGEST_LINE = 64 << 20  # bytes of a line of .jsonl or a row of .csv, which is parsed in memory
NOT_UTF8 = "is not UTF-8: correct it, or name the encoding of all files by --encoding"


class TextFile(NamedTuple):
    """A file to read: one document, or one for each line of a .jsonl or row of a .csv."""

    name: str  # decides the split, and the place in it
    path: Path
    encoding: str = "utf-8"
    searched: bool = False  # found in a folder or by a glob: skipped when it is not text


# ---- Which files, in which order ------------------------------------------------------------------------------------


def hash_of(name):
    """SHA-256 of a document's name, a number below 2^256: the same on every machine and in every run."""
    return int(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).hexdigest(), 16)


def split_of(name, val_fraction):
    """The split, "train" or "val", of the document with this name."""
    return "val" if hash_of(name) < val_fraction * 2**256 else "train"


def by_hash(files):
    """Files in the order of the hashes of their names, and those of one name in the order of their paths."""
    return sorted(files, key=lambda file: (hash_of(file.name), file.path.as_posix()))


def _files_under(folder, unwanted):
    """Files in the order of their posix paths, without those that have an unwanted name or lie in such a folder."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not unwanted(name)]
        found += [Path(root, name) for name in names if not unwanted(name)]
    return sorted((path for path in found if path.is_file()), key=Path.as_posix)


def python_files():
    """The Python files of the standard library that runs this, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = _files_under(root, NOT_PYTHON.__contains__)
    return [TextFile(path.relative_to(root).as_posix(), path) for path in paths if path.suffix == ".py"]


def list_skipped(skipped):
    """One line for files that are not text, given as (name, reason): at most 10 by name."""
    files = "1 file that is" if len(skipped) == 1 else f"{len(skipped):,} files that are"
    named = ", ".join(f"{name if name.isprintable() else ascii(name)} ({why})" for name, why in skipped[:10])
    return f"skipped {files} not text: {named}" + (f" and {len(skipped) - 10:,} more" if len(skipped) > 10 else "")


def given_files(arguments, out, encoding, include, skipped):
    """A TextFile for each text file that the arguments match, without duplicates, hidden files and those in `out`.

    Adds (name, reason) of files that are not text to `skipped`, but refuses those that an argument names directly.
    """
    names, own, unmatched = {}, set(), set(include)

    def included(path):
        patterns = {pattern for pattern in include if fnmatch.fnmatchcase(path.name, pattern)}
        unmatched.difference_update(patterns)
        return patterns or not include

    for argument in map(os.fspath, arguments):
        exists = os.path.exists(argument)
        matches = [argument] if exists else sorted(glob.glob(argument, recursive=True))
        if not matches:
            raise UserError(f"{argument!r} is not a file or folder, and not a glob that matches any: check the path")
        for match in map(Path, map(os.path.abspath, matches)):
            files = [match]
            if match.is_dir():
                files = filter(included, _files_under(match, lambda name: name.startswith(".")))
            elif exists:
                own.add(match)
            for path in files:
                if out.resolve() not in path.resolve().parents:
                    names.setdefault(path, path.relative_to(match.parent).as_posix())
                elif path in own:
                    raise UserError(f"{path} lies in the folder {out} that is to be made: choose another --out")
    if unmatched:
        raise UserError(
            f"--include {min(unmatched)!r} matches no file inside the folders that were given: expected a pattern of "
            "names such as '*.md'"
        )
    files = []
    for path, name in names.items():
        try:
            files.append(TextFile(name, path, check_text(path, encoding), path not in own))
        except NotText as error:
            if path in own:
                raise
            skipped.append((name, error.why))
    if not files:
        kinds = f" ({list_skipped(skipped)})" if skipped else ""
        raise UserError(f"there are no text files in {' '.join(map(str, arguments))}{kinds}: give {ACCEPTED} files")
    return files


# ---- Documents of files ---------------------------------------------------------------------------------------------


def read_files(files, val_fraction, keys, progress, skipped):
    """The documents of all files. Searched files that do not decode go to `skipped`; raises if no file is left."""
    left = len(files)
    for file in files:
        try:
            yield from _read_file(file, val_fraction, keys, progress, alone=len(files) == 1)
        except NotText as error:  # on opening it, before its first document
            left -= 1
            if not file.searched or not left:
                raise
            skipped.append((file.name, error.why))
            progress.add(file.path.stat().st_size)


def _read_file(file, val_fraction, keys, progress, alone):
    """A document per row, named `<name>:<number>`; else one per file, but two (train, val) if it is `alone`."""
    with open_utf8(file.path, file.encoding) as (packed, text):
        position = 0
        if read_rows := row_reader(file.path):
            for number, row in read_rows(text, file.path, keys):
                raw = row.encode("utf-8", errors="replace")
                progress.add(packed.tell() - position - len(raw))  # the text itself is counted when it is encoded
                position = packed.tell()
                yield split_of(f"{file.name}:{number}", val_fraction), io.BytesIO(raw), len(raw)
            return
        start = text.tell()
        size = os.fstat(text.fileno()).st_size - start
        progress.add(file.path.stat().st_size - size)
        if not alone:
            yield split_of(file.name, val_fraction), text, size
            return
        cut = int(size * (1 - val_fraction))
        text.seek(start + cut)
        after = text.read(3)
        cut += len(after) - len(after.lstrip(bytes(range(0x80, 0xC0))))  # to the start of a UTF-8 character
        text.seek(start)
        yield "train", text, cut
        yield "val", text, size - cut


def read_wikitext(archive):
    """The archive's own splits, a document for each article."""
    with zipfile.ZipFile(archive) as members:
        for split, member in (("train", "wiki.train.raw"), ("val", "wiki.valid.raw")):
            names = [name for name in members.namelist() if name.endswith(member)]
            if len(names) != 1:
                raise UserError(f"{archive} has {len(names)} files {member} instead of one: delete it, run this again")
            with members.open(names[0]) as lines:
                article, after_blank = bytearray(), True
                for line in lines:
                    heading = line.startswith(b" = ") and not line.startswith(b" = =") and line.endswith(b" = \n")
                    if heading and after_blank and article.strip():
                        yield split, io.BytesIO(article), len(article)
                        article = bytearray()
                    article += line
                    after_blank = not line.strip()
                yield split, io.BytesIO(article), len(article)


# ---- Rows of .jsonl and .csv ----------------------------------------------------------------------------------------


def is_csv(path):
    """Whether a file is read as CSV."""
    return path.suffix.lower() == ".csv" or path.name.endswith(".csv.gz")


def row_reader(path):
    """The function that reads a file's rows as (number, text); None where the file is one text."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_texts
    return _csv_texts if is_csv(path) else None


def _quoted(value):
    return json.dumps(value, ensure_ascii=False)


def _listed(names):
    """Names of keys or columns for a message: the first five."""
    return ", ".join(_quoted(name[:40]) for name in names[:5]) + ", ..." * (len(names) > 5)


def _jsonl_texts(stream, path, keys):
    """(line number, text) of each line that is not blank: the strings under `keys`, joined by newlines."""
    like = ", ".join(f"{_quoted(key)}: ..." for key in keys)
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), start=1):
        where = f"line {number} of {path}"
        if len(line) > LONGEST_LINE:
            raise UserError(f"{where} has over {LONGEST_LINE >> 20} MB: make it a text file")
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except UnicodeDecodeError as error:
            raise UserError(f"{where} {NOT_UTF8}") from error
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f"{where} is not a JSON object: expected one like {{{like}}}, correct it")
        for key in keys:
            if key not in values:
                found = _listed(list(values)) or "none"
                raise UserError(f"{where} has no key {_quoted(key)}, its keys are {found}: choose one with --text_key")
            if not isinstance(values[key], str):
                raise UserError(
                    f"{where} has {_quoted(values[key])[:40]} under {_quoted(key)}, expected a string: correct it, or "
                    "choose another --text_key"
                )
        yield number, "\n".join(values[key] for key in keys)


def _csv_texts(stream, path, keys):
    """(number, text) of each row below the header: its fields in the columns `keys`, joined by newlines."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))  # lines() applies it to the whole row
    text = io.TextIOWrapper(stream, "utf-8", errors="surrogateescape", newline="")
    first, size = 1, 0  # of the row that is being read: its first line, and its bytes so far

    def lines():
        nonlocal size
        while line := text.readline(LONGEST_LINE + 1):
            here = f"line {reader.line_num + 1} of {path}"
            try:
                size += len(line.encode())
            except UnicodeEncodeError as error:  # an escaped byte
                raise UserError(f"{here} {NOT_UTF8}") from error
            if size > LONGEST_LINE:
                raise UserError(
                    f"the row at line {first} of {path} has over {LONGEST_LINE >> 20} MB: close its quotes, or make it "
                    "a text file"
                )
            if "\0" in line:
                raise UserError(f"{here} has a NUL byte, expected text: correct it")
            yield line

    reader = csv.reader(lines(), strict=True)
    columns, number = None, 0
    try:
        for row in reader:
            if row and columns is None:
                width, columns = len(row), _columns_of(row, f"the header at line {first} of {path}", keys)
            elif row:  # not a blank line
                if len(row) != width:
                    raise UserError(
                        f"the row at line {first} of {path} has {len(row)} field{'s' * (len(row) > 1)}, expected "
                        f"{width} as in the header: correct it (a field with a comma or line break needs quotes)"
                    )
                number += 1
                yield number, "\n".join([row[column] for column in columns])
            first, size = reader.line_num + 1, 0
    except csv.Error as error:
        raise UserError(
            f"the row at line {first} of {path} has broken quotes ({error}): expected each field with quotes as "
            '"say ""yes""", correct it'
        ) from error
    if columns is None:
        raise UserError(f"{path} is empty, expected a first row that names the columns: correct or remove it")


def _columns_of(header, where, keys):
    """The indices of the columns that `keys` name. Raises UserError, which says `where` the header is."""
    for key in keys:
        if key not in header:
            raise UserError(
                f"{where} has no column {_quoted(key)}, its columns are {_listed(header)}: choose one with --text_key, "
                "or put a first row that names them, with commas between"
            )
        if header.count(key) > 1:
            raise UserError(f"{where} has {header.count(key)} columns {_quoted(key)}, expected one: rename the others")
    return [header.index(key) for key in keys]
