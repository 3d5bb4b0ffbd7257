"""Export a run's model: `python export.py RUN --to safetensors|int8|torch-export|onnx|hf --out FILE`."""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch
import torch.nn.functional as F

from common import UserError, atomic_write, report_error
from data.tokenizers import VOCABULARY_FILE, Tokenizer, bytes_of_letters, get_tokenizer
from inference.generation import random_tokens
from inference.int8 import quantize
from model import GPT, GPTConfig
from runtime.checkpoint import load_weights, model_config, read_checkpoint, with_eval_weights
from sample import find_file

PACKAGES = {"safetensors": ["safetensors"], "onnx": ["onnx", "onnxscript"], "hf": ["transformers"]}


def to_safetensors(model: GPT, checkpoint: dict, out: Path) -> None:
    """The fp32 weights under the model's parameter names, and config.json with shape and tokenizer beside them."""
    from safetensors.torch import save

    if checkpoint.get("vocabulary"):
        out.with_name(VOCABULARY_FILE).write_bytes(checkpoint["vocabulary"].encode("utf-8"))
    config = dict(model_type="gpt", **checkpoint["model_config"], tokenizer=checkpoint["tokenizer"])
    out.with_name("config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name: tensor.clone() for name, tensor in model.state_dict().items()
    }  # of tied ones too
    with atomic_write(out) as file:
        file.write(save(weights, {"format": "pt"}))


def to_int8(model: GPT, checkpoint: dict, out: Path) -> None:
    """A checkpoint of int8 weights and their scales, without optimizer state, for sample.py."""
    with atomic_write(out) as file:
        torch.save(
            checkpoint | dict(model=dict(quantize(model).state_dict()), optimizer={}, extra={}),
            file,
        )


