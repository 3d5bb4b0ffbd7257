"""Sample text from a checkpoint, or evaluate it: `python sample.py --run DIR|CKPT [--prompt TEXT ...]`, or with
`--perplexity FILE` or `--choices FILE.jsonl`."""

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

from data.tokenizers import get_tokenizer
from evaluation import print_choices, print_perplexity
from generation import check_cache, compile_decode_step, generate, on_host, printable
from int8 import quantize
from model import GPT, GPTConfig
from ops.cpu import skip_trial_programs
from runtime.checkpoint import BEST, as_evaluated, list_checkpoints, load_weights, model_config, read_checkpoint
from runtime.errors import UserError, report_error
from runtime.launch import peak_memory_mb, select_device
from runtime.rules import check_compiler
from runtime.sizes import DTYPES, sampling_dtype


def find_file(run: str, best: bool = False) -> Path:
    """The checkpoint file to load: the newest or best of a run's folder, or `run` itself. Raises UserError."""
    path = Path(run)
    if best and not (path / BEST).is_file():
        raise UserError(f"{path} holds no {BEST}; only runs that evaluate during training save it: remove --best")
    if best:
        return path / BEST
    if path.is_dir():
        newest = list_checkpoints(path)
        if not newest:
            raise UserError(f"{path} holds no ckpt_<step>.pt; give the folder of a run that has saved, or a file")
        return newest[0]
    return path


def load(path: Path, device: str, dtype: str, int8: bool = False, cached: bool = True) -> tuple[GPT, object]:
    """The model of a checkpoint file, or of what `export.py --to int8` wrote, for inference, and its tokenizer.

    cached: it will generate with a KV cache, which is checked. Raises UserError.
    """
    checkpoint, place = read_checkpoint(path), select_device(device)
    cfg = model_config(checkpoint, GPTConfig, path)
    dtype = DTYPES[sampling_dtype(dtype, checkpoint["config"].get("dtype"), cfg.n_embd, place)]
    quantized = any(name.endswith("_int8") for name in checkpoint["model"])
    with torch.device(place):
        model = GPT(cfg, dtype, loss_chunk=2048)
        if quantized:
            quantize(model, check=False)
    if quantized:
        try:
            model.load_state_dict(checkpoint["model"])
        except RuntimeError:
            raise UserError(f"{path} was exported from another model.py; use the source that made it") from None
    else:
        load_weights(model, as_evaluated(checkpoint), path)
    weights = [*model.parameters(), *(t for name, t in model.named_buffers() if name.endswith("weight_scale"))]
    if not all(tensor.isfinite().all() for tensor in weights):
        raise UserError(f"{path} holds weights that are not finite; use an earlier checkpoint")
    if cached:
        check_cache(model.eval())
    if int8 and not quantized:
        quantize(model)
    return model.freeze(), get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary"))


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__, allow_abbrev=False, formatter_class=shown)
    add = parser.add_argument
    add("--run", required=True, help="folder of a run, a checkpoint file, or one from export.py")
    add("--best", action="store_true", help="the weights of the best evaluation, not the newest")
    add("--prompt", nargs="+", default=[""], help="texts to continue; empty starts a new document")
    add("--interactive", action="store_true", help="continue each line that is typed")
    add("--perplexity", metavar="FILE", help="print this text file's perplexity instead of sampling")
    add("--stride", type=int, default=0, help="tokens by which windows of --perplexity advance; 0 = a context")
    add("--choices", metavar="FILE", help="print the accuracy on multiple-choice questions (docs/data.md)")
    add("--num_samples", type=int, default=1, help="samples per prompt, generated 32 at a time")
    add("--max_new_tokens", type=int, default=500, help="length of each, in tokens")
    add("--temperature", type=float, default=0.8, help="0 = greedy decoding")
    add("--top_k", type=int, default=200, help="sample from the k most likely tokens; 0 = all")
    add("--top_p", type=float, default=1.0, help="nucleus sampling: total probability to keep")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto = as trained, if supported")
    add("--int8", action="store_true", help="weights in int8; on a CPU without --compile, activations in bf16")
    add("--no_cache", action="store_true", help="re-read the whole context for each token, to compare")
    add("--compile", action="store_true", help="compile the decode step; pays off for long texts")
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stdin):  # the text may hold what a terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        check_arguments(args, parser)
        cached = args.perplexity is None and args.choices is None and not args.no_cache
        model, tokenizer = load(find_file(args.run, args.best), args.device, args.dtype, args.int8, cached)
        if args.perplexity is not None:
            print_perplexity(model, tokenizer, Path(args.perplexity), args.stride or model.cfg.seq_len)
            return 0
        if args.choices is not None:
            print_choices(model, tokenizer, Path(args.choices))
            return 0
        step = None
        if args.compile:
            check_compiler(model.device)
            skip_trial_programs()
            step = compile_decode_step(model.device)
        for prompts in typed_lines() if args.interactive else [args.prompt]:
            print_samples(model, tokenizer, prompts, args, step)
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        return report_error(error)
    return 0


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UserError for invalid values, and for flags that would have no effect."""
    for name, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, stride=0).items():
        if not getattr(args, name) >= least:
            raise UserError(f"--{name} is {getattr(args, name)}; expected at least {least}")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}; expected more than 0 and at most 1")
    if not 0 <= args.seed < 2**48:
        raise UserError(f"--seed is {args.seed}; expected at least 0 and below 2**48")
    if args.stride and args.perplexity is None:
        raise UserError("--stride is for --perplexity, which was not given; remove it")
    if args.perplexity is not None and args.choices is not None:
        raise UserError("--perplexity and --choices cannot be combined; run them one by one")
    if args.perplexity is not None or args.choices is not None:
        drawing = "prompt interactive num_samples max_new_tokens temperature top_k top_p seed no_cache compile".split()
        for name in drawing:
            if getattr(args, name) != parser.get_default(name):
                asked = "perplexity" if args.choices is None else "choices"
                raise UserError(f"--{name} does nothing for --{asked}; remove one of them")
    if args.no_cache and (args.compile or len(args.prompt) > 1):
        raise UserError("--no_cache is for a single prompt without --compile; remove one of them")
    if args.interactive and args.prompt != [""]:
        raise UserError("--interactive asks for its prompts; remove --prompt")


# ---------------------------------------------------------------------------------------------------------------------
# Text


def typed_lines():
    """Yields each typed line as a list of one prompt, until the end of input (Ctrl-D)."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield [line.removesuffix("\n")]


