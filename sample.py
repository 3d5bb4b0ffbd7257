"""Sample text from a checkpoint, or evaluate it: `python sample.py --run DIR|CKPT
[--prompt TEXT ...]`, or with `--perplexity FILE` or `--choices FILE.jsonl`."""

import argparse
import codecs
import os
import sys
import time
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment(decoding=True)

import torch

from common.errors import UserError, discard_output, run_command
from common.values import printable
from data.tokenizers import Tokenizer, get_tokenizer
from inference.evaluation import print_choices, print_perplexity
from inference.generation import (
    check_cache,
    compile_decode_step,
    freeze,
    generate,
    tokens_to_cpu,
)
from inference.int8 import quantize
from model import GPT, GPTConfig
from runtime.checkpoint import (
    BEST,
    document_token,
    list_checkpoints,
    load_weights,
    model_config,
    read_checkpoint,
    with_eval_weights,
)
from runtime.device import peak_memory_mb, select_device
from runtime.flag_checks import check_compiler
from runtime.speed import DTYPES, sampling_dtype

# For each mode, the flags that have no effect in it
SAMPLING = (
    "prompt interactive num_samples max_new_tokens stop temperature top_k top_p seed no_cache "
    "compile"
)
NO_EFFECT = {
    "perplexity": f"choices {SAMPLING}",
    "choices": SAMPLING,
    "interactive": "prompt",
    "no_cache": "compile",
}


def find_file(run: str | Path, best: bool = False) -> Path:
    """Return the checkpoint file to load: `run` itself, or the newest or best one in this folder.

    Raises UserError.
    """
    path = Path(run)
    if os.path.isfile(path):  # Path.is_file raises an error if the name is too long
        if best:
            raise UserError(f"{path} is a file, but --best is for a run's folder; remove --best")
        return path
    if not os.path.isdir(path):
        raise UserError(f"there is no {path}; give the folder of a run, or a checkpoint file")
    newest = list_checkpoints(path)
    found = list(path.glob(BEST)) if best else newest
    if found:
        return found[0]
    if newest:
        raise UserError(
            f"{path} holds no {BEST}, which is saved by evaluations during a run; remove --best to "
            f"use {newest[0].name}"
        )
    raise UserError(f"{path} holds no ckpt_<step>.pt; give the folder of a run that has saved one")


def load(
    path: str | Path, device_name: str = "auto", dtype_name: str = "auto", int8: bool = False
) -> tuple[GPT, Tokenizer]:
    """Load the model of a checkpoint file for inference, and its tokenizer.

    The file may also be from `export.py --to int8`. Raises UserError.
    """
    checkpoint = read_checkpoint(path)
    device = select_device(device_name)
    cfg = model_config(checkpoint, GPTConfig, path)
    trained_in = checkpoint["config"].get("dtype")
    dtype = DTYPES[sampling_dtype(dtype_name, trained_in, cfg.n_embd, device)]
    with torch.device(device):
        model = GPT(cfg, dtype, loss_chunk=2048, eot=document_token(checkpoint))
        if any(name.endswith("_int8") for name in checkpoint["model"]):
            quantize(model)
    load_weights(model, with_eval_weights(checkpoint), path)
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise UserError(f"{path} holds weights that are not finite; use an earlier checkpoint")
    if int8:
        quantize(model)
    tokenizer = get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary"))
    return freeze(model), tokenizer


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        "sample.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--run",
        required=True,
        help="folder of a run, a checkpoint file, or one from export.py --to int8",
    )
    add("--best", action="store_true", help="use the best evaluation's weights, not the newest")
    add("--prompt", nargs="+", default=[""], help="texts to continue; empty starts a new document")
    add(
        "--interactive",
        nargs="?",
        const="",
        metavar="END",
        help="continue each typed line, with END appended, such as $'\\n' after questions",
    )
    add(
        "--perplexity",
        metavar="FILE",
        help="print this text file's perplexity instead of sampling",
    )
    add(
        "--stride",
        type=int,
        default=0,
        help="step of --perplexity's windows, in tokens; 0 = context length, fastest",
    )
    add(
        "--choices",
        metavar="FILE",
        help="print the accuracy on these questions, such as those of data/prepare.py hellaswag",
    )
    add("--num_samples", type=int, default=1, help="samples per prompt, generated 32 at a time")
    add("--max_new_tokens", type=int, default=500, help="length of each sample, in tokens")
    add("--stop", default="", metavar="TEXT", help="end each sample before this text")
    add("--temperature", type=float, default=0.8, help="0 = greedy decoding")
    add("--top_k", type=int, default=200, help="sample from the k most likely tokens; 0 = all")
    add("--top_p", type=float, default=1.0, help="nucleus sampling: total probability to keep")
    add("--seed", type=int, default=0, help="equal seeds give equal texts")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="auto = as in training, if supported",
    )
    add(
        "--int8",
        action="store_true",
        help="weights in int8; on a CPU without --compile, activations in bf16 too",
    )
    add(
        "--no_cache",
        action="store_true",
        help="re-read the whole context for each token, for comparison",
    )
    add("--compile", action="store_true", help="compile the decode step; pays off for long texts")
    return parser


