"""Export a run's model:
`python export.py [RUN] --to safetensors|int8|torch-export|onnx|hf --out FILE`."""

import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import torch
import torch.nn.functional as F

from common.errors import UserError, run_command
from common.files import atomic_write
from data.tokenizers import Tokenizer, get_tokenizer
from inference.generation import SAMPLING, random_tokens
from inference.int8 import quantize
from model import GPT
from ops.ngrams import rows_of_hashes
from runtime.checkpoint import read_checkpoint
from runtime.device import DTYPES
from runtime.flags import Parser
from sample import RUN_HELP, find_file, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def to_safetensors(model: GPT, checkpoint: dict, out: Path) -> None:
    """Write the weights under the model's parameter names, with metadata.

    "config" is GPTConfig, the tokenizer, and GPT's `eot`, in JSON; "vocabulary" is the text of
    tokenizer.json, empty for GPT-2's tokenizer and bytes.
    """
    from safetensors.torch import save

    config = checkpoint["model_config"] | dict(tokenizer=checkpoint["tokenizer"], eot=model.eot)
    metadata = dict(
        format="pt",
        config=json.dumps(config),
        vocabulary=checkpoint.get("vocabulary") or "",
    )
    # Cloned, because safetensors refuses tied weights
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with atomic_write(out) as file:
        file.write(save(weights, metadata))


def to_int8(model: GPT, checkpoint: dict, out: Path) -> None:
    """Write a checkpoint for sample.py with int8 weights and scales, without optimizer state."""
    weights = dict(quantize(model).state_dict())
    with atomic_write(out) as file:
        torch.save(checkpoint | dict(model=weights, optimizer={}, extra={}), file)