def print_samples(model: GPT, tokenizer, prompts: list[str], args: argparse.Namespace, step) -> None:
    """Continue the prompts: a single text is streamed; several are generated 32 at a time and printed when done."""
    every = [(prompt, args.seed + i) for prompt in prompts for i in range(args.num_samples)]
    for first in range(0, len(every), 32):
        print_batch(model, tokenizer, *zip(*every[first : first + 32]), first, args, step)


def print_batch(model: GPT, tokenizer, texts, seeds, first: int, args: argparse.Namespace, step) -> None:
    """Continue texts, each with its seed; `first` is the number of the first of them, from 0."""
    tokens = [torch.tensor([tokenizer.eot, *tokenizer.encode(text).tolist()]) for text in texts]
    how = args.temperature, args.top_k, args.top_p, seeds, step, not args.no_cache
    drawn = generate(model, tokens, args.max_new_tokens, tokenizer.vocab_size, *how)
    alone = len(args.prompt) * args.num_samples == 1
    shown = printable if sys.stdout.isatty() else str  # a file gets the text unchanged
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in texts]
    if alone:
        print(texts[0], end="", flush=True)
    texts, times, counts, done = list(texts), [], [], [False] * len(texts)
    for row in on_host(drawn):
        times.append(time.perf_counter())
        counts.append(0)
        for i, token in enumerate(row):
            done[i] = done[i] or token == tokenizer.eot
            if done[i]:
                continue
            counts[-1] += 1
            piece = decoders[i].decode(tokenizer.decode_bytes([token]))
            if alone:
                print(shown(piece), end="", flush=True)
            else:
                texts[i] += piece
        if all(done):
            break
    for i, (text, decoder) in enumerate(zip(texts, decoders)):
        rest = decoder.decode(b"", final=True)
        print(rest if alone else f"--- sample {first + i + 1}\n{shown(text + rest)}")
    # The first step reads the prompts, the second may compile; on a GPU the next two record CUDA graphs
    skipped, nth = (4, "fifth") if model.device.type == "cuda" else (2, "third")
    speed = ""
    if len(times) > skipped:
        per_s = sum(counts[skipped:]) / (times[-1] - times[skipped - 1])
        speed = f"{per_s:,.0f} tokens/s from the {nth} on, "
    print(f"({sum(counts):,} tokens, {speed}{peak_memory_mb(model.device):,.0f} MiB)", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
