"""Resumable, verified downloads, and progress lines of long jobs."""

import http.client
import json
import os
import time
import urllib.request
from pathlib import Path

from common import UserError, atomic_write, sha256_of_file
from data.shards import DATA_DIR, TOKENIZER_SIZES, load_meta, read_shard

HUB = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/") + "/datasets"
GITHUB = "https://raw.githubusercontent.com"
SHAKESPEARE = f"{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
WIKITEXT2 = f"{HUB}/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"
WIKITEXT103 = f"{HUB}/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip"
HELLASWAG = (
    f"{GITHUB}/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl"
)
FINEWEB = f"{HUB}/kjj0/fineweb10B-gpt2/resolve/main/"
DOWNLOADS = {  # source -> address, SHA-256
    "shakespeare": (
        SHAKESPEARE,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": (WIKITEXT2, "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "wikitext103": (
        WIKITEXT103,
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
    "hellaswag": (HELLASWAG, "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"),
}


class Progress:
    """Says every 5 seconds, and at its end, how much of a job of `total` bytes is done."""

    def __init__(self, doing, total, say):
        self.doing, self.total, self.say, self.done = doing, total, say, 0
        self.start = self.shown = time.monotonic()

    def add(self, size):
        now = time.monotonic()
        self.done += size
        if now - self.shown > 5 or self.done == self.total:
            self.shown = now
            rate = self.done / 1e6 / max(now - self.start, 1e-6)
            self.say(
                f"{self.doing}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {rate:,.1f} MB/s"
            )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the file's SHA-256, which Hugging Face sends only with the redirect to its storage."""

    sha256 = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.sha256 = headers.get("X-Linked-ETag", "").strip('"') or self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url, partial, say):
    """One attempt to complete `partial`. Returns the SHA-256 that Hugging Face names, or None."""
    have = partial.stat().st_size if partial.exists() else 0
    redirects = _Redirects()
    request = urllib.request.Request(
        url, headers={"User-Agent": "prepare.py", "Range": f"bytes={have}-"}
    )
    with urllib.request.build_opener(redirects).open(request, timeout=30) as response:
        have = (
            have if response.status == 206 else 0
        )  # a server without Range sends the whole file again
        total = have + int(response.headers.get("Content-Length", 0))
        progress = Progress(f"downloading {partial.name.removeprefix('.tmp-')}", total, say)
        progress.add(have)
        with open(partial, "ab" if have else "wb") as file:
            while block := response.read(1 << 18):
                file.write(block)
                progress.add(len(block))
        if progress.done < total:
            raise http.client.HTTPException(
                f"the connection ended after {progress.done} of {total} bytes"
            )
    return redirects.sha256


def download(url, path, sha256=None, say=print):
    """Downloads `url` to `path` unless it is there, and returns its SHA-256 in hex.

    Partial content stays beside it as `.tmp-<name>`: further attempts and runs resume from there. Raises UserError when
    four attempts fail, or when the hash is not the one given here or named by the server.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".tmp-{path.name}")
    for wait in () if path.exists() else (1, 2, 4, None):
        try:
            named = _fetch(url, partial, say)
            sha256 = sha256 or named
            break
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # ValueError: not an address
            code = getattr(error, "code", 0)
            if code == 416:  # what we have is as long as the file, or longer
                partial.unlink()
            if wait is None or (400 <= code < 500 and code not in (408, 416, 429)):
                advice = "run this again to resume, set HF_ENDPOINT to a mirror, or use `python data/prepare.py python`"
                raise UserError(f"{url} could not be downloaded ({error}): {advice}") from error
            say(f"{error}; trying again in {wait} s")
            time.sleep(wait)
    arrived = path if path.exists() else partial
    digest = sha256_of_file(arrived)
    if sha256 not in (None, digest):
        arrived.unlink()
        raise UserError(
            f"{url} gave SHA-256 {digest} instead of {sha256}: it is deleted, run this again"
        )
    os.replace(arrived, path)
    return digest


def prepare_fineweb(out=DATA_DIR / "fineweb10B", shards=103, command=None, say=print):
    """Downloads FineWeb's shards unchanged, except those in `out`, and writes meta.json. Raises UserError."""
    folder, files = Path(out), {}
    if (folder / "meta.json").exists() and len(load_meta(folder)["files"]) > shards:
        return say(f"already there: {folder}")
    say(
        f"fineweb10B: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB in all, to {folder}"
    )
    splits = {split: {"tokens": 0, "bytes": None, "documents": None} for split in ("train", "val")}
    for number in range(shards + 1):
        split = "train" if number else "val"
        name = f"fineweb_{split}_{number:06d}.bin"
        sha256 = download(FINEWEB + name, folder / name, say=say)
        files[name] = {"tokens": read_shard(folder / name).size, "sha256": sha256}
        splits[split]["tokens"] += files[name]["tokens"]
    vocab_size, eot = TOKENIZER_SIZES["gpt2"]
    meta = dict(
        tokenizer="gpt2", vocab_size=vocab_size, eot=eot, splits=splits, source=FINEWEB, files=files
    )
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta | {"command": command}, indent=1).encode())
