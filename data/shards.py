"""Token shards and the folder that holds them: the file format and meta.json.

A prepared folder holds `*train*.bin` and `*val*.bin` in the format of llm.c and the NanoGPT
speedrun: 256 little-endian int32 (magic, version, token count, zeros), then the tokens. An
end-of-text token precedes every document. meta.json holds the tokenizer, the numbers of tokens and
bytes, the source, and all hashes.
"""

import json
import re
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import atomic_write, sha256_of_file

DATA_DIR = Path(__file__).resolve().parent
# Trained on Python 3.11.7's library and its tables, with --tokenizer bpe --vocab_size 1024
PYTHON_VOCABULARY = DATA_DIR / "python_tokenizer.json"
# The entries of meta.json for GPT-2's tokenizer
GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256}
HEADER_BYTES = 1024
# The version and the bytes of a token for each magic number
FORMATS = {20240520: (1, 2), 20240801: (7, 4)}


def write_shard(path: Path, tokens: np.ndarray) -> dict:
    """Write a 1-D uint16 array as a shard, and return its entry in meta.json."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens.size
    with open(path, "wb") as file:
        file.write(header.data)
        file.write(tokens.astype("<u2", casting="safe").data)
    return {"tokens": tokens.size, "sha256": sha256_of_file(path)}


def check_shard(path: Path) -> tuple[int, np.dtype]:
    """Return the number of tokens of a shard and their dtype, uint16 or uint32.

    Raises UserError for a file that is not an intact shard.
    """
    # A missing or short file gets a header of zeros
    size = path.stat().st_size if path.is_file() else 0
    magic, version, count = 0, 0, 0
    if size >= HEADER_BYTES:
        magic, version, count = np.fromfile(path, "<i4", 3).tolist()

    if magic and magic not in FORMATS:
        raise UserError(
            f"{path} has no header of a token shard, as nanoGPT's train.bin; prepare or download "
            "the data again, or convert the file as docs/data.md shows"
        )
    known_version, itemsize = FORMATS.get(magic, (None, 0))
    if version != known_version or count <= 0 or size != HEADER_BYTES + count * itemsize:
        raise UserError(
            f"{path} is not an intact token shard (magic {magic}, version {version}, {count} "
            f"tokens, {size} bytes); delete it, and prepare or download it again"
        )
    return count, np.dtype(f"<u{itemsize}")


def shard_paths(folder: Path, split: str) -> list[Path]:
    """List the shards of a split, "train" or "val", sorted. Raises UserError if there are none."""
    # The name of a dataset may contain "train" or "val" too, as in medieval_train_000000.bin
    is_of_split = re.compile(f"{split}(?!.*(train|val))").search
    shards = sorted(path for path in folder.glob("[!.]*.bin") if is_of_split(path.name))
    if not shards:
        found = f"there is no folder {folder}"
        if folder.is_file():
            found = f"{folder} is a file"
        elif folder.is_dir():
            found = f"{folder} has no shards *{split}*.bin"
        raise UserError(
            f"{found}; expected a folder that data/prepare.py made (`python data/prepare.py "
            "shakespeare` makes data/shakespeare, `files PATH` takes your own text)"
        )
    return shards


def meta_or_gpt2(folder: Path) -> dict:
    """Read meta.json of a prepared folder; without one, assume GPT-2's tokenizer ("assumed": True).

    Keys: tokenizer, vocab_size, eot, source, splits ({"train" and "val": {tokens, perhaps bytes and
    documents}}), files ({shard: {tokens, sha256}}); vocabulary ({sha256}) for the tokenizer "bpe";
    perhaps options. Raises UserError if one is missing or has a wrong value.
    """
    path = folder / "meta.json"
    if not path.exists():
        shard_paths(folder, "train")
        return GPT2 | {"source": "unknown", "assumed": True, "splits": {}, "files": {}}
    try:
        meta = json.loads(path.read_bytes())
        counts = [meta["splits"]["train"], meta["splits"]["val"], *meta["files"].values()]
        numbers = [meta["vocab_size"], meta["eot"], *(count["tokens"] for count in counts)]
        texts = [meta["tokenizer"], meta["source"]]
        if meta["tokenizer"] == "bpe":
            texts.append(meta["vocabulary"]["sha256"])
        if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged; delete the folder and prepare it again") from None
    return meta


def is_fineweb(meta: dict) -> bool:
    """Return True for the shards of `prepare.py fineweb10B`, from any endpoint and commit."""
    return "/fineweb10B-gpt2/resolve/" in meta["source"]


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json of a prepared folder."""
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode())


def recorded_hashes(meta: dict) -> dict[str, str | None]:
    """Return the SHA-256 of each shard, by name, as meta.json records it."""
    return {name: shard.get("sha256") for name, shard in meta["files"].items()}
