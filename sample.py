"""Sample text from a checkpoint, or evaluate it: `python sample.py [RUN] [--prompt TEXT ...]`, or
with `--perplexity FILE` or `--choices FILE.jsonl`."""

import argparse
import codecs
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime import set_environment

if __name__ == "__main__":
    set_environment(decoding=True)

import torch

from common.errors import UserError, discard_output, run_command
from common.values import printable
from data.tokenizers import Tokenizer, get_tokenizer
from inference.decode import compile_decode_step
from inference.evaluation import Table, answer_choices, perplexity
from inference.generation import (
    NO_CACHE,
    SAMPLING,
    cache_is_exact,
    freeze,
    generate,
    tokens_to_cpu,
)
from inference.int8 import quantize
from model import GPT
from runtime.checkpoint import (
    BEST,
    document_token,
    list_checkpoints,
    load_weights,
    model_config,
    read_checkpoint,
    with_eval_weights,
)
from runtime.device import DTYPES, faster_dtype, select_device
from runtime.flag_checks import check_compiler
from runtime.flags import Parser

RUN_HELP = "folder of a run, or a checkpoint file; default: the newest run of runs/"


def find_file(run: str | Path, best: bool = False) -> Path:
    """Return the checkpoint file to load: `run` itself, or the newest or best one in this folder.

    An empty `run` is that of the newest checkpoint in runs/. Raises UserError.
    """
    path = Path(run)
    if not run:
        files = list(Path("runs").rglob("ckpt_*.pt"))
        path = max(files, key=lambda file: file.stat().st_mtime, default=Path("runs/RUN")).parent
        print(f"the newest run is {path}", file=sys.stderr)
    if path.is_file():
        if best:
            raise UserError(f"{path} is a file, but --best is for a run's folder; remove --best")
        return path
    name = BEST if best else "checkpoint"
    found = [] if best else list_checkpoints(path)
    found += path.glob(BEST)
    if not found:
        raise UserError(
            f"there is no {name} in {path}; give the folder of a run that has saved one, or a "
            "checkpoint file"
        )
    return found[0]


def load(
    path: Path, device_name: str = "auto", dtype_name: str = "auto", int8: bool = False
) -> tuple[GPT, Tokenizer]:
    """Load the model of a checkpoint file for inference, and its tokenizer.

    The file may also be from `export.py --to int8`. Raises UserError.
    """
    checkpoint = read_checkpoint(path)
    model = load_model(checkpoint, path, device_name, dtype_name, int8)
    return model, get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary"))


def load_model(
    checkpoint: dict[str, Any], path: Path, device_name: str, dtype_name: str, int8: bool = False
) -> GPT:
    """Make the model of a checkpoint, which was read from `path`. Raises UserError."""
    device = select_device(device_name)
    cfg = model_config(checkpoint, path)
    trained_in = checkpoint["config"].get("dtype")
    dtype = DTYPES[faster_dtype(dtype_name, device, cfg.n_embd, trained_in)]
    with torch.device(device):
        model = GPT(cfg, dtype, loss_chunk=2048, eot=document_token(checkpoint), seed=None)
        if any(name.endswith("_int8") for name in checkpoint["model"]):
            quantize(model)
    load_weights(model, with_eval_weights(checkpoint), path)
    if int8:
        quantize(model)
    return freeze(model)


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser("sample.py", usage="sample.py [RUN] [options]", description=__doc__)
    add = parser.add_argument
    add("run", nargs="?", default="", metavar="RUN", help=RUN_HELP)
    add("--best", action="store_true", help="use the best evaluation's weights, not the newest")
    add_mode = parser.add_mutually_exclusive_group().add_argument
    add_mode(
        "--prompt", nargs="+", default=[""], help="texts to continue; empty starts a new document"
    )
    add_mode(
        "--interactive",
        nargs="?",
        const="",
        metavar="END",
        help="continue each typed line, with END appended, such as $'\\n' after questions",
    )
    add_mode(
        "--perplexity",
        metavar="FILE",
        help="print this text file's perplexity instead of sampling",
    )
    add_mode(
        "--choices",
        metavar="FILE",
        help="print the accuracy on these questions, such as those of data/prepare.py hellaswag",
    )
    add(
        "--stride",
        type=int,
        default=0,
        help="step of --perplexity's windows, in tokens; 0: context length, fastest [0]",
    )
    add("--num_samples", type=int, default=1, help="samples per prompt, generated 32 at a time [1]")
    add("--max_new_tokens", type=int, default=500, help="length of each sample, in tokens [500]")
    add("--stop", default="", metavar="TEXT", help="end each sample before this text")
    sampling = {
        "temperature": "0: greedy decoding, without the options below",
        "top_k": "sample from the k most likely tokens; 0: all",
        "top_p": "nucleus sampling: total probability to keep",
        "min_p": "smallest probability to keep, relative to the largest",
        "dry_multiplier": "penalty of tokens that lengthen a repeat (DRY); 0 disables",
    }
    for name, text in sampling.items():
        default = SAMPLING[name]
        add(f"--{name}", type=type(default), default=default, help=f"{text} [{default}]")
    add(
        "--seed",
        type=int,
        default=0,
        help="equal seeds: equal texts (on one machine, in one dtype) [0]",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="[auto]")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="auto: as in training, if supported [auto]",
    )
    add(
        "--int8",
        action="store_true",
        help="weights in int8; on a CPU without --compile, activations in bf16 too",
    )
    add("--compile", action="store_true", help="compile the decode step; pays off for long texts")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for invalid values."""
    least = dict(num_samples=1, max_new_tokens=1)
    most = dict(top_p=1, min_p=1)
    for name in ("num_samples", "max_new_tokens", "stride", "seed", *SAMPLING):
        value = getattr(args, name)
        low = least.get(name, 0)
        high = most.get(name, 2**31 - 1)
        if not low <= value <= high:
            raise UserError(f"--{name} is {value}; expected {low} to {high}")
    for text in (*args.prompt[1:], args.interactive or ""):
        is_run = os.path.exists(text) and (
            text.endswith(".pt") or any(Path(text).glob("ckpt_*.pt"))
        )
        if is_run and not args.run:
            raise UserError(
                f"{text} is read as text, because it follows --prompt or --interactive; give the "
                "RUN before them"
            )


def displayed(text: str) -> str:
    """Return the text to print, on a terminal without control characters."""
    return printable(text) if os.isatty(1) else text


class Sample:
    """The continuation of a prompt, while it is being generated."""

    def __init__(self) -> None:
        self.text = ""
        self.n_taken = 0
        self.ended = False
        # Holds bytes back until their character is complete
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, raw: bytes, stop: str) -> None:
        """Append a token's bytes. A stop text ends the sample before it."""
        self.text += self.decoder.decode(raw)
        if stop and stop in self.text:
            self.text = self.text.partition(stop)[0]
            self.ended = True

    def take(self, stop: str = "") -> str:
        """Return the text since the last call, without an end that may begin a stop text."""
        n_held = 0
        if not self.ended:
            n_held = max(n for n in range(len(stop) + 1) if self.text.endswith(stop[:n]))
        first, self.n_taken = self.n_taken, len(self.text) - n_held
        return self.text[first : self.n_taken]


