"""Corpora to token shards: `python data/prepare.py python|shakespeare|wikitext2|wikitext103|fineweb10B|files PATH...`

data/shards.py describes what a prepared folder holds, data/text.py which files are text. A folder that is complete is
left as it is; after a run that was stopped, the same command resumes its downloads and makes the shards again.
"""

import argparse
import contextlib
import difflib
import fnmatch
import glob
import gzip
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
import zlib
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
from data.text import NotText, check_encoding, check_text, marked_encoding, utf8_part, utf8_size, utf8_stream
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

NOT_PYTHON = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LONGEST_LINE = 64 << 20  # bytes of a line of .jsonl, which is parsed in memory


class Document(NamedTuple):
    """A file to read: one document, or one for each line of a .jsonl."""

    name: str  # decides the split
    path: Path
    encoding: str = "utf-8"
    searched: bool = False  # found in a folder or by a glob: skipped when it is not text


def split_of(name, val_fraction):
    """The split, "train" or "val", of the document with this name: the same on every machine and in every run."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).hexdigest()
    return "val" if int(digest, 16) < val_fraction * 2**256 else "train"


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
    """A few words for files that are not text, given as (name, reason)."""
    named = ", ".join(f"{name} ({why})" for name, why in skipped[:10])
    more = f" and {len(skipped) - 10} more" if len(skipped) > 10 else ""
    return f"skipped {len(skipped)} file{'s'[: len(skipped) - 1]} that {'is' if len(skipped) == 1 else 'are'} not text: {named}{more}"


def _given_files(arguments, out, encoding, include, skipped):
    """A Document for each text file that the arguments mean, once, without hidden ones and those in the folder `out`.

    Adds (name, reason) of what is not text to `skipped`, unless an argument is its own path: that is refused.
    """
    found, own, matching = {}, set(), set()
    for argument in map(os.fspath, arguments):
        exists = os.path.exists(argument)
        matches = [argument] if exists else sorted(glob.glob(argument, recursive=True))
        if not matches:
            raise UserError(f"{argument!r} is not a file or folder, and not a glob that matches any: check the path")
        for match in (Path(os.path.abspath(match)) for match in matches):
            files = [match]
            if match.is_dir():
                files = _files_under(match, lambda name: name.startswith("."))
                patterns = {path: {p for p in include if fnmatch.fnmatchcase(path.name, p)} for path in files}
                files = [path for path in files if patterns[path] or not include]
                matching = matching.union(*patterns.values())
            elif exists:
                own.add(match)
            for path in files:
                if out.resolve() not in path.resolve().parents:
                    found.setdefault(path, path.relative_to(match.parent).as_posix())
    for pattern in include:
        if pattern not in matching:
            raise UserError(f"--include {pattern!r} matches no file inside a folder: patterns are for names, as '*.md'")
    documents = []
    for path, name in found.items():
        try:
            documents.append(Document(name, path, check_text(path, encoding), path not in own))
        except NotText as error:
            if path in own:
                raise
            skipped.append((name, error.why))
    if not documents:
        kinds = list_skipped(skipped) if skipped else "give text, .jsonl or .jsonl.gz files"
        raise UserError(f"there are no text files in {' '.join(map(str, arguments))}: {kinds}")
    return documents


def _read_files(files, val_fraction, text_key, progress, skipped):
    """Each file a document, or each line of a .jsonl."""
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
        if _is_jsonl(path):
            yield from _read_jsonl(document, val_fraction, text_key, progress)
            continue
        progress.add(size - length)  # the text itself is counted when it is encoded
        with open(path, "rb") as file:
            yield split_of(name, val_fraction), utf8_stream(file, path, encoding), length


def _is_jsonl(path):
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _read_jsonl(document, val_fraction, text_key, progress):
    """Each line's text a document, whose name is `<name>:<line number>`."""
    name, path, encoding, _ = document
    with open(path, "rb") as file, gzip.open(file) if path.suffix == ".gz" else file as unpacked:
        number = position = 0
        try:
            lines = utf8_stream(unpacked, path, encoding)
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise UserError(f"line {number} of {path} has over {LONGEST_LINE >> 20} MB: make it a text file")
                if not line.strip():
                    continue
                raw = _text_of(line, f"line {number} of {path}", text_key).encode("utf-8", errors="replace")
                progress.add(file.tell() - position - len(raw))  # the text itself is counted when it is encoded
                position = file.tell()
                yield split_of(f"{name}:{number}", val_fraction), io.BytesIO(raw), len(raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again") from error


def _text_of(line, where, text_key):
    """The string that a line of JSON holds under `text_key`. Raises UserError, which says `where`."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: expected an object like {{{json.dumps(text_key)}: ...}}") from error
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object: expected one like {{{json.dumps(text_key)}: ...}}")
    if text_key not in values:
        keys = ", ".join(json.dumps(key[:40]) for key in list(values)[:5]) + ", ..." * (len(values) > 5)
        raise UserError(
            f"{where} has no key {json.dumps(text_key)}, but {keys or 'none'}: name the one with the text by --text_key"
        )
    if not isinstance(values[text_key], str):
        kind = type(values[text_key]).__name__
        raise UserError(f"{where} has {kind} under {json.dumps(text_key)}: expected a string, see --text_key")
    return values[text_key]


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
        counts[split][0] += len(piece)
        counts[split][1] += starts
    return {split: (np.concatenate(parts[split], dtype=np.uint16), *counts[split]) for split in parts}


class ShardWriter:
    """Writes a split as it comes, in shards of at most `shard_tokens` whose names start with `.tmp-` at first."""

    def __init__(self, folder, split, shard_tokens, pool):
        self.folder, self.split, self.shard_tokens, self.pool = folder, split, shard_tokens, pool
        self.file = None
        self.shards = {}  # name -> tokens, future of its SHA-256

    def add(self, tokens):
        """Appends a 1-D uint16 array."""
        while tokens.size:
            if self.file is None:
                self.name, self.count = f"{self.split}_{len(self.shards):06d}.bin", 0
                self.file = open(self.folder / f".tmp-{self.name}", "wb+")
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


def _seal(file):
    """Flushes a written file to the disk and closes it. Returns its SHA-256."""
    with file:
        file.flush()
        os.fsync(file.fileno())
    return sha256_of_file(file.name)


def _write_documents(documents, tokenizer, folder, shard_tokens, progress):
    """Encodes on all cores, writes in order, renames at the end. Returns "splits" and "files" of meta.json."""
    splits = {split: {"tokens": 0, "bytes": 0, "documents": 0} for split in ("train", "val")}

    def write(encoded):
        for split, (tokens, size, documents) in encoded.items():
            writers[split].add(tokens)
            splits[split]["tokens"] += tokens.size
            splits[split]["bytes"] += size
            splits[split]["documents"] += documents
            progress.add(size)

    threads, waiting = min(os.cpu_count() or 1, 16), deque()  # tiktoken and numpy do their work outside Python's lock
    with ThreadPoolExecutor(threads) as pool:
        writers = {split: ShardWriter(folder, split, shard_tokens, pool) for split in splits}
        for batch in _batches(documents):
            waiting.append(pool.submit(_encode, tokenizer, batch))
            if len(waiting) > 2 * threads:
                write(waiting.popleft().result())
        while waiting:
            write(waiting.popleft().result())
        for split, writer in writers.items():
            if not splits[split]["tokens"]:
                count = sum(counts["documents"] for counts in splits.values())
                raise UserError(
                    f"no text fell into the {split} split, by chance with {count} documents: give more of it, "
                    "another --val_fraction, or one text file, which is cut in two"
                )
            writer.finish()
    progress.add(0, finished=True)
    shards = {name: shard for writer in writers.values() for name, shard in writer.shards.items()}
    files = {name: {"tokens": tokens, "sha256": sealed.result()} for name, (tokens, sealed) in shards.items()}
    for name in files:
        os.replace(folder / f".tmp-{name}", folder / name)
    return splits, files


def _fetch_fineweb(folder, shards, say):
    """Downloads FineWeb's shards as they are. Returns "splits" and "files" of meta.json for all shards found here."""
    say(f"fineweb10B: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB in all, to {folder}")
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1)]
    digests = {name: download(_address(FINEWEB) + name, folder / name, say=say) for name in names}
    splits = {split: {"tokens": 0, "bytes": None, "documents": None} for split in ("train", "val")}
    files = {}
    for split, counts in splits.items():
        for path in list_shards(folder, split):
            files[path.name] = {
                "tokens": read_shard(path).size,
                "sha256": digests.get(path.name) or sha256_of_file(path),
            }
            counts["tokens"] += files[path.name]["tokens"]
    return splits, files


