"""Shards, tokenizers, sources, downloads, and what a trainer says of data that are damaged or change under it."""

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
import resource
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
from pathlib import Path

import numpy as np
import pytest

import train_gpt
from conftest import ROOT, TINY, flags_of, make_data, quiet, run_main
from data import corpus, download, prepare, text
from data.shards import UserError, find_shards, load_meta, read_shard, shard_header, write_shard
from data.stream import TokenShards, TokenStream, feistel_permute, prefetch, sequence_starts
from data.tokenizers import get_tokenizer

TEXT = "First Citizen: déjà vu, naïve 漢字かな 🙂\n\nno\u00a0break <|endoftext|> don't  stop\t\n end"


def in_val(name: str, fraction: float) -> bool:
    """Whether the document of this name belongs to the validation split."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) < fraction * 2**256


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files` (path -> bytes); `ranges` False ignores Range, `cut` ends that many next answers half way."""

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
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
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
        monkeypatch.setenv("HF_ENDPOINT", handler.address + "/")
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
    return [token for path in sorted(folder.glob(f"{split}_*.bin")) for token in independent_read(path)]


def documents_of(folder, split):
    """The documents of a split of bytes, in order."""
    text = "".join(map(chr, independent_split(folder, split)))
    return [document.encode("latin-1") for document in text.split(chr(256))[1:]]


def by_sha256(names):
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def forget_order(folder):
    """Leaves meta.json as it was before it told the order."""
    meta = json.loads((folder / "meta.json").read_text())
    assert meta.pop("order") == "SHA-256 of the name"
    (folder / "meta.json").write_text(json.dumps(meta))


def run_prepare(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "data/prepare.py", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Shards and folders


@pytest.mark.parametrize("dtype, top", [(np.uint16, 65535), (np.uint32, 2**32 - 1)])
def test_shard_is_what_the_format_describes(tmp_path, dtype, top):
    tokens = np.array([0, 1, 258, 50256, top], dtype=dtype)
    write_shard(tmp_path / "train.bin", tokens)
    assert independent_read(tmp_path / "train.bin") == tokens.tolist()
    mapped = read_shard(tmp_path / "train.bin")
    assert isinstance(mapped, np.memmap) and mapped.dtype == dtype and mapped.tolist() == tokens.tolist()
    with pytest.raises(ValueError):
        mapped[0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]


def test_write_shard_refuses_other_arrays(tmp_path):
    for tokens in (np.zeros(3, np.int64), np.zeros((2, 2), np.uint16), np.zeros(0, np.uint16)):
        with pytest.raises(ValueError):
            write_shard(tmp_path / "x.bin", tokens)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "0 bytes, too short"),
        (bytes(1023), "1023 bytes, too short"),
        (struct.pack("<256i", 20240519, 1, 2, *[0] * 253) + bytes(4), "magic is 20240519 instead of 20240520"),
        (struct.pack("<256i", 20240520, 7, 2, *[0] * 253) + bytes(4), "version 7 instead of 1"),
        (struct.pack("<256i", 20240801, 1, 2, *[0] * 253) + bytes(8), "version 1 instead of 7"),
        (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), "0 tokens"),
        (struct.pack("<256i", 20240520, 1, -1, *[0] * 253) + bytes(4), "-1 tokens"),
        (struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + bytes(4), "truncated, 1028 bytes instead of 1030"),
        (struct.pack("<256i", 20240520, 1, 1, *[0] * 253) + bytes(4), "too long, 1028 bytes instead of 1026"),
    ],
)
def test_read_shard_refuses_damage(tmp_path, content, says):
    (tmp_path / "bad_train.bin").write_bytes(content)
    with pytest.raises(UserError, match="bad_train.bin.*" + re.escape(says)):
        read_shard(tmp_path / "bad_train.bin")


def test_find_shards(tmp_path):
    for name in ("b_train_1.bin", "a_train_0.bin", "x_val.bin", ".tmp-train_9.bin", "train.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_shards(tmp_path, "train")] == ["a_train_0.bin", "b_train_1.bin"]
    assert [path.name for path in find_shards(str(tmp_path), "val")] == ["x_val.bin"]
    (tmp_path / "empty").mkdir()
    expected = "expected a folder that `python data/prepare.py SOURCE` made"
    with pytest.raises(UserError, match=rf"empty has no shards \*val\*.bin: {expected}$"):
        find_shards(tmp_path / "empty", "val")
    (tmp_path / "empty" / ".tmp-unfinished").write_text("")
    with pytest.raises(UserError, match="is not complete: wait for data/prepare.py, or run it again"):
        find_shards(tmp_path / "empty", "val")


def test_a_missing_data_folder_names_the_one_that_was_meant(tmp_path):
    expected = "expected a folder that `python data/prepare.py SOURCE` made"
    for name in ("shakespeare_gpt2", "shakespaere"):
        (tmp_path / name).mkdir()
    write_shard(tmp_path / "shakespeare_gpt2" / "train_000000.bin", np.zeros(3, np.uint16))
    (tmp_path / "text.txt").touch()
    for name, says in {
        "fineweb10B": f"there is no data folder {tmp_path}/fineweb10B: {expected}",
        "shakespere": f"there is no data folder {tmp_path}/shakespere: {expected}; did you mean "
        f"{tmp_path}/shakespeare_gpt2?",  # the other one holds no data
        "text.txt": f"{tmp_path}/text.txt is a file: {expected}",
        "no/folder": f"there is no data folder {tmp_path}/no/folder: {expected}",
    }.items():
        for opening in (lambda folder: find_shards(folder, "train"), load_meta):
            with pytest.raises(UserError) as caught:
                opening(tmp_path / name)
            assert str(caught.value) == says


def test_the_command_that_is_advised_made_the_folder(tmp_path):
    """meta.json's command, run as it stands, makes the same folder again."""
    for name in ("a b.md", "c.md", "d.md", "e.rst"):
        (tmp_path / name).write_text(f"text of {name} é" * 50, encoding="latin-1")
    arguments = [
        "files",
        tmp_path,
        "--tokenizer",
        "bytes",
        "--include",
        "*.md",
        "*.rst",
        "--encoding",
        "latin1",
        "--val_fraction",
        "0.5",
        "--out",
        tmp_path / "my data",
    ]
    assert prepare.main(list(map(str, arguments))) == 0
    command = load_meta(tmp_path / "my data")["command"]
    assert command == (
        f"python data/prepare.py files {tmp_path} --tokenizer=bytes '--out={tmp_path}/my data' --val_fraction=0.5 "
        "--encoding=iso8859-1 '--include=*.md' '--include=*.rst'"
    )
    shards = {path: path.read_bytes() for path in (tmp_path / "my data").glob("*.bin")}
    for path in shards:
        path.unlink()
    with pytest.raises(UserError, match="has no shards.*: make them again with `" + re.escape(command) + "`$"):
        find_shards(tmp_path / "my data", "val")
    assert prepare.main(shlex.split(command)[2:]) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "my data").glob("*.bin")} == shards
    (tmp_path / "one.txt").write_text("text " * 99)
    folder = prepare.prepare("files", [tmp_path / "one.txt"], "bytes", tmp_path / "out", say=quiet)
    assert load_meta(folder)["command"].endswith(f"files {tmp_path}/one.txt --tokenizer=bytes --out={tmp_path}/out")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({key: meta[key] for key in meta if key != "command"}))
    for path in folder.glob("*.bin"):
        path.unlink()
    with pytest.raises(UserError, match="expected a folder that `python data/prepare.py SOURCE` made$"):
        find_shards(folder, "val")


