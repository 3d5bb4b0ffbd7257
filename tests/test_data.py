"""Shards, sources, downloads, the command line, and errors of a trainer for damaged data."""

import bz2
import contextlib
import csv
import errno
import gzip
import hashlib
import http.server
import io
import itertools
import json
import lzma
import os
import random
import re
import secrets
import signal
import struct
import sys
import sysconfig
import threading
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from common.errors import RunError, run_command
from common.files import atomic_write
from conftest import make_data, refusal, run_python
from data import corpus, download, prepare, tokenizers
from data.shards import PYTHON_VOCABULARY, meta_or_gpt2, shard_paths, write_shard
from data.stream import TokenShards, TokenStream
from data.tokenizers import get_tokenizer


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes); the first `cut` answers end half way."""

    files, cut, requests = {}, 0, []

    def do_GET(self):
        type(self).requests.append(self.path)
        if self.path not in self.files:
            return self.send_error(404)
        body = self.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        type(self).cut -= 1
        self.wfile.write(body[: len(body) // 2] if self.cut >= 0 else body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The handler class of an HTTP server on this machine, with its `address`."""
    handler = type("Handler", (Server,), dict(files={}, requests=[]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        handler.address = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(download, "FINEWEB", handler.address + "/fineweb10B-gpt2/resolve/main/")
        monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(prepare, "DOWNLOAD_DIR", tmp_path / "downloads")
        yield handler
        running.shutdown()
        thread.join()


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def independent_read(path):
    """A shard's tokens by the format's description alone."""
    content = Path(path).read_bytes()
    magic, version, count = struct.unpack("<3i", content[:12])
    assert content[12:1024] == bytes(1012) and (magic, version) == (20240520, 1)
    assert len(content) == 1024 + 2 * count
    return np.frombuffer(content, "<u2", offset=1024)


def independent_split(folder, split):
    return np.concatenate([independent_read(path) for path in shard_paths(folder, split)])


def documents_of(folder):
    """The documents of both splits of bytes, in order."""
    made = {}
    for split in ("train", "val"):
        tokens = independent_split(folder, split)
        parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
        made[split] = [part[1:].astype(np.uint8).tobytes() for part in parts]
    return made


def expected_documents(files, fraction):
    """The same, of the texts of files' documents: plain, and none is large enough to be cut."""
    n_bytes = Counter()
    for text in itertools.chain(*files):
        n_bytes[text] += len(text.encode())
    in_val, reached = set(), 0
    for text in sorted(n_bytes, key=lambda text: sha256(text.encode())):
        if reached < fraction * n_bytes.total():
            in_val.add(text)
            reached += n_bytes[text]
    made = {"train": [], "val": []}
    # Files are in the order of the hashes of their documents, documents in their own
    for texts in sorted(files, key=lambda texts: [sha256(text.encode()) for text in texts if text]):
        for text in filter(None, texts):
            made["val" if text in in_val else "train"].append(text.encode())
    assert all(len(documents) > 3 for documents in made.values())
    return made


def prepared(out, *paths, source="files", tokenizer="bytes", fraction=0.3, **options):
    options |= dict(out=out, paths=paths, tokenizer=tokenizer, val_fraction=fraction)
    return prepare.prepare(source, **options)


def write_texts(folder, **texts):
    """Files called NAME.txt, in a new folder."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def packed(path, raw):
    """Write bytes to a file, packed as its name says."""
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path.write_bytes(pack.get(path.suffix, bytes)(raw))


def tree(folder):
    """Every path under a folder, with the content of files."""
    return {
        path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


# --------------------------------------------------------------------------------------------------
# The format


@pytest.mark.parametrize("letter, header", [("H", (20240520, 1)), ("I", (20240801, 7))])
def test_shard_is_what_the_format_describes(tmp_path, letter, header):
    tokens = [0, 1, 258, 50256, 65535]
    content = struct.pack("<3i", *header, 5) + bytes(1012) + struct.pack(f"<5{letter}", *tokens)
    (tmp_path / "train.bin").write_bytes(content)
    assert TokenShards(tmp_path, "train", 65536, {}).read_tokens(0, 0, 5).tolist() == tokens
    with pytest.raises(TypeError):  # int64
        write_shard(tmp_path / "val.bin", np.array(tokens))


def test_shards_of_a_split_and_meta_json(tmp_path):
    # The last "train" or "val" of a name decides
    named = {
        "train": ["a_train_0.bin", "medieval_train_0.bin"],
        "val": ["train_val_1.bin", "trains_val_0.bin"],
    }
    for name in (*sum(named.values(), []), ".tmp-train_9.bin", "train.txt"):
        (tmp_path / name).touch()
    for split, names in named.items():
        assert [path.name for path in shard_paths(tmp_path, split)] == names
    gpt2 = dict(assumed=True, tokenizer="gpt2", vocab_size=50257, eot=50256)
    assert gpt2.items() <= meta_or_gpt2(tmp_path).items()

    nano = tmp_path / "nano"
    assert "there is no folder" in refusal(meta_or_gpt2, nano)
    nano.mkdir()
    np.arange(1, 9999, dtype=np.uint16).tofile(nano / "train.bin")
    assert "has no shards *val*.bin; expected" in refusal(shard_paths, nano, "val")
    said = refusal(TokenStream, nano, 32)
    assert re.search("train.bin has no header .*nanoGPT's .*, or convert .*docs/data", said)

    split = {"tokens": 2}
    good = {"tokenizer": "mine", "vocab_size": 257, "eot": 256, "source": "x"}
    good |= {"splits": {"train": split, "val": split}, "files": {"train_0.bin": split}}
    (tmp_path / "meta.json").write_text(json.dumps(good))
    assert meta_or_gpt2(tmp_path) == good
    wrong = [{"vocab_size": "257"}, {"splits": {"train": split}}, {"tokenizer": "bpe"}]
    for bad in ("{", *(json.dumps(good | part) for part in wrong)):
        (tmp_path / "meta.json").write_text(bad)
        assert "meta.json is damaged" in refusal(meta_or_gpt2, tmp_path)


# --------------------------------------------------------------------------------------------------
# Files to documents


def test_python_source_is_the_standard_library(tmp_path, monkeypatch):
    """In a vocabulary that is shipped, so that any Python gives the same tokens."""
    monkeypatch.setattr(tokenizers, "merge_pairs", None)  # nothing is trained
    folder = prepared(tmp_path / "python", source="python", tokenizer=None, fraction=0.1)
    root = Path(sysconfig.get_path("stdlib"))
    dropped = "site-packages dist-packages test tests idle_test __pycache__ encodings pydoc_data"
    paths = root.rglob("*.py")
    paths = [path for path in paths if not {*dropped.split()} & {*path.relative_to(root).parts}]
    expected = expected_documents([[path.read_bytes().decode()] for path in paths], 0.1)
    meta, tokenizer = meta_or_gpt2(folder), get_tokenizer("bpe", PYTHON_VOCABULARY.read_text())
    for split, counts in meta["splits"].items():
        tokens = independent_split(folder, split)
        assert tokenizer.decode_bytes(tokens).split(b"<|endoftext|>")[1:] == expected[split]
        n_bytes = sum(map(len, expected[split]))
        assert counts == dict(tokens=len(tokens), bytes=n_bytes, documents=len(expected[split]))


def write_rows(path, rows, keys, mark="", **dialect):
    """A .csv or .jsonl file, also packed; in .jsonl every third line is blank."""
    written = io.StringIO(newline="")
    if ".csv" in path.name.lower():
        csv.writer(written, **dialect).writerows([keys, *rows])
    for i, row in enumerate(rows if ".jsonl" in path.name else ()):
        line = json.dumps(dict(zip(keys, row)), ensure_ascii=i % 2 == 0)
        written.write(line + "\n" * (1 + i % 2))
    packed(path, (mark + written.getvalue()).encode())


# All that CSV must quote, and characters that other splitters of lines take for an end of line
PARTS = [*",;'\t\n\r\u2028\u0085\x0b\x1c\ufeff", '"', '""', "\r\n", "\\n", "a", "word", "é 漢字 🙂"]


@pytest.mark.parametrize("keys", [["text"], ["answer", 'a "b",\nc']])
def test_files_of_all_kinds(tmp_path, keys, monkeypatch):
    """Texts and rows, packed or not, whatever the names of files and folders."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    folder, columns, files = tmp_path / "corpus", ["id", "text", 'a "b",\nc', "answer"], []
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "deep" / "empty.txt").touch()
    for i in range(18):
        files.append([f"{i} é " * 50])
        packed(folder / "deep" / f"{i}.txt{'.gz' * (i % 2)}", files[i][0].encode())
    quoted = dict(quoting=csv.QUOTE_ALL)  # where Python's writer leaves a lone \r without
    dialects = dict.fromkeys(("a.jsonl", "b.jsonl.bz2", "d.csv.xz"), {})
    dialects["E.CSV"] = quoted | dict(mark="\ufeff", lineterminator="\n")
    dialects["f.csv"] = quoted | dict(lineterminator="\r")
    dialects["g.csv"] = quoted | dict(lineterminator="\n\n")
    for name, more in dialects.items():
        draw, rows = random.Random(name), []
        for _ in range(30):
            rows.append(["".join(draw.choices(PARTS, k=draw.randint(0, 12))) for _ in columns])
        write_rows(folder / name, rows, columns, **more)
        cells = [[row[columns.index(key)] for key in keys] for row in rows]
        files.append(["\n".join(row) if any(row) else "" for row in cells])
    # A file that is named twice is taken once
    out = prepared(folder / "out", folder, folder / "a.jsonl", text_key=keys)
    assert documents_of(out) == expected_documents(files, 0.3)
    meta = meta_or_gpt2(out)
    for split, counts in meta["splits"].items():
        sizes = []
        for path in shard_paths(out, split):
            sizes.append(len(independent_read(path)))
            entry = dict(tokens=sizes[-1], sha256=sha256(path.read_bytes()))
            assert meta["files"][path.name] == entry
        assert set(sizes[:-1]) == {100} and sum(sizes) == counts["tokens"] and 0 < sizes[-1] <= 100
    # Earlier output is left out
    again = prepared(tmp_path / "again", folder, text_key=keys)
    assert meta_or_gpt2(again)["files"] == meta["files"]


def test_what_is_in_a_folder_does_not_stop_its_preparation(tmp_path):
    """It is skipped and named, also on a console that cannot show the name."""
    folder = write_texts(tmp_path / "in", **{str(i): f"text {i} " * 300 for i in range(9)})
    (folder / "lines.json").write_text('{"text": "5", "id": [1]}\n{"text": "6"}\n')
    (folder / "folder").symlink_to(tmp_path)
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (folder / "late.txt").write_bytes(b"a\n" * 9 + b"\xe9")
    (folder / "other.csv").write_text("id,name\n1,a\n")
    (folder / "settings.json").write_text('{"id": 1}')
    (folder / "array.json").write_text('\n[{"text": "3"}, {"text": "\\u00e94\\u0000"}]')
    (folder / "a.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    (folder / "a.zip").write_bytes(b"PK")
    (folder / "link").symlink_to("nothing")
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"\xff.png")).write_bytes(b"\xff\0" * 99_999)
    env = dict(os.environ, PYTHONIOENCODING="ascii")
    words = ("files", folder, "--tokenizer=bytes", "--out", tmp_path / "out", "--val_fraction=0.5")
    done = run_python("data/prepare.py", *words, env=env)
    assert done.returncode == 0, done.stderr
    for said in (
        "skipped 7 files, with 0.2% of the text, cannot be read: ",
        "late.txt (is not UTF-8 text: byte 0xe9 in line 10)",
        "other.csv (has no 'text' in row 1, which has 'id', 'name')",
        "in/link (is a link to a folder or to nothing",
        "in/folder (is a link to a folder",
        "a.zip (is packed as .zip",
    ):
        assert said in done.stdout
    texts = [b"text %d " % i * 300 for i in range(9)] + [b"3", "é4".encode()]
    texts += [b'{"id": 1}', b"packed", b"marked", b"5", b"6"]
    assert sorted(sum(documents_of(tmp_path / "out").values(), [])) == sorted(texts)
    # But not if it is much of the text
    large = b"a" * 5_000
    for name, raw in {
        "large.txt": large + b"\xe9",
        "utf-16.txt": large.decode().encode("utf-16"),
        "packed.zst": large,
        "torn.gz": gzip.compress(random.Random(0).randbytes(5_000))[:-9],
    }.items():
        (folder / name).write_bytes(raw)
        said = refusal(prepared, tmp_path / "new", folder)
        assert re.search(r"8 files, with [23].*% of the text.*; convert .*, or .* --include", said)
        (folder / name).unlink()