# ---- The whole job --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder, say):
    """One process at a time works in a folder; the others wait."""
    with open(folder / ".lock", "w") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_done(folder, made_with, shards):
    """Whether the folder is complete. Raises UserError when it holds something else than this command makes."""
    if (folder / UNFINISHED).exists():
        return False
    if not (folder / "meta.json").exists():
        if made_with["source"] != "fineweb10B" and (list_shards(folder, "train") or list_shards(folder, "val")):
            raise UserError(f"{folder} has shards of another origin, without a meta.json: choose another --out")
        return False
    meta = load_meta(folder)
    if meta.get("made_with") != made_with:
        old = meta["made_with"] if isinstance(meta.get("made_with"), dict) else {}
        other = ", ".join(key for key in made_with if old.get(key) != made_with[key])
        raise UserError(f"{folder} was made from something else ({other} differs): choose another --out or delete it")
    sizes = {folder / name: HEADER_BYTES + 2 * shard["tokens"] for name, shard in meta["files"].items()}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return whole and sum("train" in name for name in meta["files"]) >= shards


def check_arguments(source, paths, tokenizer, val_fraction, shard_tokens, shards):
    """Raises UserError for what prepare() cannot work with. `tokenizer` is a name here, never None."""
    if tokenizer not in TOKENIZER_SIZES:
        raise UserError(f"unknown tokenizer {tokenizer!r}: it must be gpt2 or bytes")
    if source == "fineweb10B" and tokenizer != "gpt2":
        raise UserError("fineweb10B comes tokenized with gpt2 and is not available in bytes: remove --tokenizer")
    if source == "files" and not paths:
        raise UserError("files needs at least one PATH: give text, .jsonl or .jsonl.gz files, folders or globs")
    if source != "files" and paths:
        raise UserError(f"{source} takes no PATH but got {paths[0]}: for your own text use the source files")
    if not 0 < val_fraction < 1:
        raise UserError(f"--val_fraction is {val_fraction} and must lie between 0 and 1: 0.1 is usual")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard_tokens is {shard_tokens} and must be 1 to {MAX_SHARD_TOKENS}: 100000000 is usual")
    if shards is not None and (source != "fineweb10B" or not 1 <= shards <= FINEWEB_SHARDS):
        raise UserError(f"--shards is {shards} for {source}: it is for fineweb10B, and must be 1 to {FINEWEB_SHARDS}")