def traced(model: GPT) -> torch.export.ExportedProgram:
    """Trace the forward pass, int64 ids (B, T) to fp32 logits (B, T, vocab_size), for any B and T.

    Raises UserError for a model that cannot be traced.
    """
    table = model.ngrams
    if table is not None:  # ONNX has lookups and sums, not embedding_bag
        n_rows = table.num_embeddings
        table.forward = lambda hashes, *_: F.embedding(
            rows_of_hashes(hashes, n_rows), table.weight
        ).sum(-2)
    seq_len = model.cfg.seq_len
    example = torch.zeros((2, max(2, seq_len // 2)), dtype=torch.int64)
    shape = {
        0: torch.export.Dim("batch", min=1),
        1: torch.export.Dim("time", min=1, max=seq_len),
    }
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # failures print the graph there
            return torch.export.export(model, (example,), dynamic_shapes=dict(idx=shape))
    except Exception as error:  # edited models fail in many ways
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the model cannot be traced ({type(error).__name__}: {first_line}); "
            "export its weights with --to safetensors"
        ) from None


def to_torch_export(model: GPT, checkpoint: dict, out: Path) -> None:
    """Write a program that torch.export.load reads without this repository."""
    content = io.BytesIO()  # in memory first, because PyTorch's writer aborts if a write fails
    torch.export.save(traced(model), content)
    with atomic_write(out) as file:
        file.write(content.getbuffer())


def to_onnx(model: GPT, checkpoint: dict, out: Path) -> None:
    """Write a graph with input "idx" and output "logits", for any batch size and length.

    Weights of 2 GB and more go into a second file beside it.
    """
    program = torch.onnx.export(
        traced(model),
        dynamic_shapes=dict(idx={0: "batch", 1: "time"}),  # their names in the file
        input_names=["idx"],
        output_names=["logits"],
        dynamo=True,
        verbose=False,
    )
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as folder:
        program.save(Path(folder) / out.name)
        # In reverse order: the file of weights, if any, then the graph
        for path in sorted(Path(folder).iterdir(), reverse=True):
            os.replace(path, out.with_name(path.name))


@torch.no_grad()
def to_hf(model: GPT, checkpoint: dict, out: Path) -> None:
    """Write a folder from which Transformers' Auto classes load model and tokenizer.

    They need trust_remote_code=True. Raises UserError if modeling_gpt.py does not compute the same
    logits as the model, for example after an edit of model.py alone.
    """
    from inference.modeling_gpt import TrainGPTConfig, TrainGPTForCausalLM

    tokenizer = get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary"))
    vocab_size, eot = tokenizer.vocab_size, tokenizer.eot
    config = checkpoint["model_config"] | dict(
        vocab_size=vocab_size,  # without the head's padding
        eot=model.eot,
        windows=[window or model.cfg.seq_len for window in model.windows],
        skips=model.cfg.skips,
        bos_token_id=eot,
        eos_token_id=eot,
        pad_token_id=eot,
    )
    del config["version"]
    hf_model = TrainGPTForCausalLM(TrainGPTConfig(**config)).eval()
    # As sample.py, but for --dry_multiplier, which Transformers lacks
    options = {name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    hf_model.generation_config.update(do_sample=True, **options)
    weights = model.state_dict()
    for name in ("wte.weight", "value_embed.weight", "head.weight"):
        weights[name] = weights[name][:vocab_size]
    idx = random_tokens(model, 2, model.cfg.seq_len) % vocab_size
    try:
        hf_model.load_state_dict(weights)
        logits = model(idx)[..., :vocab_size]
        torch.testing.assert_close(hf_model(idx).logits, logits, rtol=0, atol=1e-3)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            "modeling_gpt.py and model.py give different logits "
            f"({' '.join(str(error).split())[:300]}); apply the same edit to both"
        ) from None

    TrainGPTConfig.register_for_auto_class()
    TrainGPTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tmp-") as folder:
        written = Path(folder, "hf")
        hf_model.save_pretrained(written)
        if not tokenizer.name.startswith("integers"):
            hf_tokenizer(tokenizer, model.cfg.seq_len).save_pretrained(written)
        os.rename(written, out)


def hf_tokenizer(tokenizer: Tokenizer, seq_len: int) -> "PreTrainedTokenizerFast":
    """Convert a tokenizer to one of Transformers that gives the same tokens.

    The text "<|endoftext|>" is converted to that token, and every text begins with it, as in
    sample.py.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter()
    if tokenizer.name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    else:
        ranks = tokenizer.tiktoken._mergeable_ranks
        converter.pattern = tokenizer.tiktoken._pat_str
    converter.load_tiktoken_bpe = lambda _: ranks  # instead of reading a file
    bpe = converter.converted()
    eot = "<|endoftext|>"
    bpe.post_processor = TemplateProcessing(
        single=[eot, "$A"], special_tokens=[(eot, tokenizer.eot)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=eot,
        eos_token=eot,
        pad_token=eot,
        padding_side="left",
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
    )


GRAPH = 'input "idx" int64 (batch, time), output "logits" fp32 (batch, time, vocabulary)'
FORMATS = {  # how to write it, and what is in it
    "safetensors": (to_safetensors, 'with "config" and "vocabulary" in its metadata'),
    "int8": (to_int8, "for sample.py"),
    "torch-export": (to_torch_export, GRAPH),
    "onnx": (to_onnx, GRAPH),
    "hf": (to_hf, "for transformers, with trust_remote_code=True"),
}


def export(path: Path, kind: str, out: Path, dtype: str = "fp32") -> None:
    """Write the model of a checkpoint file in this format. Raises UserError."""
    if out.exists():
        raise UserError(f"{out} exists already; give a different --out, or delete it")
    if dtype != "fp32" and kind != "safetensors":
        raise UserError(f"--dtype {dtype} is for --to safetensors; remove it")
    checkpoint = read_checkpoint(path)
    model = load_model(checkpoint, path, "cpu", "fp32")
    if hasattr(model.wte, "weight_int8"):
        raise UserError(f"{path} is in int8; give the run that it was made from")
    out.parent.mkdir(parents=True, exist_ok=True)
    # The exporters print warnings about their own packages
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    write, content = FORMATS[kind]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(model.to(DTYPES[dtype]), checkpoint, out)
    except ImportError as error:
        raise UserError(
            f"--to {kind} needs {error.name}, which is not installed; pip install {error.name}"
        ) from None
    print(f"{path} -> {out}: {kind}, {content}")


def main(argv: list[str]) -> None:
    """Run the export that the command line describes."""
    parser = Parser("export.py", description=__doc__)
    add = parser.add_argument
    add("run", nargs="?", default="", metavar="RUN", help=RUN_HELP)
    add("--to", required=True, choices=FORMATS, help="output format; graphs are in fp32")
    add(
        "--out",
        required=True,
        metavar="FILE",
        help="file (hf: folder) to write; must not exist yet",
    )
    add("--dtype", default="fp32", choices=DTYPES, help="of the weights, for safetensors [fp32]")
    add("--best", action="store_true", help="use the best evaluation's weights, not the newest")
    args = parser.read(argv)
    export(find_file(args.run, args.best), args.to, Path(args.out), args.dtype)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
