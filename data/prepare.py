"""Corpora to token shards: `python data/prepare.py python|shakespeare|wikitext2|wikitext103|fineweb10B|files PATH...`

data/shards.py describes what a prepared folder holds, data/text.py which files are text. A folder that is complete is
left as it is; after a run that was stopped, the same command resumes its downloads and makes the shards again.
"""

import argparse
import contextlib
import csv
import difflib
import fnmatch
import glob
import hashlib
import http.client
import io
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":  # a script's first import path is its own folder, whose tokenizers.py hides a package's name
    HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(HERE.parent), *(path for path in sys.path if path != str(HERE))]

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
    read_shard,
    sha256_of_file,
    shard_header,
    sync_folder,
)
from data.text import (
    ACCEPTED,
    NotText,
    check_encoding,
    check_text,
    marked_encoding,
    open_unpacked,
    utf8_part,
    utf8_size,
    utf8_stream,
)
from data.tokenizers import get_tokenizer

DOWNLOADS = {  # source -> address ({hub} is HF_ENDPOINT), SHA-256, bytes
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        1_115_394,
    ),
    "wikitext2": (
        "{hub}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        4_721_645,
    ),
    "wikitext103": (
        "{hub}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        191_984_949,
    ),
}
FINEWEB = "{hub}/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
FINEWEB_SHARDS = 103


# ---- Progress and downloads -----------------------------------------------------------------------------------------


class Progress:
    """Says how far a job of `total` bytes is, twice a second on a terminal and every 10 seconds elsewhere."""

    def __init__(self, doing, total, say):
        self.doing, self.total, self.say, self.done = doing, total, say, 0
        self.terminal = say is print and sys.stdout.isatty()
        self.start = self.shown = time.monotonic()

    def add(self, size, finished=False):
        """Counts `size` bytes, and prints a line when it is time to."""
        self.done, now = self.done + size, time.monotonic()
        if not finished and now - self.shown < (0.5 if self.terminal else 10):
            return
        self.shown = now
        percent = "" if finished or not self.total else f", {min(100, 100 * self.done // self.total)} %"
        rate = self.done / 1e6 / max(now - self.start, 1e-6)
        line = f"{self.doing}: {self.done / 1e6:,.1f} MB{percent}, {rate:,.1f} MB/s"
        if self.terminal:
            print(f"\r{line}\033[K", end="\n" if finished else "", flush=True)
        else:
            self.say(line)


def _address(template):
    """The address with HF_ENDPOINT in it, where it names a hub."""
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if "@" in hub and "{hub}" in template:  # it would stand in meta.json and in messages
        raise UserError("HF_ENDPOINT holds a user name or a password, which cannot be used: give an address without")
    return template.replace("{hub}", hub)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps what Hugging Face says only on the response that redirects to its storage: the file's SHA-256."""

    etag = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.etag = headers.get("X-Linked-ETag") or self.etag
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url, partial, say):
    """One attempt to add to `partial` what it lacks. Returns the SHA-256 that the server names, or None."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "prepare.py"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    redirects = _Redirects()
    with urllib.request.build_opener(redirects).open(request, timeout=30) as response:
        if response.status != 206:
            have = 0  # a server without Range sends the whole file again
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException("the server sent another range than it was asked for")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        progress = Progress(f"downloading {partial.name.removeprefix('.tmp-')}", total, say)
        progress.add(have)
        with open(partial, "ab" if have else "wb") as file:
            while block := response.read(1 << 18):
                file.write(block)
                progress.add(len(block))
        if total not in (None, progress.done):
            raise http.client.HTTPException(f"the connection ended after {progress.done} of {total} bytes")
        progress.add(0, finished=True)
        etag = (response.headers.get("X-Linked-ETag") or redirects.etag or "").strip('"')
    return etag if re.fullmatch("[0-9a-f]{64}", etag) else None


def download(url, path, sha256=None, size=None, say=print, staging=None):
    """Downloads `url` to `path` unless it is there, and returns its SHA-256 in hex.

    What arrives is kept beside it as `.tmp-<name>`: further attempts and runs resume from there. With a folder
    `staging`, the file and its parts stay there. Raises UserError when four attempts fail, or when the size or the hash
    is not the one given here or named by the server.
    """
    path = Path(path)
    staged = Path(staging, path.name) if staging else path
    partial = staged.with_name(f".tmp-{path.name}")
    for wait in () if path.exists() or staged.exists() else (1, 2, 4, None):
        try:
            named = _fetch(url, partial, say)
            sha256 = sha256 or named
            break
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
            code = getattr(error, "code", 0)
            if code == 416:  # what we have is longer than the file: it is something else
                partial.unlink()
            hopeless = isinstance(error, ValueError) or (400 <= code < 500 and code not in (408, 416, 429))
            if hopeless or wait is None:
                raise UserError(
                    f"{url} could not be downloaded ({error}): run this again to resume, set HF_ENDPOINT to a mirror "
                    "of huggingface.co (and TIKTOKEN_CACHE_DIR to a copy of the gpt2 vocabulary), or work offline with "
                    "`python data/prepare.py python` or `python data/prepare.py files PATH --tokenizer bytes`"
                ) from error
            say(f"{error}; trying again in {wait} s")
            time.sleep(wait)
    arrived = next(found for found in (path, staged, partial) if found.exists())
    digest, found = sha256_of_file(arrived), arrived.stat().st_size
    if sha256 not in (None, digest) or size not in (None, found):
        arrived.unlink()
        raise UserError(
            f"{url} gave {found} bytes with SHA-256 {digest} instead of {size or 'any number of'} bytes with "
            f"{sha256 or 'any'}: they are deleted, run this again or put the right file at {path}"
        )
    if arrived == partial:
        os.replace(partial, staged)
    return digest


# ---- Documents: each source is a generator of (split, binary stream, bytes to read from it) --------------------------

ORDER = "SHA-256 of the name"  # of several files, so that the first tokens of a split are a fair sample of it
NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LONGEST_LINE = 64 << 20  # bytes of a line of .jsonl or a row of .csv, which is parsed in memory
NOT_UTF8 = "is not UTF-8: correct it, or name the encoding of all files by --encoding"


class Document(NamedTuple):
    """A file to read: one document, or one for each line of a .jsonl or row of a .csv."""

    name: str  # decides the split, and the place in it
    path: Path
    encoding: str = "utf-8"
    searched: bool = False  # found in a folder or by a glob: skipped when it is not text


def hash_of(name):
    """SHA-256 of a document's name, a number below 2^256: the same on every machine and in every run."""
    return int(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).hexdigest(), 16)


