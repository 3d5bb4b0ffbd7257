"""Which files are text, and their text in UTF-8: byte order marks, other encodings, what is not text."""

import codecs
import contextlib
import difflib
import functools
import gzip
import itertools
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from encodings.aliases import aliases
from pathlib import Path
from typing import BinaryIO

from runtime.errors import UserError

BINARY = {  # what a file is -> its suffixes
    "packed": ".gz .bz2 .xz .zst .lz4 .zip .7z .rar .tar .tgz .parquet .jar .whl .deb .rpm .iso .dmg",
    "an image": ".png .jpg .jpeg .gif .bmp .webp .tif .tiff .ico .heic .psd",
    "sound": ".mp3 .wav .flac .ogg .m4a .aac",
    "video": ".mp4 .mkv .avi .mov .webm",
    "weights or arrays": ".pt .pth .ckpt .safetensors .gguf .onnx .npy .npz .pkl .pickle .h5 .arrow .feather",
    "a document of another format": ".pdf .docx .xlsx .pptx .odt .ods .epub",
    "a program": ".exe .dll .so .dylib .pyc .pyo .pyd .class .wasm",
    "a font": ".ttf .otf .woff .woff2",
    "a database": ".sqlite .sqlite3",
}
KINDS = {suffix: kind for kind, suffixes in BINARY.items() for suffix in suffixes.split()}
BYTE_ORDER_MARKS = {  # in this order: the mark of UTF-16 begins that of UTF-32
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
RAW = ("utf-8", "utf-8-sig")  # read as they are: bytes that do not decode stay in the text
ACCEPTED = "text, .jsonl, .csv, .jsonl.gz or .csv.gz"  # what data/prepare.py reads, as its messages list it
SAMPLE = 1 << 16  # bytes looked at in the beginning, in the middle and at the end of a file
BLOCK = 1 << 18  # bytes read at once


class NotText(UserError):
    """A file that cannot be read as text; `why` is the reason in a few words."""

    def __init__(self, path: Path, why: str, advice: str):
        super().__init__(f"{path} is not text ({why}): {advice}")
        self.why = why


def check_encoding(name: str) -> str:
    """Python's name of a text encoding; "utf-8" for UTF-8 with or without byte order mark. Raises UserError."""
    try:
        codecs.getincrementaldecoder(name)
        b"ab".decode(name, errors="ignore")  # LookupError for codecs that are not of text
    except (LookupError, ValueError) as error:
        close = difflib.get_close_matches(str(name).lower(), ["latin-1", *sorted({*aliases.values()})], 1)
        hint = f"did you mean {close[0]}?" if close else "utf-8, utf-16, latin-1 and cp1252 are some that exist"
        raise UserError(f"unknown --encoding {name!r}: {hint}") from error
    found = codecs.lookup(name).name
    return "utf-8" if found in RAW else found


def marked_encoding(head: bytes) -> str:
    """The encoding that a byte order mark in these first bytes names; "utf-8" where there is none."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if head.startswith(mark)), "utf-8")


def _sample(path: Path) -> bytes:
    """The beginning, the middle and the end of a file, or all of a small one; of a packed file the beginning."""
    with open(path, "rb") as file:
        if path.suffix == ".gz":
            return gzip.open(file).read(SAMPLE)
        size = path.stat().st_size
        if size <= 3 * SAMPLE:
            return file.read()
        sample = b""
        for offset in (0, size // 2, size - SAMPLE):
            file.seek(offset)
            sample += file.read(SAMPLE)
        return sample


def check_text(path: Path, encoding: str = "utf-8") -> str:
    """The encoding to read a file with: the given one, or for "utf-8" what its byte order mark says.

    Raises NotText for a suffix of BINARY, and for a sample of at most 3 * SAMPLE bytes that has a NUL, does not decode
    in the encoding, or has more than one byte, and more than one in 1,000, that is not UTF-8.
    """
    kind = KINDS.get(path.suffix.lower())
    if not path.is_file():
        raise NotText(path, "not a regular file", f"give {ACCEPTED} files")
    if kind and not path.name.endswith((".jsonl.gz", ".csv.gz")):
        raise NotText(path, kind, "unpack it first" if kind == "packed" else f"give {ACCEPTED} files")
    try:
        sample = _sample(path)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return encoding  # reading it finds the damage, and names it
    encoding = marked_encoding(sample) if encoding == "utf-8" else encoding
    bad = 0
    if encoding in RAW:
        bad = len(sample) - len(sample.decode("utf-8", errors="ignore").encode())
    else:
        sample = b"".join(_to_utf8([sample[:SAMPLE]], path, encoding))
    if b"\0" in sample:
        advice = "give text, and --encoding utf-16-le for UTF-16 without byte order mark"
        raise NotText(path, "it has NUL bytes", advice)
    if bad > max(1, len(sample) // 1000):
        why = f"{bad:,} of {len(sample):,} bytes are not UTF-8"
        raise NotText(path, why, "name its encoding, as in --encoding cp1252, or remove it")
    return encoding


def _to_utf8(blocks: Iterable[bytes], path: Path, encoding: str) -> Iterator[bytes]:
    """Blocks of a file in any encoding, ended by an empty one -> blocks in UTF-8. Raises NotText."""
    decoder = codecs.getincrementaldecoder(encoding)()
    consumed = 0
    for block in blocks:
        consumed += len(block)
        try:
            yield decoder.decode(block, final=not block).encode()
        except UnicodeError as error:
            why = f"not {encoding}: {error}"
            if isinstance(error, UnicodeDecodeError):
                why = f"byte {consumed - len(error.object) + error.start:,} does not decode as {encoding}"
            raise NotText(path, why, "name its own encoding with --encoding, or remove it") from error


@contextlib.contextmanager
def open_utf8(path: Path, encoding: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file as two binary streams: as it is, and its text, unpacked and in UTF-8 without byte order mark.

    Text in another encoding is copied to a temporary file first, so that all that read it see UTF-8 only. Raises
    NotText where it does not decode, and UserError for a damaged .gz, when it is opened or read.
    """
    try:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(path, "rb"))
            text = opened.enter_context(gzip.open(file)) if path.suffix == ".gz" else file
            if encoding not in RAW:
                blocks = itertools.chain(iter(functools.partial(text.read, BLOCK), b""), [b""])
                text = opened.enter_context(tempfile.TemporaryFile())
                text.writelines(_to_utf8(blocks, path, encoding))
                text.seek(0)
            if encoding != "utf-8" and text.read(3) != codecs.BOM_UTF8:
                text.seek(0)
            yield file, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again") from error
