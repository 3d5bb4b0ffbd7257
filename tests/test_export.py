"""export.py: the same logits from other formats."""

import json

import pytest
import torch

import export
import sample
from conftest import flags_of, run_main, run_python, tiny_run


@pytest.fixture(scope="module")
def windowed(data, tmp_path_factory):
    """A run's folder, of a model with everything that changes the graph."""
    folder = tmp_path_factory.mktemp("windowed") / "run"
    tiny_run(folder, data=data, window="SL:5", ngram=3, ngram_rows=50, max_steps=3)
    return folder


@pytest.fixture(scope="module")
def expected(windowed):
    """The model's logits for ids of several batches and lengths."""
    model, _ = sample.load(sample.find_file(windowed), "cpu", "fp32")
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1), (1, 32), (3, 4), (2, 17), (9, 5))
    return [(idx, model(idx)) for idx in (torch.randint(257, shape, generator=generator) for shape in shapes)]


def exported(windowed, kind, out, capsys):
    assert export.main([str(windowed), "--to", kind, "--out", str(out)]) == 0
    assert f"{out}: {kind}, {out.stat().st_size:,} bytes" in capsys.readouterr().out
    return out


def test_safetensors(windowed, tmp_path, capsys):
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = load_file(exported(windowed, "safetensors", tmp_path / "m.safetensors", capsys))
    weights = sample.read_checkpoint(sample.find_file(windowed))["model"]
    assert tensors.keys() == weights.keys() and all(torch.equal(tensors[name], weights[name]) for name in weights)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["n_layer"] == 2 and config["window"] == "SL:5" and config["tokenizer"] == "bytes"


def test_int8_file_is_what_int8_makes(windowed, data, tmp_path, capsys):
    path = exported(windowed, "int8", tmp_path / "m.pt", capsys)
    (tmp_path / "text").write_text("some text " * 50)

    def nats(*flags) -> float:
        assert sample.main([*map(str, flags), "--perplexity", str(tmp_path / "text")]) == 0
        return float(capsys.readouterr().out.splitlines()[2].split()[4])

    rounded, plain = nats("--run", path), nats("--run", windowed)
    assert nats("--run", windowed, "--int8") == rounded == nats("--run", path, "--int8")
    assert plain != rounded == pytest.approx(plain, rel=0.01)
    assert sample.main(["--run", str(path), "--prompt", "abc", "--max_new_tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("abc")
    code, err = run_main(flags_of(dict(init_from=path, data=data, max_steps=4, out_dir=tmp_path / "run")), capsys)
    assert code == 2 and "does not fit this model" in err
    assert path.stat().st_size < sample.find_file(windowed).stat().st_size / 4


def test_exported_program_needs_nothing_of_ours(windowed, expected, tmp_path, capsys):
    path = exported(windowed, "torch-export", tmp_path / "m.pt2", capsys)
    torch.save(expected, tmp_path / "expected.pt")
    code = """if True:
        import sys, torch
        module = torch.export.load(sys.argv[1]).module()
        for idx, logits in torch.load(sys.argv[2]):
            torch.testing.assert_close(module(idx), logits, rtol=0, atol=1e-4)
        assert not {"model", "ops", "train_gpt"} & {name.split(".")[0] for name in sys.modules}
    """
    done = run_python("-c", code, path, tmp_path / "expected.pt")
    assert done.returncode == 0, done.stderr


def test_onnx_has_the_same_logits(windowed, expected, tmp_path, capsys):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    path = exported(windowed, "onnx", tmp_path / "m.onnx", capsys)
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    for idx, logits in expected:
        (got,) = session.run(None, {"idx": idx.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), logits, rtol=0, atol=1e-3)


def test_what_cannot_be_exported_is_said(windowed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnx" else name)
    for name in ("there", "config.json"):
        (tmp_path / name).touch()
    for to, out, says in (
        ("onnx", "m", "needs onnx, which is not installed"),
        ("int8", "there", "there is there already"),
        ("safetensors", "m", "config.json is there already"),
        ("torch-export", "m.bin", "reads .pt2 files only"),
    ):
        assert export.main([str(windowed), "--to", to, "--out", str(tmp_path / out)]) == 2
        assert says in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 2