def split_of(name, val_fraction):
    """The split, "train" or "val", of the document with this name."""
    return "val" if hash_of(name) < val_fraction * 2**256 else "train"


def by_hash(files):
    """Documents in the order of the hashes of their names, and those of one name in the order of their paths."""
    return sorted(files, key=lambda file: (hash_of(file.name), file.path.as_posix()))


def _files_under(folder, unwanted):
    """Files in the order of their posix paths, without those that have an unwanted name or lie in such a folder."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not unwanted(name)]
        found += [Path(root, name) for name in names if not unwanted(name)]
    return sorted((path for path in found if path.is_file()), key=Path.as_posix)


def _python_files():
    """(name, path) of the Python files of the standard library that runs this, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _files_under(root, NOT_PYTHON.__contains__) if path.suffix == ".py"]
    return [(path.relative_to(root).as_posix(), path) for path in paths]


def list_skipped(skipped):
    """One line for files that are not text, given as (name, reason): at most 10 by name."""
    files = "1 file that is" if len(skipped) == 1 else f"{len(skipped):,} files that are"
    named = ", ".join(f"{name if name.isprintable() else ascii(name)} ({why})" for name, why in skipped[:10])
    return f"skipped {files} not text: {named}" + (f" and {len(skipped) - 10:,} more" if len(skipped) > 10 else "")


def _given_files(arguments, out, encoding, include, skipped):
    """A Document for each text file that the arguments mean, once, without hidden ones and those in the folder `out`.

    Adds (name, reason) of what is not text to `skipped`, unless an argument is its own path: that is refused.
    """
    found, own, names = {}, set(), []
    for argument in map(os.fspath, arguments):
        exists = os.path.exists(argument)
        matches = [argument] if exists else sorted(glob.glob(argument, recursive=True))
        if not matches:
            raise UserError(f"{argument!r} is not a file or folder, and not a glob that matches any: check the path")
        for match in (Path(os.path.abspath(match)) for match in matches):
            files = [match]
            if match.is_dir():
                files = _files_under(match, lambda name: name.startswith("."))
                if include:
                    files = [path for path in files if any(fnmatch.fnmatchcase(path.name, p) for p in include)]
                    names += [path.name for path in files]
            elif exists:
                own.add(match)
            for path in files:
                if out.resolve() in path.resolve().parents:
                    if path in own:
                        raise UserError(f"{path} lies in the folder {out} that is to be made: choose another --out")
                else:
                    found.setdefault(path, path.relative_to(match.parent).as_posix())
    for pattern in include:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"--include {pattern!r} matches no file inside the folders that were given: expected a pattern of "
                "names such as '*.md'"
            )
    documents = []
    for path, name in found.items():
        try:
            documents.append(Document(name, path, check_text(path, encoding), path not in own))
        except NotText as error:
            if path in own:
                raise
            skipped.append((name, error.why))
    if not documents:
        kinds = f" ({list_skipped(skipped)})" if skipped else ""
        places = " ".join(map(str, arguments))
        raise UserError(f"there are no text files in {places}{kinds}: give {ACCEPTED} files")
    return documents


