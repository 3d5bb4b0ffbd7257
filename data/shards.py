"""Token shards and the folder that holds them: format, meta.json, atomic writes, and one-sentence errors.

A prepared folder holds `*train*.bin` and `*val*.bin` in the format that llm.c and the NanoGPT speedrun read: 256
little-endian int32 (magic, version, token count, zeros), then the tokens. Every document is preceded by one end-of-text
token. meta.json, written last, says which tokenizer, how many tokens and bytes, from which source, and every hash.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.errors import UserError

DATA_DIR = Path(__file__).resolve().parent
PYTHON_VOCABULARY = DATA_DIR / "python_tokenizer.json"  # of 3.11.7, as --tokenizer bpe --vocab_size 1024 makes it
SOURCES = {  # source -> its default tokenizer, or a file with its vocabulary; None: chosen by size
    "python": str(PYTHON_VOCABULARY),
    "shakespeare": "bytes",
    "wikitext2": "gpt2",
    "wikitext103": "gpt2",
    "fineweb10B": "gpt2",
    "files": None,
}
TOKENIZER_SIZES = {"gpt2": (50257, 50256), "bytes": (257, 256)}  # tokenizer -> vocab_size, end-of-text token


# ---- Files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file, written under a name that starts with `.tmp`, then flushed to disk and renamed to `path`.

    If anything fails, it is removed and `path` stays as it was.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, and so new names, to the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot fsync a folder
                raise
        finally:
            os.close(opened)


def sha256_of_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- Shards ---------------------------------------------------------------------------------------------------------

HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic -> version, dtype of the tokens


def shard_header(dtype: np.dtype | type, count: int) -> bytes:
    """The first HEADER_BYTES of a shard of `count` tokens of this dtype, uint16 or uint32."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = next((magic, version, count) for magic, (version, kind) in FORMATS.items() if kind == dtype)
    return header.tobytes()


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes a 1-D uint16 or uint32 array as one shard, atomically. Raises ValueError for other arrays."""
    if tokens.dtype not in (np.uint16, np.uint32) or tokens.ndim != 1 or not 0 < tokens.size <= MAX_SHARD_TOKENS:
        raise ValueError(f"tokens must be 1-D uint16 or uint32, not {tokens.dtype} of shape {tokens.shape}")
    with atomic_write(Path(path)) as file:
        file.writelines((shard_header(tokens.dtype, tokens.size), np.ascontiguousarray(tokens)))


def read_shard(path: str | Path) -> np.memmap:
    """Maps a shard: a read-only 1-D np.memmap of uint16 or uint32. Raises UserError when it is not an intact shard."""
    path, wrong = Path(path), None
    if not path.is_file():
        raise UserError(f"there is no shard {path}: prepare the data again")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise UserError(f"{path} has {size} bytes, too short for a shard's header of {HEADER_BYTES}: make it again")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    known_version, dtype = FORMATS.get(magic, (None, np.dtype("<u2")))
    whole = HEADER_BYTES + count * dtype.itemsize
    if known_version is None:
        wrong = f"is not a token shard, its magic is {magic} instead of {' or '.join(map(str, FORMATS))}"
    elif version != known_version:
        wrong = f"is a shard of version {version} instead of {known_version}"
    elif count <= 0:
        wrong = f"has {count} tokens by its header instead of one or more"
    elif size != whole:
        wrong = f"is {'truncated' if size < whole else 'too long'}, {size} bytes instead of {whole} for {count} tokens"
    if wrong:
        raise UserError(f"{path} {wrong}: delete it, and prepare or download it again")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))


# ---- A prepared folder ----------------------------------------------------------------------------------------------

UNFINISHED = ".tmp-unfinished"  # holds the command that makes the folder; ignored once meta.json exists
EXPECTED = "expected a folder that `python data/prepare.py SOURCE` made"


def list_shards(folder: Path, split: str) -> list[Path]:
    """Sorted paths of a split's shards, without temporary ones."""
    return sorted(path for path in folder.glob(f"*{split}*.bin") if not path.name.startswith("."))