def test_load_meta(tmp_path):
    assumed = load_meta(tmp_path)
    assert assumed["assumed"] is True and assumed["tokenizer"] == "gpt2" and assumed["splits"] == {}
    assert (assumed["vocab_size"], assumed["eot"]) == (50257, 50256)
    split = {"tokens": 2, "bytes": None, "documents": None}
    good = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "splits": {"train": split, "val": split}}
    good |= {"source": "x", "files": {"train_000000.bin": {"tokens": 2, "sha256": ""}}}

    def load(meta):
        (tmp_path / "meta.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
        return load_meta(tmp_path)

    assert load(good) == good and load(good | {"command": "python x"})["command"] == "python x"
    for bad in (
        "{",
        "[]",
        good | {"vocab_size": "257"},
        good | {"eot": True},
        good | {"splits": {"train": split}},
        good | {"splits": {"train": split | {"bytes": 1.5}, "val": split}},
        {k: good[k] for k in good if k != "files"},
        good | {"files": {"../../train_0.bin": {"tokens": 2}}},
        good | {"files": {"train_0.bin": {}}},
        good | {"command": ["python"]},
        good | {"order": 1},
    ):
        with pytest.raises(UserError, match="meta.json"):
            load(bad)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def check_tokenizer(tokenizer, vocab_size, eot):
    assert (tokenizer.vocab_size, tokenizer.eot) == (vocab_size, eot)
    tokens = tokenizer.encode(TEXT)
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.uint16 and tokens.ndim == 1
    assert eot not in tokens  # the text contains <|endoftext|>, which is ordinary text here
    assert tokenizer.decode_bytes(tokens) == TEXT.encode() == tokenizer.decode_bytes(tokens.tolist())
    assert tokenizer.decode_bytes([eot, *tokens[:3]]) == b"<|endoftext|>" + tokenizer.decode_bytes(tokens[:3])
    assert tokenizer.decode_bytes(tokenizer.encode("a\ud800b")) == b"a?b"
    assert tokenizer.encode("").size == 0


def test_bytes_tokenizer():
    check_tokenizer(get_tokenizer("bytes"), 257, 256)
    assert get_tokenizer("bytes").encode("é").tolist() == [0xC3, 0xA9]
    with pytest.raises(UserError, match="gpt2 or bytes"):
        get_tokenizer("gpt3")


def test_gpt2_tokenizer(gpt2):
    check_tokenizer(gpt2, 50257, 50256)
    assert gpt2.encode("hello world").tolist() == [31373, 995]


def test_pieces_have_the_tokens_of_the_whole(gpt2, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 48)
    draw = random.Random(1)
    words = ["word", "é", "漢字", "。", "don't", "'", "12", "...", "🙂", " ", "  ", "\n", "\n\n", "\t", "\r\n"]
    words += ["\u00a0", "\u2003", "\u3000", "\u0085", "\x1c", "\u0300", "\u1680", "ж", "かな", "µ", "²"]
    for raw in [" ".join(draw.choices(words, k=3000)).encode(), "".join(draw.choices(words, k=3000)).encode()] + [
        # not UTF-8: the decoder's replacements must not depend on the cuts either
        b" ".join(draw.choices([b"\xff", b"\xe2\x80", b"\xf0\x9f", b"ok", b"\xc3", b"\x80 ", b"\xa0"], k=2000))
    ]:
        pieces = list(prepare.pieces_of(io.BytesIO(raw), len(raw)))
        assert b"".join(pieces) == raw and len(pieces) > 100
        joined = [token for piece in pieces for token in gpt2.encode_raw(piece).tolist()]
        assert joined == gpt2.tiktoken.encode_ordinary(raw.decode("utf-8", errors="replace"))


def test_pieces_without_a_place_to_cut_stay_small(monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 48)
    raw = "漢字🙂".encode() * 500
    pieces = list(prepare.pieces_of(io.BytesIO(raw), len(raw)))
    assert b"".join(pieces) == raw and max(map(len, pieces)) <= 4 * 48
    assert "".join(piece.decode() for piece in pieces) == raw.decode()  # no character was cut


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_python_source_is_the_standard_library(tmp_path):
    folder = prepare.prepare("python", tokenizer="bytes", out=tmp_path / "python", say=quiet)
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names = by_sha256(name for name in names if not corpus.NOT_PYTHON & set(name.split("/")))
    assert {"argparse.py", "this.py", "json/decoder.py"} <= set(names)
    for split in ("train", "val"):
        contents = [(root / name).read_bytes() for name in names if in_val(name, 0.1) == (split == "val")]
        assert documents_of(folder, split) == [content for content in contents if content]
    meta = load_meta(folder)
    assert meta["tokenizer"] == "bytes" and meta["source"].startswith("standard library of Python 3.")
    for split, counts in meta["splits"].items():
        shards = [read_shard(path) for path in find_shards(folder, split)]
        assert counts["tokens"] == sum(map(len, shards)) == counts["bytes"] + counts["documents"]
        assert counts["documents"] == sum(int((shard == 256).sum()) for shard in shards)
    assert 0.02 < meta["splits"]["val"]["documents"] / meta["splits"]["train"]["documents"] < 0.25
    assert sum(counts["documents"] for counts in meta["splits"].values()) > 300


def test_python_files_leave_out_tests_and_installed_packages(tmp_path, monkeypatch):
    kept = ["b.py", "a/c.py", "a/test_it.py", "a-b.py"]
    dropped = [
        "test/x.py",
        "a/tests/x.py",
        "site-packages/p.py",
        "dist-packages/p.py",
        "idlelib/idle_test/x.py",
        "__pycache__/x.py",
        "a/readme.txt",
    ]
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [file.name for file in corpus.python_files()] == sorted(kept)


def test_split_is_a_sha256_of_the_name():
    for name, begins, share in (("a.txt", "18b7", 0.0965), ("argparse.py", "c93f", 0.7861)):  # share = 0x18b7 / 65536
        assert hashlib.sha256(name.encode()).hexdigest()[:4] == begins
        assert corpus.split_of(name, share + 1e-4) == "val" and corpus.split_of(name, share - 1e-4) == "train"


def test_files_stand_in_the_order_of_the_hashes_of_their_names(tmp_path):
    """Whatever the order of the arguments and wherever the folders lie; those of one name in the order of paths."""
    names = [f"{folder}/{letter}.txt" for folder in "yx" for letter in "abcdefghijkl"]
    for name in names:
        for place in ("here", "else/where"):
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).write_text(name)
    here, elsewhere = tmp_path / "here", tmp_path / "else" / "where"
    given = [here / "x", here / "y"], [here / "y", here / "x"], [f"{here}/*"], [elsewhere / "x", elsewhere / "y"]
    for number, paths in enumerate(given):
        folder = prepare.prepare("files", paths, "bytes", tmp_path / str(number), val_fraction=0.5, say=quiet)
        for split in ("train", "val"):
            expected = by_sha256(name for name in names if in_val(name, 0.5) == (split == "val"))
            assert documents_of(folder, split) == [name.encode() for name in expected]
            assert len(expected) > 6 and expected not in (sorted(expected), sorted(expected, reverse=True))
        assert load_meta(folder)["order"] == "SHA-256 of the name"
    twice = [here / "y/a.txt", here / "y/b.txt", here / "x/b.txt", here / "x/a.txt"]
    for number, paths in enumerate((twice, twice[::-1])):
        folder = prepare.prepare("files", paths, "bytes", tmp_path / f"two{number}", val_fraction=0.5, say=quiet)
        assert documents_of(folder, "val") == [b"x/a.txt", b"y/a.txt"]
        assert documents_of(folder, "train") == [b"x/b.txt", b"y/b.txt"]


@pytest.mark.parametrize("source", ["python", "files"])
def test_a_folder_in_the_order_of_paths_is_kept_and_told(source, tmp_path, monkeypatch):
    """Also when it loses a shard, so that a run which was trained on it can go on."""
    names = [f"lib/{letter}.py" for letter in "abcdefghijkl"]
    (tmp_path / "lib").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(prepare, "DATA_DIR", tmp_path)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    said, split_names = [], [name.removeprefix("lib/" if source == "python" else "") for name in names]
    arguments = dict(source=source, tokenizer="bytes")
    if source == "files":
        arguments |= dict(paths=[tmp_path / "lib"], out=tmp_path / "mine")
    folder = prepare.prepare(**arguments, val_fraction=0.5, say=quiet)
    new = {split: documents_of(folder, split) for split in ("train", "val")}
    forget_order(folder)
    for lost in ("val_000000.bin", "train_000000.bin"):
        (folder / lost).unlink()
        prepare.prepare(**arguments, val_fraction=0.5, say=quiet)
        for split in new:
            kept = [name.encode() for name, own in zip(names, split_names) if in_val(own, 0.5) == (split == "val")]
            assert documents_of(folder, split) == kept != new[split] and sorted(new[split]) == kept
    before = tree(folder)
    assert "order" not in load_meta(folder)
    for _ in range(2):
        assert prepare.prepare(**arguments, val_fraction=0.5, say=said.append) == folder and tree(folder) == before
    line = (
        f"already there: {folder}, made with its documents in the order of their paths, so that a part of the "
        "validation split is no fair sample; remove it to make it again"
    )
    assert said == [line, line]
    with pytest.raises(UserError, match=r"\(val_fraction differs\)"):
        prepare.prepare(**arguments, val_fraction=0.4, say=quiet)
    shutil.rmtree(folder)
    for _ in range(2):
        prepare.prepare(**arguments, val_fraction=0.5, say=said.append)
    assert {split: documents_of(folder, split) for split in new} == new and said[-1] == f"already there: {folder}"