def _read_files(files, val_fraction, keys, progress, skipped):
    """Each file a document, or each line of a .jsonl and each row of a .csv."""
    left = len(files)
    for document in files:
        name, path, encoding, searched = document
        size = path.stat().st_size
        try:
            length = utf8_size(path, encoding)  # reads all of it where it is not UTF-8: it must decode to the end
        except NotText as error:
            left -= 1
            if not searched or not left:
                raise
            skipped.append((name, error.why))
            progress.add(size)
            continue
        if _row_reader(path):
            yield from _read_rows(document, val_fraction, keys, progress)
            continue
        progress.add(size - length)  # the text itself is counted when it is encoded
        with open(path, "rb") as file:
            yield split_of(name, val_fraction), utf8_stream(file, path, encoding), length


def _is_csv(path):
    return path.suffix.lower() == ".csv" or path.name.endswith(".csv.gz")


def _row_reader(path):
    """The function that reads the rows of a .jsonl or .csv; None for a file that is one text."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_texts
    return _csv_texts if _is_csv(path) else None


def _read_rows(document, val_fraction, keys, progress):
    """Each row's text a document, whose name is `<name>:<number>`."""
    name, path, encoding, _ = document
    position = 0
    with open_unpacked(path) as (file, unpacked):
        for number, text in _row_reader(path)(utf8_stream(unpacked, path, encoding), path, keys):
            raw = text.encode("utf-8", errors="replace")
            progress.add(file.tell() - position - len(raw))  # the text itself is counted when it is encoded
            position = file.tell()
            yield split_of(f"{name}:{number}", val_fraction), io.BytesIO(raw), len(raw)


def _jsonl_texts(stream, path, keys):
    """(line number, text) of each line that is not blank."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"line {number} of {path} has over {LONGEST_LINE >> 20} MB: make it a text file")
        if line.strip():
            yield number, _text_of(line, f"line {number} of {path}", keys)


def _quoted(value):
    return json.dumps(value, ensure_ascii=False)


def _listed(names):
    """Names of keys or columns for a message: the first five."""
    return ", ".join(_quoted(name[:40]) for name in names[:5]) + ", ..." * (len(names) > 5)


def _like(keys):
    return "{" + ", ".join(f"{_quoted(key)}: ..." for key in keys) + "}"


def _text_of(line, where, keys):
    """The strings that a line of JSON holds under `keys`, one below the other. Raises UserError, which says `where`."""
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} {NOT_UTF8}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON object: expected one like {_like(keys)}, correct it") from error
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object: expected one like {_like(keys)}, correct it")
    for key in keys:
        if key not in values:
            found = _listed(list(values)) or "none"
            raise UserError(f"{where} has no key {_quoted(key)}, its keys are {found}: choose one with --text_key")
        if not isinstance(values[key], str):
            raise UserError(
                f"{where} has {_quoted(values[key])[:40]} under {_quoted(key)}, expected a string: correct it, or "
                "choose another --text_key"
            )
    return "\n".join(values[key] for key in keys)


def _csv_texts(stream, path, keys):
    """(number, text) of each row below the header: its fields in the columns `keys`, one below the other."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))  # which the whole row must keep here
    header, number = None, 0
    first, size = 1, 0  # of the row that is being read: its first line, and its bytes so far

    def lines():
        nonlocal size
        while block := stream.readline(LONGEST_LINE + 1):
            size += len(block)
            if size > LONGEST_LINE:
                raise UserError(
                    f"the row at line {first} of {path} has over {LONGEST_LINE >> 20} MB: close its quotes, or make it "
                    "a text file"
                )
            for line in block.splitlines(keepends=True):  # a lone carriage return ends a line too
                if b"\0" in line:
                    raise UserError(f"line {reader.line_num + 1} of {path} has a NUL byte, expected text: correct it")
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    raise UserError(f"line {reader.line_num + 1} of {path} {NOT_UTF8}") from error

    reader = csv.reader(lines(), strict=True)
    try:
        for row in reader:
            if row and header is None:
                header, columns = row, _columns_of(row, f"the header at line {first} of {path}", keys)
            elif row:  # not a blank line
                if len(row) != len(header):
                    raise UserError(
                        f"the row at line {first} of {path} has {len(row)} field{'s' * (len(row) > 1)}, expected "
                        f"{len(header)} as in the header: correct it (a field with a comma or line break needs quotes)"
                    )
                number += 1
                yield number, "\n".join([row[column] for column in columns])
            first, size = reader.line_num + 1, 0
    except csv.Error as error:
        raise UserError(
            f"the row at line {first} of {path} has broken quotes ({error}): expected each field with quotes as "
            '"say ""yes""", correct it'
        ) from error
    if header is None:
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


