"""Token shards and the folder that holds them: the file format, meta.json, and errors for damage.

A prepared folder holds `*train*.bin` and `*val*.bin` in the format that llm.c and the NanoGPT
speedrun read: 256 little-endian int32 (magic, version, token count, zeros), then the tokens. Every
document is preceded by one end-of-text token. meta.json holds the tokenizer, the numbers of tokens
and bytes, the source, and all hashes.
"""

import json
import re
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import atomic_write, sha256_of_file

DATA_DIR = Path(__file__).resolve().parent
# Trained on Python 3.11.7's library, with --tokenizer bpe --vocab_size 1024
PYTHON_VOCABULARY = DATA_DIR / "python_tokenizer.json"
# Tokenizer -> vocab_size, end-of-text token
TOKENIZER_SIZES = {"gpt2": (50257, 50256), "bytes": (257, 256)}
HEADER_BYTES = 1024
# Magic -> version, dtype of the tokens
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}


def write_shard(path, tokens):
    """Write a 1-D uint16 or uint32 array as a shard, and return its entry in meta.json.

    Raises ValueError for other arrays.
    """
    # The dtype of the tokens decides the magic and the version
    header = np.zeros(256, dtype="<i4")
    for magic, (version, dtype) in FORMATS.items():
        if tokens.dtype == dtype:
            header[:3] = magic, version, tokens.size
    # The count is an int32
    if not header[0] or tokens.ndim != 1 or not 0 < tokens.size < 2**31:
        found = f"{tokens.dtype} of shape {tokens.shape}"
        raise ValueError(f"tokens must be 1-D uint16 or uint32, not {found}")
    with open(path, "wb") as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens))
    return {"tokens": tokens.size, "sha256": sha256_of_file(path)}


def check_shard(path):
    """Return the number of tokens of a shard and their dtype, uint16 or uint32.

    Raises UserError for a file that is not an intact shard.
    """
    # A file that is missing or too short gets a header of zeros
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    magic, version, count = 0, 0, 0
    if size >= HEADER_BYTES:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        magic, version, count = np.frombuffer(header, dtype="<i4", count=3).tolist()
    known_version, dtype = FORMATS.get(magic, (None, None))

    advice = "delete it, and prepare or download it again"
    if version != known_version or count <= 0:
        found = f"magic {magic}, version {version}, {count} tokens"
        raise UserError(f"{path} is not a token shard ({found}): {advice}")
    expected = HEADER_BYTES + count * dtype.itemsize
    if size != expected:
        damage = "truncated" if size < expected else "too long"
        raise UserError(f"{path} is {damage}, {size} bytes instead of {expected}: {advice}")
    return count, dtype


def read_shard(path):
    """Return the tokens of a shard, 1-D uint16 or uint32. Raises UserError, as check_shard."""
    count, dtype = check_shard(path)
    return np.fromfile(path, dtype=dtype, count=count, offset=HEADER_BYTES)


def find_shards(folder, split):
    """Return the sorted paths of the shards of a split, "train" or "val".

    Raises UserError if there are none.
    """
    # The name of a dataset may hold "train" or "val" too, as in medieval_train_000000.bin
    is_of_split = re.compile(f"{split}(?!.*(train|val))").search
    shards = sorted(path for path in Path(folder).glob("[!.]*.bin") if is_of_split(path.name))
    if not shards:
        found = f"there is no folder {folder}"
        if Path(folder).is_dir():
            found = f"{folder} has no shards *{split}*.bin"
        raise UserError(f"{found}: expected a folder that `python data/prepare.py SOURCE` made")
    return shards


def load_meta(folder):
    """Return meta.json of a prepared folder; without one, GPT-2's tokenizer and "assumed": True.

    Keys: tokenizer, vocab_size, eot, source, splits ({"train" and "val": {tokens, bytes,
    documents}}, None where not known), files ({shard: {tokens, sha256}}), for the tokenizer "bpe"
    vocabulary ({sha256}), and perhaps "command", "made_from" and "order" (of the documents).

    Raises UserError if one is missing or of another type.
    """
    path = Path(folder) / "meta.json"
    if not path.exists():
        find_shards(folder, "train")
        vocab_size, eot = TOKENIZER_SIZES["gpt2"]
        sizes = dict(vocab_size=vocab_size, eot=eot)
        return dict(tokenizer="gpt2", **sizes, splits={}, source="unknown", files={}, assumed=True)
    try:
        meta = json.loads(path.read_bytes())
        if _is_valid_meta(meta):
            return meta
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UserError(f"{path} is damaged: delete the folder and prepare it again")


def _is_valid_meta(meta):
    """Check the values of meta.json. Raises KeyError, TypeError and the like for missing ones."""
    vocab_size = meta["vocab_size"]
    eot = meta["eot"]
    counts = [vocab_size, eot]
    texts = [meta["tokenizer"], meta["source"]]
    for part in (meta["splits"]["train"], meta["splits"]["val"]):
        counts += [part["tokens"], part.get("bytes") or 0]
    for shard in meta["files"].values():
        counts.append(shard["tokens"])
    if meta["tokenizer"] == "bpe":
        texts.append(meta["vocabulary"]["sha256"])

    return (
        all(type(count) is int and count >= 0 for count in counts)
        and all(type(text) is str for text in texts)
        and eot < vocab_size <= 2**20
        and TOKENIZER_SIZES.get(meta["tokenizer"]) in (None, (vocab_size, eot))
    )


def write_meta(folder, meta):
    """Write meta.json of a prepared folder."""
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=1).encode())


def recorded_hashes(meta):
    """Return the SHA-256 of each shard, by name, as meta.json records it."""
    return {name: shard.get("sha256") for name, shard in meta["files"].items()}