def split_of(tmp_path, fraction, *files):
    """The documents of both splits, of files with these texts, each text a row."""
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir()
    for i, texts in enumerate(files):
        (folder / f"{i}.jsonl").write_text(jsonl(texts))
    return documents_of(prepared(folder / "out", folder, fraction=fraction)).values()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_validation_has_its_fraction(tmp_path, fraction):
    """Of the bytes, whatever the sizes. Equal texts stay together, and names do not matter."""
    draw = random.Random(1)
    texts = [f"{i}." * draw.randint(1, 99) for i in range(400)]
    for files in ([texts], [[text] for text in texts[:60]], [texts, texts[::2]]):
        train, val = split_of(tmp_path, fraction, *files)
        assert not {*train} & {*val} and len(train + val) == sum(map(len, files))
        n_train, n_val = sum(map(len, train)), sum(map(len, val))
        assert 0 <= n_val - fraction * (n_train + n_val) < 1_000
    # A row that is removed moves few of the others
    whole, fewer = split_of(tmp_path, fraction, texts), split_of(tmp_path, fraction, texts[1:])
    assert len({*list(whole)[1]} ^ {*list(fewer)[1]}) < 9


@pytest.mark.parametrize(
    "documents, fraction, n_val, n_cut",
    [
        ({"a": 1000}, 0.1, 100, 1),  # a single one
        ({"a": 500, "b": 500}, 0.5, 500, 0),
        ({"a": 100, "b": 100, "c": 100}, 0.1, 30, 1),
        ({letter: 100 for letter in "abcdef"}, 0.1, 100, 0),  # up to twice the fraction
        ({"a": 10, "b": 5000, "c": 9990}, 0.1, 1500, 1),
        ({"a": 100, "b": 100}, 0.9, 180, 1),  # never all
    ],
)
@pytest.mark.parametrize("copies", [1, 4])
def test_large_documents_are_cut(tmp_path, documents, fraction, n_val, n_cut, copies):
    """Copies all at the same place."""
    texts = [letter * n for letter, n in documents.items()] * copies
    train, val = split_of(tmp_path, fraction, *([text] for text in texts))
    assert not {*train} & {*val} and sum(map(len, val)) == n_val * copies
    assert len(train + val) == (len(documents) + n_cut) * copies
    assert Counter(b"".join(train + val)) == Counter("".join(texts).encode())