def _read_by_position(document, val_fraction, progress):
    """One text as two documents, its first part for training and its last for validation."""
    _, path, encoding, _ = document
    size = utf8_size(path, encoding)
    progress.add(path.stat().st_size - size)
    cut = int(size * (1 - val_fraction))
    after = utf8_part(path, encoding, cut, 3)
    cut += len(after) - len(after.lstrip(bytes(range(0x80, 0xC0))))  # to the start of a UTF-8 character
    with open(path, "rb") as file:
        stream = utf8_stream(file, path, encoding)
        yield "train", stream, cut
        yield "val", stream, size - cut


def _read_wikitext(archive):
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


# ---- Documents to shards --------------------------------------------------------------------------------------------

PIECE = 1 << 18  # bytes read at once; pieces stay under 10^6, where tiktoken fails on a long run of blanks
BATCH = 1 << 20  # bytes given to a thread at once
# GPT-2 never joins a blank to a visible character before it. Surely visible: ASCII, and UTF-8 other than the blanks
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
        if not safe and len(rest) >= 3 * PIECE:  # no place in sight: between any two characters, to bound the memory
            cut = max((i for i in range(len(rest) - 4, len(rest)) if rest[i] & 0xC0 != 0x80), default=len(rest))
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _batches(documents):
    """Lists of (split, whether a document starts, bytes), each of about BATCH bytes."""
    batch, size = [], 0
    for split, stream, length in documents:
        for number, piece in enumerate(pieces_of(stream, length)):
            batch.append((split, number == 0, piece))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def _encode(tokenizer, batch):
    """Returns {split: (1-D uint16 tokens, bytes of text, documents begun)}."""
    end_of_text = np.array([tokenizer.eot], dtype=np.uint16)
    parts = {"train": [end_of_text[:0]], "val": [end_of_text[:0]]}
    counts = {"train": [0, 0], "val": [0, 0]}
    for split, starts, piece in batch:
        parts[split] += [end_of_text] * starts + [tokenizer.encode_raw(piece)]
        counts[split][0] += tokenizer.text_bytes(piece)
        counts[split][1] += starts
    return {split: (np.concatenate(parts[split], dtype=np.uint16), *counts[split]) for split in parts}


def encode_file(path, tokenizer):
    """A text file's tokens, as preparation makes them, in a 1-D uint16 array, and the bytes of the text they stand for.

    Raises NotText when a byte order mark names an encoding in which it does not decode.
    """
    with open(path, "rb") as file:
        encoding = marked_encoding(file.read(4))
        file.seek(0)
        pieces = pieces_of(utf8_stream(file, path, encoding), utf8_size(path, encoding))
        tokens, size, _ = _encode(tokenizer, [("val", False, piece) for piece in pieces])["val"]
    return tokens, size


class ShardWriter:
    """Writes a split into a folder as it comes, in shards of at most `shard_tokens`."""

    def __init__(self, folder, split, shard_tokens, pool):
        self.folder, self.split, self.shard_tokens, self.pool = folder, split, shard_tokens, pool
        self.file = None
        self.shards = {}  # name -> tokens, future of its SHA-256

    def add(self, tokens):
        """Appends a 1-D uint16 array."""
        while tokens.size:
            if self.file is None:
                self.name, self.count = f"{self.split}_{len(self.shards):06d}.bin", 0
                self.file = open(self.folder / self.name, "wb+")
                self.file.write(bytes(HEADER_BYTES))
            part, tokens = np.split(tokens, [self.shard_tokens - self.count])
            self.file.write(part.data)
            self.count += part.size
            if self.count == self.shard_tokens:
                self.finish()

    def finish(self):
        """Completes the shard that is open, if one is; another thread flushes and hashes it."""
        if self.file:
            self.file.seek(0)
            self.file.write(shard_header(np.uint16, self.count))
            self.shards[self.name] = self.count, self.pool.submit(_seal, self.file)
            self.file = None

    def close(self):
        """Gives up the shard that is open, if one is."""
        if self.file:
            with contextlib.suppress(OSError):  # of a full disk, told already
                self.file.close()