def _inputs(source, paths, folder):
    """(origin as meta.json tells it, [(name, path)] of the files to read). A download may not be there yet."""
    if source == "fineweb10B":
        return _address(FINEWEB), []
    if source in DOWNLOADS:
        url = DOWNLOADS[source][0]
        return _address(url), [(source, folder / url.rpartition("/")[2])]
    if source == "python":
        return f"standard library of Python {platform.python_version()}", _python_files()
    return f"files {' '.join(map(os.fspath, paths))}", _given_files(paths, folder)


def _made_with(source, tokenizer, val_fraction, shard_tokens, files):
    """What a folder must have been made with for it to count as this command's."""
    made_with = {"source": source, "tokenizer": tokenizer}
    if source != "fineweb10B":
        made_with |= {"val_fraction": val_fraction, "shard_tokens": shard_tokens}
    if source == "files":  # not for "python": an update of Python must not ask for the data to be deleted
        facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files]
        made_with["inputs"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return made_with


def _make_shards(source, origin, files, tokenizer, folder, val_fraction, shard_tokens, say):
    """Files to shards, after a download if the source has one. Returns "splits" and "files" of meta.json."""
    for pattern in (".tmp-train_*.bin", ".tmp-val_*.bin", "train_*.bin", "val_*.bin"):  # of a run that stopped
        for path in list(folder.glob(pattern)):
            path.unlink()
    if source in DOWNLOADS:
        _, sha256, size = DOWNLOADS[source]
        download(origin, files[0][1], sha256, size, say)
    packed = source.startswith("wikitext")  # how much text a zip holds is not known
    total = None if packed else sum(path.stat().st_size for _, path in files)
    progress = Progress(f"preparing {source}", total, say)
    if packed:
        documents = _read_wikitext(files[0][1])
    elif len(files) == 1 and not files[0][1].name.endswith((".jsonl", ".jsonl.gz")):
        documents = _read_by_position(files[0][1], val_fraction)
    else:
        documents = _read_files(files, val_fraction, progress)
    return _write_documents(documents, tokenizer, folder, shard_tokens, progress)


def prepare(source, paths=(), tokenizer=None, out=None, val_fraction=0.1, shard_tokens=10**8, shards=None, say=print):
    """Makes a folder of token shards and returns its Path. One that is complete already is left as it is.

    source: a key of SOURCES. paths: files, folders and globs, for "files". tokenizer: "gpt2" or "bytes" (None: the
    source's own). out: the folder (None: beside this file). val_fraction: of documents, or of a single text's bytes.
    shard_tokens: the most that one shard holds. shards: how many training shards of fineweb10B (None: all). say: gets
    each line of output. Raises UserError. Several processes may run it at once: one works, the others wait.
    """
    if source not in SOURCES:
        closest = difflib.get_close_matches(str(source), SOURCES, 1, 0)[0]
        raise UserError(f"unknown source {source!r}: did you mean {closest}? (there are {', '.join(SOURCES)})")
    tokenizer = tokenizer or SOURCES[source]
    check_arguments(source, paths, tokenizer, val_fraction, shard_tokens, shards)
    folder = Path(out) if out else DATA_DIR / (source if tokenizer == SOURCES[source] else f"{source}_{tokenizer}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where a folder was expected: choose another --out")

    given = dict(tokenizer=tokenizer, out=folder, val_fraction=val_fraction, shard_tokens=shard_tokens, shards=shards)
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = shlex.join(["python", "data/prepare.py", source, *map(str, paths), *flags])
    fineweb = source == "fineweb10B"
    expected_shards = (shards or FINEWEB_SHARDS) if fineweb else 0
    origin, inputs = _inputs(source, paths, folder)
    made_with = _made_with(source, tokenizer, val_fraction, shard_tokens, inputs)

    if _is_done(folder, made_with, expected_shards):  # asked before locking too: a complete folder may be read-only
        say(f"already there: {folder}")
        return folder
    encoder = None if fineweb else get_tokenizer(tokenizer)  # may fail: before anything is changed
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, say):
        if _is_done(folder, made_with, expected_shards):
            say(f"already there: {folder}")
            return folder
        (folder / UNFINISHED).write_text(command, encoding="utf-8", errors="surrogateescape")
        (folder / "meta.json").unlink(missing_ok=True)
        if fineweb:
            splits, files = _fetch_fineweb(folder, expected_shards, say)
        else:
            splits, files = _make_shards(source, origin, inputs, encoder, folder, val_fraction, shard_tokens, say)
        vocab_size, eot = TOKENIZER_SIZES[tokenizer]
        meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eot": eot, "splits": splits}
        meta |= {"source": origin, "files": files, "made_with": made_with}
        with atomic_write(folder / "meta.json") as file:
            file.write(json.dumps(meta, indent=1).encode())
        (folder / UNFINISHED).unlink()
    train, val = splits["train"]["tokens"], splits["val"]["tokens"]
    say(f"{folder}: {train:,} tokens for training, {val:,} for validation ({tokenizer}) in {len(files)} shards")
    return folder


def main(argv=None):
    """The command line. Returns the exit code: 0 done, 2 the user's mistake, 1 anything else."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("source", help=", ".join(SOURCES))
    parser.add_argument("paths", nargs="*", metavar="PATH", help="for files: text, .jsonl, .jsonl.gz, folders, globs")
    parser.add_argument("--tokenizer", help="gpt2 or bytes; the default depends on the source")
    parser.add_argument("--out", metavar="DIR", help="the folder to make; default: data/<source>")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="fraction for validation (default: 0.1)")
    parser.add_argument("--shard_tokens", type=int, default=10**8, help="most tokens in a shard (default: 100000000)")
    parser.add_argument("--shards", type=int, help="fineweb10B: training shards to get, 200 MB each (default: 103)")

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
    except OSError as error:  # a full disk, a folder without permission: the sentence is enough
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: run the same command again to resume", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
