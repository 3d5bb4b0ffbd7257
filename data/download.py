"""Resumable, verified downloads, and progress lines of long jobs."""

import http.client
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

from data.shards import UserError, list_shards, read_shard, sha256_of_file

DOWNLOADS = {  # source -> address ({hub} is HF_ENDPOINT), SHA-256
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": (
        "{hub}/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext103": (
        "{hub}/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
}
FINEWEB = "{hub}/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
FINEWEB_SHARDS = 103


class Progress:
    """Reports the progress of a job of `total` bytes, twice a second on a terminal and every 10 seconds elsewhere."""

    def __init__(self, doing, total, say):
        self.doing, self.total, self.say = doing, total, say
        self.done = 0
        self.terminal = say is print and sys.stdout.isatty()
        self.start = self.shown = time.monotonic()

    def add(self, size, finished=False):
        """Counts `size` bytes, and prints a line when it is time to."""
        now = time.monotonic()
        self.done += size
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


def address_of(template):
    """The address, with its {hub} replaced by HF_ENDPOINT or the default."""
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if "@" in hub and "{hub}" in template:  # it would show up in meta.json and in messages
        raise UserError("HF_ENDPOINT holds a user name or a password, which cannot be used: give an address without")
    return template.replace("{hub}", hub)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the file's SHA-256, which Hugging Face sends only with the redirect to its storage."""

    etag = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.etag = headers.get("X-Linked-ETag") or self.etag
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url, partial, say):
    """One attempt to complete `partial`. Returns the SHA-256 that the server reports, or None."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "prepare.py"}
    if have:
        headers["Range"] = f"bytes={have}-"
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as response:
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


def download(url, path, sha256=None, say=print):
    """Downloads `url` to `path` unless it is there, and returns its SHA-256 in hex.

    Partial content stays beside it as `.tmp-<name>`: further attempts and runs resume from there. Raises UserError when
    four attempts fail, or when the hash is not the one given here or named by the server.
    """
    path = Path(path)
    partial = path.with_name(f".tmp-{path.name}")
    for wait in () if path.exists() else (1, 2, 4, None):
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
    arrived = path if path.exists() else partial
    digest = sha256_of_file(arrived)
    if sha256 not in (None, digest):
        size = arrived.stat().st_size
        arrived.unlink()
        raise UserError(
            f"{url} gave {size} bytes with SHA-256 {digest} instead of {sha256}: they are deleted, run this again or "
            f"put the right file at {path}"
        )
    os.replace(arrived, path)
    return digest


def download_fineweb(folder, staging, shards, say):
    """Downloads FineWeb's shards unchanged to `staging`, except those in `folder`. Returns "splits" and "files" of
    meta.json for the shards of both.
    """
    say(f"fineweb10B: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB in all, to {folder}")
    digests = {}
    for name in ("fineweb_val_000000.bin", *(f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1))):
        url = address_of(FINEWEB) + name
        path = folder / name if (folder / name).exists() else staging / name
        digests[name] = download(url, path, say=say)
        try:
            read_shard(path)
        except UserError as error:
            if path.parent == staging:
                path.unlink()
                raise UserError(f"{url} gave no token shard ({error}): it is deleted, run this again") from error
            raise
    splits = {split: {"tokens": 0, "bytes": None, "documents": None} for split in ("train", "val")}
    files = {}
    for split, counts in splits.items():
        for path in sorted(list_shards(staging, split) + list_shards(folder, split), key=lambda path: path.name):
            tokens, sha256 = read_shard(path).size, digests.get(path.name) or sha256_of_file(path)
            files[path.name] = {"tokens": tokens, "sha256": sha256}
            counts["tokens"] += tokens
    return splits, files
