"""Export a run's model: `python export.py RUN --to safetensors|int8|torch-export|onnx --out FILE`."""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch
import torch.nn.functional as F
from torch import Tensor

from data.shards import atomic_write
from data.tokenizers import VOCABULARY_FILE
from generation import some_tokens
from int8 import quantize
from model import GPT, GPTConfig, NgramEmbedding
from runtime.checkpoint import as_evaluated, load_weights, model_config, read_checkpoint
from runtime.errors import UserError, report_error
from sample import find_file

PACKAGES = {"safetensors": ["safetensors"], "onnx": ["onnx", "onnxscript"]}


def to_safetensors(model: GPT, checkpoint: dict, out: Path) -> None:
    """The fp32 weights under the model's parameter names, and config.json with shape and tokenizer beside them."""
    from safetensors.torch import save

    config = dict(model_type="gpt", **checkpoint["model_config"], tokenizer=checkpoint["tokenizer"])
    if checkpoint.get("vocabulary"):
        out.with_name(VOCABULARY_FILE).write_bytes(checkpoint["vocabulary"].encode("utf-8"))
    with atomic_write(out) as file:
        weights = {name: t.clone() for name, t in model.state_dict().items()}  # of tied ones too
        file.write(save(weights, {"format": "pt"}))
        with atomic_write(out.with_name("config.json")) as beside:  # if it fails, the weights do not appear either
            beside.write(json.dumps(config, indent=2).encode() + b"\n")


def to_int8(model: GPT, checkpoint: dict, out: Path) -> None:
    """A checkpoint of int8 weights and their scales, without optimizer state, for sample.py."""
    checkpoint = checkpoint | dict(model=dict(quantize(model).state_dict()), optimizer={})
    with atomic_write(out) as file:
        torch.save(checkpoint, file)


def sum_of_rows(table: NgramEmbedding, rows: Tensor, weights: None) -> Tensor:
    """The table's forward pass in operations that ONNX has."""
    return F.embedding(rows, table.weight).sum(1)


def traced(model: GPT) -> torch.export.ExportedProgram:
    """The forward pass from int64 ids (batch, length) to fp32 logits (batch, length, vocab_size), of any such shape."""
    if model.ngrams is not None:
        model.ngrams.forward = types.MethodType(sum_of_rows, model.ngrams)
    length = torch.export.Dim("length", min=1, max=model.cfg.seq_len)
    example = torch.zeros((2, max(2, model.cfg.seq_len // 2)), dtype=torch.int64)
    shapes = dict(idx={0: torch.export.Dim("batch", min=1), 1: length})
    other = "export the weights, --to safetensors"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    except Exception as error:  # of many kinds: an edit may not be traceable
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(f"the model cannot be traced into a graph ({reason}); {other}") from None
    idx = some_tokens(model, 3, model.cfg.seq_len)
    if not torch.allclose(program.module()(idx), model(idx), rtol=1e-3, atol=1e-3):
        raise UserError(f"the traced graph's logits differ from the model's, so it lacks part of the model; {other}")
    return program


def to_torch_export(model: GPT, checkpoint: dict, out: Path) -> None:
    """A program that torch.export.load reads without this repository."""
    content = io.BytesIO()  # in memory first: PyTorch's own writer aborts when a write fails
    torch.export.save(traced(model), content)
    with atomic_write(out) as file:
        file.write(content.getbuffer())


def to_onnx(model: GPT, checkpoint: dict, out: Path) -> None:
    """A graph with input "idx" and output "logits", of any batch and length; weights of 2 GB and more lie beside it."""
    program = torch.onnx.export(traced(model), input_names=["idx"], output_names=["logits"], dynamo=True, verbose=False)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as folder:
        program.save(Path(folder) / out.name)
        for path in sorted(Path(folder).iterdir(), reverse=True):  # the weights, if they are apart, and then the graph
            os.replace(path, out.with_name(path.name))


FORMATS = {"safetensors": to_safetensors, "int8": to_int8, "torch-export": to_torch_export, "onnx": to_onnx}


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake."""
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint file")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format; graphs are in fp32")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write; must not exist yet")
    parser.add_argument("--best", action="store_true", help="the weights of the best evaluation, not the newest")
    args = parser.parse_args(argv)
    try:
        for package in PACKAGES.get(args.to, []):
            if importlib.util.find_spec(package) is None:
                needed = " ".join(PACKAGES[args.to])
                raise UserError(f"--to {args.to} needs {package}, which is not installed; pip install {needed}")
        path, out = find_file(args.run, args.best), Path(args.out)
        if not out.name:
            raise UserError(f"--out is {args.out!r}; expected the name of a file")
        beside = dict(safetensors=["config.json"], onnx=[f"{out.name}.data"]).get(args.to, [])
        for there in filter(Path.exists, (out, *map(out.with_name, beside))):
            raise UserError(f"{there} is there already; give another --out, or delete it")
        if out.name in beside:
            raise UserError("--out is config.json, which is written beside the weights; give them another name")
        if args.to == "torch-export" and out.suffix != ".pt2":
            raise UserError(f"--out is {out}, and torch.export.load reads .pt2 files only; give it that ending")
        if not out.parent.is_dir():
            raise UserError(f"there is no folder {out.parent}; make it, or give another --out")
        checkpoint = as_evaluated(read_checkpoint(path))
        model = GPT(model_config(checkpoint, GPTConfig, path)).eval()
        load_weights(model, checkpoint, path)
        model.requires_grad_(False)
        count = sum(p.numel() for p in model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own, as the log of packages that nothing here needs
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            FORMATS[args.to](model, checkpoint, out)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        return report_error(error)
    print(f"{path} -> {out}: {args.to}, {out.stat().st_size:,} bytes ({count:,} parameters)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
