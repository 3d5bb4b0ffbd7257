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

import numpy as np
import pytest

from common.errors import RunError, UserError
from common.files import atomic_write
from conftest import ROOT, make_data, run_python
from data import corpus, download, prepare
from data.shards import find_shards, load_meta, read_shard, write_shard
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
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
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
def server(monkeypatch):
    """The handler class of an HTTP server on this machine, with its `address`."""
    handler = type("Handler", (Server,), dict(files={}, redirects={}, requests=[]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        handler.address = f"http://127.0.0.1:{running.server_address[1]}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(download, "FINEWEB", handler.address + "/fineweb10B-gpt2/resolve/main/")
        monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
        yield handler
        running.shutdown()
        thread.join()


def independent_read(path):
    """A shard's tokens by the format's description alone, as a list of ints."""
    content = Path(path).read_bytes()
    magic, version, count = struct.unpack("<3i", content[:12])
    assert content[12:1024] == bytes(1012)
    letter = {(20240520, 1): "H", (20240801, 7): "I"}[magic, version]
    assert len(content) == 1024 + count * struct.calcsize(f"<{letter}")
    return list(struct.unpack(f"<{count}{letter}", content[1024:]))


def independent_split(folder, split):
    return [
        token for path in sorted(folder.glob(f"{split}_*.bin")) for token in independent_read(path)
    ]


def documents_of(folder):
    """The documents of both splits of bytes, in order."""
    texts = {
        split: "".join(map(chr, independent_split(folder, split))) for split in ("train", "val")
    }
    return {
        split: [part.encode("latin-1") for part in text.split(chr(256))[1:]]
        for split, text in texts.items()
    }


def expected_documents(texts, fraction):
    """The same, of {file's name: its text, or the texts of its rows}.

    Files are in the order of their hashes, rows in their own. Names of files and texts of rows
    decide.
    """
    made = {"train": [], "val": []}
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        rows = texts[name]
        for document, text in [(name, rows)] if type(rows) is str else zip(rows, rows):
            in_val = int(hashlib.sha256(document.encode()).hexdigest(), 16) < fraction * 2**256
            made["val" if in_val else "train"] += [text.encode()] * bool(text)
    assert all(len(documents) > 3 for documents in made.values())
    return made


def prepared(folder, *paths, tokenizer="bytes", fraction=0.3, **options):
    return prepare.prepare("files", paths, tokenizer, folder, fraction, **options)


def tree(folder):
    """Every path under a folder, with the content of files."""
    return {
        path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("dtype, top", [(np.uint16, 65535), (np.uint32, 2**32 - 1)])
def test_shard_is_what_the_format_describes(tmp_path, dtype, top):
    tokens = np.array([0, 1, 258, 50256, top], dtype=dtype)
    write_shard(tmp_path / "train.bin", tokens)
    assert independent_read(tmp_path / "train.bin") == tokens.tolist()
    read = read_shard(tmp_path / "train.bin")
    assert read.dtype == dtype and read.tolist() == tokens.tolist()
    for wrong in (np.zeros(3, np.int64), np.zeros((2, 2), np.uint16), np.zeros(0, np.uint16)):
        with pytest.raises(ValueError):
            write_shard(tmp_path / "x.bin", wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]


@pytest.mark.parametrize(
    "header, n_bytes, says",
    [
        ((20240519, 1, 2), 4, "is not a token shard (magic 20240519"),
        ((20240801, 1, 2), 8, "version 1"),
        ((20240520, 1, -1), 4, "-1 tokens"),
        ((20240520, 1, 3), 4, "truncated, 1028 bytes instead of 1030"),
        ((20240520, 1, 1), 4, "too long, 1028 bytes instead of 1026"),
        ((), -1000, "is not a token shard"),
    ],
)
def test_read_shard_refuses_damage(tmp_path, header, n_bytes, says):
    content = struct.pack("<3i", *header or (20240520, 1, 2)) + bytes(1012 + n_bytes)
    (tmp_path / "bad_train.bin").write_bytes(content)
    with pytest.raises(UserError, match="bad_train.bin " + ".*" + re.escape(says)):
        read_shard(tmp_path / "bad_train.bin")


def test_find_shards_and_meta_json(tmp_path):
    with pytest.raises(
        UserError, match="there is no folder .*none: expected a folder that `python data/prepare"
    ):
        load_meta(tmp_path / "none")
    for name in ("b_train_1.bin", "a_train_0.bin", ".tmp-train_9.bin", "train.txt"):
        (tmp_path / name).touch()
    names = [path.name for path in find_shards(str(tmp_path), "train")]
    assert names == ["a_train_0.bin", "b_train_1.bin"]
    with pytest.raises(UserError, match=r"has no shards \*val\*.bin"):
        find_shards(tmp_path, "val")
    # The last "train" or "val" of a name decides
    (tmp_path / "medieval").mkdir()
    for name in ("medieval_train_0.bin", "trains_val_0.bin", "train_val_1.bin"):
        (tmp_path / "medieval" / name).touch()
    for split, expected in (("train", 1), ("val", 2)):
        assert len(find_shards(tmp_path / "medieval", split)) == expected
    assumed = load_meta(tmp_path)
    assert assumed["assumed"] and [assumed[k] for k in ("tokenizer", "vocab_size", "eot")] == [
        "gpt2",
        50257,
        50256,
    ]
    split = {"tokens": 2, "bytes": None, "documents": None}
    good = {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot": 256,
        "splits": {"train": split, "val": split},
    }
    good |= {
        "source": "x",
        "files": {"train_000000.bin": {"tokens": 2, "sha256": ""}},
        "command": "python x",
    }
    wrong = (
        {"vocab_size": "257"},
        {"vocab_size": 300},
        {"splits": {"train": split}},
        {"files": {"train_0.bin": {}}},
    )
    for bad in (None, *wrong, {"tokenizer": "bpe"}):
        (tmp_path / "meta.json").write_text(json.dumps(good))
        assert load_meta(tmp_path) == good
        (tmp_path / "meta.json").write_text(json.dumps(good | bad) if bad else "{")
        with pytest.raises(UserError, match="meta.json is damaged"):
            load_meta(tmp_path)


def test_python_source_is_the_standard_library(tmp_path):
    folder = prepare.prepare("python", tokenizer="bytes", out=tmp_path / "python")
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    dropped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = [name for name in names if not dropped & set(name.split("/"))]
    assert {"argparse.py", "this.py", "json/decoder.py"} <= set(names)
    texts = {name: (root / name).read_bytes().decode() for name in names}
    assert documents_of(folder) == expected_documents(texts, 0.1)
    meta = load_meta(folder)
    assert meta["tokenizer"] == "bytes" and meta["source"].startswith(
        "standard library of Python 3."
    )
    assert (
        meta["command"] == "python data/prepare.py python"
        and meta["order"] == "SHA-256 of the name"
    )
    for split, counts in meta["splits"].items():
        tokens = independent_split(folder, split)
        assert counts["tokens"] == len(tokens) == counts["bytes"] + counts["documents"]
        assert counts["documents"] == tokens.count(256)


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


@pytest.mark.parametrize("keys", [["text"], ["answer", 'a "b",\nc']])
def test_files_of_all_kinds(tmp_path, keys, capsys):
    """Texts and rows, packed or not, in folders, by glob and by name.

    They are in the order of the hashes of their names.
    """
    texts, folder, columns = {}, tmp_path / "corpus", ["id", "text", 'a "b",\nc', "answer"]
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "deep" / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for i in range(9):
        (folder / "deep" / f"{i}.txt").write_text(
            texts.setdefault(f"corpus/deep/{i}.txt", f"é{i} " * 50)
        )
        (tmp_path / f"glob{i}.md").write_text(texts.setdefault(f"glob{i}.md", f"glob {i}"))
    (folder / "packed.txt.gz").write_bytes(
        gzip.compress(texts.setdefault("corpus/packed.txt.gz", "packed").encode())
    )
    # all that CSV must quote, and what other splitters of lines take for an end of line
    parts = [
        "a",
        "word",
        "é",
        "漢字",
        "🙂",
        " ",
        ",",
        '"',
        '""',
        "\n",
        "\r\n",
        "\r",
        "\t",
        ";",
        "'",
        "\\n",
    ]
    parts += ["\u2028", "\u0085", "\x0b", "\x1c", "\ufeff"]
    quoted = dict(quoting=csv.QUOTE_ALL)  # where Python's writer leaves a lone \r without
    dialects = dict.fromkeys(("a.jsonl", "b.jsonl.gz", "c.csv", "d.csv.gz"), {})
    dialects |= {"E.CSV": quoted | dict(mark="\ufeff", lineterminator="\n")}
    dialects |= {
        "f.csv": quoted | dict(lineterminator="\r"),
        "g.csv": quoted | dict(lineterminator="\n\n"),
    }
    for name, more in dialects.items():
        draw = random.Random(name)
        rows = [
            ["".join(draw.choices(parts, k=draw.randint(0, 12))) for _ in columns]
            for _ in range(30)
        ]
        write_rows(folder / name, rows, columns, **more)
        joined = ["\n".join(row[columns.index(key)] for key in keys) for row in rows]
        texts[f"corpus/{name}"] = joined
    # What is named twice is taken once
    arguments = [folder, f"{tmp_path}/glob*.md", folder / "a.jsonl"]
    capsys.readouterr()
    out = prepared(folder / "out", *arguments, shard_tokens=100, text_key=keys)
    assert documents_of(out) == expected_documents(texts, 0.3)
    found = "corpus/image.png (is not UTF-8 text at byte 0)"
    said = f"skipped 1 files that cannot be read as text: {found}"
    assert capsys.readouterr().out.splitlines()[0] == said
    meta = load_meta(out)
    for split, counts in meta["splits"].items():
        sizes = [len(read_shard(path)) for path in find_shards(out, split)]
        assert sizes == [100] * (counts["tokens"] // 100) + [counts["tokens"] % 100] * (
            counts["tokens"] % 100 > 0
        )
    assert {name: shard["sha256"] for name, shard in meta["files"].items()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.bin")
    }
    moved = shutil.copytree(
        folder, tmp_path / "else" / "corpus", ignore=shutil.ignore_patterns("out")
    )
    again = prepared(
        tmp_path / "again", f"{tmp_path}/glob*.md", moved, shard_tokens=100, text_key=keys
    )
    assert (
        load_meta(again)["files"] == meta["files"]
    )  # wherever the folder lies, in any order of the arguments


def test_include(tmp_path):
    for name in ("a.md", "b.txt", "c.py", "deep/d.md", "deep/F.MD"):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(f"<{name}>" * 9)
    (tmp_path / "own.rst").write_text("<own>" * 9)
    for number, flags in enumerate(
        (["--include", "*.md", "b.*"], ["--include", "b.t?t", "--include=*.md"])
    ):
        command = [
            "files",
            tmp_path / "corpus",
            tmp_path / "own.rst",
            "--tokenizer=bytes",
            "--val_fraction=0.5",
        ]
        assert prepare.main([*map(str, command), "--out", str(tmp_path / str(number)), *flags]) == 0
        found = b"".join(sum(documents_of(tmp_path / str(number)).values(), []))
        assert set(re.findall(rb"<(.*?)>", found)) == {
            b"a.md",
            b"b.txt",
            b"deep/d.md",
            b"deep/F.MD",
            b"own",
        }


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
    prepared(folder / "earlier", folder / "0.txt", folder / "1.txt")
    env = dict(os.environ, PYTHONIOENCODING="ascii")
    words = ("files", folder, "--tokenizer=bytes", "--out", tmp_path / "out", "--val_fraction=0.5")
    done = run_python("data/prepare.py", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert "skipped 6 files that cannot be read as text: in/late.txt (is not" in done.stdout
    assert 'in/other.csv (after row 0: expected {"text": TEXT} (KeyError' in done.stdout
    assert "in/link (is a broken link)" in done.stdout
    texts = [b"text %d" % i for i in range(9)] + ["é1".encode(), b"2", b"3", "é4".encode()]
    texts += [b'{"id": 1}', b"packed"]
    assert sorted(sum(documents_of(tmp_path / "out").values(), [])) == sorted(texts)


@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_each_split_has_a_document(n, tmp_path):
    """Whatever the fraction, in files of one name and in rows; a large file is cut in two."""
    for i in range(n):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "README.md").write_text(f"the text number {i}")
    rows = "".join(json.dumps({"text": f"row number {i}"}) + "\n" for i in range(n))
    (tmp_path / "rows.jsonl").write_text(rows)
    for path, fraction in itertools.product(("*/README.md", "rows.jsonl"), (0.1, 0.5, 0.9)):
        out = prepared(tmp_path / f"{fraction}-{path[0]}", tmp_path / path, fraction=fraction)
        parts = documents_of(out)
        assert parts["train"] and parts["val"]
        is_cut = n == 1 or (path != "rows.jsonl" and n * fraction < 1)
        assert len(parts["train"]) + len(parts["val"]) == n * (1 + is_cut)
        assert is_cut or set(map(len, parts["train"] + parts["val"])) <= {12, 13, 17, 18}


def test_a_row_of_parquet_is_a_document(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [f"row {i} \U0001f642\n" * (i % 5) or None for i in range(3000)]
    (tmp_path / "in").mkdir()
    table = pa.table({"id": list(range(3000)), "content": rows, "more": ["x"] * 3000})
    pq.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=700)
    for number, path in enumerate(
        (tmp_path / "in", tmp_path / "in" / "*.parquet", tmp_path / "in" / "a.parquet")
    ):
        out = prepared(tmp_path / str(number), path, text_key=["content"])
        name = "in/a.parquet" if number == 0 else "a.parquet"
        texts = {name: [row or "" for row in rows]}
        assert documents_of(out) == expected_documents(texts, 0.3)
    both = prepared(tmp_path / "both", tmp_path / "in", text_key=["more", "content"])
    assert documents_of(both)["train"][0].startswith(b"x\n")
    with pytest.raises(UserError, match=r"KeyError: 'text; its columns are id, content, more'"):
        prepared(tmp_path / "wrong", tmp_path / "in" / "a.parquet")


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        UserError, match="a.parquet needs the package pyarrow: run `pip install pyarrow`"
    ):
        prepared(tmp_path / "out", tmp_path / "a.parquet")


def test_own_validation_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(9))
    )
    for name in ("train.txt", "valid.txt", "more.txt"):
        (tmp_path / name).write_text(f"the text of {name} " * 20)
    train = [tmp_path / "train.txt"], [tmp_path / "train.txt", tmp_path / "rows.jsonl"]
    val = [tmp_path / "valid.txt"], [tmp_path / "more.txt", tmp_path / "valid.txt"]
    for number, (ours, theirs) in enumerate(itertools.product(train, val)):
        out = prepared(tmp_path / str(number), *ours, val=theirs)
        found = documents_of(out)
        texts = [(tmp_path / "train.txt").read_bytes(), *(b"row %d" % i for i in range(9))]
        assert sorted(found["train"]) == sorted(texts if len(ours) > 1 else texts[:1])
        assert sorted(found["val"]) == sorted(path.read_bytes() for path in theirs)
        assert load_meta(out)["source"].endswith(" --val " + " ".join(map(str, theirs)))
    with pytest.raises(UserError, match="valid.txt is given for training and as --val"):
        prepared(tmp_path / "both", tmp_path / "*.txt", val=[tmp_path / "valid.txt"])
    # Under a different name, among others
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "new.txt").write_text("new")
    (tmp_path / "held" / "copy.txt").write_bytes((tmp_path / "train.txt").read_bytes())
    says = r"train.txt is given for training and as --val \(held/copy.txt\)"
    with pytest.raises(UserError, match=says):
        prepared(tmp_path / "copy", tmp_path / "train.txt", val=[tmp_path / "held"])