def test_a_row_of_parquet_is_a_document(tmp_path, monkeypatch):
    """Also of binary columns, as older programs write text."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i} \U0001f642\n" * (i % 5) or None for i in range(3000)]
    raw = pa.array([row and row.encode() for row in rows], pa.binary())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": rows, "raw": raw}), path, row_group_size=700)
    expected = expected_documents([[row or "" for row in rows]], 0.3)
    for key in ("content", "raw"):
        assert documents_of(prepared(tmp_path / key, path, text_key=[key])) == expected
    said = refusal(prepared, tmp_path / "wrong", path)
    assert "has no 'text' in row 1, which has 'content', 'raw'; give --text_key" in said
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "needs the package pyarrow; run `pip" in refusal(prepared, tmp_path / "out", path)


def test_own_validation_files(tmp_path):
    rows = [f"row {i}" for i in range(9)]
    (tmp_path / "rows.jsonl").write_text(jsonl(rows))
    ours = write_texts(tmp_path / "ours", train="train " * 20)
    theirs = write_texts(tmp_path / "theirs", valid="valid " * 20, more="more " * 20)
    paths = ours, tmp_path / "rows.jsonl"
    found = documents_of(prepared(tmp_path / "out", *paths, val=[theirs]))
    assert sorted(found["train"]) == [row.encode() for row in (*rows, "train " * 20)]
    assert sorted(found["val"]) == [b"more " * 20, b"valid " * 20]
    # The same text under a different name, among others
    (theirs / "copy.txt").write_text("train " * 20)
    said = refusal(prepared, tmp_path / "copy", *paths, val=[theirs])
    assert re.search(r"train.txt is given for training and as --val \(.*theirs/copy.txt\)", said)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_end_of_text_separates_documents(tmp_path, name, monkeypatch):
    """Wherever a block ends; line breaks around it belong to no document."""
    monkeypatch.setattr(corpus, "BLOCK", 50)
    stories = [f"Story {i}.\n\n  The énd." for i in range(60)]
    text = "".join(f"{story}\n\r\n<|endoftext|>\n" for story in stories[:40])
    text += "<|endoftext|>".join(stories[40:]) + "<|endoftext|>\n"
    if name == "a.jsonl":
        text = json.dumps({"text": "<|endoftext|>".join(stories) + "<|endoftext|>"})
    packed(tmp_path / name, text.encode())
    out = prepared(tmp_path / "out", tmp_path / name)
    assert documents_of(out) == expected_documents([stories], 0.3)
    tokens, n_bytes = prepare.encode_file(tmp_path / name, get_tokenizer("bytes"))
    assert (tokens == 256).sum() == 59 and len(tokens) == n_bytes + 59


def test_integers_are_tokens(tmp_path, monkeypatch):
    """None is cut, wherever a block or the training split ends."""
    monkeypatch.setattr(corpus, "BLOCK", 50)
    tokens = np.random.default_rng(0).integers(0, 300, 5_000)
    (tmp_path / "a.txt").write_text(" ".join(map(str, tokens)))
    for fraction in (0.1, 0.1001, 0.1002, 0.1003):
        options = dict(tokenizer="integers:300", fraction=fraction)
        out = prepared(tmp_path / f"{fraction}", tmp_path / "a.txt", **options)
        train, val = (independent_split(out, split).tolist() for split in ("train", "val"))
        assert train + val[1:] == [300, *tokens] and val[0] == 300 and 490 < len(val) < 510
    meta, tokenizer = meta_or_gpt2(out), get_tokenizer("integers:300")
    assert (meta["vocab_size"], meta["splits"]["val"]["bytes"]) == (301, None)
    assert tokenizer.decode_bytes([3, 300]) == b" 3 <|endoftext|>"
    for text in ("3 300", "-1", "three", "9" * 30):
        assert "must be integers from 0 to 299" in refusal(tokenizer.encode, text)


def test_a_single_text_is_cut_between_characters(tmp_path, monkeypatch):
    """And keeps its line breaks, because it has no <|endoftext|>."""
    monkeypatch.setattr(corpus, "BLOCK", 37)
    raw = ("\r\n<|endoftext\n|>漢字🙂é" * 99 + "<|endoftext|\n\n").encode()
    packed(tmp_path / "a.gz", raw)
    for fraction in (0.25, 0.26, 0.27, 0.28, 0.37):
        out = prepared(tmp_path / f"{fraction}", tmp_path / "a.gz", fraction=fraction)
        (train,), (val,) = documents_of(out).values()
        assert train + val == raw and train.decode()
        assert 0 <= len(train) - int(len(raw) * (1 - fraction)) < 4


WORDS = "word é 漢字 。 don't ' 12 ... 🙂 \x1c \u0300 ж かな µ ²".split(" ")
WORDS += [*" \n\t\u00a0\u2003\u3000\u0085\u1680", "  ", "\n\n", "\r\n"]


def test_pieces_have_the_tokens_of_the_whole(gpt2, monkeypatch):
    """Of blocks of any size, which may cut characters."""
    monkeypatch.setattr(corpus, "BLOCK", 200)
    draw = random.Random(1)
    texts = [separator.join(draw.choices(WORDS, k=3000)) for separator in (" ", "", "\n")]
    for text in [*texts, "漢字🙂" * 500]:  # the last has no place to cut
        stream, blocks = io.BytesIO(text.encode()), [("val", True, b"")]
        while block := stream.read(draw.randint(1, 100)):
            blocks.append(("val", False, block))
        splits, starts, pieces = zip(*corpus.cut_pieces(blocks))
        assert {*splits} == {"val"} and starts == (True,) + (False,) * (len(pieces) - 1)
        assert "".join(piece.decode() for piece in pieces) == text
        assert max(map(len, pieces)) <= 3 * 200 and len(pieces) > 8
        joined = [token for piece in pieces for token in gpt2.encode_raw(piece).tolist()]
        assert text not in texts or joined == gpt2.tiktoken.encode_ordinary(text)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.txt"])
def test_texts_are_read_in_little_memory(tmp_path, name):
    """Rows of a table, and a document that ends in <|endoftext|>."""
    row = b'1,"' + b"a text, of words " * 300 + b'"\r\n'
    packed(tmp_path / name, b"id,text\n" + row * 2000 + b"<|endoftext|>" * (name == "a.txt"))
    tracemalloc.start()
    measured = corpus.measure(tmp_path / name, ["text"])
    blocks = corpus.split_documents([tmp_path / name], ["text"], itertools.repeat(5))
    size = sum(len(piece) for _, _, piece in corpus.cut_pieces(blocks))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == sum(measured.sizes) > 10_000_000 and peak < 3 << 20, peak


# --------------------------------------------------------------------------------------------------
# The prepared folder


def test_a_folder_that_is_complete_is_used_as_it_is(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "in", a="some text " * 50, b="more")
    (tmp_path / "in" / "one.bin").write_bytes(b"\xff\xfe\x81")
    folder = prepared(tmp_path / "out", tmp_path / "in")
    before = tree(folder)
    capsys.readouterr()
    # Wherever it is said from; files that are skipped do not matter
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "two.bin").write_bytes(b"\xff\xfe\x81")
    assert prepared(folder, "in") == folder
    assert f"already there: {folder}; to make it again, remove it" in capsys.readouterr().out
    # With other options or other texts it is refused
    (tmp_path / "b.txt").write_text("other")
    for change, says in (
        (dict(fraction=0.5), "with val_fraction 0.3, not 0.5; remove it"),
        (dict(tokenizer=None), "with tokenizer bytes, not None"),
        (dict(val=["b.txt"]), "with val 0 files.*, not 1 files"),
        (dict(source="python"), "with source files, not python"),
    ):
        said = refusal(prepared, folder, "in", **change)
        assert re.search(f"{folder} was made {says}", said)
    (tmp_path / "in" / "a.txt").write_text("same size " * 50)
    said = refusal(prepared, folder, "in")
    assert re.search("was made with texts 2 files, hash .*, not 2 files, hash ", said)
    # So is a folder whose meta.json was written by hand
    (tmp_path / "hand").mkdir()
    meta = meta_or_gpt2(folder)
    del meta["options"]
    (tmp_path / "hand" / "meta.json").write_text(json.dumps(meta))
    assert "was made with source None, not files" in refusal(prepared, tmp_path / "hand", "in")
    assert tree(folder) == before
    for out in (tmp_path / "in", tmp_path / "b.txt"):
        assert "not a folder of prepared data; choose a different" in refusal(prepared, out, "in")


@pytest.mark.parametrize("how", [KeyboardInterrupt(), OSError(27, "File too large"), None])
def test_a_preparation_that_fails_is_not_in_the_way(how, tmp_path, monkeypatch, capsys):
    """It leaves nothing, or a hidden folder if it was killed."""
    (tmp_path / "a.txt").write_text("some text " * 100_000)
    out = tmp_path / "new" / "out"
    words = ["files", f"{tmp_path}/a.txt", "--tokenizer=bytes", f"--out={out}"]
    if how:
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "write_shard", Mock(side_effect=how))
            assert run_command(prepare.main, words) == 1
        said = capsys.readouterr().err
        assert re.search("(stopped|File too large); run the same command again\n$", said)
        assert not os.listdir(out.parent)
    else:
        code = "import os, sys; from data import prepare; prepare.write_shard = lambda *_: os.kill("
        done = run_python("-c", f"{code}os.getpid(), 9); prepare.main({words!r})")
        assert done.returncode == -signal.SIGKILL and not out.exists()
    assert run_command(prepare.main, words) == 0
    assert sum(map(len, documents_of(out).values())) == 2


@pytest.mark.parametrize("out", ["link", "dangling", "new/deep"])
def test_what_is_prepared_arrives(out, tmp_path, monkeypatch):
    write_texts(tmp_path / "in", a="some text " * 50)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    with prepare.temporary_folder(tmp_path / out):  # another process is first
        prepared(tmp_path / out, tmp_path / "in")
    names = [path.name for path in sorted((tmp_path / out).iterdir())]
    assert names == ["meta.json", "train_000000.bin", "val_000000.bin"]
    assert not [*tmp_path.rglob(".*")]
    # Where a folder cannot be renamed, it is kept
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError(5, "Input/output error")))
    says = r"Input/output error.; the data are complete in (\S*), move it by hand"
    with pytest.raises(RunError, match=says) as told:
        prepared(tmp_path / "other", tmp_path / "in")
    kept = Path(re.search(says, str(told.value))[1])
    assert meta_or_gpt2(kept) and len(independent_split(kept, "train")) == 351


def test_the_folder_has_the_name_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "DATA_DIR", tmp_path / "data")
    folder = write_texts(tmp_path / "my.notes", a="a" * 99, b="b" * 99)
    own = write_texts(tmp_path / "python", a="a" * 99)
    for paths, options, name in (
        ([folder / "a.txt"], {}, "a"),
        ([*folder.iterdir()], dict(tokenizer="bytes"), "my.notes_bytes"),
        ([own], {}, "python_files"),  # not the default dataset
    ):
        assert prepare.prepare("files", paths=paths, **options) == tmp_path / "data" / name


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_files_are_written_where_fsync_is_not_supported(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, "fsync")))
    with contextlib.suppress(OSError), atomic_write(tmp_path / "file") as file:
        file.write(b"content")
    assert os.listdir(tmp_path) == ["file"] * (number != errno.EIO)


# --------------------------------------------------------------------------------------------------
# Downloads

BODY = random.Random(3).randbytes(1_000_000)
SHA = sha256(BODY)


def test_downloads_are_whole_and_verified(server, tmp_path, capsys):
    server.files["/x"], server.cut = BODY, 2
    for _ in range(2):  # the second time it is there: nothing is asked for
        assert download.download(server.address + "/x", tmp_path / "x", SHA) == SHA
    assert (tmp_path / "x").read_bytes() == BODY and server.requests == ["/x"] * 3
    (tmp_path / "x").unlink()
    for url, says in (
        (server.address + "/x", f"gave SHA-256 {SHA} instead of 0000.*; it is deleted, run this"),
        (server.address + "/y", "/y .*404.*; run this again, put the file at .*/x by hand"),
        ("http://127.0.0.1:9/x", "refused"),
    ):
        assert re.search(says, refusal(download.download, url, tmp_path / "x", "0" * 64))
    assert not os.listdir(tmp_path) and capsys.readouterr().out.count("trying again") == 8
    code = "from data.download import FINEWEB; print(FINEWEB)"
    done = run_python("-c", code, env=dict(os.environ, HF_ENDPOINT="https://mirror.example/"))
    pinned = r"https://mirror\.example/datasets/kjj0/fineweb10B-gpt2/resolve/[0-9a-f]{40}/\n"
    assert re.fullmatch(pinned, done.stdout)


def test_fineweb(server, tmp_path, capsys, monkeypatch):
    assert len(download.fineweb_hashes()) == 32
    base, entries = "/fineweb10B-gpt2/resolve/main/", {}
    for number, name in enumerate(("val_000000", "train_000001", "train_000002")):
        path = tmp_path / f"fineweb_{name}.bin"
        entries[path.name] = write_shard(path, np.full(10 + number, number, dtype=np.uint16))
        server.files[base + path.name] = path.read_bytes()
    known = {"fineweb_val_000000.bin": entries["fineweb_val_000000.bin"]["sha256"]}
    monkeypatch.setattr(download, "fineweb_hashes", lambda: known)
    folder = tmp_path / "fw"

    def run(shards, out=folder):
        words = ["fineweb10B", "--out", str(out), "--shards", str(shards)]
        return run_command(prepare.main, words), capsys.readouterr().err

    missing = server.files.popitem()
    assert run(0)[0] == 2 and run(2)[0] == 2 and not (folder / "meta.json").exists()
    server.files |= [missing]
    for shards in (2, 1):  # what has arrived stays
        assert run(shards)[0] == 0 and len(server.requests) == 7
    meta = meta_or_gpt2(folder)
    assert meta["splits"] == {"train": {"tokens": 23}, "val": {"tokens": 10}}
    assert meta["files"] == entries
    assert TokenStream(folder, 2).eval_starts(4).tolist() == [0, 2]  # the first, as in races
    # A shard that is damaged, or not the known one
    server.files[base + "fineweb_train_000003.bin"] = b"<html>"
    assert "000003.bin is not an intact token shard" in run(3)[1]
    known["fineweb_train_000003.bin"] = "0" * 64
    assert f"instead of {'0' * 64}" in run(3)[1]
    assert "holds other data" in run(3, make_data(tmp_path / "other"))[1]


def serve(server, monkeypatch, source, name, content):
    server.files[f"/{name}"] = content
    entry = (f"{server.address}/{name}", sha256(content))
    monkeypatch.setitem(download.DOWNLOADS, source, entry)
    return entry


def test_wikitext_has_a_document_for_each_article(server, tmp_path, monkeypatch):
    articles = [
        " \n = Títle one = \n \n Text = of = it . \n = not after a blank = \n",
        " \n = = Part = = \n \n more \n \n",
        " = Second = \n \n Text . \n \n = = = Sub = = = \n end \n",
    ]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/wiki.train.raw", "".join(articles))
        archive.writestr("w/wiki.valid.raw", " \n = V = \n x \n")
        archive.writestr("../../wiki.test.raw", "no")
    entry = serve(server, monkeypatch, "wikitext2", "w.zip", content.getvalue())
    folder = prepared(tmp_path / "a" / "out", source="wikitext2")
    train = [(articles[0] + articles[1]).encode(), articles[2].encode()]
    assert documents_of(folder) == dict(train=train, val=[b" \n = V = \n x \n"])
    assert meta_or_gpt2(folder)["source"] == entry[0]


def test_shakespeare_is_split_by_position_and_hellaswag_is_verified(server, tmp_path, monkeypatch):
    text = b"First Citizen:\n" * 1000
    serve(server, monkeypatch, "shakespeare", "input.txt", text)
    for name in ("out", "again"):  # the download is kept
        folder = prepared(tmp_path / name, source="shakespeare", fraction=0.1)
        assert documents_of(folder) == dict(train=[text[:13500]], val=[text[13500:]])
    assert len(server.requests) == 1
    serve(server, monkeypatch, "hellaswag", "h", b"{}\n")
    for served, code in ((b"wrong", 2), (b"{}\n", 0)):
        server.files["/h"] = served
        assert run_command(prepare.main, ["hellaswag", "--out", str(tmp_path / "h")]) == code
    assert tree(tmp_path / "h") == {"hellaswag_val.jsonl": b"{}\n"}


# --------------------------------------------------------------------------------------------------
# The command line

FILES = {
    "a.txt": b"text",
    "long.txt": "é\n\n".encode() + "é".encode() * 200_000 + b"\xff",
    "cut.txt": b"a\n\xe2\x82",
    "bad.jsonl": b'{"text": "good"}\n{"text": \n',
    "empty.txt": b"",
    "cut.jsonl.gz": gzip.compress(b'{"text": "good"}\n' * 9)[:-9],
    "wide.csv": b"id,text\n1,a\n2,b, c\n",
    "zero.txt": b"no\0text",
    "latin.csv": b"text,id\n" + b"fine,1\n" * 9 + b"b,\xff\n",
}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("fineweb10B --tokenizer bytes", "fineweb10B does not take tokenizer; remove it"),
        ("python a.txt", "python does not take paths"),
        ("python --tokenizer gpt5", "there is no vocabulary gpt5"),
        ("python --tokenizer bytes --vocab_size 400", "--vocab_size 400 needs --tokenizer bpe"),
        ("python --vocab_size 257", "--vocab_size is 257; expected 258 to 65536"),
        ("python --tokenizer integers:70000", "integers:70000; expected 1 to 65535"),
        ("files", r"there is no text in \[\]; give PATHs of readable files or folders"),
        ("files a.txt none*.txt", r"there is no file or folder .*none\*.txt; check the path"),
        ("files long.txt", "long.txt is not UTF-8 text: byte 0xff in line 3; convert or remove it"),
        ("files cut.txt", "cut.txt is not UTF-8 text: byte 0xe2 in line 2"),
        ("files zero.txt", "zero.txt is not UTF-8 text: byte 0x00 in line 1"),
        ("files empty.txt", "there is no text in .*empty.txt.*; give PATHs of readable files"),
        ("files in --include *.md b*", "no text in .*in'.; give .*, or a different --include"),
        ("in/a.txt", "in/a.txt is not one of python,.*; for your own texts, .* files .*in/a.txt`"),
        ("files a.txt --val_fraction 0", "--val_fraction is 0.0; expected between 0 and 1"),
        ("files bad.jsonl", 'bad.jsonl after row 1: expected {"text": TEXT} .*; correct it'),
        ("files cut.jsonl.gz", "cut.jsonl.gz cannot be read .Compressed file ended"),
        ("files a.txt --out a.txt/sub", "cannot be read or written .Not a directory."),
        ("files wide.csv", "wide.csv after row 1: expected .*TypeError"),
        ("files latin.csv", "latin.csv is not UTF-8 text: byte 0xff in line 11; convert"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, arguments, says):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    write_texts(tmp_path / "in", a="text")
    before, words = tree(tmp_path), arguments.split()
    ours = {*FILES, "a.txt/sub", "none*.txt", "in", "in/a.txt"}
    words = [str(tmp_path / word) if word in ours else word for word in words]
    words += ["--tokenizer=bytes"] * (words[0] == "files")
    words[1:1] = ["--out", str(tmp_path / "out")]  # the final --out counts
    assert run_command(prepare.main, words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error
    assert tree(tmp_path) == before


def test_command_line(tmp_path, capsys):
    """Flags may stand between the paths."""
    folder = write_texts(tmp_path / "in", b="<b>" * 9, no="<no>" * 9)
    (folder / "deep").mkdir()
    for path in (folder / "c.py", folder / "deep/F.MD", tmp_path / "own.py"):
        path.write_text(f"<{path.name}>" * 9)
    flags = ["--tokenizer", "bytes", tmp_path / "own.py", "--val_fraction", "0.5"]
    flags += ["--include", "b.t?t", "--include=*.md", "--out", tmp_path / "out"]
    done = run_python("-OO", "data/prepare.py", "files", folder, *flags)
    assert done.returncode == 0, done.stderr
    found = b"".join(sum(documents_of(tmp_path / "out").values(), []))
    assert {*re.findall(rb"<(.*?)>", found)} == {b"b", b"F.MD", b"own.py"}
    with pytest.raises(SystemExit, match="2"):
        run_command(prepare.main, ["python", "--tok", "bytes"])
    assert "error: unrecognized arguments: --tok" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# The stream


def test_shards_that_meta_json_does_not_describe_are_refused(tmp_path):
    data = make_data(tmp_path / "data")
    shard, more, meta_json = data / "a_train_1.bin", data / "more_train.bin", data / "meta.json"
    content, meta = shard.read_bytes(), meta_json.read_text()
    whole = TokenStream(data, 32).fingerprint()
    longer = struct.pack("<3i", 20240520, 1, 17890) + content[12:] + b"a\0"
    for path, wrong, says in (
        (shard, longer, "is not the shard that meta.json describes"),
        (more, content, "has other shards than its meta.json names .more_train.bin."),
    ):
        path.write_bytes(wrong)
        assert re.search(f"{data}.*{says}", refusal(TokenStream, data, 32))
        more.unlink(missing_ok=True)
        shard.write_bytes(content)
    # Other tokens, or another entry in meta.json, are other data
    shard.write_bytes(content[:5000] + b"a\0" + content[5002:])
    assert TokenStream(data, 32).fingerprint() != whole
    shard.write_bytes(content)
    meta_json.write_text(meta.replace('"sha256": ""', '"sha256": "0"'))
    assert TokenStream(data, 32).fingerprint() != whole


def test_shards_stay_open(data, monkeypatch):
    """Files are opened once per run, again if a server loses them, and closed with the stream."""
    before = len(os.listdir("/proc/self/fd"))
    shards, pread, lost = TokenStream(data, 32).train, os.pread, [errno.ESTALE]
    assert len(os.listdir("/proc/self/fd")) == before + 2

    def read(descriptor, *place):
        if lost:
            raise OSError(lost.pop(), "Stale file handle")
        return pread(descriptor, *place)

    whole = shards.read_sequence(0, 29_000)
    monkeypatch.setattr(os, "pread", read)
    opened = Mock(side_effect=open)
    monkeypatch.setattr("builtins.open", opened)
    for _ in range(3):
        assert np.array_equal(shards.read_sequence(0, 29_000), whole)
    assert opened.call_count == 1
    lost += [errno.ESTALE] * 2
    assert "can no longer be read whole" in refusal(shards.read_sequence, 0, 9)


@pytest.mark.parametrize("n_tokens", [33, 63, 64, 65, 576, 40_000])
def test_sequences_of_an_epoch(n_tokens, tmp_path):
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}.bin", np.arange(n_tokens, dtype=np.uint16))
    stream, offsets = TokenStream(tmp_path, seq_len=32, seed=3), set()
    n_seqs = stream.seqs_per_epoch
    assert stream.eval_part == "first"  # without meta.json
    assert n_seqs == max(1, n_tokens // 32 - 1)
    for epoch in range(40):
        starts = stream.sequence_starts(epoch * n_seqs + np.arange(n_seqs))
        offsets.add(int(starts.min()))
        # Every sequence once, in another order
        assert np.array_equal(np.sort(starts), starts.min() + 32 * np.arange(n_seqs))
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
        assert n_seqs < 1000 or abs(np.corrcoef(np.arange(n_seqs), starts)[0, 1]) < 0.1
    assert len(offsets) > 10 or n_tokens < 64


def test_batches_hold_the_tokens_of_their_sequences(data, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)  # some file systems have no memory maps
    everything = independent_split(data, "train")
    stream = TokenStream(data, seq_len=32)
    stream.set_batch_tokens(512)
    starts = stream.sequence_starts(77 * 16 + np.arange(16))
    assert np.array_equal(stream.batch(77), np.stack([everything[s : s + 33] for s in starts]))
    # --doc_align
    stream = TokenStream(data, seq_len=32, doc_align=True)
    stream.set_batch_tokens(512)
    batches = np.concatenate([stream.batch(step) for step in range(-(-len(stream.aligned) // 16))])
    assert (batches[:, 0] == 256).all()
    assert (np.diff(stream.aligned) >= 32).all() and len(stream.aligned) > 0.9 * 29000 / 97
    # 4,333 tokens for validation are four sequences of 1,024 and more
    assert TokenStream(data, seq_len=8192, may_shorten=True).seq_len == 1024