def traced(model: GPT) -> torch.export.ExportedProgram:
    """The forward pass from int64 ids (batch, length) to fp32 logits (batch, length, vocab_size), of any such shape."""
    if (table := model.ngrams) is not None:
        table.forward = lambda rows, weights: F.embedding(rows, table.weight).sum(
            1
        )  # which ONNX has
    example = torch.zeros((2, max(2, model.cfg.seq_len // 2)), dtype=torch.int64)
    shape = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("length", min=1, max=model.cfg.seq_len),
    }
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where a failure prints the graph
            return torch.export.export(model, (example,), dynamic_shapes=dict(idx=shape))
    except Exception as error:  # of many kinds: an edit may not be traceable
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            f"the model cannot be traced ({reason}); export its weights, --to safetensors"
        ) from None


def to_torch_export(model: GPT, checkpoint: dict, out: Path) -> None:
    """A program that torch.export.load reads without this repository."""
    content = io.BytesIO()  # in memory first: PyTorch's own writer aborts when a write fails
    torch.export.save(traced(model), content)
    with atomic_write(out) as file:
        file.write(content.getbuffer())


def to_onnx(model: GPT, checkpoint: dict, out: Path) -> None:
    """A graph with input "idx" and output "logits", of any batch and length; weights of 2 GB and more lie beside it."""
    names = dict(input_names=["idx"], output_names=["logits"])
    program = torch.onnx.export(traced(model), **names, dynamo=True, verbose=False)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as folder:
        program.save(Path(folder) / out.name)
        for path in sorted(
            Path(folder).iterdir(), reverse=True
        ):  # the weights, if they are apart, and then the graph
            os.replace(path, out.with_name(path.name))


@torch.no_grad()
def to_hf(model: GPT, checkpoint: dict, out: Path) -> None:
    """A folder for transformers: its Auto classes load model and tokenizer, with trust_remote_code=True.

    Raises UserError where modeling_gpt.py does not give the model's logits, as after an edit of model.py alone.
    """
    from inference.modeling_gpt import TrainGPTConfig, TrainGPTForCausalLM

    own, shape = (
        get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary")),
        dict(checkpoint["model_config"]),
    )
    model.doc_eot = own.eot if checkpoint["config"].get("doc_mask") else None
    shape |= dict(vocab_size=own.vocab_size, doc_eot=model.doc_eot)  # without the head's padding
    del shape["version"]
    special = dict(bos_token_id=own.eot, eos_token_id=own.eot, pad_token_id=own.eot)
    theirs = TrainGPTForCausalLM(TrainGPTConfig(**shape, **special)).eval()
    padded = ("wte.weight", "value_embed.weight", "head.weight")
    weights = model.state_dict()
    weights |= {name: weights[name][: own.vocab_size] for name in padded}
    idx = random_tokens(model, 2, model.cfg.seq_len) % own.vocab_size
    try:
        theirs.load_state_dict(weights)
        torch.testing.assert_close(
            theirs(idx).logits, model(idx)[..., : own.vocab_size], rtol=0, atol=1e-3
        )
    except (RuntimeError, AssertionError) as error:
        wrong = str(error).strip().partition("\n")[0]
        raise UserError(
            f"modeling_gpt.py does not compute what model.py does ({wrong}); edit it alike"
        ) from None
    TrainGPTConfig.register_for_auto_class()
    TrainGPTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as folder:
        theirs.save_pretrained(made := Path(folder, out.name))
        if not own.name.startswith("integers"):
            hf_tokenizer(own, model.cfg.seq_len).save_pretrained(made)
        os.rename(made, out)


def hf_tokenizer(own: Tokenizer, seq_len: int):
    """A tokenizer of transformers that makes the same tokens; the text "<|endoftext|>" becomes that token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {byte: letter for letter, byte in bytes_of_letters().items()}
    ranks, split = {bytes([byte]): byte for byte in range(256)}, []
    if own.name != "bytes":
        ranks, split = (
            own.tiktoken._mergeable_ranks,
            [pre_tokenizers.Split(Regex(own.tiktoken._pat_str), "isolated")],
        )
    vocab, merges = {raw: "".join(letters[byte] for byte in raw) for raw in ranks}, []
    for raw in sorted(
        ranks, key=ranks.get
    ):  # every way to make a token, in the order of tokens, which is tiktoken's
        pairs = [
            (raw[:i], raw[i:]) for i in range(1, len(raw)) if raw[:i] in ranks and raw[i:] in ranks
        ]
        merges += [
            (vocab[a], vocab[b])
            for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    bpe = Tokenizer(models.BPE({vocab[raw]: rank for raw, rank in ranks.items()}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.Sequence([*split, byte_level]),
        decoders.ByteLevel(),
    )
    end = "<|endoftext|>"  # begins every text, as in sample.py
    bpe.post_processor = processors.TemplateProcessing(
        single=[end, "$A"], special_tokens=[(end, own.eot)]
    )
    special = dict(
        bos_token=end, eos_token=end, pad_token=end, padding_side="left", model_max_length=seq_len
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, **special
    )


FORMATS = {
    "safetensors": to_safetensors,
    "int8": to_int8,
    "torch-export": to_torch_export,
    "onnx": to_onnx,
    "hf": to_hf,
}


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake."""
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint file")
    parser.add_argument(
        "--to", required=True, choices=FORMATS, help="the format; graphs are in fp32"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the file (hf: folder) to write; must not exist yet",
    )
    parser.add_argument(
        "--best", action="store_true", help="the weights of the best evaluation, not the newest"
    )
    args = parser.parse_args(argv)
    try:
        for package in PACKAGES.get(args.to, []):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"--to {args.to} needs {package}, which is not installed; pip install {package}"
                )
        path, out = find_file(args.run, args.best), Path(args.out)
        beside = dict(safetensors=["config.json", VOCABULARY_FILE], onnx=[f"{out.name}.data"]).get(
            args.to, []
        )
        if there := [
            str(path) for path in (out, *(out.parent / name for name in beside)) if path.exists()
        ]:
            raise UserError(f"{there[0]} is there already; give another --out, or delete it")
        if out.name in beside:
            raise UserError(
                f"--out is {out.name}, which is written beside the weights; give them another name"
            )
        if args.to == "torch-export" and out.suffix != ".pt2":
            raise UserError(
                f"--out is {out}, and torch.export.load reads .pt2 files only; give it that ending"
            )
        checkpoint = with_eval_weights(read_checkpoint(path))
        model = GPT(model_config(checkpoint, GPTConfig, path))
        load_weights(model, checkpoint, path)
        count = sum(p.numel() for p in model.parameters())
        out.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the exporters' own, as the log of packages that nothing here needs
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            FORMATS[args.to](model.freeze(), checkpoint, out)
    except Exception as error:
        return report_error(error)
    size = sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))
    print(f"{path} -> {out}: {args.to}, {size:,} bytes ({count:,} parameters)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
