"""export.py: the same logits from other formats."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

import export
import model as model_module
import sample
from common.errors import run_command
from conftest import final, refusal, run_python, tiny_run
from data.shards import PYTHON_VOCABULARY
from data.tokenizers import get_tokenizer
from inference.generation import generate
from runtime.device import DTYPES


@pytest.fixture(scope="module")
def windowed(data, tmp_path_factory):
    """A run's folder, of a model with everything that changes the graph."""
    folder = tmp_path_factory.mktemp("windowed") / "run"
    flags = dict(window="SL:5", ngram=3, ngram_rows=50, doc_mask=True, max_steps=3)
    tiny_run(folder, data=data, **flags)
    return folder


@pytest.fixture(scope="module")
def expected(windowed):
    """The model's logits for ids of several batches and lengths."""
    model, _ = sample.load(sample.find_file(windowed), "cpu", "fp32")
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for shape in ((1, 1), (1, 32), (2, 17), (9, 5)):
        idx = torch.randint(257, shape, generator=generator)
        idx[:, 3::7] = 256  # documents begin
        pairs.append((idx, model(idx)))
    return pairs


def exported(windowed, kind, out, capsys, *flags):
    capsys.readouterr()
    assert run_command(export.main, [str(windowed), "--to", kind, "--out", str(out), *flags]) == 0
    assert capsys.readouterr().out.startswith(f"{sample.find_file(windowed)} -> {out}: {kind}, ")
    return out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_safetensors(dtype, windowed, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    path = exported(windowed, "safetensors", tmp_path / "m", capsys, "--dtype", dtype)
    checkpoint = sample.read_checkpoint(sample.find_file(windowed))
    weights = {name: w.to(DTYPES[dtype]) for name, w in checkpoint["model"].items()}
    torch.testing.assert_close(safetensors.load_file(path), weights, rtol=0, atol=0)
    with safetensors.safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    assert config == checkpoint["model_config"] | dict(tokenizer="bytes", eot=256)
    assert list(tmp_path.iterdir()) == [path]


def test_int8_file_is_what_int8_makes(windowed, data, tmp_path, capsys):
    path = exported(windowed, "int8", tmp_path / "m.pt", capsys)
    (tmp_path / "text").write_text("some text " * 50)

    def nats(*flags) -> float:
        words = [*map(str, flags), "--perplexity", str(tmp_path / "text")]
        assert run_command(sample.main, words) == 0
        return float(capsys.readouterr().out.splitlines()[2].split()[4])

    rounded, plain = nats(path), nats(windowed)
    assert nats(windowed, "--int8") == rounded == nats(path, "--int8")
    again = [str(path), "--to", "safetensors", "--out", str(tmp_path / "again")]
    assert run_command(export.main, again) == 2
    assert "m.pt is in int8; give the run that it was made from" in capsys.readouterr().err
    assert plain != rounded == pytest.approx(plain, rel=0.01)
    said = refusal(tiny_run, tmp_path / "run", init_from=path, data=data)
    assert "does not fit this model" in said
    assert path.stat().st_size < sample.find_file(windowed).stat().st_size / 4


def test_weights_are_exported_without_their_tokenizer(plain, tmp_path, capsys):
    torch.save(final(plain) | dict(tokenizer="mine"), tmp_path / "ckpt_1.pt")
    exported(tmp_path / "ckpt_1.pt", "int8", tmp_path / "m.pt", capsys)


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
    (inputs,), (outputs,) = session.get_inputs(), session.get_outputs()
    assert [inputs.name, *inputs.shape, outputs.name] == ["idx", "batch", "time", "logits"]
    for idx, logits in expected:
        (got,) = session.run(None, {"idx": idx.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), logits, rtol=0, atol=1e-3)


def for_transformers(folder: Path, data: Path, masked: bool) -> None:
    """Leave in the folder an exported model, and what it must give."""
    flags = dict(window="SL:5", ngram=3, ngram_rows=50, max_steps=3, eval_tokens=512)
    tiny_run(folder / "run", data=data, **flags, doc_mask=masked)
    path = sample.find_file(folder / "run")
    assert run_command(export.main, [str(path), "--to", "hf", "--out", str(folder / "hf")]) == 0
    model, tokenizer = sample.load(path, "cpu", "fp32")
    assert model.eot == (256 if masked else None)
    idx = torch.randint(257, (3, 32), generator=torch.Generator().manual_seed(0))
    idx[:, ::9] = 256
    texts, prompt = ["abc d", "", "é\n\n  x12345 don't<"], torch.tensor([256, *b"ab"])
    steps = generate(model, prompt[None], n_tokens=50, vocab_size=257, temperature=0)
    drawn = [int(token) for token in steps]  # beyond the context of 32
    expected = [
        idx,
        model(idx)[..., :257],
        texts,
        [tokenizer.encode(text).tolist() for text in texts],
        drawn,
    ]
    torch.save(expected, folder / "expected.pt")


IN_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def check(folder):
    trusted = dict(pretrained_model_name_or_path=folder + "/hf", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(**trusted)
    tokenizer = AutoTokenizer.from_pretrained(**trusted)
    idx, logits, texts, tokens, drawn = torch.load(folder + "/expected.pt")
    close = dict(rtol=0, atol=1e-4)
    torch.testing.assert_close(model(idx).logits, logits, **close)
    for kwargs in (dict(output_attentions=True), dict(past_key_values=[])):
        try:
            raise SystemError(model(idx, **kwargs))
        except ValueError as error:
            assert str(error) == f"this model does not support {min(kwargs)}; remove it"
    assert model.generation_config.do_sample and model.generation_config.min_p == 0.05
    assert [tokenizer(text).input_ids for text in texts] == [[256, *ids] for ids in tokens]
    assert [tokenizer.decode(ids) for ids in tokens] == texts
    more = dict(max_new_tokens=50, do_sample=False)
    both = tokenizer(["ab", "a longer text"], return_tensors="pt", padding=True)
    made = model.generate(**both, **more)
    new = made[0, both.input_ids.size(1) :].tolist()
    new = new[: new.index(256) + 1] if 256 in new else new
    assert new == (drawn[: drawn.index(256) + 1] if 256 in drawn else drawn), (new, drawn)
    alone = [model(row[None, :n]).logits for row, n in zip(idx, (32, 20, 9))]
    for side in ("right", "left"):
        rows, seen = torch.full((3, 32), 256), torch.zeros(3, 32, dtype=torch.int64)
        for i, n in enumerate((32, 20, 9)):
            part = slice(32 - n, 32) if side == "left" else slice(n)
            rows[i, part], seen[i, part] = idx[i, :n], 1
        padded = model(rows, attention_mask=seen).logits
        for row, mask, one in zip(padded, seen, alone):
            torch.testing.assert_close(row[mask > 0], one[0], **close)
    # Two texts in a row do not see each other
    packed = torch.cat((idx[0, :20], idx[1, :9]))[None]
    starts = torch.cat((torch.arange(20), torch.arange(9)))[None]
    both = torch.cat([model(row[None]).logits[0] for row in (idx[0, :20], idx[1, :9])])
    torch.testing.assert_close(model(packed, position_ids=starts).logits[0], both, **close)
    # The loss is a mean; parts of a batch, padded or not, add up to that of the batch
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], idx[0, 1:])
    torch.testing.assert_close(model(idx[:1], labels=idx[:1]).loss, loss, **close)
    batch = dict(input_ids=rows, attention_mask=seen, labels=rows.masked_fill(seen == 0, -100))
    n_items, whole = (batch["labels"][:, 1:] != -100).sum(), 0
    for i, n in enumerate((32, 20, 9)):
        row = idx[i : i + 1, :n]
        whole = whole + model(row, labels=row, num_items_in_batch=n_items).loss
    torch.testing.assert_close(whole, model(**batch).loss, **close)