def test_equal_texts_are_in_one_split(tmp_path):
    """And a row that is removed does not move the others."""
    texts = [f"row {i} " + "x" * (i % 7) for i in range(400)]
    for name, rows in {"all": texts * 3, "fewer": texts[1:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    whole = documents_of(prepared(tmp_path / "1", tmp_path / "all.jsonl"))
    fewer = documents_of(prepared(tmp_path / "2", tmp_path / "fewer.jsonl"))
    for parts in (whole, fewer):
        assert not set(parts["train"]) & set(parts["val"])
        assert 0.2 < len(parts["val"]) / sum(map(len, parts.values())) < 0.4
    assert set(fewer["train"]) <= set(whole["train"]) and set(fewer["val"]) <= set(whole["val"])
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"file {i // 2}")
    parts = documents_of(prepared(tmp_path / "3", tmp_path / "*.txt"))
    assert not set(parts["train"]) & set(parts["val"]) and len(parts["val"]) > 3


@pytest.mark.parametrize("names", ["book notes", "a b", "novel readme", "corpus extra", "c d e"])
def test_validation_has_its_fraction_of_unequal_files(tmp_path, names):
    for name, size in zip(names.split(), (90_000, 13, 5_000)):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * (size // 2))
    counts = load_meta(prepared(tmp_path / "out", tmp_path / "*.txt", fraction=0.1))["splits"]
    n_val = counts["val"]["bytes"]
    assert 0.09 < n_val / (n_val + counts["train"]["bytes"]) < 0.2


def test_unequal_rows_are_told(tmp_path, capsys):
    rows = ["x" * size for size in (9, 50_000, 8)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"note: (0.0|99.9|100.0)% of the tokens are for validation", said)


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
    assert tokens.tolist().count(256) == 59 and n_bytes == sum(len(s.encode()) for s in stories)


def test_damage_after_end_of_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n<|endoftext|>\ntwo \xff")
    with pytest.raises(UserError, match="a.txt is not UTF-8 text at byte 22"):
        prepared(tmp_path / "out", tmp_path / "a.txt")


def test_integers_are_tokens(tmp_path, capsys):
    draw = np.random.default_rng(0)
    tokens, other = draw.integers(0, 300, 5000), draw.integers(0, 300, 700).astype(np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    np.save(tmp_path / "b.npy", other)
    one = ["files", str(tmp_path / "a.npy"), "--vocab_size", "300"]
    for name, flags in dict(
        fraction=["--val_fraction", "0.2"], own=["--val", str(tmp_path / "b.npy")]
    ).items():
        assert prepare.main([*one, "--out", str(tmp_path / name), *flags]) == 0
        cut = 4000 if name == "fraction" else 5000
        assert independent_split(tmp_path / name, "train") == [300, *tokens[:cut].tolist()]
        expected = tokens[cut:] if name == "fraction" else other
        assert independent_split(tmp_path / name, "val") == [300, *expected.tolist()]
        meta = load_meta(tmp_path / name)
        assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("integers:300", 301, 300)
        assert meta["splits"]["val"]["bytes"] is None
    tokenizer = get_tokenizer("integers:300")
    assert (
        tokenizer.encode(" 3 299\n0 ").tolist() == [3, 299, 0]
        and tokenizer.decode_bytes([3, 299]) == b" 3 299"
    )
    for text, says in {
        "3 300": "integers from 3 to 300, where tokens are 0 to 299",
        "three": "not text of integers",
    }.items():
        with pytest.raises(UserError, match=says):
            tokenizer.encode(text)


def test_single_text_is_split_by_position(tmp_path):
    for number, (text, fraction, name) in enumerate(
        (
            ("".join(map(chr, range(32, 127))) * 99, 0.1, "a.txt"),
            ("x" * 9973, 0.37, "b.txt.gz"),
            ("🙂" * 21, 0.4, "c"),
        )
    ):
        raw = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if ".gz" in name else raw)
        folder = prepared(tmp_path / str(number), tmp_path / name, fraction=fraction)
        (train,), (val,) = documents_of(folder).values()
        assert train + val == raw and train.decode() and val.decode()  # cut between characters
        assert 0 <= len(train) - int(len(raw) * (1 - fraction)) < 4
        counts = load_meta(folder)["splits"]
        assert counts["train"] == {"tokens": len(train) + 1, "bytes": len(train), "documents": 1}
        assert "order" not in load_meta(folder)


def test_pieces_have_the_tokens_of_the_whole(gpt2, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 48)
    draw = random.Random(1)
    words = [
        "word",
        "é",
        "漢字",
        "。",
        "don't",
        "'",
        "12",
        "...",
        "🙂",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
    ]
    words += [
        "\u00a0",
        "\u2003",
        "\u3000",
        "\u0085",
        "\x1c",
        "\u0300",
        "\u1680",
        "ж",
        "かな",
        "µ",
        "²",
    ]
    for raw in [
        " ".join(draw.choices(words, k=3000)).encode(),
        "".join(draw.choices(words, k=3000)).encode(),
    ]:
        splits, starts, pieces = zip(*corpus.read_document("val", io.BytesIO(raw), "x"))
        assert b"".join(pieces) == raw and len(pieces) > 100
        assert set(splits) == {"val"} and starts == (True,) + (False,) * (len(pieces) - 1)
        joined = [token for piece in pieces for token in gpt2.encode_raw(piece).tolist()]
        assert joined == gpt2.tiktoken.encode_ordinary(raw.decode())
    raw = "漢字🙂".encode() * 500  # no place to cut: they stay small, and no character is cut
    pieces = [piece for _, _, piece in corpus.read_document("val", io.BytesIO(raw), "x")]
    assert (
        "".join(piece.decode() for piece in pieces).encode() == raw
        and max(map(len, pieces)) <= 4 * 48
    )


# The first digits of SHA-256 of train and val of the next test's files: they must not change
SHARDS = {
    "bytes": ["93ef45b79840eaf2", "c59ed57256b0613a"],
    "gpt2": ["0c0d74482adb3084", "b965de5288ae18c6"],
}


@pytest.mark.parametrize("tokenizer", SHARDS)
def test_order_splits_and_shards_stay_what_they_were(tokenizer, gpt2, tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    words = "déjà vu naïve 漢字 the of and 🙂 \u00a0 \n\n \t don't".split(" ")
    for i in range(12):
        raw = " ".join(words[(j * j + 3 * i * j + i) % len(words)] for j in range(300)).encode()
        (folder / f"{i}.txt").write_bytes(raw)
    lines = (" ".join(words[(j * j + i) % len(words)] for j in range(20 + i)) for i in range(50))
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"id": 1, "text": line}) + "\n" for line in lines)
    )
    files = load_meta(prepared(tmp_path / "out", folder, tokenizer=tokenizer, fraction=0.2))[
        "files"
    ]
    assert [files[f"{split}_000000.bin"]["sha256"][:16] for split in ("train", "val")] == SHARDS[
        tokenizer
    ]