def test_files_of_all_kinds(tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    documents = {}  # name -> bytes
    lines = [f"line {i} é" for i in range(20)]
    written = "\n".join([json.dumps({"id": 1, "text": line}, ensure_ascii=i % 2 == 0) for i, line in enumerate(lines)])
    (corpus / "a.jsonl").write_text(written + "\n\n", encoding="utf-8")  # with a blank line at the end
    documents |= {f"corpus/a.jsonl:{i + 1}": line.encode() for i, line in enumerate(lines)}
    with gzip.open(corpus / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(written)
    documents |= {f"corpus/b.jsonl.gz:{i + 1}": line.encode() for i, line in enumerate(lines)}
    for i in range(8):
        (corpus / "deep" / f"{i}.txt").write_bytes(documents.setdefault(f"corpus/deep/{i}.txt", b"raw \xff%d\r\n" % i))
    for i in range(8):
        path = tmp_path / f"glob{i}.md"
        path.write_bytes(documents.setdefault(path.name, b"glob %d" % i))
    (corpus / ".hidden").write_text("no")
    (corpus / "deep" / "empty.txt").touch()
    expected = {"train": [], "val": []}
    for path in by_sha256({name.partition(":")[0] for name in documents}):
        for name in (name for name in documents if name.partition(":")[0] == path):  # lines stay in their order
            expected["val" if in_val(name, 0.3) else "train"] += [256, *documents[name]]
    assert all(len(tokens) > 50 for tokens in expected.values())

    arguments = [corpus, str(tmp_path / "glob*.md"), corpus / "a.jsonl"]  # what is named twice is taken once
    folder = prepare.prepare("files", arguments, "bytes", corpus / "out", val_fraction=0.3, shard_tokens=100, say=quiet)
    for split in ("train", "val"):
        assert independent_split(folder, split) == expected[split]
        sizes = [len(read_shard(path)) for path in find_shards(folder, split)]
        assert sizes == [100] * (len(expected[split]) // 100) + [len(expected[split]) % 100]
    meta = load_meta(folder)
    assert {name: shard["sha256"] for name, shard in meta["files"].items()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.bin")
    }
    said = []
    prepare.prepare("files", arguments, "bytes", corpus / "out", val_fraction=0.3, shard_tokens=100, say=said.append)
    assert "already there" in said[0]  # its own output, in the folder that it reads, is no input


@pytest.mark.parametrize("fraction", [0.1, 0.37])
def test_single_text_is_split_by_position(tmp_path, fraction):
    raw = bytes(random.Random(0).choices(range(32, 127), k=9973))
    (tmp_path / "one.txt").write_bytes(raw)
    folder = prepare.prepare("files", [tmp_path / "one.txt"], "bytes", tmp_path / "out", fraction, say=quiet)
    cut = int(9973 * (1 - fraction))
    assert independent_split(folder, "train") == [256, *raw[:cut]]
    assert independent_split(folder, "val") == [256, *raw[cut:]]
    counts = load_meta(folder)["splits"]
    assert counts["train"] == {"tokens": cut + 1, "bytes": cut, "documents": 1} and counts["val"]["bytes"] == 9973 - cut


def test_single_text_is_cut_between_characters(tmp_path):
    for size in range(20, 32):
        (tmp_path / "one.txt").write_text("🙂" * size, encoding="utf-8")
        folder = prepare.prepare("files", [tmp_path / "one.txt"], "bytes", tmp_path / f"out{size}", 0.4, say=quiet)
        train, val = (bytes(independent_split(folder, split)[1:]).decode() for split in ("train", "val"))
        assert train + val == "🙂" * size and len(train) == -(-int(4 * size * 0.6) // 4)  # rounded up


def test_gpt2_tokens_of_a_prepared_text(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 1000)
    monkeypatch.setattr(prepare, "BATCH", 3000)
    text = " ".join(random.Random(2).choices(TEXT.split(" ") + ["\n", "  x"], k=20000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    folder = prepare.prepare("files", [tmp_path / "a.txt"], "gpt2", tmp_path / "out", say=quiet)
    meta = load_meta(folder)
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("gpt2", 50257, 50256)
    size = meta["splits"]["train"]["bytes"]
    train, val = text.encode()[:size].decode(), text.encode()[size:].decode()
    assert independent_split(folder, "train") == [50256, *gpt2.tiktoken.encode_ordinary(train)]
    assert independent_split(folder, "val") == [50256, *gpt2.tiktoken.encode_ordinary(val)]
    assert meta["splits"]["val"] == {
        "tokens": len(independent_split(folder, "val")),
        "bytes": len(val.encode()),
        "documents": 1,
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is text, and in which encoding


WORDS = "Voilà: déjà vu, “naïve” 漢字かな 🙂\r\n" * 300


@pytest.fixture
def mixed(tmp_path):
    """A folder with nine texts and 14 files that are none."""
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes("é a text \xff\n".encode() * 50 + b"\xff stray \n")
    for i in range(8):
        (folder / f"t{i}.TXT").write_text(f"another text {i} " * 50)
    (folder / "deep" / "nul.txt").write_bytes(b"text " * 50 + b"\0" + b"text " * 50)
    (folder / "deep" / "latin.txt").write_bytes("déjà vu ".encode("latin-1") * 50)
    (folder / "deep" / "utf16.txt").write_bytes("text ".encode("utf-16-le") * 50)
    for name in (
        "c.PNG",
        "d.zip",
        "e.pt",
        "f.parquet",
        "g.npy",
        "h.pdf",
        "i.tar.gz",
        "j.so",
        "k.mp3",
        "l.woff2",
        "m.gz",
    ):
        (folder / name).write_text("text by its content")
    return folder


def test_files_that_are_not_text_are_skipped_and_named(mixed, tmp_path):
    for number, arguments in enumerate(([mixed], [f"{mixed}/*.*", f"{mixed}/deep/*"])):
        said = []
        folder = prepare.prepare("files", arguments, "bytes", tmp_path / f"o{number}", 0.5, say=said.append)
        counts = load_meta(folder)["splits"]
        assert counts["train"]["documents"] + counts["val"]["documents"] == 9
        kept = b"".join(bytes(token % 256 for token in independent_split(folder, split)) for split in counts)
        assert all(path.read_bytes() in kept for path in [mixed / "a.txt", *mixed.glob("*.TXT")])
        assert said[-1].startswith("skipped 14 files that are not text: ") and said[-1].endswith(") and 4 more")
        assert said[-1].count("(") == 10 and "c.PNG (an image), " in said[-1] and "d.zip (packed), " in said[-1]
        assert "e.pt (weights or arrays)" in said[-1]
    only = [mixed / "a.txt", f"{mixed}/deep/*"]
    prepare.prepare("files", only, "bytes", tmp_path / "three", 0.5, say=said.append)
    assert said[-1] == (
        "skipped 3 files that are not text: latin.txt (100 of 400 bytes are not UTF-8), nul.txt (it has NUL bytes), "
        "utf16.txt (it has NUL bytes)"
    )
    prepare.prepare("files", only[:1] + [f"{mixed}/deep/n*"], "bytes", tmp_path / "one", 0.5, say=said.append)
    assert said[-1] == "skipped 1 file that is not text: nul.txt (it has NUL bytes)"
    for path in [mixed / "a.txt", *mixed.glob("*.TXT")]:
        path.unlink()
    with pytest.raises(
        UserError, match=f"^there are no text files in {mixed} .skipped 14 files .* more.: give text, .jsonl"
    ):
        prepare.prepare("files", [mixed], "bytes", tmp_path / "none", say=quiet)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "name, says",
    [
        ("c.PNG", r"c.PNG is not text \(an image\): give text, .jsonl, .csv, .jsonl.gz or .csv.gz files$"),
        ("d.zip", r"d.zip is not text \(packed\): unpack it first$"),
        ("e.pt", r"e.pt is not text \(weights or arrays\): give"),
        ("deep/nul.txt", r"nul.txt is not text \(it has NUL bytes\): give text, and --encoding utf-16-le for UTF-16"),
        ("deep/latin.txt", r"latin.txt is not text \(100 of 400 bytes are not UTF-8\): name its encoding, as in"),
    ],
)
def test_a_path_that_is_not_text_is_refused(mixed, tmp_path, name, says):
    with pytest.raises(UserError, match=f"^{mixed}/.*{says}"):  # though the folder has it too
        prepare.prepare("files", [mixed, mixed / name], "bytes", tmp_path / "out", say=quiet)
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not text .not a regular file."):
        prepare.prepare("files", [tmp_path / "pipe"], "bytes", tmp_path / "out", say=quiet)


def test_what_counts_as_text(tmp_path, monkeypatch):
    path = tmp_path / "x"
    for raw, is_text in (
        (b"", True),
        (b"\xff", True),
        (b"\xff\xfe", True),
        (b"\x80\x81", False),
        (b"a" * 2000 + b"\x80\x81", True),
        (b"a" * 2000 + b"\x80\x81\x82", False),
        ("漢".encode() * 999 + b"\xe6", True),
        ("\ufffd".encode() * 99, True),
        (b"a\0", False),
        (random.Random(4).randbytes(9999), False),
        (b"\xff\xfea", True),
        (b"\xff\xfe\0\xd8\0\xd8", False),
    ):
        path.write_bytes(raw)
        try:
            assert text.check_text(path) in ("utf-8", "utf-16") and is_text, raw
        except text.NotText:
            assert not is_text, raw
    read = []  # a huge file is not read: three samples of it tell
    with open(path, "wb") as file:
        file.truncate(1 << 40)
        file.write(b"a" * text.SAMPLE)
    with pytest.raises(UserError, match="NUL"):
        text.check_text(path)
    monkeypatch.setattr(text, "SAMPLE", 4)
    for at, is_text in ((0, False), (50, False), (99, False), (20, True), (80, True)):
        raw = bytearray(b"a" * 100)
        raw[at] = 0
        path.write_bytes(raw)
        try:
            read.append(text.check_text(path))
            assert is_text, at
        except text.NotText:
            assert not is_text, at
    assert read == ["utf-8"] * 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-16-le", "gb18030", "utf-7"])
def test_other_encodings_make_the_shards_of_the_same_text_in_utf_8(encoding, tmp_path, monkeypatch):
    """Alone, as one of several files, and as JSON lines, packed or not; counted as UTF-8 in meta.json."""
    monkeypatch.setattr(text, "BLOCK", 50)
    monkeypatch.setattr(prepare, "PIECE", 64)
    marked = encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32")
    lines = "".join(json.dumps({"text": f"{i} é漢🙂"}, ensure_ascii=False) + "\n" for i in range(40))

    def fill(folder, encoding, mark=""):
        folder.mkdir()
        (folder / "one.txt").write_bytes((mark + WORDS).encode(encoding))
        (folder / "two.txt").write_bytes((mark + WORDS[::-1]).encode(encoding))
        (folder / "lines.jsonl").write_bytes((mark + lines).encode(encoding))
        (folder / "lines.jsonl.gz").write_bytes(gzip.compress((mark + lines).encode(encoding)))

    fill(tmp_path / "plain", "utf-8")
    fill(tmp_path / "coded", encoding, "\ufeff" if encoding == "utf-16-be" else "")
    name = "utf-8" if marked else encoding
    for number, chosen in enumerate((["one.txt"], ["one.txt", "two.txt", "lines.jsonl", "lines.jsonl.gz"])):
        made, said = {}, []
        for kind, given in (("plain", "utf-8"), ("coded", name)):
            paths = [tmp_path / kind / name for name in chosen]
            out = tmp_path / f"{kind}{number}"
            made[kind] = prepare.prepare("files", paths, "bytes", out, 0.3, encoding=given, say=said.append)
        for split in ("train", "val"):
            assert independent_split(made["plain"], split) == independent_split(made["coded"], split)
        plain, coded = map(load_meta, made.values())
        assert coded["splits"] == plain["splits"] and coded["files"] == plain["files"]
        assert coded["made_with"].get("encoding") == (None if marked else encoding)
    assert (
        "already there"
        in (prepare.prepare("files", paths, "bytes", out, 0.3, encoding=name, say=said.append), said[-1])[1]
    )


def test_encodings_by_name(tmp_path):
    (tmp_path / "a.txt").write_bytes("“naïve” €".encode("cp1252") * 50)
    folder = prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "a", 0.5, encoding="CP1252", say=quiet)
    raw = "“naïve” €".encode() * 50
    assert independent_split(folder, "train") + independent_split(folder, "val")[1:] == [256, *raw]
    assert load_meta(folder)["made_with"]["encoding"] == "cp1252"
    with pytest.raises(UserError, match=r"\(encoding differs\)"):
        prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "a", 0.5, encoding="latin-1", say=quiet)
    for name in ("utf8", "UTF-8", "utf-8-sig"):
        assert text.check_encoding(name) == "utf-8"


def test_a_file_that_does_not_decode_is_refused_or_skipped(tmp_path):
    """Also where the damage lies far behind the sample."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(8):
        (corpus / f"{i}.txt").write_bytes(f"text {i}".encode("utf-16-le") * 50)
    (corpus / "odd.txt").write_bytes("text".encode("utf-16-le") * 100_000 + b"a")
    (corpus / "surrogate.txt").write_bytes(b"\0\xdc" * 9)
    said = []
    arguments = dict(source="files", tokenizer="bytes", val_fraction=0.5, encoding="utf-16-le")
    folder = prepare.prepare(paths=[corpus], out=tmp_path / "out", **arguments, say=said.append)
    assert said[-1] == (
        "skipped 2 files that are not text: corpus/surrogate.txt (byte 0 does not decode as utf-16-le), corpus/odd.txt "
        "(byte 800,000 does not decode as utf-16-le)"
    )
    assert sum(counts["documents"] for counts in load_meta(folder)["splits"].values()) == 8
    for paths in ([corpus / "odd.txt"], [corpus, corpus / "odd.txt"]):
        with pytest.raises(
            UserError, match=r"odd.txt is not text \(byte 800,000 does not decode as utf-16-le\): name its"
        ):
            prepare.prepare(paths=paths, out=tmp_path / "refused", **arguments, say=quiet)
    with pytest.raises(UserError, match="0.txt is not text .not utf-16: UTF-16 stream does not start with BOM"):
        prepare.prepare(
            paths=[corpus / "0.txt"], out=tmp_path / "refused", **arguments | dict(encoding="utf-16"), say=quiet
        )
    assert not (tmp_path / "refused").exists()


def test_decoding_stays_bounded_in_memory(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        "naïve text, 漢字 ".encode("utf-16") + "naïve text, 漢字 ".encode("utf-16-le") * 999_999
    )
    script = f"""
import resource
from data import corpus, download, prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
file = corpus.TextFile("a", corpus.Path({str(tmp_path / "a.txt")!r}), "utf-16")
documents = corpus.read_files([file], 0.1, ["text"], download.Progress("", 0, print), [])
print(sum(len(piece) for _, stream, size in documents for piece in prepare.pieces_of(stream, size)),
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    size, more = map(int, done.stdout.split())
    assert size == len("naïve text, 漢字 ".encode()) * 1_000_000 and more < 10_000  # KB, of 30 MB


def test_bytes_in_meta_json_are_those_of_the_tokenized_text(tmp_path, gpt2):
    raw = b"text and \xff more of it, " * 99
    (tmp_path / "a.txt").write_bytes(b"plain text " * 900 + b"\xff" + b"plain text " * 900)
    folder = prepare.prepare("files", [tmp_path / "a.txt"], "gpt2", tmp_path / "out", say=quiet)
    size = len((b"plain text " * 1800).decode()) + 3  # U+FFFD
    assert sum(counts["bytes"] for counts in load_meta(folder)["splits"].values()) == size
    assert gpt2.text_bytes(raw) == len(gpt2.decode_bytes(gpt2.encode_raw(raw))) == len(raw) + 2 * 99
    assert get_tokenizer("bytes").text_bytes(raw) == len(raw)


def test_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": 1, "content": "line {i}"}}\n' for i in range(20)))
    paths, said = [tmp_path / "a.jsonl"], []
    folder = prepare.prepare("files", paths, "bytes", tmp_path / "out", 0.3, text_key="content", say=said.append)
    tokens = independent_split(folder, "train") + independent_split(folder, "val")
    assert sorted(bytes(t % 256 for t in tokens).split(b"\0")[1:]) == sorted(b"line %d" % i for i in range(20))
    assert load_meta(folder)["made_with"]["text_key"] == "content"
    prepare.prepare("files", paths, "bytes", tmp_path / "out", 0.3, text_key="content", say=said.append)
    assert "already there" in said[-1]
    with pytest.raises(UserError, match=r"\(text_key differs\)"):
        prepare.prepare("files", paths, "bytes", tmp_path / "out", 0.3, say=quiet)
    (tmp_path / "a.txt").write_text("text " * 99)
    said.clear()
    prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "b", text_key="content", say=said.append)
    assert said[0] == "--text_key has no effect: there is no .jsonl or .csv file among those given"


def expected_splits(texts_of, fraction):
    """The documents of both splits, of {file's name: texts in order}: by the hash of the name, then by name:number."""
    made = {"train": [], "val": []}
    for name in by_sha256(texts_of):
        for number, content in enumerate(texts_of[name], start=1):
            if content:
                made["val" if in_val(f"{name}:{number}", fraction) else "train"].append(content.encode())
    assert all(len(documents) > 5 for documents in made.values())
    return made


def awkward_rows(count, columns, seed=5):
    """Rows of random cells with all that CSV must quote, and what other splitters of lines take for an end of line."""
    draw = random.Random(seed)
    parts = ["a", "word", "é", "漢字", "🙂", " ", ",", ",,", '"', '""', "\n", "\r\n", "\r", "\t", ";", "'", "\\", "\\n"]
    parts += ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c", "\ufeff"]
    return [["".join(draw.choices(parts, k=draw.randint(0, 12))) for _ in range(columns)] for _ in range(count)]


def write_csv(path, rows, mark="", encoding="utf-8", **dialect):
    written = io.StringIO(newline="")
    csv.writer(written, **dialect).writerows(rows)
    raw = (mark + written.getvalue()).encode(encoding)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("keys", [["text"], ["answer", "text"], ["text", "id", 'a "b",\nc']])
def test_csv_rows_are_those_of_csv_dictreader(keys, tmp_path, monkeypatch):
    """Plain and packed, with and without byte order mark, any end of line, a blank line: the whole file at once."""
    monkeypatch.setattr(text, "BLOCK", 50)
    header, rows = ["id", "text", 'a "b",\nc', "answer"], awkward_rows(60, 4)
    write_csv(tmp_path / "plain.csv", [header, *rows])
    write_csv(tmp_path / "packed.csv.gz", [header, *rows, [], *rows[:9]], mark="\ufeff")
    in_quotes = dict(quoting=csv.QUOTE_ALL)  # all of them, where Python's writer leaves a lone \r without
    write_csv(tmp_path / "MARKED.CSV", [header, *rows], mark="\ufeff", lineterminator="\n", **in_quotes)
    write_csv(tmp_path / "mac.csv", [header, *rows], lineterminator="\r", **in_quotes)
    write_csv(tmp_path / "wide.csv", [[], header, *rows], encoding="utf-16", lineterminator="\n\n", **in_quotes)
    (tmp_path / "no end of line.csv").write_bytes((tmp_path / "plain.csv").read_bytes().removesuffix(b"\r\n"))
    texts = {}
    for path in tmp_path.iterdir():
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        encoding = "utf-16" if path.name == "wide.csv" else "utf-8-sig"
        whole = raw.decode(encoding).lstrip("\r\n")  # DictReader takes a blank first line for the header
        read = list(csv.DictReader(io.StringIO(whole, newline="")))
        assert [list(row.values()) for row in read] == rows + rows[:9] * (path.suffix == ".gz")
        texts[path.name] = ["\n".join(row[key] for key in keys) for row in read]
    given = keys if len(keys) > 1 else keys[0]
    paths = list(tmp_path.iterdir())
    folder = prepare.prepare("files", paths, "bytes", tmp_path / "out", 0.3, text_key=given, say=quiet)
    for split, expected in expected_splits(texts, 0.3).items():
        assert documents_of(folder, split) == expected
        assert load_meta(folder)["splits"][split]["documents"] == len(expected)
    paths = [tmp_path / "plain.csv"]
    alone = prepare.prepare("files", paths, "bytes", tmp_path / "one", 0.3, text_key=given, say=quiet)
    for split, expected in expected_splits({"plain.csv": texts["plain.csv"]}, 0.3).items():  # a single one, not cut
        assert documents_of(alone, split) == expected


def test_several_keys_of_jsonl_and_csv_make_one_document(tmp_path, capsys):
    rows = awkward_rows(40, 3)
    write_csv(tmp_path / "a.csv", [["question", "id", "answer"], *rows])
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(dict(answer=row[2], question=row[0])) + "\n" for row in rows), encoding="utf-8"
    )
    expected = expected_splits(dict.fromkeys(("a.csv", "b.jsonl"), [f"{row[0]}\n{row[2]}" for row in rows]), 0.4)
    start = ["files", f"{tmp_path}/a.csv", f"{tmp_path}/b.jsonl", "--tokenizer=bytes", "--val_fraction=0.4"]
    for number, flags in enumerate(("--text_key question answer", "--text_key=question --text_key=answer")):
        folder = tmp_path / str(number)
        assert prepare.main([*start, *flags.split(), "--out", str(folder)]) == 0, capsys.readouterr().err
        assert {split: documents_of(folder, split) for split in expected} == expected
        assert load_meta(folder)["made_with"]["text_key"] == ["question", "answer"]
        command = shlex.split(load_meta(folder)["command"])
        assert command[-2:] == ["--text_key=question", "--text_key=answer"]
        assert prepare.main(command[2:]) == 0 and "already there" in capsys.readouterr().out
    assert prepare.main([*start, "--out", str(folder), "--text_key", "answer", "question"]) == 2
    assert "(text_key differs)" in capsys.readouterr().err


def test_one_key_in_a_list_is_the_key_itself(tmp_path):
    """Folders, their meta.json and the command in it are what they are with a string."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {i}", "b": "{i}"}}\n' for i in range(20)))
    for key in ("text", "b"):
        said, arguments = [], dict(source="files", paths=[tmp_path / "a.jsonl"], tokenizer="bytes", val_fraction=0.4)
        arguments |= dict(out=tmp_path / key, say=said.append)
        meta = load_meta(prepare.prepare(**arguments, text_key=key))
        assert meta["made_with"].get("text_key") == (None if key == "text" else "b")
        assert meta["command"].endswith("--val_fraction=0.4" + " --text_key=b" * (key == "b"))
        prepare.prepare(**arguments, text_key=[key])
        assert "already there" in said[-1]


def test_a_folder_made_of_csv_as_one_text_is_something_else(tmp_path):
    write_csv(tmp_path / "a.csv", [["text"], *([f"row {i}"] for i in range(40))])
    folder = prepare.prepare("files", [tmp_path / "a.csv"], "bytes", tmp_path / "out", 0.4, say=quiet)
    meta, stat = load_meta(folder), (tmp_path / "a.csv").stat()
    facts = json.dumps([("a.csv", stat.st_size, stat.st_mtime_ns)])  # as before rows were documents
    meta["made_with"]["inputs"] = hashlib.sha256(facts.encode()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"\(inputs differs\)"):
        prepare.prepare("files", [tmp_path / "a.csv"], "bytes", tmp_path / "out", 0.4, say=quiet)


def test_csv_in_folders_and_by_include(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = awkward_rows(40, 1)
    write_csv(corpus / "a.csv", [["text"], *rows], quoting=csv.QUOTE_ALL)
    (corpus / "b.txt").write_text("text " * 9)
    (corpus / "c.csv").write_bytes(b"text\n" + b"\0" * 9)
    said = []
    folder = prepare.prepare("files", [corpus], "bytes", tmp_path / "out", 0.4, include="*.csv", say=said.append)
    for split, expected in expected_splits({"corpus/a.csv": [row[0] for row in rows]}, 0.4).items():
        assert documents_of(folder, split) == expected
    assert said[-1] == "skipped 1 file that is not text: corpus/c.csv (it has NUL bytes)"


def test_large_fields_of_csv_and_their_limit(tmp_path, monkeypatch):
    """Fields over the limit of Python's csv module are read; an open quote does not take a whole file into memory."""
    large = ["x" * 200_000, 'some "quotes"\n' * 10_000]
    write_csv(tmp_path / "a.csv", [["text"], *([field] for field in large * 8)])
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1 << 20)  # of a row: the file is longer
    before = csv.field_size_limit(131_072)
    try:
        folder = prepare.prepare("files", [tmp_path / "a.csv"], "bytes", tmp_path / "out", 0.4, say=quiet)
    finally:
        csv.field_size_limit(before)
    for split, expected in expected_splits({"a.csv": large * 8}, 0.4).items():
        assert documents_of(folder, split) == expected
    says = r"^the row at line 3 of .*a.csv has over 1 MB: close its quotes, or make it a text file$"
    for raw in (b'text\nfine\n"' + (b"line " * 99 + b"\n") * 9999, b"text\nfine\n" + b"x" * (1 << 21)):
        (tmp_path / "a.csv").write_bytes(raw)
        tracemalloc.start()
        with pytest.raises(UserError, match=says):
            prepare.prepare("files", [tmp_path / "a.csv"], "bytes", tmp_path / "refused", 0.4, say=quiet)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20, peak
    assert not (tmp_path / "refused").exists()


def test_reading_csv_stays_bounded_in_memory(tmp_path):
    content = 'naïve text, 漢字, with "quotes" ' * 150 + "\n"
    row = f'id,"{content.replace(chr(34), chr(34) * 2)}"\r\n'.encode()
    with gzip.open(tmp_path / "a.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"id,text\n" + row * 2000)
    document = corpus.TextFile("a", tmp_path / "a.csv.gz")
    tracemalloc.start()
    rows = corpus.read_files([document], 0.1, ["text"], download.Progress("", 0, quiet), [])
    size = sum(len(stream.read(length)) for _, stream, length in rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2000 * len(content.encode()) > 10_000_000 and peak < 1 << 20, peak


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"", "{path} is empty, expected a first row that names the columns: correct or remove it"),
        (b"\r\n\n", "{path} is empty, expected a first row that names the columns"),
        (
            b'id,"te\nxt",b\n1,2,3\n',
            'the header at line 1 of {path} has no column "text", its columns are "id", "te\\nxt", '
            '"b": choose one with --text_key, or put a first row that names them, with commas between',
        ),
        (
            b"\nHow are you?,fine\nwell,\n",
            'line 2 of {path} has no column "text", its columns are "How are you?", "fine"',
        ),
        (b"id;text\n1;a\n", 'has no column "text", its columns are "id;text": choose'),
        (b"a,b,c,d,e,f\n", 'its columns are "a", "b", "c", "d", "e", ...: choose'),
        (
            b"text,id,text\na,b,c\n",
            'the header at line 1 of {path} has 2 columns "text", expected one: rename the others',
        ),
        (
            b'text,id\n"a\nb",1\n\nc\n',
            "the row at line 5 of {path} has 1 field, expected 2 as in the header: correct it",
        ),
        (
            b"text,id\na,1\nb,c,2\nd\n",
            "the row at line 3 of {path} has 3 fields, expected 2 as in the header: correct it",
        ),
        (b'text,id\na,1\n"b\nc,2\nd,3\n', "the row at line 3 of {path} has broken quotes (unexpected end of data): "),
        (
            b'text,id\n"a" b,1\n',
            "the row at line 2 of {path} has broken quotes (',' expected after '\"'): expected each",
        ),
        (
            b"text\n" + b"fine\n" * 49_999 + b"a\0b\nfine" + b"\nfine" * 149_999,
            "line 50001 of {path} has a NUL byte, expected text: correct it",
        ),
        (b"text\r" + b"a\0b\r" * 9, "{path} is not text (it has NUL bytes): give text, and --encoding"),
        (
            b"text,id\n" + b"fine,1\n" * 999 + b"b,\xff\n",
            "line 1001 of {path} is not UTF-8: correct it, or name the encod",
        ),
        (
            b"text,id\r" + b"fine,1\r" * 999 + b"b,\xff\r",
            "line 1001 of {path} is not UTF-8: correct it, or name the encod",
        ),
        (b"text\n" + b"\xff\n" * 99, "{path} is not text (99 of 203 bytes are not UTF-8): name its encoding, as in"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_mistakes_in_csv_get_one_sentence(raw, says, packed, tmp_path, capsys):
    path = tmp_path / f"bad.csv{packed}"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    there = tree(tmp_path)
    assert prepare.main(["files", str(path), "--tokenizer=bytes", f"--out={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says.format(path=path) in error, error
    assert tree(tmp_path) == there


def test_include(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    for name in ("a.md", "b.txt", "c.py", "deep/d.md", "deep/e.py", "deep/F.MD"):
        (corpus / name).write_text(f"<{name}>" * 9)
    (tmp_path / "own.rst").write_text("<own>" * 9)
    for number, flags in enumerate((["--include", "*.md", "b.*"], ["--include", "b.t?t", "--include=*.md"])):
        out = tmp_path / str(number)
        arguments = [
            "files",
            corpus,
            tmp_path / "own.rst",
            "--tokenizer",
            "bytes",
            "--val_fraction",
            "0.5",
            "--out",
            out,
        ]
        assert prepare.main([*map(str, arguments), *flags]) == 0, capsys.readouterr().err
        found = b"".join(bytes(t % 256 for t in independent_split(out, split)) for split in ("train", "val"))
        assert set(re.findall(rb"<(.*?)>", found)) == {b"a.md", b"b.txt", b"deep/d.md", b"own"}
    capsys.readouterr()
    assert prepare.main([*map(str, arguments), "--include", "*.md", "b.t?t", "*.md"]) == 0
    assert "already there" in capsys.readouterr().out
    assert prepare.main([*map(str, arguments)]) == 2
    assert "(inputs, include differs)" in capsys.readouterr().err


SHARDS_BEFORE = {  # what prepare.py of before --encoding made of the next test's files: SHA-256 of train and val
    ("all", "bytes"): (
        "9f9a63a9c6983831b60825e992e65f46a1ebc35a29e7efac1cb2e2ef1aea26a5",
        "cf438cb076c45d4ae7804ba016dc6e7945d121182b3ef17340562b412c2738c1",
    ),
    ("all", "gpt2"): (
        "78742905fd003c36b5ed1e5f0fd03f09da8d5df69a73ee04999ef8e956ddf003",
        "bf15d90f89e0fbc363d2bdbfe404f397c8b602ecb78104abf5807a464ff22756",
    ),
    ("3.txt", "bytes"): (
        "c4ccdd92d28dae78281ca5d2e6490077cba8d9c9476588cb235b1420d6d93888",
        "eb1cb5e72c8b6958d3962960db3ff7c0d5d2a67125f4897dfdfcc35b24f294d3",
    ),
    ("3.txt", "gpt2"): (
        "37e001910e427916016b4d354c8bdc62b181d6f6d3460703ff6d35be0727c247",
        "d2bd63208260365b3e8bd00f8f4b2008200223a1e8b855b0bb5726db610a699c",
    ),
}


@pytest.mark.parametrize("which, tokenizer", SHARDS_BEFORE)
def test_order_splits_and_shards_stay_what_they_were(which, tokenizer, gpt2, tmp_path):
    corpus = tmp_path / "all"
    corpus.mkdir()
    words = "déjà vu naïve 漢字 the of and 🙂 \u00a0 \n\n \t don't".split(" ")
    for i in range(12):
        raw = " ".join(words[(j * j + 3 * i * j + i) % len(words)] for j in range(300)).encode()
        (corpus / f"{i}.txt").write_bytes(raw + b" \xff" * (i == 3))
    lines = (" ".join(words[(j * j + i) % len(words)] for j in range(20 + i)) for i in range(50))
    (corpus / "lines.jsonl").write_text("".join(json.dumps({"id": 1, "text": line}) + "\n" for line in lines))
    path = corpus if which == "all" else corpus / which
    folder = prepare.prepare("files", [path], tokenizer, tmp_path / "out", val_fraction=0.2, say=quiet)
    if which == "all":  # was in the order of paths, which a folder keeps
        forget_order(folder)
        (folder / "val_000000.bin").unlink()
        prepare.prepare("files", [path], tokenizer, folder, val_fraction=0.2, say=quiet)
    hashes = [load_meta(folder)["files"][f"{split}_000000.bin"]["sha256"] for split in ("train", "val")]
    assert hashes == [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))]
    assert tuple(hashes) == SHARDS_BEFORE[which, tokenizer]


def test_an_unfinished_folder_names_the_whole_command(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("text " * 99)
    seen = []

    def look(*arguments):
        with pytest.raises(UserError) as caught:
            find_shards(tmp_path / "out", "train")
        seen.append(str(caught.value))
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_write_documents", look)
    flags = dict(tokenizer="bytes", encoding="cp1252", text_key="a b", include=["*.md"], out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare("files", [tmp_path], **flags, say=quiet)
    assert seen == [
        f"{tmp_path}/out is not complete: wait for `python data/prepare.py files {tmp_path} --tokenizer=bytes "
        f"--out={tmp_path}/out --encoding=cp1252 '--text_key=a b' '--include=*.md'`, or run it again if it was stopped"
    ]


def test_folders_made_before_these_options_are_complete(tmp_path):
    """made_with, and the hash of the inputs, are what they were without --encoding, --text_key and --include, and in
    the order of the arguments, which was that of the documents.
    """
    paths = [tmp_path / "b.txt", tmp_path / "a.txt"]
    assert by_sha256(["a.txt", "b.txt"]) == ["a.txt", "b.txt"]
    for path in paths:
        path.write_text("text " * 99)
        os.utime(path, ns=(10**18, 10**18))
    for given in (paths[1:], paths):
        folder = prepare.prepare("files", given, "bytes", tmp_path / f"out{len(given)}", 0.5, say=quiet)
        facts = hashlib.sha256(json.dumps([(path.name, 495, 10**18) for path in given]).encode()).hexdigest()
        assert load_meta(folder)["made_with"] == {
            "source": "files",
            "tokenizer": "bytes",
            "val_fraction": 0.5,
            "shard_tokens": 10**8,
            "inputs": facts,
        }
        assert ("order" in load_meta(folder)) == (given == paths)


# ---------------------------------------------------------------------------------------------------------------------
# Running again, stopping, running twice at once


def test_running_again(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    arguments = dict(source="files", paths=[tmp_path / "a.txt"], tokenizer="bytes", out=tmp_path / "out")
    said = []
    folder = prepare.prepare(**arguments, say=said.append)
    assert not any("already there" in line for line in said) and any("MB/s" in line for line in said)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    said.clear()
    assert prepare.prepare(**arguments, say=said.append) == folder and said == [f"already there: {folder}"]
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
    for change in (dict(val_fraction=0.2), dict(shard_tokens=7), dict(source="python", paths=())):
        with pytest.raises(UserError, match="another --out or delete it"):
            prepare.prepare(**arguments | change, say=quiet)
    (tmp_path / "a.txt").write_text("other text " * 50)
    with pytest.raises(UserError, match=r"\(inputs differs\)"):
        prepare.prepare(**arguments, say=quiet)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_lost_shard_is_made_again(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    folder = prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "out", say=quiet)
    content = (folder / "val_000000.bin").read_bytes()
    (folder / "val_000000.bin").write_bytes(content[:-1])
    prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "out", say=quiet)
    assert (folder / "val_000000.bin").read_bytes() == content


def test_shards_of_others_are_not_touched(tmp_path):
    write_shard(tmp_path / "train_000000.bin", np.arange(3, dtype=np.uint16))
    with pytest.raises(UserError, match="another origin"):
        prepare.prepare("python", out=tmp_path, say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["train_000000.bin"]


@pytest.mark.parametrize("moment", [0, 1, 2, 3])  # before the renames: meta.json's first, the shards', its last
def test_killed_run_leaves_nothing_that_looks_complete(tmp_path, moment):
    (tmp_path / "a.txt").write_text("some text " * 50)
    script = f"""
import os, signal, data.prepare as prepare
renames, replace = [], os.replace
def killing(*names):
    if len(renames) == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
    renames.append(replace(*names))
os.replace = killing
prepare.prepare("files", [{str(tmp_path / "a.txt")!r}], "bytes", {str(tmp_path / "out")!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "out"
    assert not (folder / "meta.json").exists() and list(folder.iterdir())
    with pytest.raises(UserError, match=f"not complete.*prepare.py files {tmp_path / 'a.txt'} --tokenizer=bytes"):
        find_shards(folder, "train")
    prepare.prepare("files", [tmp_path / "a.txt"], "bytes", folder, say=quiet)
    clean = prepare.prepare("files", [tmp_path / "a.txt"], "bytes", tmp_path / "clean", say=quiet)
    for path in clean.glob("*.bin"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert load_meta(folder) | {"command": ""} == load_meta(clean) | {"command": ""}
    assert {path.name for path in folder.iterdir()} == {path.name for path in clean.iterdir()}


def tree(folder):
    """Every path under a folder, with the content of files."""
    return {path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


class FullDisk(io.BufferedWriter):
    """A file of which nothing can be written any more."""

    def __init__(self, path, mode):
        super().__init__(io.FileIO(path, "a"))

    def write(self, block):
        raise OSError(errno.ENOSPC, "No space left on device")


def raising(error):
    def function(*arguments):
        raise error

    return function


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "another file"])
@pytest.mark.parametrize("how", ["bad line", "too little", "disk full", "Ctrl-C", "after the shards"])
def test_a_failed_preparation_leaves_nothing_in_the_way(before, how, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "out"
    if before != "nothing":
        out.mkdir(parents=True)
    if before == "another file":
        (out / "notes.txt").write_text("mine")
    (tmp_path / "a.txt").write_text("some text " * 50)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' * 90_000 + "{\n")
    (tmp_path / "one.jsonl").write_text('{"text": "good"}\n')
    inputs = {"bad line": "bad.jsonl", "too little": "one.jsonl"}
    flags = ["--tokenizer", "bytes", "--shard_tokens", "1000", "--out", str(out)]
    there, left = tree(tmp_path), []
    with monkeypatch.context() as patch:
        if how == "disk full":
            opened = {"ab": FullDisk}
            patch.setattr(prepare, "open", lambda path, mode: opened.get(mode, open)(path, mode), raising=False)
        if how == "Ctrl-C":
            patch.setattr(prepare, "_append", raising(KeyboardInterrupt()))
        if how == "after the shards":
            patch.setattr(prepare, "atomic_write", raising(OSError(errno.ENOSPC, "No space left on device")))
        begin = prepare._begin
        patch.setattr(prepare, "_begin", lambda *arguments: (begin(*arguments), left.append(tree(out))))
        code = prepare.main(["files", str(tmp_path / inputs.get(how, "a.txt")), *flags])
    err = capsys.readouterr().err
    assert code == (2 if how in inputs else 1) and err.count("\n") == 1, err
    assert {"bad line": "not a JSON object", "too little": "no text fell", "Ctrl-C": "stopped: run the same"}.get(
        how, "No space left on device: change that and run the same command again"
    ) in err
    assert ".tmp-unfinished" in left[0]  # while it was working
    assert tree(tmp_path) == there
    assert prepare.main(["files", str(tmp_path / "a.txt"), *flags[:2], "--out", str(out)]) == 0
    assert len(independent_split(out, "train")) == 451 and len(find_shards(out, "val")) == 1


def test_a_real_full_disk_and_a_real_interrupt(tmp_path):
    """RLIMIT_FSIZE stands for the disk; SIGINT comes while the process waits for its input."""
    (tmp_path / "a.txt").write_text("some text " * 500_000)
    command = [sys.executable, "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer=bytes"]
    command += [f"--out={tmp_path}/out"]
    limit = (1 << 20, 1 << 20)
    full = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert full.returncode == 1 and full.stderr.startswith("error: [Errno 27] File too large: change that"), full.stderr
    assert full.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    os.mkfifo(tmp_path / "pipe")
    script = f"""
import sys, data.prepare as prepare
batches = prepare._batches
def wait(documents):
    print("working", flush=True)
    open({str(tmp_path / "pipe")!r})
    yield from batches(documents)
prepare._batches = wait
sys.exit(prepare.main({list(map(str, command[2:]))!r}))
"""
    stopped = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background shells have it ignored
    )
    assert stopped.stdout.readline() == "working\n" and (tmp_path / "out").exists()
    stopped.send_signal(signal.SIGINT)
    said, err = stopped.communicate(timeout=60)
    assert (
        stopped.returncode == 1
        and err == "stopped: run the same command again to resume\n"
        and not (tmp_path / "out").exists()
    )


def test_what_a_killed_run_left_is_not_in_the_way_of_another_command(tmp_path):
    """Killed between two renames, at the worst moment; also where FineWeb's shards were downloaded before."""
    out = tmp_path / "out"
    (out / ".tmp-new").mkdir(parents=True)
    (out / ".tmp-unfinished").write_text("python data/prepare.py fineweb10B")
    for name in (
        "train_000000.bin",
        "train_000001.bin",
        "fineweb_val_000000.bin",
        ".tmp-new/val_000000.bin",
        ".tmp-new/fineweb_train_000001.bin",
        ".tmp-train_000007.bin",
    ):
        write_shard(out / name, np.zeros(9, np.uint16))
    (tmp_path / "a.txt").write_text("some text " * 50)
    said = []
    prepare.prepare("files", [tmp_path / "a.txt"], "bytes", out, say=said.append)
    assert (
        len(find_shards(out, "train")) == len(find_shards(out, "val")) == 1
        and len(independent_split(out, "train")) == 451
    )
    assert said[-1] == f"{out} still has .tmp-new from a run that was stopped: delete what you do not need"
    kept = ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    assert sorted(path.name for path in (out / ".tmp-new").iterdir()) == kept


def test_complete_data_stay_valid_until_the_new_ones_are_complete(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text " * 50)
    arguments = dict(
        source="files", paths=[tmp_path / "a.txt"], tokenizer="bytes", shard_tokens=100, out=tmp_path / "out"
    )
    folder = prepare.prepare(**arguments, say=quiet)
    complete = tree(folder)
    (folder / "val_000000.bin").unlink()
    (folder / ".tmp-unfinished").write_text("killed between the last two changes")
    seen = []

    def stop(*arguments):
        seen.append((folder / "meta.json").read_bytes() == complete["meta.json"] and len(find_shards(folder, "train")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_append", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(**arguments, say=quiet)
    assert seen == [5] and tree(folder) == {name: complete[name] for name in complete if name != "val_000000.bin"}
    prepare.prepare(**arguments, say=quiet)
    assert tree(folder) == complete


def test_a_folder_that_another_process_removes_is_made_again(tmp_path):
    """The first of two processes fails and removes the folder whose lock the second waits for."""
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "a.txt").write_text("some text " * 50)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-u", "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer", "bytes"]
    with open(tmp_path / "out" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = subprocess.Popen([*command, "--out", tmp_path / "out"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert "waiting for another process" in waiting.stdout.readline()
        prepare._clean_up(tmp_path / "out", [tmp_path / "out"])
        assert not (tmp_path / "out").exists()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and len(independent_split(tmp_path / "out", "train")) == 451


def test_two_processes_at_once(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "a.txt").write_text("some text " * 200_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-u", "data/prepare.py", "files", tmp_path / "a.txt", "--tokenizer", "bytes"]
    command += ["--out", tmp_path / "out"]
    with open(tmp_path / "out" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert all("waiting for another process" in process.stdout.readline() for process in both)
    said = sorted(process.communicate(timeout=60)[0].count("already there") for process in both)
    assert [process.returncode for process in both] == [0, 0] and said == [0, 1]
    assert len(independent_split(tmp_path / "out", "train")) == 1_800_001


# ---------------------------------------------------------------------------------------------------------------------
# Downloads


BODY = random.Random(3).randbytes(1_000_000)


SHA = hashlib.sha256(BODY).hexdigest()


def test_download_goes_on_after_a_cut(server, tmp_path):
    server.files["/x"] = BODY
    server.cut = 2
    assert download.download(server.address + "/x", tmp_path / "x", SHA, quiet) == SHA
    assert (tmp_path / "x").read_bytes() == BODY and os.listdir(tmp_path) == ["x"]
    assert [asked for _, asked in server.requests] == [None, "bytes=500000-", "bytes=750000-"]
    assert download.download(server.address + "/x", tmp_path / "x", SHA, say=quiet) == SHA
    assert len(server.requests) == 3  # it is there: nothing was asked for


def test_download_goes_on_in_the_next_run(server, tmp_path):
    server.files["/x"] = BODY
    server.cut = 4
    with pytest.raises(UserError, match=r"could not be downloaded \(the connection ended after 937500 of 1000000"):
        download.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert os.listdir(tmp_path) == [".tmp-x"]
    download.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY and server.requests[-1] == ("/x", "bytes=937500-")


def test_download_from_a_server_without_range(server, tmp_path):
    server.files["/x"], server.ranges, server.cut = BODY, False, 1
    download.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY and len(server.requests) == 2


def test_download_replaces_a_partial_file_that_is_too_long(server, tmp_path):
    server.files["/x"] = BODY
    (tmp_path / ".tmp-x").write_bytes(BODY + b"more")
    download.download(server.address + "/x", tmp_path / "x", SHA, say=quiet)
    assert (tmp_path / "x").read_bytes() == BODY


def test_download_refuses_a_wrong_hash(server, tmp_path):
    server.files["/x"] = BODY
    with pytest.raises(UserError, match=f"gave 1000000 bytes with SHA-256 {SHA} instead of 0000"):
        download.download(server.address + "/x", tmp_path / "x", "0" * 64, say=quiet)
    assert os.listdir(tmp_path) == []


def test_download_checks_the_hash_that_hugging_face_names(server, tmp_path):
    server.files["/store/x"], server.redirects["/x"] = BODY, "/store/x"
    server.linked_sha256 = SHA
    assert download.download(server.address + "/x", tmp_path / "x", say=quiet) == SHA
    server.linked_sha256 = "0" * 64
    with pytest.raises(UserError, match="instead of 0000.*deleted"):
        download.download(server.address + "/x", tmp_path / "y", say=quiet)
    assert os.listdir(tmp_path) == ["x"]


def test_download_says_what_to_do_offline(server, tmp_path):
    with pytest.raises(UserError) as caught:
        download.download(server.address + "/missing", tmp_path / "x", say=quiet)
    assert len(server.requests) == 1  # a 404 is final
    for words in ("/missing", "404", "HF_ENDPOINT", "TIKTOKEN_CACHE_DIR", "python data/prepare.py python"):
        assert words in str(caught.value)
    said = []
    with pytest.raises(UserError, match="refused"):
        download.download("http://127.0.0.1:9/x", tmp_path / "x", say=said.append)
    assert len(said) == 3 and os.listdir(tmp_path) == []


def test_fineweb(server, tmp_path):
    base = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
    tokens = {}
    for number, name in enumerate(["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]):
        tokens[name] = np.full(10 + number, number, dtype=np.uint16)
        write_shard(tmp_path / name, tokens[name])
        server.files[base + name] = (tmp_path / name).read_bytes()
    said = []
    folder = prepare.prepare("fineweb10B", out=tmp_path / "fw", shards=1, say=said.append)
    assert "1 training shards and one for validation, 0.4 GB" in said[0]
    assert sorted(path.name for path in folder.glob("*.bin")) == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    before = len(server.requests)
    prepare.prepare("fineweb10B", out=folder, shards=1, say=said.append)
    assert "already there" in said[-1] and len(server.requests) == before
    prepare.prepare("fineweb10B", out=folder, shards=2, say=quiet)  # more of them: only the new one is fetched
    assert [path for path, _ in server.requests[before:]] == [base + "fineweb_train_000002.bin"]
    meta = load_meta(folder)
    assert meta["splits"]["train"] == {"tokens": 23, "bytes": None, "documents": None}
    for name, array in tokens.items():
        content = server.files[base + name]
        assert (folder / name).read_bytes() == content and independent_read(folder / name) == array.tolist()
        assert meta["files"][name] == {"tokens": array.size, "sha256": hashlib.sha256(content).hexdigest()}
    complete = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.files[base + "fineweb_train_000003.bin"] = b"<html>not a shard"
    with pytest.raises(UserError, match="fineweb_train_000003.bin gave no token shard .* has 17 bytes"):
        prepare.prepare("fineweb10B", out=folder, shards=3, say=quiet)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == complete  # still the data that it was
    assert [path.name for path in find_shards(folder, "train")] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    server.files[base + "fineweb_train_000003.bin"] = server.files[base + "fineweb_train_000002.bin"]
    prepare.prepare("fineweb10B", out=folder, shards=3, say=quiet)
    assert len(find_shards(folder, "train")) == len(load_meta(folder)["files"]) - 1 == 3


def serve_zip(server, monkeypatch, path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = Path(path).read_bytes()
    url = download.DOWNLOADS["wikitext2"][0]
    server.files[url.replace("{hub}", "")] = content
    monkeypatch.setitem(download.DOWNLOADS, "wikitext2", (url, hashlib.sha256(content).hexdigest()))


def test_a_failed_download_leaves_what_has_arrived_and_nothing_else(server, tmp_path, monkeypatch):
    text = b"First Citizen:\n" * 1000
    entry = (server.address + "/main/input.txt", hashlib.sha256(text).hexdigest())
    monkeypatch.setitem(download.DOWNLOADS, "shakespeare", entry)
    out = tmp_path / "new" / "out"
    with pytest.raises(UserError, match="404"):
        prepare.prepare("shakespeare", out=out, say=quiet)
    assert not (tmp_path / "new").exists()
    server.files["/main/input.txt"], server.cut = text, 4
    with pytest.raises(UserError, match="could not be downloaded"):
        prepare.prepare("shakespeare", out=out, say=quiet)
    assert sorted(path.name for path in out.iterdir()) == [".tmp-input.txt", ".tmp-unfinished"]
    with pytest.raises(UserError, match="is not complete: wait for `python data/prepare.py shakespeare --out="):
        find_shards(out, "train")
    (tmp_path / "a.txt").write_text("some text " * 50)
    said = []
    prepare.prepare("files", [tmp_path / "a.txt"], "bytes", out, say=said.append)  # another command is not in its way
    assert said[-1].startswith(f"{out} still has .tmp-input.txt") and len(find_shards(out, "val")) == 1
    (tmp_path / "other").mkdir()
    (out / ".tmp-input.txt").rename(tmp_path / "other" / ".tmp-input.txt")
    prepare.prepare("shakespeare", out=tmp_path / "other", say=quiet)
    assert server.requests[-1][1] == "bytes=14062-" and independent_split(tmp_path / "other", "train")[1:] == [
        *text[:13500]
    ]


def test_fineweb_resumes_after_a_failure_and_gives_way_to_another_source(server, tmp_path):
    base = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"
    for number, name in enumerate(["fineweb_val_000000.bin", "fineweb_train_000001.bin"]):
        write_shard(tmp_path / name, np.full(1000 + number, number, dtype=np.uint16))
        server.files[base + name] = (tmp_path / name).read_bytes()
    out = tmp_path / "out"
    with pytest.raises(UserError, match="fineweb_train_000002.bin could not be downloaded"):
        prepare.prepare("fineweb10B", out=out, shards=2, say=quiet)
    with pytest.raises(
        UserError, match="is not complete: wait for `python data/prepare.py fineweb10B --out=.* --shards=2`"
    ):
        find_shards(out, "train")
    server.files[base + "fineweb_train_000002.bin"] = server.files[base + "fineweb_train_000001.bin"]
    asked = len(server.requests)
    prepare.prepare("fineweb10B", out=out, shards=2, say=quiet)
    assert [path for path, _ in server.requests[asked:]] == [base + "fineweb_train_000002.bin"]
    assert len(find_shards(out, "train")) == 2 and not list(out.glob(".tmp-*"))


def test_wikitext_has_a_document_for_each_article(server, tmp_path, monkeypatch):
    articles = [
        " \n = Títle one = \n \n Text = of = it . \n = not after a blank = \n",
        " \n = = Part = = \n \n more \n \n",
        " = Second = \n \n Text . \n \n = = = Sub = = = \n end \n",
    ]
    train = "".join(articles)
    members = {"w/wiki.train.raw": train, "w/wiki.valid.raw": " \n = V = \n x \n", "w/wiki.test.raw": "no"}
    members |= {"../../evil.txt": "no", "/tmp/evil-absolute.txt": "no"}
    (tmp_path / "a" / "b").mkdir(parents=True)
    serve_zip(server, monkeypatch, tmp_path / "a" / "zip", members)
    folder = prepare.prepare("wikitext2", tokenizer="bytes", out=tmp_path / "a" / "b" / "out", say=quiet)
    expected = [256, *(articles[0] + articles[1]).encode(), 256, *articles[2].encode()]
    assert independent_split(folder, "train") == expected
    assert independent_split(folder, "val") == [256, *b" \n = V = \n x \n"]
    assert not list(tmp_path.rglob("evil*")) and not os.path.exists("/tmp/evil-absolute.txt")
    source = load_meta(folder)["source"]
    assert source == server.address + "/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"


def test_shakespeare(server, tmp_path, monkeypatch):
    text = b"First Citizen:\n" * 100
    server.files["/main/input.txt"] = text
    entry = (server.address + "/main/input.txt", hashlib.sha256(text).hexdigest())
    monkeypatch.setitem(download.DOWNLOADS, "shakespeare", entry)
    folder = prepare.prepare("shakespeare", out=tmp_path, say=quiet)
    assert independent_split(folder, "train") == [256, *text[:1350]]
    assert independent_split(folder, "val") == [256, *text[1350:]]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input, by the command line


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("pyton", "did you mean python?"),
        ("python --tokeniser bytes", "unknown flag --tokeniser: did you mean --tokenizer?"),
        ("python --tok bytes", "unknown flag --tok: did you mean --tokenizer?"),
        ("python --val_fracton=0.1", "unknown flag --val_fracton=0.1: did you mean --val_fraction?"),
        ("python --tokenizer gpt4", "must be gpt2, bytes, bpe"),
        ("fineweb10B --tokenizer bytes", "remove --tokenizer"),
        ("fineweb10B --shards 0", "must be 1 to 103"),
        ("python --shards 2", "for fineweb10B"),
        ("python --shards two", "invalid int value: 'two'"),
        ("python --val_fraction 1", "between 0 and 1"),
        ("python --shard_tokens 0", "must be 1 to 2147483647"),
        ("python --out {tmp}/a.txt", "is a file where a folder"),
        ("python {tmp}/a.txt", "takes no PATH"),
        ("files", "at least one PATH"),
        ("files {tmp}/none*.txt", "none*.txt' is not a file or folder"),
        ("files {tmp}/empty", "there are no text files in {tmp}/empty: give"),
        ("files {tmp}/a.txt.gz --tokenizer bytes", "unpack it first"),
        ("files {tmp}/bad.jsonl --tokenizer bytes --out {tmp}/out", "line 2 of {tmp}/bad.jsonl is not a JSON object"),
        ("files {tmp}/bad2.jsonl --tokenizer bytes --out {tmp}/out", "line 1 of {tmp}/bad2.jsonl has 5 under"),
        ("files {tmp}/bad3.jsonl.gz --tokenizer bytes --out {tmp}/out", "bad3.jsonl.gz is a damaged gzip file"),
        ("files {tmp}/one.jsonl --tokenizer bytes --out {tmp}/out", "no text fell into the"),
        (
            "files {tmp}/two.jsonl --tokenizer bytes --out {tmp}/out",
            'line 1 of {tmp}/two.jsonl has no key "text", its keys '
            'are "a", "b", "c", "d", "e", ...: choose one with --text_key',
        ),
        (
            "files {tmp}/two.jsonl --text_key z --tokenizer bytes",
            'line 2 of {tmp}/two.jsonl has no key "z", its keys are none',
        ),
        ("files {tmp}/two.jsonl --text_key g --tokenizer bytes", 'has ["x"] under "g", expected a string'),
        (
            "files {tmp}/two.jsonl --text_key z g --tokenizer bytes",
            'line 1 of {tmp}/two.jsonl has ["x"] under "g", exp',
        ),
        (
            "files {tmp}/two.jsonl --text_key z y --tokenizer bytes",
            'line 1 of {tmp}/two.jsonl has no key "y", its keys',
        ),
        (
            "files {tmp}/list.jsonl --text_key z y --tokenizer bytes",
            'expected one like {{"z": ..., "y": ...}}, correct',
        ),
        ("files {tmp}/bad.csv.gz --tokenizer bytes --out {tmp}/out", "bad.csv.gz is a damaged gzip file"),
        ("files --text_key a {tmp}/a.txt", "files needs at least one PATH before --text_key: give text, .jsonl, .csv,"),
        ("files --text_key a --include *.txt {tmp}", "at least one PATH before --text_key and --include: give"),
        ("python --text_key a b", "--text_key is for the source files, not for python: remove it"),
        (
            "files {tmp}/list.jsonl --tokenizer bytes",
            "line 1 of {tmp}/list.jsonl is not a JSON object: expected one like",
        ),
        ("files {tmp}/a.txt --encoding latin-l", "unknown --encoding 'latin-l': did you mean latin-1?"),
        ("files {tmp}/a.txt --encoding rot13", "unknown --encoding 'rot13'"),
        (
            "files {tmp}/a.txt --encoding zzzzzzzz",
            "unknown --encoding 'zzzzzzzz': utf-8, utf-16, latin-1 and cp1252 are",
        ),
        ("python --encoding cp1252", "--encoding is for the source files, not for python: remove it"),
        ("shakespeare --include *.txt", "--include is for the source files, not for shakespeare"),
        ("files {tmp} --include *.txt *.rst", "--include '*.rst' matches no file inside the folders"),
        ("files {tmp}/a.txt --include *.txt", "--include '*.txt' matches no file inside the folders"),
        ("files --include *.txt {tmp}", "files needs at least one PATH before --include"),
        ("", "required: source"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, arguments, says):
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "a.txt.gz"):
        (tmp_path / name).write_text("text")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "bad2.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "bad3.jsonl.gz").write_bytes(gzip.compress(b'{"text": "good"}\n' * 9)[:-9])
    (tmp_path / "bad.csv.gz").write_bytes(gzip.compress(b"text\n" + b"good\n" * 9)[:-9])
    (tmp_path / "one.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "two.jsonl").write_text('{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "z": "", "g": ["x"]}\n{}\n')
    (tmp_path / "list.jsonl").write_text('["text"]\n')
    assert prepare.main(arguments.format(tmp=tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says.format(tmp=tmp_path) in error


def test_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "b.txt").write_text("more " * 100)
    # flags may stand between the paths
    done = run_prepare(
        "files",
        tmp_path / "a.txt",
        "--tokenizer",
        "bytes",
        tmp_path / "b.txt",
        "--val_fraction",
        "0.5",
        "--out",
        tmp_path / "out",
    )
    split = ["val" if in_val(name, 0.5) else "train" for name in ("a.txt", "b.txt")]
    assert split == ["val", "train"] and done.returncode == 0, done.stderr
    assert len(independent_split(tmp_path / "out", "val")) == 501
    wrong = run_prepare("pythn")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: unknown source") and not wrong.stdout


def test_gpt2_without_network(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "cache").mkdir()
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = dict(nowhere, TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"), no_proxy="", NO_PROXY="")
    done = run_prepare("files", tmp_path / "a.txt", "--tokenizer", "gpt2", "--out", tmp_path / "out", **environment)
    assert done.returncode == 2 and done.stderr.startswith("error: the gpt2 vocabulary could not be loaded")
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and "--tokenizer bytes" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_import_is_light(tmp_path):
    script = "import sys, data.prepare; sys.exit(bool({'torch', 'tiktoken', 'requests'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# What leaves or enters the folder


def test_an_endpoint_with_a_password_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "https://user:SECRETmirror@mirror.example")
    assert prepare.main(["wikitext2", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "HF_ENDPOINT holds a user name or a password" in err and "SECRET" not in err


def test_a_download_stays_in_its_folder(server, tmp_path, monkeypatch):
    """Neither a redirect's name, a header nor a name inside an archive chooses where something is written."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("../../escaped.txt", "x")
        members.writestr("../w/wiki.train.raw", " \n = A = \n text \n" * 50)
        members.writestr("/w/wiki.valid.raw", " \n = B = \n text \n" * 50)
    body = archive.getvalue()
    server.files["/real/..%2F..%2Fescaped.zip"] = body
    server.redirects["/w.zip"] = server.address + "/real/..%2F..%2Fescaped.zip"
    server.linked_sha256 = hashlib.sha256(body).hexdigest()
    monkeypatch.setitem(download.DOWNLOADS, "wikitext2", ("{hub}/w.zip", server.linked_sha256))
    inside = tmp_path / "a" / "b" / "out"
    prepare.prepare("wikitext2", tokenizer="bytes", out=inside, say=quiet)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and inside not in path.parents]
    assert outside == [] and (inside / "meta.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Data that a trainer refuses, and data that change while it reads them


def damage(name, how):
    return pytest.param(how[0], how[1], id=name)


@pytest.mark.parametrize(
    "how, sentence",
    [
        damage("magic", (lambda raw: b"\0\0\0\0" + raw[4:], "train_0.bin.*magic")),
        damage("version", (lambda raw: raw[:4] + b"\x09" + raw[5:], "train_0.bin.*version")),
        damage("truncated", (lambda raw: raw[:-100], "train_0.bin")),
        damage("vocabulary", (lambda raw: raw[:2000] + b"\xff\xff" + raw[2002:], "train_0.bin holds token 65535")),
    ],
)
def test_wrong_shards_are_refused_by_name(how, sentence, tmp_path, capsys):
    data = make_data(tmp_path / "data")
    shard = data / "a_train_0.bin"
    shard.write_bytes(how(shard.read_bytes()))
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and re.search(sentence, err) and err.count("\n") == 1, err


def test_tokens_beyond_the_vocabulary_are_caught_wherever_they_are(data, monkeypatch):
    monkeypatch.setattr(TokenShards, "CHECKED", 0)  # as in a corpus too large to scan on opening
    shards = TokenShards(data, "train", 100)
    with pytest.raises(UserError, match="a_train_0.bin holds token .* ends at 99"):
        shards.read_sequences(np.array([0]), 33)


@pytest.mark.parametrize("how", ["truncated", "emptied"])
def test_a_shard_that_shrinks_while_it_is_read(how, tmp_path, monkeypatch, capsys):
    data = make_data(tmp_path / "data")
    step = train_gpt.train_step

    def and_damage(run, windows, scale):
        os.truncate(data / "a_train_1.bin", 20_000 if how == "truncated" else 0)
        return step(run, windows, scale)

    monkeypatch.setattr(train_gpt, "train_step", and_damage)
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=200)), capsys)
    assert code == 2 and re.search(r"a_train_1.bin ended at byte \d+ while it was in use", err), err
    assert err.count("\n") == 1


def test_a_shard_that_is_deleted_while_it_is_read_is_named(tmp_path):
    data = make_data(tmp_path / "data")
    shards = TokenShards(data, "train", 257)
    shards.read_sequences(np.array([0, 12000, 28900]), 33)
    (data / "a_train_1.bin").unlink()
    with pytest.raises(UserError, match="a_train_1.bin ended at byte .* No such file"):
        shards.read_sequences(np.array([0, 12000, 28900]), 33)


def test_missing_changed_and_shared_shards_are_refused(tmp_path, capsys):
    data = make_data(tmp_path / "data")
    flags = TINY | dict(data=data, out_dir=tmp_path / "run", max_steps=1)
    shard, meta = data / "a_train_1.bin", json.loads((data / "meta.json").read_text())
    content = shard.read_bytes()
    shard.unlink()
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin is missing, where meta.json says 17889 tokens" in err
    write_shard(shard, np.zeros(50, np.uint16))
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin has 50 tokens, where meta.json says 17889" in err
    shard.write_bytes(content)
    meta["files"]["a_train_1.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta))
    assert run_main(flags_of(flags), capsys)[0] == 0
    shard.write_bytes(content[:5000] + b"a\0" + content[5002:])
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_train_1.bin is not the shard whose hash meta.json holds" in err
    shard.write_bytes(content)
    for link in (os.link, os.symlink, lambda a, b: Path(b).write_bytes(Path(a).read_bytes())):
        link(data / "a_val_0.bin", data / "more_train.bin")
        code, err = run_main(flags_of(flags), capsys)
        assert code == 2 and "the same tokens for training in more_train.bin and for validation in a_val_0.bin" in err
        (data / "more_train.bin").unlink()
    (data / "a_val_0.bin").rename(data / "a_val_of_train.bin")  # both patterns match it
    (data / "meta.json").write_text(json.dumps(meta | dict(files={})))
    code, err = run_main(flags_of(flags), capsys)
    assert code == 2 and "a_val_of_train.bin and for validation in a_val_of_train.bin" in err


def test_other_content_is_other_data_without_meta_json_too(tmp_path):
    def fingerprint():
        return TokenStream(data, seq_len=32, batch_tokens=64).fingerprint()

    data = make_data(tmp_path / "data")
    (data / "meta.json").unlink()
    before = fingerprint()
    assert fingerprint() == before
    content = (data / "a_train_1.bin").read_bytes()
    (data / "a_train_1.bin").write_bytes(content[:5000] + b"a\0" + content[5002:])
    assert fingerprint() != before


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files, and reads /proc")
@pytest.mark.parametrize("checked, steps", [(1 << 24, 100), pytest.param(1 << 28, 1000, marks=pytest.mark.soak)])
def test_two_thousand_shards_need_little_memory_and_few_open_files(checked, steps, tmp_path):
    """20 billion tokens with and without meta.json; at most 32 open files where Linux allows 1,024."""
    count, names = 10_000_000, [f"{'val' if i < 10 else 'train'}_{i:06d}.bin" for i in range(2000)]
    files = {name: dict(tokens=count, sha256="") for name in names}
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(shard_header(np.uint16, count) + struct.pack("<2H", 50256, i))
        os.truncate(tmp_path / name, 1024 + 2 * count)
    files[names[10]]["sha256"] = hashlib.sha256((tmp_path / names[10]).read_bytes()).hexdigest()
    splits = {split: dict(tokens=n * count, bytes=None, documents=n) for split, n in (("train", 1990), ("val", 10))}
    meta = dict(tokenizer="gpt2", vocab_size=50257, eot=50256, splits=splits, source="test", files=files)
    script = f"""if True:
        import resource
        from pathlib import Path
        from data.stream import TokenShards, TokenStream, feistel_permute, prefetch, sequence_starts

        def mb(name):
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            return int(status[name].split()[0]) / 1024

        def after_batches(first, last):
            for step in range(first, last):
                assert stream.batch(step, rank=0, world_size=8).shape == (64, 1025)
            return mb("VmRSS")

        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        TokenShards.CHECKED, before = {checked}, mb("VmRSS")
        stream = TokenStream({str(tmp_path)!r}, seq_len=1024, batch_tokens=524288)
        stream.fingerprint()
        print(mb("VmHWM") - before, -after_batches(0, 10) + after_batches(10, {steps}))
    """
    for content in ("", json.dumps(meta)):
        if content:
            (tmp_path / "meta.json").write_text(content)
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        start, batches = map(float, done.stdout.split())  # MB more
        assert start < 40 and batches < 4, done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The stream


def every_token(data: Path) -> np.ndarray:
    return np.concatenate([np.fromfile(path, dtype="<u2", offset=1024) for path in sorted(data.glob("*train*"))])


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_visits_everything_once(n):
    order = feistel_permute(np.arange(n), n, key=7)
    assert sorted(order.tolist()) == list(range(n))
    if n > 100:
        assert not np.array_equal(order, feistel_permute(np.arange(n), n, key=8))
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.1


@pytest.mark.parametrize("n_tokens", [33, 63, 64, 65, 1000])
def test_windows_of_an_epoch(n_tokens):
    per_epoch, offsets = max(1, (n_tokens - 32) // 32), set()
    for epoch in range(40):
        starts = sequence_starts(epoch * per_epoch + np.arange(per_epoch), n_tokens, 32, seed=3)
        offsets.add(int(starts.min()))
        assert np.array_equal(np.sort(starts), starts.min() + 32 * np.arange(per_epoch))  # every sequence once
        assert starts.min() >= 0 and starts.max() + 33 <= n_tokens
    assert len(offsets) > 10 or n_tokens < 64


def test_batches_hold_the_tokens_of_their_windows(data):
    everything, starts = every_token(data), np.array([11100, 11110, 11111, 0])  # over the end of a shard
    read = TokenShards(data, "train", 257).read_sequences(starts, 33)
    assert np.array_equal(read, np.stack([everything[s : s + 33] for s in starts]))
    starts = sequence_starts(77 * 16 + np.arange(16), len(everything), 32, seed=0)
    batch = TokenStream(data, seq_len=32, batch_tokens=512).batch(77)
    assert np.array_equal(batch, np.stack([everything[s : s + 33] for s in starts]))


def test_windows_start_at_documents(data):
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
