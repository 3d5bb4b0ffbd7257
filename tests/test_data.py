"""Shards, sources, downloads, the command line, and errors of a trainer for damaged data."""

import contextlib
import csv
import errno
import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import tracemalloc
import zipfile
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from common.errors import RunError, UserError, run_command
from common.files import atomic_write
from conftest import ROOT, make_data, run_python
from data import corpus, download, prepare, tokenizers
from data.shards import PYTHON_VOCABULARY, find_shards, load_meta, write_meta, write_shard
from data.stream import TokenShards, TokenStream, feistel_permute, prefetch
from data.tokenizers import get_tokenizer


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes).

    `ranges` False ignores Range, `cut` ends that many next answers half way.
    """

    files, redirects, ranges, cut, requests = {}, {}, True, 0, []

    def do_GET(self):
        asked = self.headers.get("Range")
        type(self).requests.append((self.path, asked))
        if self.path in self.redirects:
            self.send_response(302)
            self.send_header("Location", self.redirects[self.path])
            self.send_header("X-Linked-ETag", f'"{self.linked_sha256}"')
            self.end_headers()
            return
        if self.path not in self.files:
            self.send_error(404)
            return
        body = self.files[self.path]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if self.ranges else 0
        if start >= len(body) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        body = body[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.cut > 0:
            type(self).cut -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The handler class of an HTTP server on this machine, with its `address`."""
    handler = type("Handler", (Server,), dict(files={}, redirects={}, requests=[]))
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
    return np.concatenate([independent_read(path) for path in find_shards(folder, split)])


def documents_of(folder):
    """The documents of both splits of bytes, in order."""
    made = {}
    for split in ("train", "val"):
        tokens = independent_split(folder, split)
        parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
        made[split] = [part[1:].astype(np.uint8).tobytes() for part in parts]
    return made


def expected_documents(texts, fraction):
    """The same, of {file's name: its text, or the texts of its rows}.

    Files are in the order of their hashes, rows in their own. Names of files and texts of rows
    decide.
    """
    made = {"train": [], "val": []}
    for name in sorted(texts, key=lambda name: sha256(name.encode())):
        rows = texts[name]
        for document, text in [(name, rows)] if type(rows) is str else zip(rows, rows):
            in_val = int(sha256(document.encode()), 16) < fraction * 2**256
            made["val" if in_val else "train"] += [text.encode()] * bool(text)
    assert all(len(documents) > 3 for documents in made.values())
    return made


def prepared(out, *paths, source="files", tokenizer="bytes", fraction=0.3, **options):
    args = prepare.parse_args([source, *map(str, paths)])
    vars(args).update(out=out, tokenizer=tokenizer, val_fraction=fraction, **options)
    return prepare.prepare(args)