def check_folder(folder: Path) -> None:
    """Raises UserError when there is no such folder; it suggests the data folder beside it with the closest name."""
    if folder.is_dir():
        return
    problem = f"{folder} is a file" if folder.exists() else f"there is no data folder {folder}"
    names = []
    with contextlib.suppress(OSError):
        names = [path.name for path in folder.parent.iterdir() if path.is_dir() and list_shards(path, "train")]
    close = difflib.get_close_matches(folder.name, names, 1)
    hint = f"; did you mean {folder.with_name(close[0])}?" if close else ""
    raise UserError(f"{problem}: {EXPECTED}{hint}")


def find_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a split's shards, split being "train" or "val". Raises UserError when there are none to use."""
    folder = Path(folder)
    check_folder(folder)
    if not (folder / "meta.json").exists() and (folder / UNFINISHED).exists():
        command = ""
        with contextlib.suppress(FileNotFoundError):  # finished since
            command = (folder / UNFINISHED).read_text(encoding="utf-8", errors="surrogateescape")
        wait = f"wait for `{command}`" if command.isprintable() and command else "wait for data/prepare.py"
        raise UserError(f"{folder} is not complete: {wait}, or run it again if it was stopped")
    shards = list_shards(folder, split)
    if not shards:
        command = load_meta(folder).get("command") or ""
        again = f"make them again with `{command}`" if command.isprintable() and command else EXPECTED
        raise UserError(f"{folder} has no shards *{split}*.bin: {again}")
    return shards


def load_meta(folder: str | Path) -> dict:
    """meta.json of a prepared folder; where there is none, GPT-2's tokenizer, marked by "assumed": True.

    Keys: tokenizer, vocab_size, eot, splits ({"train" and "val": {tokens, bytes, documents}}, None where not known),
    source, files ({shard: {tokens, sha256}}), and for the tokenizer "bpe" vocabulary ({sha256}). Raises UserError when
    they are missing or of another type. "command", which makes the folder again, "order", of documents that come from
    several files, and "made_with" may be missing.
    """
    check_folder(Path(folder))
    path = Path(folder) / "meta.json"
    if not path.exists():
        vocab_size, eot = TOKENIZER_SIZES["gpt2"]
        assumed = {"tokenizer": "gpt2", "vocab_size": vocab_size, "eot": eot, "assumed": True}
        return assumed | {"splits": {}, "source": "unknown", "files": {}}
    again = "delete the folder and prepare it again"
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {again}") from error

    def check(name, value, *kinds):
        if type(value) not in kinds or (type(value) is int and value < 0):
            raise UserError(f"{path} has no valid {name}: {again}")

    check("content", meta, dict)
    for key, kind in dict(tokenizer=str, vocab_size=int, eot=int, splits=dict, source=str, files=dict).items():
        check(key, meta.get(key), kind)
    for key in ("command", "order"):
        check(key, meta.get(key), str, type(None))
    for split in ("train", "val"):
        counts = meta["splits"].get(split)
        check(f"splits.{split}", counts, dict)
        check(f"splits.{split}.tokens", counts.get("tokens"), int)
        check(f"splits.{split}.bytes", counts.get("bytes"), int, type(None))
    for name, shard in meta["files"].items():
        check(f"files.{name}", shard, dict)
        check(f"files.{name}.tokens", shard.get("tokens"), int)
        check(f"files.{name}.sha256", shard.get("sha256"), str, type(None))
        if Path(name).name != name or name == "..":
            raise UserError(f"{path} names a file {name!r} outside its folder: {again}")
    vocab_size, eot = meta["vocab_size"], meta["eot"]
    if meta["tokenizer"] == "bpe":
        check("vocabulary", meta.get("vocabulary"), dict)
        check("vocabulary.sha256", meta["vocabulary"].get("sha256"), str)
    known = TOKENIZER_SIZES.get(meta["tokenizer"], (min(max(vocab_size, 1), 2**20), eot))
    if (vocab_size, eot) != known or not eot < vocab_size:
        raise UserError(
            f"{path} gives tokenizer {meta['tokenizer']!r} {vocab_size} tokens and end-of-text {eot}, which cannot be: "
            f"{again}"
        )
    return meta


def recorded_hashes(meta: dict) -> dict[str, str | None]:
    """SHA-256 of each shard, by name, as meta.json records it."""
    return {name: shard.get("sha256") for name, shard in meta["files"].items()}
