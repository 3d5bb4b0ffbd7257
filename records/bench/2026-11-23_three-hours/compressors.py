"""Bits per byte of a data set's validation text by compressors: `python compressors.py DATA`.

Each compresses the text alone, and given the training text: zstd --patch-from it, the others both texts, less what the
training text alone takes. DATA: a folder of data/prepare.py with one shard a split and a byte pair tokenizer; its texts
go without what stands between documents. Needs xz, zstd and `pip install pyppmd==1.3.1`.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyppmd

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from data.shards import find_shards  # noqa: E402
from data.tokenizers import get_tokenizer  # noqa: E402

XZ = ["xz", "-k", "-c", "-T1", "--lzma2=preset=9e,dict=192MiB"]
ZSTD = ["zstd", "-q", "-c", "-19", "--ultra", "--long=27"]


def ppmd(path: Path, order: int) -> int:
    """Bytes of a file by PPMd (variant H, as in 7-Zip) with 2 GB of memory."""
    encoder, size = pyppmd.Ppmd7Encoder(order, 2**31 - 1), 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            size += len(encoder.encode(part))
    return size + len(encoder.flush())


def size_of(command: list[str]) -> int:
    return len(subprocess.run(command, check=True, capture_output=True).stdout)


def text_of(data: Path, split: str) -> bytes:
    """A split's text."""
    tokenizer = get_tokenizer("bpe", (data / "tokenizer.json").read_text())
    shards = [np.fromfile(shard, "<u2", offset=1024) for shard in find_shards(data, split)]
    tokens = np.concatenate(shards)
    return tokenizer.decode_bytes(tokens[tokens != tokenizer.eot].tolist())


if __name__ == "__main__":
    data = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        train, val, both = (Path(folder) / name for name in ("train", "val", "both"))
        train.write_bytes(text_of(data, "train"))
        val.write_bytes(text_of(data, "val"))
        both.write_bytes(train.read_bytes() + val.read_bytes())
        n_bytes = val.stat().st_size
        print(f"training text {train.stat().st_size:,} bytes, validation text {n_bytes:,} bytes")
        print("| Compressor | Alone | Given the training text | Seconds for both |\n| --- | --- | --- | --- |")
        for name, alone, given in (
            (" ".join(XZ[4:]), lambda: size_of([*XZ, val]), lambda: size_of([*XZ, both]) - size_of([*XZ, train])),
            (" ".join(ZSTD[3:]), lambda: size_of([*ZSTD, val]), lambda: size_of([*ZSTD, f"--patch-from={train}", val])),
            ("PPMd, order 6", lambda: ppmd(val, 6), lambda: ppmd(both, 6) - ppmd(train, 6)),
            ("PPMd, order 16", lambda: ppmd(val, 16), lambda: ppmd(both, 16) - ppmd(train, 16)),
        ):
            began = time.perf_counter()
            bits = [f"{8 * size() / n_bytes:.3f}" for size in (alone, given)]
            print(f"| {name} | {bits[0]} | {bits[1]} | {time.perf_counter() - began:,.0f} |", flush=True)