def write_texts(folder, **texts):
    """Files called NAME.txt."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


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
    with pytest.raises(TypeError):
        write_shard(tmp_path / "val.bin", np.array(tokens))


def test_find_shards_and_meta_json(tmp_path):
    # The last "train" or "val" of a name decides
    named = {
        "train": ["a_train_0.bin", "b_train_1.bin", "medieval_train_0.bin"],
        "val": ["train_val_1.bin", "trains_val_0.bin"],
    }
    for name in (*sum(named.values(), []), ".tmp-train_9.bin", "train.txt"):
        (tmp_path / name).touch()
    for split, names in named.items():
        assert [path.name for path in find_shards(str(tmp_path), split)] == names
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no shards \*val\*.bin"):
        find_shards(tmp_path / "empty", "val")
    gpt2 = dict(assumed=True, tokenizer="gpt2", vocab_size=50257, eot=50256)
    assert gpt2.items() <= load_meta(tmp_path).items()

    split = {"tokens": 2}
    good = {"tokenizer": "mine", "vocab_size": 257, "eot": 256, "source": "x"}
    good |= {"splits": {"train": split, "val": split}, "files": {"train_0.bin": split}}
    (tmp_path / "meta.json").write_text(json.dumps(good))
    assert load_meta(tmp_path) == good
    wrong = [{"vocab_size": "257"}, {"splits": {"train": split}}, {"files": {"train_0.bin": {}}}]
    for bad in ("{", *(json.dumps(good | part) for part in (*wrong, {"tokenizer": "bpe"}))):
        (tmp_path / "meta.json").write_text(bad)
        with pytest.raises(UserError, match="meta.json is damaged"):
            load_meta(tmp_path)


# --------------------------------------------------------------------------------------------------
# Files to documents


def test_python_source_is_the_standard_library(tmp_path, monkeypatch):
    """In a vocabulary that is shipped, so that any Python gives the same tokens."""
    monkeypatch.setattr(tokenizers, "merge_pairs", None)  # nothing is trained
    folder = prepared(tmp_path / "python", source="python", tokenizer=None, fraction=0.1)
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    dropped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = [name for name in names if not dropped & set(name.split("/"))]
    assert "json/decoder.py" in names
    texts = {name: (root / name).read_bytes().decode() for name in names}
    expected = expected_documents(texts, 0.1)
    meta, vocabulary = load_meta(folder), PYTHON_VOCABULARY.read_text()
    assert (folder / "tokenizer.json").read_text() == vocabulary
    assert meta["vocab_size"] == 1024 and meta["command"] == "python data/prepare.py python"
    assert meta["source"].startswith("standard library of Python 3.")
    tokenizer = get_tokenizer("bpe", vocabulary)
    for split, counts in meta["splits"].items():
        tokens = independent_split(folder, split)
        documents = tokenizer.decode_bytes(tokens).split(b"<|endoftext|>")[1:]
        n_bytes = sum(map(len, documents))
        assert documents == expected[split] and n_bytes / len(tokens) > 2.4
        assert counts == dict(tokens=len(tokens), bytes=n_bytes, documents=len(documents))


def write_rows(path, rows, keys, mark="", **dialect):
    """A .csv or .jsonl file, also .gz; in .jsonl every third line is blank."""
    written = io.StringIO(newline="")
    if ".csv" in path.name.lower():
        csv.writer(written, **dialect).writerows([keys, *rows])
    for i, row in enumerate(rows if ".jsonl" in path.name else ()):
        written.write(
            json.dumps(dict(zip(keys, row)), ensure_ascii=i % 2 == 0) + "\n" * (1 + (i % 2))
        )
    raw = (mark + written.getvalue()).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


# All that CSV must quote, and characters that other splitters of lines take for an end of line
PARTS = [*",;'\t\n\r\u2028\u0085\x0b\x1c\ufeff", '"', '""', "\r\n", "\\n", "a", "word", "é 漢字 🙂"]


@pytest.mark.parametrize("keys", [["text"], ["answer", 'a "b",\nc']])
def test_files_of_all_kinds(tmp_path, keys, capsys, monkeypatch):
    """Texts and rows, packed or not, in folders, by glob and by name.

    They are in the order of the hashes of their names.
    """
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    texts, folder, columns = {}, tmp_path / "corpus", ["id", "text", 'a "b",\nc', "answer"]
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "deep" / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for i in range(9):
        texts |= {f"corpus/deep/{i}.txt": f"é{i} " * 50, f"glob{i}.md": f"glob {i}"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    texts["corpus/packed.txt.gz"] = "packed"
    (folder / "packed.txt.gz").write_bytes(gzip.compress(b"packed"))
    quoted = dict(quoting=csv.QUOTE_ALL)  # where Python's writer leaves a lone \r without
    dialects = dict.fromkeys(("a.jsonl", "b.jsonl.gz", "c.csv", "d.csv.gz"), {})
    dialects["E.CSV"] = quoted | dict(mark="\ufeff", lineterminator="\n")
    dialects["f.csv"] = quoted | dict(lineterminator="\r")
    dialects["g.csv"] = quoted | dict(lineterminator="\n\n")
    for name, more in dialects.items():
        draw = random.Random(name)
        rows = [
            ["".join(draw.choices(PARTS, k=draw.randint(0, 12))) for _ in columns]
            for _ in range(30)
        ]
        write_rows(folder / name, rows, columns, **more)
        joined = ["\n".join(row[columns.index(key)] for key in keys) for row in rows]
        texts[f"corpus/{name}"] = joined
    # A file that is named twice is taken once
    arguments = [folder, f"{tmp_path}/glob*.md", folder / "a.jsonl"]
    out = prepared(folder / "out", *arguments, text_key=keys)
    assert documents_of(out) == expected_documents(texts, 0.3)
    said = "skipped 1 files that cannot be read as text: corpus/image.png (is not UTF-8 text)"
    assert capsys.readouterr().out.splitlines()[0] == said
    meta = load_meta(out)
    for split, counts in meta["splits"].items():
        paths = find_shards(out, split)
        sizes = [len(independent_read(path)) for path in paths]
        assert set(sizes[:-1]) == {100} and sum(sizes) == counts["tokens"] and 0 < sizes[-1] <= 100
        for path, size in zip(paths, sizes):
            assert meta["files"][path.name] == dict(tokens=size, sha256=sha256(path.read_bytes()))
    # Wherever the folder lies, in any order of the arguments; earlier output is left out
    moved = shutil.copytree(folder, tmp_path / "else" / "corpus")
    again = prepared(tmp_path / "again", f"{tmp_path}/glob*.md", moved, text_key=keys)
    assert load_meta(again)["files"] == meta["files"]


def test_what_is_in_a_folder_does_not_stop_its_preparation(tmp_path):
    """It is skipped and named, also on a console that cannot show the name."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_bytes(b"\xef\xbb\xbf" * (i % 2) + b"text %d" % i)
    (folder / "late.txt").write_bytes(b"a" * 600_000 + b"\xe9")
    (folder / "other.csv").write_text("id,name\n1,a\n")
    (folder / "other.jsonl").write_text('{"text": "good"}\n{"id": 1}\n')
    (folder / "settings.json").write_text('{"id": 1}')
    (folder / "lines.JSON").write_text('{"text": "é1"}\n{"text": "2"}\n')
    (folder / "array.json").write_text('\n[{"text": "3"}, {"text": "\\u00e94\\u0000"}]')
    (folder / "packed.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    (folder / "link").symlink_to("nothing")
    os.mkfifo(folder / "pipe")
    (tmp_path / "in" / os.fsdecode(b"\xff.bin")).write_bytes(b"\xff")
    env = dict(os.environ, PYTHONIOENCODING="ascii")
    words = ("files", folder, "--tokenizer=bytes", "--out", tmp_path / "out", "--val_fraction=0.5")
    done = run_python("data/prepare.py", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert "skipped 6 files that cannot be read as text: in/late.txt (is not" in done.stdout
    assert 'in/other.csv (after row 0: expected {"text": TEXT} (KeyError' in done.stdout
    assert "in/link (is a broken link" in done.stdout
    texts = [b"text %d" % i for i in range(9)] + ["é1".encode(), b"2", b"3", "é4".encode()]
    texts += [b'{"id": 1}', b"packed"]
    assert sorted(sum(documents_of(tmp_path / "out").values(), [])) == sorted(texts)


@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_each_split_has_a_document(n, tmp_path):
    """Whatever the fraction, in files of one name and in rows; a large file is cut in two."""
    for i in range(n):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "README.md").write_text(f"the text number {i}")
    (tmp_path / "rows.jsonl").write_text(jsonl(f"row number {i}" for i in range(n)))
    for path, fraction in itertools.product(("*/README.md", "rows.jsonl"), (0.1, 0.5, 0.9)):
        out = prepared(tmp_path / f"{fraction}-{path[0]}", tmp_path / path, fraction=fraction)
        train, val = documents_of(out).values()
        is_cut = n == 1 or (path != "rows.jsonl" and n * fraction < 1)
        assert train and val and len(train + val) == n * (1 + is_cut)
        assert is_cut or set(map(len, train + val)) <= {12, 13, 17, 18}


@pytest.mark.parametrize("names", ["ab", "ba", "cde"])
def test_validation_has_its_fraction_of_unequal_files(tmp_path, names):
    sizes = zip(names, (90_000, 13, 5_000))
    write_texts(tmp_path, **{name: f"{name} " * (size // 2) for name, size in sizes})
    counts = load_meta(prepared(tmp_path / "out", tmp_path / "*.txt", fraction=0.1))["splits"]
    n_val = counts["val"]["bytes"]
    assert 0.09 < n_val / (n_val + counts["train"]["bytes"]) < 0.2


def test_a_row_of_parquet_is_a_document(tmp_path, monkeypatch):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [f"row {i} \U0001f642\n" * (i % 5) or None for i in range(3000)]
    path = tmp_path / "a.parquet"
    table = pa.table({"id": list(range(3000)), "content": rows})
    pq.write_table(table, path, row_group_size=700)
    out = prepared(tmp_path / "one", path, text_key=["content"])
    assert documents_of(out) == expected_documents({"a.parquet": [row or "" for row in rows]}, 0.3)
    with pytest.raises(UserError, match="KeyError: 'text'"):
        prepared(tmp_path / "wrong", path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="needs the package pyarrow: run `pip install pyarrow`"):
        prepared(tmp_path / "out", path)


def test_own_validation_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text(jsonl(f"row {i}" for i in range(9)))
    write_texts(tmp_path, train="train " * 20, valid="valid " * 20, more="more " * 20)
    ours = [tmp_path / "train.txt", tmp_path / "rows.jsonl"]
    theirs = [tmp_path / "more.txt", tmp_path / "valid.txt"]
    found = documents_of(prepared(tmp_path / "out", *ours, val=theirs))
    assert sorted(found["train"]) == sorted([b"train " * 20, *(b"row %d" % i for i in range(9))])
    assert sorted(found["val"]) == [b"more " * 20, b"valid " * 20]
    # The same text under a different name, among others
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "new.txt").write_text("new")
    (tmp_path / "held" / "copy.txt").write_text("train " * 20)
    says = r"train.txt is given for training and as --val \(held/copy.txt\)"
    with pytest.raises(UserError, match=says):
        prepared(tmp_path / "copy", *ours, val=[tmp_path / "held"])


def test_equal_texts_are_in_one_split(tmp_path):
    """And a row that is removed does not move the others."""
    texts = [f"row {i} " + "x" * (i % 7) for i in range(400)]
    (tmp_path / "all.jsonl").write_text(jsonl(texts * 3))
    (tmp_path / "fewer.jsonl").write_text(jsonl(texts[1:]))
    whole = documents_of(prepared(tmp_path / "1", tmp_path / "all.jsonl"))
    fewer = documents_of(prepared(tmp_path / "2", tmp_path / "fewer.jsonl"))
    assert set(fewer["train"]) <= set(whole["train"]) and set(fewer["val"]) <= set(whole["val"])
    write_texts(tmp_path / "texts", **{str(i): f"file {i // 2}" for i in range(60)})
    for parts in (whole, fewer, documents_of(prepared(tmp_path / "3", tmp_path / "texts"))):
        assert not set(parts["train"]) & set(parts["val"])
        assert 0.2 < len(parts["val"]) / sum(map(len, parts.values())) < 0.6


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_end_of_text_separates_documents(tmp_path, name):
    stories = [f"Story {i}.\n  The énd." for i in range(60)]
    raw = "".join(f"{story}\n<|endoftext|>\n" for story in stories[:40])
    raw += "<|endoftext|>".join(stories[40:])
    if name == "a.jsonl":
        raw = json.dumps({"text": "<|endoftext|>".join(stories) + "<|endoftext|>"})
    raw = raw.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if ".gz" in name else raw)
    parts = documents_of(prepared(tmp_path / "out", tmp_path / name))
    assert sorted(parts["train"] + parts["val"]) == sorted(story.encode() for story in stories)
    assert len(parts["val"]) > 5
    tokens, n_bytes = prepare.encode_file(tmp_path / name, get_tokenizer("bytes"))
    assert (tokens == 256).sum() == 59 and len(tokens) == n_bytes + 59


def test_integers_are_tokens(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, 5000)
    np.savetxt(tmp_path / "a.txt", tokens, fmt="%d")
    np.savetxt(tmp_path / "b.txt", tokens[:700], fmt="%d")
    options = dict(tokenizer="integers:300", val=[tmp_path / "b.txt"])
    out = prepared(tmp_path / "out", tmp_path / "a.txt", **options)
    for split, n_tokens in (("train", 5000), ("val", 700)):
        assert independent_split(out, split).tolist() == [300, *tokens[:n_tokens]]
    meta, tokenizer = load_meta(out), get_tokenizer("integers:300")
    assert (meta["vocab_size"], meta["eot"], meta["splits"]["val"]["bytes"]) == (301, 300, None)
    assert tokenizer.decode_bytes([3, 299]) == b" 3 299"
    for text in ("3 300", "-1", "three", "9" * 30):
        with pytest.raises(UserError, match="must be integers from 0 to 299"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    "text, fraction, name",
    [
        ("".join(map(chr, range(32, 127))) * 99, 0.1, "a.txt"),
        ("x" * 9973, 0.37, "b.txt.gz"),
        ("🙂" * 21, 0.4, "c"),
    ],
)
def test_single_text_is_split_by_position(tmp_path, text, fraction, name):
    raw = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if ".gz" in name else raw)
    out = prepared(tmp_path / "out", tmp_path / name, fraction=fraction)
    (train,), (val,) = documents_of(out).values()
    assert train + val == raw and train.decode() and val.decode()  # cut between characters
    assert 0 <= len(train) - int(len(raw) * (1 - fraction)) < 4


WORDS = "word é 漢字 。 don't ' 12 ... 🙂 \x1c \u0300 ж かな µ ²".split(" ")
WORDS += [*" \n\t\u00a0\u2003\u3000\u0085\u1680", "  ", "\n\n", "\r\n"]


def test_pieces_have_the_tokens_of_the_whole(gpt2, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 48)
    draw = random.Random(1)
    for separator in (" ", ""):
        raw = separator.join(draw.choices(WORDS, k=3000)).encode()
        splits, starts, pieces = zip(*corpus.read_document("val", io.BytesIO(raw), "x"))
        assert b"".join(pieces) == raw and len(pieces) > 100
        assert set(splits) == {"val"} and starts == (True,) + (False,) * (len(pieces) - 1)
        joined = [token for piece in pieces for token in gpt2.encode_raw(piece).tolist()]
        assert joined == gpt2.tiktoken.encode_ordinary(raw.decode())
    raw = "漢字🙂".encode() * 500  # no place to cut: they stay small, and no character is cut
    pieces = [piece for _, _, piece in corpus.read_document("val", io.BytesIO(raw), "x")]
    assert "".join(piece.decode() for piece in pieces).encode() == raw
    assert max(map(len, pieces)) <= 4 * 48


def test_rows_are_read_in_little_memory(tmp_path):
    row = b'1,"' + b"a text, of words " * 300 + b'"\r\n'
    with gzip.open(tmp_path / "a.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"id,text\n" + row * 2000)
    tracemalloc.start()
    pieces = corpus.read_files([("a", tmp_path / "a.csv.gz")], ["text"], (0.1, 0, -1))
    size = sum(len(piece) for _, _, piece in pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2000 * (len(row) - 6) > 10_000_000 and peak < 1 << 20, peak


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
    for change, says in (
        (dict(fraction=0.5), "val_fraction 0.3, which now is 0.5: remove it"),
        (dict(tokenizer="bpe"), "tokenizer bytes, which now is bpe"),
        (dict(val=["b.txt"]), "val 0 files.* which now is 1 files"),
    ):
        (tmp_path / "b.txt").write_text("other")
        with pytest.raises(UserError, match=f"{folder} was made with {says}"):
            prepared(folder, "in", **change)
    (tmp_path / "in" / "a.txt").write_text("same size " * 50)
    with pytest.raises(UserError, match="paths 2 files, hash .*, which now is 2 files, hash "):
        prepared(folder, "in")
    assert tree(folder) == before
    for out in (tmp_path / "in", tmp_path / "b.txt"):
        with pytest.raises(UserError, match="not a folder of prepared data: choose a different"):
            prepared(out, "in")


@pytest.mark.parametrize("how", ["bad line", "disk full", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_preparation_that_fails_is_not_in_the_way(how, tmp_path):
    """It leaves nothing, or a hidden folder if it was killed."""
    (tmp_path / "a.txt").write_text("some text " * 100_000)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' * 9_000 + "{\n")
    name = "bad.jsonl" if how == "bad line" else "a.txt"
    before = tree(tmp_path)
    command = ["files", str(tmp_path / name), "--tokenizer=bytes", f"--out={tmp_path}/new/out"]
    script = f"""
import os, resource, runpy, signal, sys
from data import shards
write, how = shards.write_shard, {how!r}
def stop(path, tokens):
    write(path, tokens)
    os.kill(os.getpid(), signal.Signals[how])
if how == "disk full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if how.startswith("SIG"):
    shards.write_shard = stop
sys.argv[1:] = {command!r}
runpy.run_path("data/prepare.py", run_name="__main__")
"""
    done = run_python("-c", script)
    code, says = {
        "bad line": (2, "bad.jsonl after row 9000: expected"),
        "disk full": (1, "File too large.*: run the same command again"),
        "SIGINT": (128 + signal.SIGINT, "stopped: run the same command again to resume"),
        "SIGTERM": (128 + signal.SIGTERM, "stopped: run the same command again to resume"),
        "SIGKILL": (-signal.SIGKILL, ""),
    }[how]
    assert done.returncode == code and re.search(says, done.stderr)
    assert done.stderr.count("\n") == (how != "SIGKILL")
    assert not (tmp_path / "new" / "out").exists()
    if how != "SIGKILL":
        assert {name for name in tree(tmp_path) if name != "new"} == before.keys()
    folder = prepared(tmp_path / "new" / "out", tmp_path / "a.txt", fraction=0.5)
    assert sum(map(len, documents_of(folder).values())) == 2


@pytest.mark.parametrize("out", ["link", "dangling", ".", "left", "no renaming", "new"])
def test_what_is_prepared_arrives(out, tmp_path, monkeypatch):
    write_texts(tmp_path, a="some text " * 50)
    for name in ("empty", "here", "left/.tmp-left-1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "here" if out == "." else tmp_path)
    if out == "no renaming":  # of folders
        monkeypatch.setattr(prepare.os, "rename", lambda old, new: os.link(old, new))
    for _ in range(2):  # the second time it is there
        prepared(out, tmp_path / "a.txt")
    names = [path.name for path in sorted(Path(out).glob("[!.]*"))]
    assert names == ["meta.json", "train_000000.bin", "val_000000.bin"]
    assert [path.name for path in tmp_path.rglob(".*")] == [".tmp-left-1"]


def test_what_cannot_arrive_is_kept(tmp_path, monkeypatch):
    write_texts(tmp_path, a="some text " * 50)
    (tmp_path / "out").mkdir()

    def fail(old, new):
        if Path(old).suffix == ".bin":
            raise OSError(5, "Input/output error")
        replace(old, new)

    replace = os.replace
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="Input/output error.*: the data are complete in ") as told:
        prepared(tmp_path / "out", tmp_path / "a.txt")
    kept = Path(re.search(r"complete in (\S*),", str(told.value))[1])
    assert load_meta(kept) and len(independent_split(kept, "train")) == 351


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_files_are_written_where_fsync_is_not_supported(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, "fsync")))
    with contextlib.suppress(OSError), atomic_write(tmp_path / "file") as file:
        file.write(b"content")
    assert os.listdir(tmp_path) == ["file"] * (number != errno.EIO)


def test_several_processes_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200_000)
    command = [sys.executable, "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer=bytes"]
    all_three = [subprocess.Popen([*command, f"--out={tmp_path}/out"], cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=60) for process in all_three] == [0, 0, 0]
    assert load_meta(tmp_path / "out")["splits"]["train"]["tokens"] == 1_800_001
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]


# --------------------------------------------------------------------------------------------------
# Downloads

BODY = random.Random(3).randbytes(1_000_000)
SHA = sha256(BODY)


@pytest.mark.parametrize(
    "cut, ranges, before, asked",
    [
        (2, True, b"", ["bytes=0-", "bytes=500000-", "bytes=750000-"]),
        (1, False, b"", ["bytes=0-", "bytes=500000-"]),  # a server without ranges
        (0, True, BODY[:9], ["bytes=9-"]),
        (0, True, BODY + b"more", ["bytes=1000004-", "bytes=0-"]),
    ],
)
def test_downloads_resume(server, tmp_path, cut, ranges, before, asked):
    server.files["/x"], server.cut, server.ranges = BODY, cut, ranges
    if before:
        (tmp_path / ".tmp-x").write_bytes(before)
    for _ in range(2):  # the second time it is there: nothing is asked for
        assert download.download(server.address + "/x", tmp_path / "x", SHA) == SHA
    assert (tmp_path / "x").read_bytes() == BODY and os.listdir(tmp_path) == ["x"]
    assert [request for _, request in server.requests] == asked


def test_downloads_are_verified(server, tmp_path, capsys):
    """By the hash that is known, or by the one that Hugging Face names in its redirect."""
    server.files["/x"], server.redirects["/y"], server.linked_sha256 = BODY, "/x", SHA
    assert download.download(server.address + "/y", tmp_path / "y") == SHA
    server.linked_sha256 = "0" * 64
    for name, known in (("x", "0" * 64), ("y", None)):
        with pytest.raises(UserError, match=f"gave SHA-256 {SHA} instead of 0000.*deleted"):
            download.download(f"{server.address}/{name}", tmp_path / "z", known)
    says = "/missing .*404.* to resume, .* put the file at .*/x by hand, or .*prepare.py python"
    with pytest.raises(UserError, match=says):
        download.download(server.address + "/missing", tmp_path / "x")
    with pytest.raises(UserError, match="refused"):
        download.download("http://127.0.0.1:9/x", tmp_path / "x")
    assert os.listdir(tmp_path) == ["y"] and capsys.readouterr().out.count("trying again") == 6
    code = "from data.download import FINEWEB; print(FINEWEB)"
    done = run_python("-c", code, env=dict(os.environ, HF_ENDPOINT="https://mirror.example/"))
    pinned = r"https://mirror\.example/datasets/kjj0/fineweb10B-gpt2/resolve/[0-9a-f]{40}/\n"
    assert re.fullmatch(pinned, done.stdout)


def test_fineweb(server, tmp_path, capsys, monkeypatch):
    assert len(download.fineweb_hashes()) == 32
    base, entries = "/fineweb10B-gpt2/resolve/main/", {}
    for number, name in enumerate(("val_000000", "train_000001", "train_000002")):
        name = f"fineweb_{name}.bin"
        entries[name] = write_shard(tmp_path / name, np.full(10 + number, number, dtype=np.uint16))
    content = {base + name: (tmp_path / name).read_bytes() for name in entries}
    known = {name: entry["sha256"] for name, entry in list(entries.items())[:2]}
    monkeypatch.setattr(download, "fineweb_hashes", lambda: known)
    folder, command = tmp_path / "fw", ["fineweb10B", "--out", f"{tmp_path}/fw", "--shards"]
    server.files |= dict(list(content.items())[:2])
    # It fails, resumes, is there
    for shards, code, fetched in ((2, 2, 6), (2, 0, 1), (2, 0, 0), (1, 0, 0)):
        before = len(server.requests)
        assert run_command(prepare.main, [*command, str(shards)]) == code
        assert len(server.requests) - before == fetched
        assert (folder / "meta.json").exists() == (code == 0)
        server.files |= content
    meta = load_meta(folder)
    assert meta["splits"] == {"train": {"tokens": 23}, "val": {"tokens": 10}}
    assert meta["files"] == entries
    assert TokenStream(folder, 4, 8).eval_subset == "first"
    # A folder from another endpoint or commit goes on
    write_meta(folder, meta | dict(source="https://x/kjj0/fineweb10B-gpt2/resolve/main/"))
    assert TokenStream(folder, 4, 8).eval_subset == "first"
    assert run_command(prepare.main, [*command, "2"]) == 0
    server.files[base + "fineweb_train_000003.bin"] = b"<html>"
    assert run_command(prepare.main, [*command, "3"]) == 2
    assert "000003.bin is not an intact token shard" in capsys.readouterr().err
    known["fineweb_train_000003.bin"] = "0" * 64
    (folder / "fineweb_train_000003.bin").unlink()
    assert run_command(prepare.main, [*command, "3"]) == 2
    assert f"instead of {'0' * 64}" in capsys.readouterr().err
    assert load_meta(folder)["files"] == meta["files"]
    assert (
        run_command(prepare.main, ["fineweb10B", "--out", str(make_data(tmp_path / "other"))]) == 2
    )
    assert "holds other data" in capsys.readouterr().err


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
    assert load_meta(folder)["source"] == entry[0]
    assert sorted(os.listdir(tmp_path)) == ["a", "downloads"]
    assert os.listdir(tmp_path / "downloads") == ["w.zip"]


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
    "long.txt": "é".encode() * 200_000 + b"\xff",
    "later.txt": b"one\n<|endoftext|>\ntwo \xff",
    "bad.jsonl": b'{"text": "good"}\n{"text": \n',
    "number.jsonl": b'{"text": 5}\n',
    "keys.jsonl": b'\n{"a": "1"}\n',
    "cut.jsonl.gz": gzip.compress(b'{"text": "good"}\n' * 9)[:-9],
    "wide.csv": b"id,text\n1,a\n2,b, c\n",
    "narrow.csv": b"id,text\n1,a\n2\n",
    "quotes.csv": b'text\nfine\n"open\n',
    "bad.parquet": b"PAR1 no PAR1",
    "two.json": b'[{"text": "one"}, {"text": "two"}]',
    "zero.txt": b"no\0text",
    "latin.csv": b"text,id\n" + b"fine,1\n" * 9 + b"b,\xff\n",
}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("fineweb10B --tokenizer bytes", "fineweb10B does not take tokenizer: remove it"),
        ("python a.txt", "python does not take paths"),
        ("python --tokenizer gpt5", "there is no vocabulary gpt5"),
        ("python --tokenizer bytes --vocab_size 400", "--vocab_size 400 needs --tokenizer bpe"),
        ("python --vocab_size 257", "--vocab_size is 257: expected 258 to 65536"),
        ("python --tokenizer integers:70000", "integers:70000: expected 1 to 65535"),
        ("files", r"there is no text in \[\]: give PATHs of readable files, folders or globs"),
        ("files a.txt none*.txt", "none.*txt is not a file or folder, nor a glob that matches any"),
        ("files long.txt", "long.txt is not UTF-8 text: convert or remove it"),
        ("files later.txt", "later.txt is not UTF-8 text"),
        ("files zero.txt", "zero.txt is not UTF-8 text"),
        ("files a.txt --val_fraction 0", "--val_fraction is 0.0: expected between 0 and 1"),
        ("files keys.jsonl --text_key a", "the .* split has no text: give more"),
        (
            "files bad.jsonl",
            r'bad.jsonl after row 1: expected {"text": TEXT} .*: correct it, or give --text_key',
        ),
        ("files number.jsonl", "number.jsonl after row 0: expected .* int found"),
        (
            "files keys.jsonl --text_key a b",
            r"""keys.jsonl after row 1: expected {"a": TEXT, "b": TEXT} .*: 'b'""",
        ),
        ("files cut.jsonl.gz", "cut.jsonl.gz is a damaged gzip file"),
        ("files narrow.csv", "narrow.csv after row 1: expected .* NoneType found"),
        ("files wide.csv", "wide.csv after row 1: expected .* list found"),
        ("files quotes.csv", "quotes.csv after row 1: .*unexpected end of data"),
        pytest.param(
            "files bad.parquet",
            "bad.parquet after row 0: .*Arrow",
            marks=pytest.mark.skipif(not find_spec("pyarrow"), reason="needs pyarrow"),
        ),
        ("files two.json --text_key txet", "two.json after row 0: expected .*KeyError: 'txet'"),
        ("files link", "link is a broken link, a pipe or a device: give a file"),
        ("files /dev/null", "/dev/null is a broken link, a pipe or a device"),
        ("files a.txt --out a.txt/sub", "cannot be read or written .Not a directory."),
        (f"files a.txt --out {'x' * 300}", "cannot be read or written .File name too long."),
        ("files latin.csv", "latin.csv after row .* 'utf-8' codec can't decode"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, arguments, says):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to("nothing")
    before, words = tree(tmp_path), arguments.split()
    ours = {*FILES, "link", "a.txt/sub", "none*.txt"}
    words = [str(tmp_path / word) if word in ours else word for word in words]
    words += ["--tokenizer=bytes"] * (words[0] == "files")
    words[1:1] = ["--out", str(tmp_path / "out")]  # the last --out counts
    assert run_command(prepare.main, words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error
    assert tree(tmp_path) == before


def test_command_line(tmp_path, capsys):
    """Flags may stand between the paths."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("a.md", "b.txt", "c.py", "deep/d.md", "deep/F.MD"):
        (tmp_path / "in" / name).write_text(f"<{name}>" * 9)
    write_texts(tmp_path, own="<own>" * 9)
    flags = ["--tokenizer", "bytes", tmp_path / "own.txt", "--val_fraction", "0.5"]
    flags += ["--include", "b.t?t", "--include=*.md", "--out", tmp_path / "out"]
    words = list(map(str, ["data/prepare.py", "files", tmp_path / "in", *flags]))
    done = run_python("-OO", *words)
    assert done.returncode == 0, done.stderr
    found = b"".join(sum(documents_of(tmp_path / "out").values(), []))
    names = {b"a.md", b"b.txt", b"deep/d.md", b"deep/F.MD", b"own"}
    assert set(re.findall(rb"<(.*?)>", found)) == names
    meta = load_meta(tmp_path / "out")
    assert shlex.split(meta["command"]) == ["python", *words]
    for wrong, says in (
        (["notes/"], "invalid choice: 'notes/' .choose from 'python', 'files'"),
        (["python", "--tok", "bytes"], "unrecognized"),
        (["files", "a", "--val", "b", "--val_fraction", "0.1"], "not allowed with argument"),
        ([], "required"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_command(prepare.main, wrong)
        assert ended.value.code == 2 and re.search(f"error: .*{says}", capsys.readouterr().err)


# --------------------------------------------------------------------------------------------------
# The stream


def test_shards_that_meta_json_does_not_describe_are_refused(tmp_path):
    data = make_data(tmp_path / "data")
    shard, meta = data / "a_train_1.bin", json.loads((data / "meta.json").read_text())
    content, more = shard.read_bytes(), data / "more_train.bin"
    meta["files"]["a_train_1.bin"]["sha256"] = sha256(content)
    meta_json = json.dumps(meta)
    (data / "meta.json").write_text(meta_json)
    whole = TokenStream(data, 32, 64).fingerprint()
    other = content[:5000] + b"a\0" + content[5002:]
    for path, wrong, says in (
        (shard, content[:2000] + b"\xff\xff" + content[2002:], "token 65535, but the .* at 256"),
        (shard, other, "is not the shard that meta.json describes"),
        (shard, None, "has other shards than its meta.json names .a_train_1.bin."),
        (more, content, "has other shards than its meta.json names .more_train.bin."),
    ):
        path.write_bytes(wrong) if wrong else path.unlink()
        with pytest.raises(UserError, match=f"{data}.*{says}"):
            TokenStream(data, 32, 64)
        more.unlink(missing_ok=True)
        shard.write_bytes(content)
    # Other content is other data
    shard.write_bytes(other)
    (data / "meta.json").unlink()
    assert TokenStream(data, 32, 64).fingerprint() != whole
    shard.write_bytes(content)
    (data / "meta.json").write_text(meta_json)
    assert TokenStream(data, 32, 64).fingerprint() == whole


def test_damage_is_caught_while_tokens_are_read(tmp_path, monkeypatch):
    data = make_data(tmp_path / "data")
    starts = np.array([0, 11100, 11110, 11111, 28900])  # also over the end of a shard
    shards = TokenShards(data, "train", 257, {})
    everything = independent_split(data, "train")
    whole = shards.read_sequences(starts, 33)
    assert np.array_equal(whole, [everything[at : at + 33] for at in starts])
    monkeypatch.setattr(TokenShards, "CHECKED", 0)  # as in a corpus too large to scan on opening
    with pytest.raises(UserError, match="a_train_0.bin holds token .* ends at 99"):
        TokenShards(data, "train", 100, {}).read_sequences(starts, 33)
    os.truncate(data / "a_train_1.bin", 20_000)
    for _ in range(2):
        with pytest.raises(UserError, match="a_train_1.bin can no longer be read whole"):
            shards.read_sequences(starts, 33)
        (data / "a_train_1.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_visits_everything_once(n):
    order = feistel_permute(np.arange(n), n, key=7)
    assert sorted(order.tolist()) == list(range(n))
    if n > 100:
        assert not np.array_equal(order, feistel_permute(np.arange(n), n, key=8))
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.1


@pytest.mark.parametrize("n_tokens", [33, 63, 64, 65, 1000])
def test_windows_of_an_epoch(n_tokens, tmp_path):
    for split in ("train", "val"):
        write_shard(tmp_path / f"{split}.bin", np.arange(n_tokens, dtype=np.uint16))
    stream, offsets = TokenStream(tmp_path, seq_len=32, batch_tokens=32, seed=3), set()
    n_seqs = stream.seqs_per_epoch
    assert n_seqs == max(1, n_tokens // 32 - 1)
    for epoch in range(40):
        starts = stream.sequence_starts(epoch * n_seqs + np.arange(n_seqs))
        offsets.add(int(starts.min()))
        # Every sequence once
        assert np.array_equal(np.sort(starts), starts.min() + 32 * np.arange(n_seqs))
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
    assert len(offsets) > 10 or n_tokens < 64


def test_batches_hold_the_tokens_of_their_windows(data, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)  # some file systems have no memory maps
    everything = independent_split(data, "train")
    stream = TokenStream(data, seq_len=32, batch_tokens=512)
    starts = stream.sequence_starts(77 * 16 + np.arange(16))
    assert np.array_equal(stream.batch(77), np.stack([everything[s : s + 33] for s in starts]))
    # --doc_align
    stream = TokenStream(data, seq_len=32, batch_tokens=512, doc_align=True)
    batches = np.concatenate([stream.batch(step) for step in range(-(-len(stream.aligned) // 16))])
    assert (batches[:, 0] == 256).all()
    assert (np.diff(stream.aligned) >= 32).all() and len(stream.aligned) > 0.9 * 29000 / 97


def test_prefetch_keeps_order_and_passes_errors_on():
    def load(i):
        if i == 9:
            raise UserError("shard gone")
        return i * i

    assert list(itertools.islice(prefetch(load, 3, depth=2), 6)) == [9, 16, 25, 36, 49, 64]
    with pytest.raises(UserError, match="shard gone"):
        list(prefetch(load, 0, depth=3))