def check_arguments(args, parser: argparse.ArgumentParser) -> None:
    """Raise UserError for invalid values, and for flags that would have no effect."""
    minimum = dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, stride=0, seed=0)
    for name, least in minimum.items():
        value = getattr(args, name)
        if not least <= value < 2**31:
            raise UserError(f"--{name} is {value}; expected at least {least}, below 2**31")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}; expected more than 0 and at most 1")
    changed = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if "stride" in changed and "perplexity" not in changed:
        raise UserError("--stride is for --perplexity; add that, or remove --stride")
    for mode, names in NO_EFFECT.items():
        unused = changed & set(names.split())
        if mode in changed and unused:
            raise UserError(f"--{min(unused)} has no effect with --{mode}; remove one of them")


class Sample:
    """A text that is being generated: the prompt, and its continuation so far."""

    def __init__(self, prompt: str, seed: int):
        self.prompt = prompt
        self.seed = seed
        self.text = ""
        self.n_printed = 0  # characters of the text
        self.ended = False
        # Holds bytes back until their character is complete
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, raw: bytes, stop: str) -> None:
        """Append a token's bytes. If the text now contains the stop text, end it before that."""
        self.text += self.decoder.decode(raw)
        if stop and stop in self.text:
            self.text = self.text.partition(stop)[0]
            self.decoder.reset()
            self.ended = True

    def stream(self, stop: str) -> None:
        """Print the new text, except for an end that may become the stop text."""
        end = len(self.text) - max(0, len(stop) - 1)
        if end > self.n_printed:
            print(displayed(self.text[self.n_printed : end]), end="", flush=True)
            self.n_printed = end


def displayed(text: str) -> str:
    """Return the text to print, on a terminal without control characters."""
    return printable(text) if os.isatty(1) else text


def complete(samples: list[Sample], model: GPT, tokenizer, args, step, stream: bool) -> str:
    """Generate the samples' texts; return a sentence with the number of tokens, speed and memory.

    step: as in generate. stream: print the text while it is being generated.
    """
    prompts = []
    for sample in samples:
        tokens = [tokenizer.eot, *tokenizer.encode(sample.prompt).tolist()]
        prompts.append(torch.tensor(tokens))
    steps = generate(
        model,
        prompts,
        n_tokens=args.max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seeds=[sample.seed for sample in samples],
        step=step,
        use_cache=not args.no_cache,
    )
    n_tokens = 0
    speed = ""
    for number, step_tokens in enumerate(tokens_to_cpu(steps), 1):
        for sample, token in zip(samples, step_tokens):
            if token == tokenizer.eot:
                sample.ended = True
            if not sample.ended:
                n_tokens += 1
                sample.append(tokenizer.decode_bytes([token]), args.stop)
        if stream:
            samples[0].stream(args.stop)
        # Without the first steps, which read the prompts, compile, and record CUDA graphs
        if number == 4:
            start = time.perf_counter()
            n_before = n_tokens
        if number > 4:
            tokens_per_s = (n_tokens - n_before) / (time.perf_counter() - start)
            speed = f"{tokens_per_s:,.0f} tokens/s from the fifth on, "
        if all(sample.ended for sample in samples):
            break
    return f"({n_tokens:,} tokens, {speed}{peak_memory_mb(model.device):,.0f} MiB)"


def print_samples(prompts: list[str], model: GPT, tokenizer, args, step) -> None:
    """Continue the prompts. A single sample is streamed; several are printed when complete."""
    context = model.cfg.seq_len
    for prompt in prompts:
        n_tokens = len(tokenizer.encode(prompt))
        if n_tokens > context:
            print(
                f"the prompt has {n_tokens:,} tokens; the model reads the final {context:,}, "
                "its context length",
                file=sys.stderr,
            )
    seeds = range(args.seed, args.seed + args.num_samples)
    samples = [Sample(prompt, seed) for prompt in prompts for seed in seeds]
    stream = len(samples) == 1
    if stream:
        print(samples[0].prompt, end="", flush=True)
    for first in range(0, len(samples), 32):
        batch = samples[first : first + 32]
        summary = complete(batch, model, tokenizer, args, step, stream)
        for number, sample in enumerate(batch, first + 1):
            sample.text += sample.decoder.decode(b"", final=True)
            if stream:
                print(displayed(sample.text[sample.n_printed :]))
            else:
                print(f"--- sample {number}\n{displayed(sample.prompt + sample.text)}")
        print(summary, file=sys.stderr)


def typed_lines(end: str):
    """Yield each typed line, with this end, as a list of one prompt, until Ctrl-D."""
    print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin or []:  # None if it is closed
        yield [line.removesuffix("\n") + end]
        print("> ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def run(args) -> None:
    """Load the model, and print perplexity, accuracy or samples."""
    path = find_file(args.run, args.best)
    model, tokenizer = load(path, args.device, args.dtype, args.int8)
    if args.perplexity is not None:
        stride = args.stride or model.cfg.seq_len
        print_perplexity(model, tokenizer, Path(args.perplexity), stride)
    elif args.choices is not None:
        print_choices(model, tokenizer, Path(args.choices))
    else:
        if not args.no_cache:
            check_cache(model)
        step = None
        if args.compile:
            check_compiler(model.device)
            step = compile_decode_step(model.device)
        prompt_lists = [args.prompt]
        if args.interactive is not None:
            prompt_lists = typed_lines(args.interactive)
        for prompts in prompt_lists:
            print_samples(prompts, model, tokenizer, args, step)


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_arguments(args, parser)
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