def _seal(file):
    """Flushes a written file to the disk and closes it. Returns its SHA-256."""
    with file:
        file.flush()
        os.fsync(file.fileno())
    return sha256_of_file(file.name)


def _write_documents(documents, tokenizer, folder, shard_tokens, progress):
    """Encodes on all cores, writes in order. Returns "splits" and "files" of meta.json."""
    splits = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in ("train", "val")}

    def write(encoded):
        for split, (tokens, size, documents) in encoded.items():
            writers[split].add(tokens)
            splits[split]["tokens"] += tokens.size
            splits[split]["bytes"] += size
            splits[split]["documents"] += documents
            progress.add(size)

    threads, waiting = min(os.cpu_count() or 1, 16), deque()  # tiktoken and numpy do their work outside Python's lock
    with ThreadPoolExecutor(threads) as pool, contextlib.ExitStack() as opened:
        writers = {split: ShardWriter(folder, split, shard_tokens, pool) for split in splits}
        for writer in writers.values():
            opened.callback(writer.close)
        for batch in _batches(documents):
            waiting.append(pool.submit(_encode, tokenizer, batch))
            if len(waiting) > 2 * threads:
                write(waiting.popleft().result())
        while waiting:
            write(waiting.popleft().result())
        for split, writer in writers.items():
            if not splits[split]["tokens"]:
                count = sum(counts["documents"] for counts in splits.values())
                if not count:
                    raise UserError("there is no text in the files that were given: expected some to learn from")
                raise UserError(
                    f"no text fell into the {split} split, by chance with {count} documents: give more of it, "
                    "another --val_fraction, or one text file, which is cut in two"
                )
            writer.finish()
    progress.add(0, finished=True)
    shards = {name: shard for writer in writers.values() for name, shard in writer.shards.items()}
    files = {name: {"tokens": tokens, "sha256": sealed.result()} for name, (tokens, sealed) in shards.items()}
    return splits, files


def _fetch_fineweb(folder, shards, say):
    """Downloads FineWeb's shards as they are, to STAGING. Returns "splits" and "files" of meta.json for all of them,
    those that were in `folder` already among them.
    """
    say(f"fineweb10B: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB in all, to {folder}")
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1)]
    digests, staging = {}, folder / STAGING
    for name in names:
        url = _address(FINEWEB) + name
        digests[name] = download(url, folder / name, say=say, staging=staging)
        if not (folder / name).exists():
            try:
                read_shard(staging / name)
            except UserError as error:
                (staging / name).unlink()
                raise UserError(f"{url} gave no token shard ({error}): it is deleted, run this again") from error
    splits = {split: {"tokens": 0, "bytes": None, "documents": None} for split in ("train", "val")}
    files = {}
    for split, counts in splits.items():
        for path in sorted(list_shards(staging, split) + list_shards(folder, split), key=lambda path: path.name):
            tokens, sha256 = read_shard(path).size, digests.get(path.name) or sha256_of_file(path)
            files[path.name] = {"tokens": tokens, "sha256": sha256}
            counts["tokens"] += tokens
    return splits, files


# ---- The whole job --------------------------------------------------------------------------------------------------

STAGING = ".tmp-new"  # folder inside a data folder: what is made or downloaded stays there until all of it is complete
MADE = re.compile(r"(train|val)_\d{6}\.bin")  # names of the shards that are made here


def _open_locked(folder, say):
    """Makes a folder and locks it. Returns the file whose closing unlocks it, and the folders made, innermost first."""
    made = []
    while True:
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
            file = opened.enter_context(open(folder / ".lock", "w"))
            _lock(file, folder, say)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / ".lock")):
                opened.pop_all()
                return file, made
        # else a process that failed has removed the file or the folder: once more


