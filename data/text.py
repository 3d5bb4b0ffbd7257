"""Which files are text, and their text as a stream of UTF-8: byte order marks, other encodings, what is not text."""

import codecs
import contextlib
import difflib
import gzip
import io
import os
import zlib
from encodings.aliases import aliases
from pathlib import Path
from typing import BinaryIO

from data.shards import UserError

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
RAW = (
    "utf-8",
    "utf-8-sig",
)  # read as it is, from after the byte order mark: bytes that do not decode stay what they are
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
            return file.read(3 * SAMPLE)
        pieces = []
        for offset in (0, size // 2, size - SAMPLE):
            file.seek(offset)
            pieces.append(file.read(SAMPLE))
        return b"".join(pieces)


def check_text(path: Path, encoding: str = "utf-8") -> str:
    """The encoding to read a file with: the given one, but what a byte order mark says where that is "utf-8".

    Raises NotText for a suffix of BINARY, and for a sample of at most 3 * SAMPLE bytes that has a NUL, does not decode
    in the encoding, or has more bytes that are not UTF-8 than one, and than one in 1,000.
    """
    kind = KINDS.get(path.suffix.lower())
    if not path.is_file():
        raise NotText(path, "not a regular file", f"give {ACCEPTED} files")
    if kind and not path.name.endswith((".jsonl.gz", ".csv.gz")):
        advice = "unpack it first" if kind == "packed" else f"give {ACCEPTED} files"
        raise NotText(path, kind, advice)
    try:
        sample = _sample(path)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return encoding  # who reads it finds the damage, and says so
    encoding = marked_encoding(sample) if encoding == "utf-8" else encoding
    if encoding in RAW:
        bad = len(sample) - len(sample.decode("utf-8", errors="ignore").encode())
    else:
        sample, bad = Utf8Reader(io.BytesIO(), path, encoding).decode(sample[:SAMPLE], final=False), 0
    if b"\0" in sample:
        raise NotText(
            path, "it has NUL bytes", "give text, and --encoding utf-16-le for UTF-16 without byte order mark"
        )
    if bad > max(1, len(sample) // 1000):
        why = f"{bad:,} of {len(sample):,} bytes are not UTF-8"
        raise NotText(path, why, "name its encoding, as in --encoding cp1252, or remove it")
    return encoding


class Utf8Reader(io.RawIOBase):
    """A binary stream in any encoding, read as UTF-8 without byte order mark. Reading raises NotText."""

    def __init__(self, stream: BinaryIO, path: Path, encoding: str):
        self.stream, self.path, self.encoding = stream, path, encoding
        self.decoder, self.started, self.consumed, self.ready = codecs.getincrementaldecoder(encoding)(), False, 0, b""

    def readable(self) -> bool:
        return True

    def decode(self, block: bytes, final: bool) -> bytes:
        """The text of the next bytes, as UTF-8. Raises NotText."""
        self.consumed += len(block)
        try:
            text = self.decoder.decode(block, final).encode()
        except UnicodeError as error:
            why = f"not {self.encoding}: {error}"
            if isinstance(error, UnicodeDecodeError):
                why = f"byte {self.consumed - len(error.object) + error.start:,} does not decode as {self.encoding}"
            raise NotText(self.path, why, "name its own encoding with --encoding, or remove it") from error
        if text and not self.started:
            self.started, text = True, text.removeprefix(codecs.BOM_UTF8)
        return text

    def readinto(self, buffer) -> int:
        while not self.ready:
            block = self.stream.read(len(buffer))
            self.ready = self.decode(block, final=not block)
            if not block:
                break
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


def utf8_stream(stream: BinaryIO, path: Path, encoding: str) -> BinaryIO:
    """A binary stream at its beginning, as UTF-8 without byte order mark. Reading it raises NotText."""
    if encoding == "utf-8-sig":
        stream.read(len(codecs.BOM_UTF8))
    return stream if encoding in RAW else io.BufferedReader(Utf8Reader(stream, path, encoding), BLOCK)


@contextlib.contextmanager
def open_unpacked(path: Path):
    """A file as two binary streams: as it is, and unpacked where it is a .gz. Raises UserError when that is damaged."""
    try:
        with open(path, "rb") as file, gzip.open(file) if path.suffix == ".gz" else file as unpacked:
            yield file, unpacked
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is a damaged gzip file ({error}): fetch it again") from error


def utf8_size(path: Path, encoding: str) -> int:
    """Bytes of a file's text as UTF-8. Raises NotText when any of it does not decode."""
    if encoding in RAW:
        return path.stat().st_size - len(codecs.BOM_UTF8) * (encoding == "utf-8-sig")
    with open_unpacked(path) as (_, unpacked):
        stream = utf8_stream(unpacked, path, encoding)
        return sum(map(len, iter(lambda: stream.read(BLOCK), b"")))


def utf8_part(path: Path, encoding: str, offset: int, size: int) -> bytes:
    """`size` bytes of a file's text as UTF-8, from its byte `offset`."""
    with open(path, "rb") as file:
        stream = utf8_stream(file, path, encoding)
        if encoding in RAW:
            stream.seek(offset, os.SEEK_CUR)
        else:
            while offset:
                offset -= len(stream.read(min(offset, BLOCK)))
        return stream.read(size)
