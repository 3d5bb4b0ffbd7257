"""Token shards and the folder that holds them: format, meta.json, atomic writes, and one-sentence errors.

A prepared folder holds `*train*.bin` and `*val*.bin` in the format that llm.c and the NanoGPT speedrun read: 256
little-endian int32 (magic, version, token count, zeros), then the tokens. Every document is preceded by one end-of-text
token. meta.json says which tokenizer, how many tokens and bytes, from which source, and every hash.
"""

import json
from pathlib import Path

import numpy as np

from common import UserError, sha256_of_file

DATA_DIR = Path(__file__).resolve().parent
PYTHON_VOCABULARY = (
    DATA_DIR / "python_tokenizer.json"
)  # of 3.11.7, as --tokenizer bpe --vocab_size 1024 makes it
TOKENIZER_SIZES = {
    "gpt2": (50257, 50256),
    "bytes": (257, 256),
}  # tokenizer -> vocab_size, end-of-text token


HEADER_BYTES = 1024
FORMATS = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}  # magic -> version, dtype of the tokens


def write_shard(path: str | Path, tokens: np.ndarray) -> dict:
    """Writes a 1-D uint16 or uint32 array as a shard; returns its entry in meta.json. Raises ValueError for others."""
    formats = [
        (magic, version) for magic, (version, dtype) in FORMATS.items() if dtype == tokens.dtype
    ]
    if not formats or tokens.ndim != 1 or not 0 < tokens.size < 2**31:  # the count is an int32
        raise ValueError(
            f"tokens must be 1-D uint16 or uint32, not {tokens.dtype} of shape {tokens.shape}"
        )
    header = np.zeros(256, dtype="<i4")
    header[:3] = *formats[0], tokens.size
    with open(path, "wb") as file:
        file.writelines((header, np.ascontiguousarray(tokens)))
    return {"tokens": tokens.size, "sha256": sha256_of_file(path)}


def read_shard(path: str | Path) -> np.memmap:
    """Maps a shard: a read-only 1-D np.memmap of uint16 or uint32. Raises UserError when it is not an intact shard."""
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    magic, version, count = (
        np.fromfile(path, dtype="<i4", count=3).tolist() if size >= HEADER_BYTES else (0, 0, 0)
    )
    known_version, dtype = FORMATS.get(magic, (None, np.dtype("<u2")))
    whole = HEADER_BYTES + count * dtype.itemsize
    if version != known_version or count <= 0:
        wrong = f"is not a token shard (magic {magic}, version {version}, {count} tokens)"
    elif size != whole:
        wrong = f"is {'truncated' if size < whole else 'too long'}, {size} bytes instead of {whole}"
    else:
        return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    raise UserError(f"{path} {wrong}: delete it, and prepare or download it again")


def find_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a split's shards, split being "train" or "val". Raises UserError when there are none."""
    shards = sorted(
        path for path in Path(folder).glob(f"*{split}*.bin") if not path.name.startswith(".")
    )
    if not shards:
        found = (
            f"{folder} has no shards *{split}*.bin"
            if Path(folder).is_dir()
            else f"there is no folder {folder}"
        )
        raise UserError(f"{found}: expected a folder that `python data/prepare.py SOURCE` made")
    return shards


def load_meta(folder: str | Path) -> dict:
    """meta.json of a prepared folder; where there is none, GPT-2's tokenizer, marked by "assumed": True.

    Keys: tokenizer, vocab_size, eot, splits ({"train" and "val": {tokens, bytes, documents}}, None where not known),
    source, files ({shard: {tokens, sha256}}), for the tokenizer "bpe" vocabulary ({sha256}), and perhaps "command" and
    "order" of the documents. Raises UserError when they are missing or of another type.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        find_shards(folder, "train")
        vocab_size, eot = TOKENIZER_SIZES["gpt2"]
        sizes = dict(vocab_size=vocab_size, eot=eot)
        return dict(tokenizer="gpt2", **sizes, splits={}, source="unknown", files={}, assumed=True)
    try:
        meta = json.loads(path.read_bytes())
        sizes, splits = (
            (meta["vocab_size"], meta["eot"]),
            [meta["splits"][split] for split in ("train", "val")],
        )
        counts = [*sizes, *(n for part in splits for n in (part["tokens"], part.get("bytes") or 0))]
        counts += [shard["tokens"] for shard in meta["files"].values()]
        hashes = [meta["vocabulary"]["sha256"]] if meta["tokenizer"] == "bpe" else []
        hashes += [shard.get("sha256") or "" for shard in meta["files"].values()]
        valid = all(type(n) is int and n >= 0 for n in counts) and sizes[1] < sizes[0] <= 2**20
        valid = valid and all(
            type(text) is str for text in (meta["tokenizer"], meta["source"], *hashes)
        )
        valid = valid and sizes == TOKENIZER_SIZES.get(meta["tokenizer"], sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{path} is damaged: delete the folder and prepare it again")
    return meta


def recorded_hashes(meta: dict) -> dict[str, str | None]:
    """SHA-256 of each shard, by name, as meta.json records it."""
    return {name: shard.get("sha256") for name, shard in meta["files"].items()}