def _lock(file, folder, say):
    """Locks an open file until it is closed, after waiting if need be."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another process that prepares {folder}")
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_done(folder, made_with, shards):
    """Whether the folder is complete. Raises UserError when it holds something else than this command makes."""
    if not (folder / "meta.json").exists():
        if (folder / UNFINISHED).exists():
            return False
        shards = list_shards(folder, "train") + list_shards(folder, "val")
        if any(made_with["source"] != "fineweb10B" or not path.name.startswith("fineweb_") for path in shards):
            raise UserError(f"{folder} has shards of another origin, without a meta.json: choose another --out")
        return False
    meta = load_meta(folder)
    if meta.get("made_with") != made_with:
        old = meta["made_with"] if isinstance(meta.get("made_with"), dict) else {}
        other = ", ".join(key for key in {**made_with, **old} if old.get(key) != made_with.get(key))
        raise UserError(f"{folder} was made from something else ({other} differs): choose another --out or delete it")
    sizes = {folder / name: HEADER_BYTES + 2 * shard["tokens"] for name, shard in meta["files"].items()}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return whole and sum("train" in name for name in meta["files"]) >= shards


def _order(folder, files):
    """What meta.json tells of the order of several files: nothing where a folder has them in that of their paths."""
    by_path = (folder / "meta.json").exists() and not load_meta(folder).get("order")
    return {} if by_path or len(files) < 2 else {"order": ORDER}


def _already_there(folder, files):
    """The line about a folder that is complete, with what is wrong with the order of an old one."""
    by_path = len(files) > 1 and not _order(folder, files)
    return f"already there: {folder}" + by_path * (
        ", but it was made with its documents in the order of their paths, so that a part of the validation split is "
        "no fair sample; remove it to make it again"
    )


DEFAULTS = {"val_fraction": 0.1, "shard_tokens": 10**8, "shards": None}
FILES_DEFAULTS = {"encoding": "utf-8", "text_key": "text", "include": []}  # of the source "files" alone


def _changed(options):
    """The options for the source "files" that are not at their default."""
    return {name: options[name] for name, default in FILES_DEFAULTS.items() if options[name] != default}


def check_arguments(source, paths, tokenizer, options):
    """Raises UserError for what prepare() cannot work with. `tokenizer` is a name here, never None; `options` has all
    of DEFAULTS and FILES_DEFAULTS.
    """
    val_fraction, shard_tokens, shards = (options[name] for name in DEFAULTS)
    if tokenizer not in TOKENIZER_SIZES:
        raise UserError(f"unknown tokenizer {tokenizer!r}: it must be gpt2 or bytes")
    if source == "fineweb10B" and tokenizer != "gpt2":
        raise UserError("fineweb10B comes tokenized with gpt2 and is not available in bytes: remove --tokenizer")
    if source == "files" and not paths:
        several = [f"--{name}" for name in ("text_key", "include") if name in _changed(options)]  # took the path too
        place = f" before {' and '.join(several)}" if several else ""
        raise UserError(f"files needs at least one PATH{place}: give {ACCEPTED} files, folders or globs")
    if source != "files" and paths:
        raise UserError(f"{source} takes no PATH but got {paths[0]}: for your own text use the source files")
    if source != "files" and _changed(options):
        raise UserError(f"--{next(iter(_changed(options)))} is for the source files, not for {source}: remove it")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction is {val_fraction} and must lie between 0 and 1: 0.1 is usual")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard_tokens is {shard_tokens} and must be 1 to {MAX_SHARD_TOKENS}: 100000000 is usual")
    if shards is not None and (source != "fineweb10B" or not 1 <= shards <= FINEWEB_SHARDS):
        raise UserError(f"--shards is {shards} for {source}: it is for fineweb10B, and must be 1 to {FINEWEB_SHARDS}")


def _inputs(source, paths, folder, options, skipped):
    """(origin as meta.json tells it, Documents to read). A download may not be there yet."""
    if source == "fineweb10B":
        return _address(FINEWEB), []
    if source in DOWNLOADS:
        url = DOWNLOADS[source][0]
        return _address(url), [Document(source, folder / url.rpartition("/")[2])]
    if source == "python":
        return f"standard library of Python {platform.python_version()}", [Document(*file) for file in _python_files()]
    files = _given_files(paths, folder, options["encoding"], options["include"], skipped)
    return f"files {' '.join(map(os.fspath, paths))}", files


def _made_with(source, tokenizer, files, options):
    """What a folder must have been made with for it to count as this command's."""
    made_with = {"source": source, "tokenizer": tokenizer}
    if source != "fineweb10B":
        made_with |= {"val_fraction": options["val_fraction"], "shard_tokens": options["shard_tokens"]}
    if source == "files":  # not for "python": an update of Python must not ask for the data to be deleted
        facts = [(file.name, file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
        marked = [(file.encoding,) if file.encoding != options["encoding"] else () for file in files]
        marked = [mark + ("csv",) * _is_csv(file.path) for file, mark in zip(files, marked)]  # once one text
        facts = [fact + mark for fact, mark in zip(facts, marked)]
        made_with["inputs"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return made_with | _changed(options)


def _command(source, paths, options):
    """The command line with these options, but without those at their default: None where DEFAULTS has no other."""
    flags = []
    for name, value in options.items():
        if value != (DEFAULTS | FILES_DEFAULTS).get(name):
            flags += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return shlex.join(["python", "data/prepare.py", source, *map(str, paths), *flags])


def _make_shards(source, origin, files, encoder, folder, options, skipped, say):
    """Files to shards in STAGING, after a download if the source has one. Returns "splits" and "files" of meta.json."""
    if source == "fineweb10B":
        return _fetch_fineweb(folder, options["shards"] or FINEWEB_SHARDS, say)
    if source in DOWNLOADS:
        _, sha256, size = DOWNLOADS[source]
        download(origin, files[0].path, sha256, size, say)
    packed = source.startswith("wikitext")  # how much text a zip holds is not known
    total = None if packed else sum(file.path.stat().st_size for file in files)
    progress = Progress(f"preparing {source}", total, say)
    if packed:
        documents = _read_wikitext(files[0].path)
    elif len(files) == 1 and not _row_reader(files[0].path):
        documents = _read_by_position(files[0], options["val_fraction"], progress)
    else:
        keys = [options["text_key"]] if isinstance(options["text_key"], str) else options["text_key"]
        documents = _read_files(files, options["val_fraction"], keys, progress, skipped)
    return _write_documents(documents, encoder, folder / STAGING, options["shard_tokens"], progress)


def _begin(folder, source, command):
    """Removes what a killed run has left, but keeps downloads; marks a folder that has no shards as unfinished."""
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    for path in [*staging.iterdir(), *folder.glob(".tmp-*")]:
        if MADE.fullmatch(path.name.removeprefix(".tmp-")):
            path.unlink()
    complete = (folder / "meta.json").exists()
    if not complete and (folder / UNFINISHED).exists():
        for path in {*list_shards(folder, "train"), *list_shards(folder, "val")}:
            if MADE.fullmatch(path.name):
                path.unlink()
            elif source != "fineweb10B":
                os.replace(path, staging / path.name)
    if not complete and not list_shards(folder, "train"):
        (folder / UNFINISHED).write_text(command, encoding="utf-8", errors="surrogateescape")


def _publish(folder, meta):
    """Replaces the data of a folder by those of `meta`, which are in STAGING as far as they are new."""
    staging = folder / STAGING
    with atomic_write(staging / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode())
    (folder / UNFINISHED).write_text(meta["command"], encoding="utf-8", errors="surrogateescape")
    (folder / "meta.json").unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if MADE.fullmatch(path.name) and path.name not in meta["files"]:
            path.unlink()
    for name in meta["files"]:
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
    os.replace(staging / "meta.json", folder / "meta.json")
    sync_folder(folder)
    (folder / UNFINISHED).unlink()
    with contextlib.suppress(OSError):  # downloads of another source may be left
        staging.rmdir()


def _clean_up(folder, made):
    """After an error: removes what was being made, and the folders `made` if nothing else is in them.

    What stays: downloads, for the next run to resume, and data that were complete before.
    """
    staging = folder / STAGING
    with contextlib.suppress(OSError):
        for path in [*staging.iterdir(), *folder.glob(".tmp-*")]:
            empty = path.is_file() and not path.stat().st_size
            if empty or MADE.fullmatch(path.name) or path.name.endswith("meta.json"):
                path.unlink()
        staging.rmdir()
    with contextlib.suppress(OSError):
        complete = (folder / "meta.json").exists()
        downloads = [path for path in folder.glob(".tmp-*") if path.name != UNFINISHED]
        if complete or not (downloads or list_shards(folder, "train") or list_shards(folder, "val")):
            (folder / UNFINISHED).unlink(missing_ok=True)
        if not complete:
            (folder / ".lock").unlink()
    for path in made:
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def prepare(source, paths=(), tokenizer=None, out=None, val_fraction=0.1, shard_tokens=10**8, shards=None,
            encoding="utf-8", text_key="text", include=(), say=print):  # fmt: skip
    """Makes a folder of token shards and returns its Path. One that is complete already is left as it is.

    source: a key of SOURCES. paths: files, folders and globs, for "files". tokenizer: "gpt2" or "bytes" (None: the
    source's own). out: the folder (None: beside this file). val_fraction: of documents, or of a single text's bytes.
    shard_tokens: the most that one shard holds. shards: how many training shards of fineweb10B (None: all). encoding:
    of all files given ("utf-8": or what a byte order mark says). text_key: the key of the text in lines of .jsonl, and
    its column in .csv; or a list of them, whose texts are joined by newlines. include: patterns of names, of which a
    file inside a folder must match one. say: gets each line of output. Raises UserError. Several processes may run it
    at once: one works, the others wait. After an error the folder is what it was before, and downloads in it resume.
    """
    if source not in SOURCES:
        closest = difflib.get_close_matches(str(source), SOURCES, 1, 0)[0]
        raise UserError(f"unknown source {source!r}: did you mean {closest}? (there are {', '.join(SOURCES)})")
    tokenizer = tokenizer or SOURCES[source]
    include = sorted({include} if isinstance(include, str) else set(include))
    if not isinstance(text_key, str):  # one stands in meta.json as itself
        text_key = list(text_key) or FILES_DEFAULTS["text_key"]
        text_key = text_key[0] if len(text_key) == 1 else text_key
    options = dict(val_fraction=val_fraction, shard_tokens=shard_tokens, shards=shards)
    options |= dict(encoding=check_encoding(encoding), text_key=text_key, include=include)
    check_arguments(source, paths, tokenizer, options)
    default = DATA_DIR / (source if tokenizer == SOURCES[source] else f"{source}_{tokenizer}")
    folder = Path(out) if out else default
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where a folder was expected: choose another --out")

    named = dict(tokenizer={SOURCES[source]: None}.get(tokenizer, tokenizer), out=None if folder == default else folder)
    command, skipped = _command(source, paths, named | options), []
    fineweb = source == "fineweb10B"
    expected_shards = (shards or FINEWEB_SHARDS) if fineweb else 0
    origin, inputs = _inputs(source, paths, folder, options, skipped)
    made_with = _made_with(source, tokenizer, inputs, options)

    if _is_done(folder, made_with, expected_shards):  # asked before locking too: a complete folder may be read-only
        say(_already_there(folder, inputs))
        return folder
    encoder = None if fineweb else get_tokenizer(tokenizer)  # may fail: before anything is changed
    if text_key != FILES_DEFAULTS["text_key"] and not any(_row_reader(file.path) for file in inputs):
        say("--text_key has no effect: there is no .jsonl or .csv file among those given")
    lock, made = _open_locked(folder, say)
    with lock:
        if _is_done(folder, made_with, expected_shards):
            say(_already_there(folder, inputs))
            return folder
        try:
            order = _order(folder, inputs)  # a folder that has lost a shard keeps its own
            _begin(folder, source, command)
            documents = by_hash(inputs) if order else inputs
            splits, files = _make_shards(source, origin, documents, encoder, folder, options, skipped, say)
            vocab_size, eot = TOKENIZER_SIZES[tokenizer]
            meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot": eot, "splits": splits, "source": origin}
            _publish(folder, meta | order | {"files": files, "made_with": made_with, "command": command})
        except BaseException:
            _clean_up(folder, made)
            raise
    train, val = splits["train"]["tokens"], splits["val"]["tokens"]
    say(f"{folder}: {train:,} tokens for training, {val:,} for validation ({tokenizer}) in {len(files)} shards")
    if skipped:
        say(list_skipped(skipped))
    if left := sorted(path.name for path in folder.glob(".tmp-*")):
        say(f"{folder} still has {', '.join(left)} from a run that was stopped: delete what you do not need")
    return folder


def main(argv=None):
    """The command line. Returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("source", help=", ".join(SOURCES))
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"for files: {ACCEPTED}, folders, globs")
    parser.add_argument("--tokenizer", help="gpt2 or bytes; the default depends on the source")
    parser.add_argument("--out", metavar="DIR", help="the folder to make; default: data/<source>")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="fraction for validation (default: 0.1)")
    parser.add_argument("--shard_tokens", type=int, default=10**8, help="most tokens in a shard (default: 100000000)")
    parser.add_argument("--shards", type=int, help="fineweb10B: training shards to get, 200 MB each (default: 103)")
    how = "files: encoding of all of them (default: utf-8, or what a byte order mark says)"
    parser.add_argument("--encoding", metavar="NAME", default="utf-8", help=how)
    how = "files: keys of .jsonl, columns of .csv that hold the text, joined by newlines (default: text)"
    parser.add_argument("--text_key", metavar="KEY", nargs="+", action="extend", default=[], help=how)
    how = "files: inside folders, take only names that match one of these, such as '*.md' '*.txt'"
    parser.add_argument("--include", metavar="PATTERN", nargs="+", action="extend", default=[], help=how)

    def refuse(message):
        raise UserError(f"{message}: see `python data/prepare.py --help`")

    parser.error = refuse
    try:
        options, unknown = parser.parse_known_intermixed_args(argv)
        if unknown:
            flags = [f"--{name}" for name in vars(options) if name not in ("source", "paths")]
            closest = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1, 0)[0]
            raise UserError(f"unknown flag {unknown[0]}: did you mean {closest}?")
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