def test_rows_are_read_in_little_memory(tmp_path):
    row = b'1,"' + b"a text, of words " * 300 + b'"\r\n'
    with gzip.open(tmp_path / "a.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"id,text\n" + row * 2000)
    tracemalloc.start()
    pieces = corpus.read_files([("a", tmp_path / "a.csv.gz")], 0.1, ["text"])
    size = sum(len(piece) for _, _, piece in pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2000 * (len(row) - 6) > 10_000_000 and peak < 1 << 20, peak


def test_a_folder_that_is_complete_is_used_as_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("some text " * 50)
    folder = prepared(tmp_path / "out", tmp_path / "a.txt")
    before = tree(folder)
    capsys.readouterr()
    assert prepared(folder, tmp_path / "a.txt") == folder
    said = f"already there: {folder} (of files {tmp_path}/a.txt); for other data remove it, or give"
    assert said in capsys.readouterr().out
    with pytest.raises(UserError, match="made with val_fraction 0.3, which now is 0.5: remove it"):
        prepared(folder, tmp_path / "a.txt", fraction=0.5)
    # Wherever it is said from, and also when the text has gone
    monkeypatch.chdir(tmp_path)
    prepared(folder, "a.txt")
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.txt").rename(tmp_path / "moved" / "a.txt")
    prepared(folder, tmp_path / "moved" / "a.txt")
    prepared(folder, "a.txt")
    (tmp_path / "a.txt").write_text("same size " * 50)
    texts = "texts 1 files of 500 bytes, hash .*, which now is 1 files of 500 bytes, hash "
    with pytest.raises(UserError, match=texts):
        prepared(folder, tmp_path / "a.txt")
    (tmp_path / "moved" / "a.txt").rename(tmp_path / "a.txt")
    with pytest.raises(UserError, match="val 0 files of .* which now is 1 files"):
        prepared(folder, tmp_path / "a.txt", val=[tmp_path / "a.txt"])
    # Defaults may be spelled out, and a vocabulary may have gone
    for _ in range(2):  # the text has 265 pairs only
        prepared(tmp_path / "pairs", tmp_path / "a.txt", tokenizer="bpe", vocab_size=270)
    prepared(tmp_path / "same", tmp_path / "a.txt", tokenizer=str(tmp_path / "pairs"))
    prepared(tmp_path / "pairs", tmp_path / "a.txt", tokenizer="bpe")
    with pytest.raises(UserError, match="made with vocab_size 270, which now is 300"):
        prepared(tmp_path / "pairs", tmp_path / "a.txt", tokenizer="bpe", vocab_size=300)
    shutil.rmtree(tmp_path / "pairs")
    prepared(tmp_path / "same", tmp_path / "a.txt", tokenizer=str(tmp_path / "pairs"))
    # Files that are skipped do not count
    (tmp_path / "several").mkdir()
    for name in ("b.txt", "c.txt"):
        shutil.copyfile(tmp_path / "a.txt", tmp_path / "several" / name)
    for name in ("one.bin", "two.bin"):
        (tmp_path / "several" / name).write_bytes(b"\xff\xfe\x81")
        prepared(tmp_path / "texts", tmp_path / "several")
    prepared(tmp_path / "size", tmp_path / "a.txt", tokenizer=None)
    prepared(tmp_path / "size", tmp_path / "a.txt", tokenizer="bytes")
    assert tree(folder) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for out in (tmp_path / "mine", tmp_path / "a.txt", tmp_path / "loop"):
        with pytest.raises(
            UserError, match="holds something else than prepared data: choose another --out"
        ):
            prepared(out, tmp_path / "a.txt")


@pytest.mark.parametrize(
    "how", ["bad line", "too little", "disk full", "Ctrl-C", "SIGTERM", "kill"]
)
def test_a_preparation_that_fails_is_not_in_the_way(how, tmp_path):
    """It leaves nothing, or a hidden folder if it was killed."""
    (tmp_path / "a.txt").write_text("some text " * 100_000)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' * 9_000 + "{\n")
    (tmp_path / "one.jsonl").write_text('{"text": "g"}\n')
    name = {"bad line": "bad.jsonl", "too little": "one.jsonl"}.get(how, "a.txt")
    before, command = (
        tree(tmp_path),
        ["files", str(tmp_path / name), "--tokenizer=bytes", f"--out={tmp_path}/new/out"],
    )
    script = f"""
import os, resource, runpy, signal, sys
from data import shards
write, how = shards.write_shard, {how!r}
def stop(path, tokens):
    write(path, tokens)
    number = dict(kill=signal.SIGKILL, SIGTERM=signal.SIGTERM).get(how, signal.SIGINT)
    os.kill(os.getpid(), number)
if how == "disk full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if how in ("Ctrl-C", "SIGTERM", "kill"):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shards.write_shard = stop
sys.argv[1:] = {command!r}
runpy.run_path("data/prepare.py", run_name="__main__")
"""
    done = run_python("-c", script)
    code, says = {
        "bad line": (2, "bad.jsonl after row 9000: expected"),
        "too little": (2, "no text is in the"),
        "disk full": (1, "File too large"),
        "Ctrl-C": (1, "stopped: by Ctrl-C; run the same command again"),
        "SIGTERM": (128 + signal.SIGTERM, ""),
        "kill": (-signal.SIGKILL, ""),
    }[how]
    assert (
        done.returncode == code
        and re.search(says, done.stderr)
        and done.stderr.count("\n") == (how not in ("SIGTERM", "kill"))
    )
    assert not (tmp_path / "new" / "out").exists()
    if how != "kill":
        assert {name for name in tree(tmp_path) if name != "new"} == before.keys()
    folder = prepared(tmp_path / "new" / "out", tmp_path / "a.txt", fraction=0.5)
    assert sum(map(len, documents_of(folder).values())) == 2
    if how != "kill":
        assert os.listdir(tmp_path / "new") == ["out"]


@pytest.mark.parametrize("out", ["link", "dangling", ".", "left", "no renaming", "new"])
def test_what_is_prepared_arrives(out, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text " * 50)
    for name in ("empty", "here", "left/.tmp-left-1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "here" if out == "." else tmp_path)
    if out == "no renaming":  # of folders
        monkeypatch.setattr(prepare.os, "rename", lambda old, new: os.link(old, new))
    for _ in range(2):  # the second time it is there
        prepared(out, tmp_path / "a.txt")
    assert sorted(path.name for path in Path(out).glob("[!.]*")) == [
        "meta.json",
        "train_000000.bin",
        "val_000000.bin",
    ]
    hidden = [path.name for path in tmp_path.rglob(".*")]
    assert hidden == [".tmp-left-1"]


def test_what_cannot_arrive_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text " * 50)
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


def test_files_are_written_where_fsync_is_not_supported(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(number, "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    for number, content in ((errno.EINVAL, b"1"), (errno.ENOTSUP, b"2"), (errno.EIO, b"2")):
        with contextlib.suppress(OSError), atomic_write(tmp_path / "file") as file:
            file.write(b"%d" % (1 + (number != errno.EINVAL) + (number == errno.EIO)))
        assert (tmp_path / "file").read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_two_processes_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200_000)
    command = [sys.executable, "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer=bytes"]
    both = [subprocess.Popen([*command, f"--out={tmp_path}/out"], cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=60) for process in both] == [0, 0, 0]
    assert len(independent_split(tmp_path / "out", "train")) == 1_800_001
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out"]


BODY = random.Random(3).randbytes(1_000_000)
SHA = hashlib.sha256(BODY).hexdigest()


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


def test_downloads_are_verified(server, tmp_path):
    """By the hash that is known, or by the one that Hugging Face names in its redirect."""
    server.files["/x"], server.redirects["/y"], server.linked_sha256 = BODY, "/x", SHA
    assert download.download(server.address + "/y", tmp_path / "y") == SHA
    server.linked_sha256 = "0" * 64
    for name, known in (("x", "0" * 64), ("y", None)):
        with pytest.raises(UserError, match=f"gave SHA-256 {SHA} instead of 0000.*deleted"):
            download.download(f"{server.address}/{name}", tmp_path / "z", known)
    assert os.listdir(tmp_path) == ["y"]


def test_downloads_say_what_to_do_offline(server, tmp_path, capsys):
    with pytest.raises(
        UserError,
        match="/missing .*404.* to resume, put the file at .*/x by hand, or .*prepare.py python",
    ):
        download.download(server.address + "/missing", tmp_path / "x")
    with pytest.raises(UserError, match="refused"):
        download.download("http://127.0.0.1:9/x", tmp_path / "x")
    assert len(server.requests) == 1 and os.listdir(tmp_path) == []  # a 404 is final
    assert capsys.readouterr().out.count("trying again") == 3
    endpoint = dict(os.environ, HF_ENDPOINT="https://mirror.example/")
    code = "from data.download import FINEWEB; print(FINEWEB)"
    done = run_python("-c", code, env=endpoint)
    assert done.stdout == "https://mirror.example/datasets/kjj0/fineweb10B-gpt2/resolve/main/\n"


def test_fineweb(server, tmp_path, capsys):
    base, tokens = "/fineweb10B-gpt2/resolve/main/", {}
    for number, name in enumerate(
        ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    ):
        tokens[name] = np.full(10 + number, number, dtype=np.uint16)
        write_shard(tmp_path / name, tokens[name])
    content = {base + name: (tmp_path / name).read_bytes() for name in tokens}
    folder, command = tmp_path / "fw", ["fineweb10B", "--out", f"{tmp_path}/fw", "--shards"]
    server.files |= dict(list(content.items())[:2])
    for shards, code, fetched in (
        (2, 2, 2),
        (2, 0, 1),
        (2, 0, 0),
        (1, 0, 0),
    ):  # it fails, resumes, is there
        before = len(server.requests)
        assert prepare.main([*command, str(shards)]) == code
        assert len(server.requests) - before == fetched + (code == 2)
        assert (folder / "meta.json").exists() == (code == 0)
        server.files |= content
    meta = load_meta(folder)
    assert meta["splits"]["train"] == {"tokens": 23, "bytes": None, "documents": None}
    for name, array in tokens.items():
        assert independent_read(folder / name) == array.tolist()
        assert meta["files"][name] == {
            "tokens": array.size,
            "sha256": hashlib.sha256(content[base + name]).hexdigest(),
        }
    assert TokenStream(folder, 4, 8).eval_subset == "first"
    server.files[base + "fineweb_train_000003.bin"] = b"<html>"
    assert (
        prepare.main([*command, "3"]) == 2
        and "000003.bin is not a token shard" in capsys.readouterr().err
    )
    assert load_meta(folder) == meta
    other = make_data(tmp_path / "other")
    assert prepare.main(["fineweb10B", "--out", str(other)]) == 2
    assert "holds other data" in capsys.readouterr().err


def test_wikitext_has_a_document_for_each_article(server, tmp_path, monkeypatch):
    articles = [
        " \n = Títle one = \n \n Text = of = it . \n = not after a blank = \n",
        " \n = = Part = = \n \n more \n \n",
        " = Second = \n \n Text . \n \n = = = Sub = = = \n end \n",
    ]
    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/wiki.train.raw", "".join(articles))
        archive.writestr("w/wiki.valid.raw", " \n = V = \n x \n")
        archive.writestr("../../wiki.test.raw", "no")
    server.files["/w.zip"] = body = (tmp_path / "zip").read_bytes()
    entry = (server.address + "/w.zip", hashlib.sha256(body).hexdigest())
    monkeypatch.setitem(download.DOWNLOADS, "wikitext2", entry)
    folder = prepare.prepare("wikitext2", tokenizer="bytes", out=tmp_path / "a" / "out")
    expected = dict(
        train=[(articles[0] + articles[1]).encode(), articles[2].encode()],
        val=[b" \n = V = \n x \n"],
    )
    assert documents_of(folder) == expected and load_meta(folder)["source"] == entry[0]
    assert sorted(os.listdir(tmp_path)) == ["a", "zip"] and os.listdir(tmp_path / "a") == ["out"]
    assert sorted(os.listdir(folder)) == [
        "meta.json",
        "train_000000.bin",
        "val_000000.bin",
        "w.zip",
    ]


def test_hellaswag_is_verified(server, tmp_path, monkeypatch, capsys):
    server.files["/h"] = b"{}\n"
    for sha256, code in (("0" * 64, 2), (hashlib.sha256(b"{}\n").hexdigest(), 0)):
        monkeypatch.setitem(download.DOWNLOADS, "hellaswag", (server.address + "/h", sha256))
        assert prepare.main(["hellaswag", "--out", str(tmp_path / "h")]) == code
    assert tree(tmp_path) == {"h": False, "h/hellaswag_val.jsonl": b"{}\n"}


def test_shakespeare_resumes(server, tmp_path, monkeypatch):
    text = b"First Citizen:\n" * 1000
    entry = (server.address + "/main/input.txt", hashlib.sha256(text).hexdigest())
    monkeypatch.setitem(download.DOWNLOADS, "shakespeare", entry)
    server.files["/main/input.txt"], server.cut = text, 4
    with pytest.raises(UserError, match="could not be downloaded"):
        prepare.prepare("shakespeare", out=tmp_path / "out")
    assert os.listdir(tmp_path) == [".tmp-out"]
    folder = prepare.prepare("shakespeare", out=tmp_path / "out")
    assert server.requests[-1][1] == "bytes=14062-" and os.listdir(tmp_path) == ["out"]
    assert documents_of(folder) == dict(train=[text[:13500]], val=[text[13500:]])


def npy(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


FILES = {
    "a.txt": b"text",
    "long.txt": "é".encode() * 200_000 + b"\xff",
    "bad.jsonl": b'{"text": "good"}\n{"text": \n',
    "number.jsonl": b'{"text": 5}\n',
    "keys.jsonl": b'\n{"a": "1"}\n',
    "cut.jsonl.gz": gzip.compress(b'{"text": "good"}\n' * 9)[:-9],
    "wide.csv": b"id,text\n1,a\n2,b, c\n",
    "narrow.csv": b"id,text\n1,a\n2\n",
    "quotes.csv": b'text\nfine\n"open\n',
    "two.npy": npy(np.zeros((2, 9), dtype=int)),
    "half.npy": npy(np.full(9, 0.5)),
    "big.npy": npy(np.full(99, 70)),
    "bad.parquet": b"PAR1 no PAR1",
    "two.json": b'[{"text": "one"}, {"text": "two"}]',
    "zero.txt": b"no\0text",
    "zero.csv": b"text\nyes\nno\0text\n",
    "latin.csv": b"text,id\n" + b"fine,1\n" * 9 + b"b,\xff\n",
}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("fineweb10B --tokenizer bytes", "fineweb10B does not take tokenizer: remove it"),
        ("python --shards 2", "python does not take shards"),
        ("python a.txt", "python does not take paths"),
        ("python --tokenizer gpt5", "there is no vocabulary gpt5"),
        (
            "python --tokenizer bytes --vocab_size 400",
            "--vocab_size 400: it is for --tokenizer bpe",
        ),
        ("python --vocab_size 257", "--vocab_size 257: it must be 258 to 65536"),
        ("files", r"there is no text in \[\]: give PATHs of files, folders or globs"),
        ("files a.txt none*.txt", "none.*txt is not a file or folder, nor a glob that matches any"),
        ("files long.txt", r"long.txt is not UTF-8 text at byte 400,000: convert or remove it"),
        ("files a.txt --val_fraction 0", "--val_fraction 0.0 .*: expected a fraction"),
        ("files keys.jsonl --text_key a", "no text is in the .* split"),
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
        (
            "files two.npy --vocab_size 9",
            r"two.npy is not a .npy file of integers, 1-D \(int64 of shape \(2, 9\)\)",
        ),
        ("files half.npy --vocab_size 9", "half.npy is not a .npy file of integers"),
        ("files big.npy --vocab_size 70", "found integers from 70 to 70, where tokens are 0 to 69"),
        (
            "files big.npy --vocab_size 70000",
            "--vocab_size 70000: for integers it must be 1 to 65535",
        ),
        ("files a.txt --val big.npy --vocab_size 99", "is not text of integers"),
        ("files big.npy", "a .npy file holds tokens: give --vocab_size N"),
        (
            "files big.npy --vocab_size 71 --tokenizer bytes",
            "give --vocab_size N, .*, no --tokenizer",
        ),
        (
            "files a.txt --val a.txt --val_fraction 0.1",
            "--val and --val_fraction contradict each other",
        ),
        pytest.param(
            "files bad.parquet",
            "bad.parquet after row 0: .*Arrow",
            marks=pytest.mark.skipif(not find_spec("pyarrow"), reason="needs pyarrow"),
        ),
        ("files zero.txt", "zero.txt is not UTF-8 text at byte 2: convert or remove it"),
        ("files zero.csv", "zero.csv after row 1: .* NUL"),
        ("files two.json --text_key txet", "two.json after row 0: expected .*KeyError: 'txet'"),
        ("files link", "link is a broken link: give a file"),
        ("files /dev/null", "/dev/null is a pipe or a device: give a file"),
        ("files a.txt --out a.txt/sub", "a.txt/sub cannot be made .Not a directory.: .* --out"),
        (f"files a.txt --out {'x' * 300}", "x cannot be made .File name too long.: .* --out"),
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
    words += ["--tokenizer=bytes"] * (words[0] == "files" and "npy" not in arguments)
    words[1:1] = ["--out", str(tmp_path / "out")]  # the last --out counts
    assert prepare.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error
    assert tree(tmp_path) == before


def test_command_line(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text{name}" * 100)
    flags = [
        "--tokenizer",
        "bytes",
        tmp_path / "b.txt",
        "--val_fraction",
        "0.5",
        "--out",
        tmp_path / "out",
    ]
    words = [
        "data/prepare.py",
        "files",
        tmp_path / "a.txt",
        *flags,
    ]  # flags may stand between the paths
    done = run_python(*words)
    assert done.returncode == 0 and len(independent_split(tmp_path / "out", "val")) == 501, (
        done.stderr
    )
    assert load_meta(tmp_path / "out")["command"] == " ".join(map(str, ["python", *words]))
    done = run_python("-OO", "data/prepare.py", "notes/")
    assert done.returncode == 2 and "for your own text: files notes/" in done.stderr
    for wrong in (["pythn"], ["python", "--tok", "bytes"], []):
        done = run_python("data/prepare.py", *wrong)
        assert done.returncode == 2 and "prepare.py: error: " in done.stderr and not done.stdout


def test_shards_that_meta_json_does_not_name_are_refused(tmp_path):
    data = make_data(tmp_path / "data")
    shard = data / "a_train_1.bin"
    content, more = shard.read_bytes(), data / "more_train.bin"
    for path, wrong, says in (
        (
            shard,
            content[:2000] + b"\xff\xff" + content[2002:],
            "holds token 65535, but the vocabulary ends at 256",
        ),
        (
            shard,
            content[:8] + struct.pack("<i", 50) + content[12:1124],
            "has 50 tokens, where meta.json says 17889",
        ),
        (shard, None, "has no tokens, where meta.json says 17889"),
        (more, content, "has 17889 tokens, where meta.json says nothing"),
    ):
        path.write_bytes(wrong) if wrong else path.unlink()
        with pytest.raises(UserError, match=f"{path}.*{says}"):
            TokenStream(data, 32, 64)
        more.unlink(missing_ok=True)
        shard.write_bytes(content)


def test_shards_of_another_content_are_refused(tmp_path):
    data = make_data(tmp_path / "data")
    shard, meta = data / "a_train_1.bin", json.loads((data / "meta.json").read_text())
    content = shard.read_bytes()
    meta["files"]["a_train_1.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta))
    whole = TokenStream(data, 32, 64).fingerprint()
    shard.write_bytes(content[:5000] + b"a\0" + content[5002:])
    with pytest.raises(
        UserError, match="a_train_1.bin is not the shard whose hash meta.json holds"
    ):
        TokenStream(data, 32, 64)
    (data / "meta.json").unlink()
    assert TokenStream(data, 32, 64).fingerprint() != whole  # other content is other data
    shard.write_bytes(content)
    (data / "meta.json").write_text(json.dumps(meta))
    assert TokenStream(data, 32, 64).fingerprint() == whole
    for options, says in (
        (dict(seq_len=5000), "the val split of .* has 4333 tokens, too few"),
        (dict(seq_len=32, vocab_size=100), "--vocab_size 100 is less than the 257"),
    ):
        with pytest.raises(UserError, match=says):
            TokenStream(data, batch_tokens=6000, **options)


def test_tokens_beyond_the_vocabulary_are_caught_wherever_they_are(data, monkeypatch):
    monkeypatch.setattr(TokenShards, "CHECKED", 0)  # as in a corpus too large to scan on opening
    shards = TokenShards(data, "train", 100, {})
    with pytest.raises(UserError, match="a_train_0.bin holds token .* ends at 99"):
        shards.read_sequences(np.array([0]), 33)


def test_a_shard_that_shrinks_or_goes_while_it_is_read(tmp_path):
    data = make_data(tmp_path / "data")
    shards = TokenShards(data, "train", 257, {})
    whole = shards.read_sequences(np.array([0, 11100, 28900]), 33)
    assert whole.tolist() == [
        sum(map(independent_read, shards.paths), [])[at : at + 33] for at in (0, 11100, 28900)
    ]
    os.truncate(data / "a_train_1.bin", 20_000)
    with pytest.raises(UserError, match="a_train_1.bin was truncated while in use"):
        shards.read_sequences(np.array([0, 11100, 28900]), 33)
    (data / "a_train_1.bin").unlink()
    with pytest.raises(UserError, match="a_train_1.bin cannot be read any more"):
        shards.read_sequences(np.array([0, 11100, 28900]), 33)


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
    for epoch in range(40):
        starts = stream.sequence_starts(
            epoch * stream.seqs_per_epoch + np.arange(stream.seqs_per_epoch)
        )
        offsets.add(int(starts.min()))
        assert np.array_equal(
            np.sort(starts), starts.min() + 32 * np.arange(stream.seqs_per_epoch)
        )  # every sequence once
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
    assert stream.seqs_per_epoch == max(1, n_tokens // 32 - 1) and (
        len(offsets) > 10 or n_tokens < 64
    )


def test_batches_hold_the_tokens_of_their_windows(data):
    everything = np.concatenate([read_shard(path) for path in find_shards(data, "train")])
    starts = np.array([11100, 11110, 11111, 0])  # over the end of a shard
    read = TokenShards(data, "train", 257, {}).read_sequences(starts, 33)
    assert np.array_equal(read, np.stack([everything[s : s + 33] for s in starts]))
    stream = TokenStream(data, seq_len=32, batch_tokens=512)
    starts = stream.sequence_starts(77 * 16 + np.arange(16))
    assert np.array_equal(stream.batch(77), np.stack([everything[s : s + 33] for s in starts]))
    assert np.array_equal(stream.batch(77)[8:], stream.batch(77, rank=1, world_size=2))


def test_windows_start_at_documents(data, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)  # some file systems have no memory maps
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
