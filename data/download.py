"""Resumable, verified downloads, and the progress lines of long jobs."""

import http.client
import os
import time
import urllib.request
from pathlib import Path

from common.errors import UserError, print_line
from common.files import sha256_of_file
from data.shards import DATA_DIR, check_shard, is_fineweb, load_meta, write_meta

HUB = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/") + "/datasets"
GITHUB = "https://raw.githubusercontent.com"
# At a commit, so that it cannot change
FINEWEB = f"{HUB}/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c/"
# The URL and the SHA-256 of each source
DOWNLOADS = {
    "shakespeare": (
        f"{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": (
        f"{HUB}/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext103": (
        f"{HUB}/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
    "hellaswag": (
        f"{GITHUB}/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/"
        "hellaswag_val.jsonl",
        "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    ),
}


class Progress:
    """Prints how much of a job of `total` bytes is done, every 5 seconds and at its end."""

    def __init__(self, job, total):
        self.job = job
        self.total = total
        self.done = 0
        self.shown = time.monotonic()

    def add(self, n_bytes):
        self.done += n_bytes
        if time.monotonic() - self.shown > 5 or self.done == self.total:
            self.shown = time.monotonic()
            print_line(f"{self.job}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the file's SHA-256. Hugging Face sends it only with the redirect to its storage."""

    sha256 = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        self.sha256 = headers.get("X-Linked-ETag", "").strip('"') or self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url, partial):
    """Try once to complete the file `partial`.

    Returns the SHA-256 that Hugging Face sends, or None for other servers.
    """
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "prepare.py", "Range": f"bytes={have}-"}
    request = urllib.request.Request(url, headers=headers)
    redirects = _Redirects()
    with urllib.request.build_opener(redirects).open(request, timeout=30) as response:
        # A server that ignores ranges sends the whole file again
        if response.status != 206:
            have = 0
        total = have + int(response.headers.get("Content-Length", 0))
        progress = Progress(f"downloading {partial.name.removeprefix('.tmp-')}", total)
        progress.add(have)
        mode = "ab" if have else "wb"
        with open(partial, mode) as file:
            while block := response.read(1 << 18):
                file.write(block)
                progress.add(len(block))
    if progress.done < total:
        raise http.client.HTTPException(
            f"the connection ended after {progress.done} of {total} bytes"
        )
    return redirects.sha256


def _fetch_with_retries(url, path, partial):
    """Try up to four times to complete the file `partial`; return the hash from _fetch.

    Raises UserError.
    """
    for wait_s in (1, 2, 4, None):
        try:
            return _fetch(url, partial)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # 416: the partial file is as long as the whole, or longer
            if getattr(error, "code", None) == 416:
                partial.unlink()
            if wait_s is None:
                raise UserError(
                    f"{url} could not be downloaded ({error}): run this again to resume, set "
                    f"HF_ENDPOINT to a mirror of Hugging Face, put the file at {path} by hand, or "
                    "use `python data/prepare.py python`"
                ) from error
            print_line(f"{error}; trying again in {wait_s} s")
            time.sleep(wait_s)


def download(url, path, sha256=None):
    """Download `url` to `path` unless it is there, and return its SHA-256 in hex.

    Until it is complete, the file beside it is called `.tmp-<name>`; later runs resume from there.
    Raises UserError if four attempts fail, or if the hash is not `sha256` or, without one, the
    hash that the server sent.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only a file that is complete and verified gets the name `path`
    arrived = path
    if not path.exists():
        arrived = path.with_name(f".tmp-{path.name}")
        server_sha256 = _fetch_with_retries(url, path, arrived)
        sha256 = sha256 or server_sha256
    digest = sha256_of_file(arrived)
    if sha256 not in (None, digest):
        arrived.unlink()
        raise UserError(
            f"{url} gave SHA-256 {digest} instead of {sha256}: it is deleted, run this again"
        )
    os.replace(arrived, path)
    return digest


def prepare_hellaswag(out):
    """Download HellaSwag's questions to the folder `out`. Raises UserError."""
    path = Path(out or DATA_DIR / "hellaswag", "hellaswag_val.jsonl")
    url, sha256 = DOWNLOADS["hellaswag"]
    download(url, path, sha256)
    print_line(f"next: python sample.py RUN --choices {path}")


def fineweb_hashes():
    """Return the SHA-256 of the shards that records may use: name -> hex."""
    lines = Path(__file__).with_name("fineweb10B.sha256").read_text().splitlines()
    pairs = [line.split() for line in lines]
    return {name: sha256 for sha256, name in pairs}


def prepare_fineweb(out, shards, command):
    """Download the FineWeb shards that are not in the folder `out` yet, and write meta.json.

    shards: the number of training shards. Raises UserError.
    """
    folder = Path(out or DATA_DIR / "fineweb10B")
    if (folder / "meta.json").exists():
        meta = load_meta(folder)
        if not is_fineweb(meta):
            raise UserError(f"{folder} holds other data: choose a different --out")
        shards = max(shards, len(meta["files"]) - 1)
    print_line(
        f"{folder}: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB"
    )

    known = fineweb_hashes()
    files = {}
    n_tokens = {"train": 0, "val": 0}
    for number in range(shards + 1):
        split = "train" if number else "val"
        name = f"fineweb_{split}_{number:06d}.bin"
        sha256 = download(FINEWEB + name, folder / name, known.get(name))
        length, _ = check_shard(folder / name)
        files[name] = {"tokens": length, "sha256": sha256}
        n_tokens[split] += length

    meta = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "source": FINEWEB}
    splits = {split: {"tokens": count} for split, count in n_tokens.items()}
    write_meta(folder, meta | {"splits": splits, "files": files, "command": command})