for folder in sys.argv[1:]:
    check(folder)
assert not {"model", "ops", "train_gpt"} & {name.split(".")[0] for name in sys.modules}
"""


def test_transformers_has_the_same_logits_and_draws_the_same(data, tmp_path):
    pytest.importorskip("transformers")
    for_transformers(tmp_path / "plain", data, masked=False)
    for_transformers(tmp_path / "masked", data, masked=True)
    env = os.environ | dict(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    done = run_python("-c", IN_TRANSFORMERS, tmp_path / "plain", tmp_path / "masked", env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["gpt2", "bpe"])
def test_transformers_has_the_same_tokens(kind, gpt2):
    pytest.importorskip("transformers")
    own = gpt2 if kind == "gpt2" else get_tokenizer("bpe", PYTHON_VOCABULARY.read_text())
    draw, theirs = random.Random(0), export.hf_tokenizer(own, 32)
    parts = [*"def| the|é|漢字|🙂| |  |\n|\t|\r\n|'ll|1234|__|...|\u00a0|import".split("|")]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=20))
        assert theirs(text).input_ids == [own.eot, *own.encode(text).tolist()], text
        assert theirs(text, add_special_tokens=False).input_ids == own.encode(text).tolist()
        assert theirs.decode(own.encode(text).tolist()) == text
    assert theirs.eos_token_id == own.eot and len(theirs) == own.vocab_size


def test_an_edit_of_the_model_alone_is_not_exported_to_transformers(
    windowed, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("transformers")
    command = [str(windowed), "--to", "hf", "--out", str(tmp_path / "hf")]
    differs = "modeling_gpt.py and model.py give different logits"
    monkeypatch.setattr(model_module, "leaky_relu_squared", torch.relu)
    assert run_command(export.main, command) == 2 and differs in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_said(windowed, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for flags, says in (
        ("int8 --out there", "there exists already"),
        ("int8 --out m --dtype bf16", "--dtype bf16 is for --to safetensors"),
        ("safetensors --out m", "which is not installed; pip install safetensors"),
    ):
        monkeypatch.chdir(tmp_path)
        assert run_command(export.main, [str(windowed), "--to", *flags.split()]) == 2
        assert says in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1