def print_samples(
    prompt: str,
    seeds: range,
    model: GPT,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    decoding: dict,
) -> None:
    """Print continuations of a prompt, one per seed; a single one while it is being generated.

    Then print tokens and speed to stderr. decoding: the use_cache and step of generate().
    """
    tokens = tokenizer.encode(prompt).tolist()
    context = model.cfg.seq_len
    if len(tokens) > context:
        print(
            f"the prompt has {len(tokens):,} tokens; the model reads the final {context:,}, "
            "its context length",
            file=sys.stderr,
        )
    steps = generate(
        model,
        torch.tensor([[tokenizer.eot, *tokens]] * len(seeds)),
        n_tokens=args.max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        seeds=seeds,
        **decoding,
        **{name: getattr(args, name) for name in SAMPLING},
    )
    is_single = args.num_samples == 1
    if is_single:
        print(displayed(prompt), end="", flush=True)
    samples = [Sample() for _ in seeds]
    n_tokens = 0
    start = time.perf_counter()
    for i, step_tokens in enumerate(tokens_to_cpu(steps)):
        for sample, token in zip(samples, step_tokens):
            sample.ended |= token == tokenizer.eot
            if not sample.ended:
                n_tokens += 1
                sample.append(tokenizer.decode_bytes([token]), args.stop)
                if is_single:
                    print(displayed(sample.take(args.stop)), end="", flush=True)
        if i == 1:  # the first step has read the prompt, the second one may have compiled
            start = time.perf_counter()
        if all(sample.ended for sample in samples):
            break
    tokens_per_s = len(seeds) * max(0, i - 1) / (time.perf_counter() - start)

    for seed, sample in zip(seeds, samples):
        if is_single:
            print(displayed(sample.take()))
        else:
            print(f"--- seed {seed}\n{displayed(prompt + sample.text)}")
    speed = f"{tokens_per_s:,.0f} tokens/s from the third on"
    print(f"({n_tokens:,} tokens, {speed})", file=sys.stderr)


def typed_lines(end: str) -> Iterator[str]:
    """Yield each typed line, with this end, until Ctrl-D."""
    print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin or []:  # None if it is closed
        yield line.removesuffix("\n") + end
        print("> ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def print_table(title: str, table: Table) -> None:
    """Print a table of evaluation.py."""
    columns = list(next(iter(table.values())))
    print(title)
    print(" " * 16 + "".join(f"{column:>16}" for column in columns))
    for name, row in table.items():
        forms = [">16," if isinstance(value, int) else ">16,.6g" for value in row.values()]
        print(f"{name:16}" + "".join(map(format, row.values(), forms)))


def run(args: argparse.Namespace) -> None:
    """Load the model, and print perplexity, accuracy or samples."""
    path = find_file(args.run, args.best)
    model, tokenizer = load(path, args.device, args.dtype, args.int8)
    if args.perplexity is not None:
        stride = args.stride or model.cfg.seq_len
        table = perplexity(model, tokenizer, Path(args.perplexity), stride)
        return print_table(args.perplexity, table)
    if args.choices is not None:
        return print_table(args.choices, answer_choices(model, tokenizer, Path(args.choices)))

    decoding: dict[str, Any] = dict(use_cache=cache_is_exact(model))
    if not decoding["use_cache"]:
        print(NO_CACHE, file=sys.stderr)
    elif args.compile:
        check_compiler(model.device)
        decoding["step"] = compile_decode_step(model)
    prompts = args.prompt if args.interactive is None else typed_lines(args.interactive)
    seeds = range(args.seed, args.seed + args.num_samples)
    for prompt in prompts:
        for first in range(0, len(seeds), 32):
            batch = seeds[first : first + 32]
            print_samples(prompt, batch, model, tokenizer, args, decoding)


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit code."""
    args = make_parser().read(argv)
    try:
        check_arguments(args)
        run(args)
        print(end="", flush=True)  # a closed pipe may only be noticed here
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        discard_output(1)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
