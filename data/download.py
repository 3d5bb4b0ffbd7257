"""Verified downloads, and the progress lines of long jobs."""

import http.client
import os
import time
import urllib.request
from pathlib import Path

from common.errors import UserError, print_line
from common.files import atomic_write, sha256_of_file
from data.shards import DATA_DIR, GPT2, check_shard, is_fineweb, meta_or_gpt2, write_meta

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

    def __init__(self, job: str, total: int):
        self.job = job
        self.total = total
        self.done = 0
        self.shown = time.monotonic()

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if time.monotonic() - self.shown > 5 or self.done == self.total:
            self.shown = time.monotonic()
            print_line(f"{self.job}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB")


def fetch(url: str, path: Path) -> None:
    """Download `url` to `path`, whole or not at all. Raises OSError, ValueError, HTTPException."""
    request = urllib.request.Request(url, headers={"User-Agent": "prepare.py"})
    with urllib.request.urlopen(request, timeout=30) as response, atomic_write(path) as file:
        total = int(response.headers.get("Content-Length", 0))
        progress = Progress(f"downloading {path.name}", total)
        while block := response.read(1 << 18):
            file.write(block)
            progress.add(len(block))
        if progress.done < total:
            raise OSError(f"the connection ended after {progress.done} of {total} bytes")


def download(url: str, path: Path, sha256: str | None = None) -> str:
    """Download `url` to `path` unless it is there, and return its SHA-256 in hex.

    Raises UserError if four attempts fail, or if the hash is not `sha256`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for wait_s in (1, 2, 4, None):
        if path.exists():
            break
        try:
            fetch(url, path)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if wait_s is None:
                advice = "run this again, "
                if url.startswith(HUB):
                    advice += "set HF_ENDPOINT to a mirror of Hugging Face, "
                advice += f"put the file at {path} by hand, or use `python data/prepare.py python`"
                raise UserError(f"{url} could not be downloaded ({error}); {advice}") from error
            print_line(f"{error}; trying again in {wait_s} s")
            time.sleep(wait_s)

    digest = sha256_of_file(path)
    if sha256 not in (None, digest):
        path.unlink()
        raise UserError(
            f"{url} gave SHA-256 {digest} instead of {sha256}; it is deleted, run this again"
        )
    return digest


def prepare_hellaswag(out: str | None = None) -> None:
    """Download HellaSwag's questions to the folder `out`. Raises UserError."""
    path = Path(out or DATA_DIR / "hellaswag", "hellaswag_val.jsonl")
    url, sha256 = DOWNLOADS["hellaswag"]
    download(url, path, sha256)
    print_line(f"next: python sample.py RUN --choices {path}")


def fineweb_hashes() -> dict[str, str]:
    """Return the SHA-256 of the shards that records may use, by their names."""
    lines = Path(__file__).with_name("fineweb10B.sha256").read_text().splitlines()
    return {name: sha256 for sha256, name in map(str.split, lines)}


def prepare_fineweb(out: str | None = None, shards: int = 103) -> None:
    """Download the FineWeb shards that are not in the folder `out` yet, and write meta.json.

    shards: the number of training shards. Raises UserError.
    """
    if shards < 1:
        raise UserError(f"--shards is {shards}; expected 1 or more")
    folder = Path(out or DATA_DIR / "fineweb10B")
    if (folder / "meta.json").exists():
        meta = meta_or_gpt2(folder)
        if not is_fineweb(meta):
            raise UserError(f"{folder} holds other data; choose a different --out")
        shards = max(shards, len(meta["files"]) - 1)
    print_line(
        f"{folder}: {shards} training shards and one for validation, {0.2 * (shards + 1):.1f} GB"
    )

    known = fineweb_hashes()
    files = {}
    splits = {"train": {"tokens": 0}, "val": {"tokens": 0}}
    for number in range(shards + 1):
        split = "train" if number else "val"
        name = f"fineweb_{split}_{number:06d}.bin"
        sha256 = download(FINEWEB + name, folder / name, known.get(name))
        length, _ = check_shard(folder / name)
        files[name] = {"tokens": length, "sha256": sha256}
        splits[split]["tokens"] += length
    write_meta(folder, GPT2 | {"source": FINEWEB, "splits": splits, "files": files})
