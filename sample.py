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

from common import UserError, printable, report_error
from data.tokenizers import get_tokenizer
from inference.evaluation import print_choices, print_perplexity
from inference.generation import check_cache, compile_decode_step, generate, tokens_to_cpu
from inference.int8 import quantize
from model import GPT, GPTConfig
from ops.compile import skip_inductor_isa_test
from runtime.checkpoint import (
    BEST,
    list_checkpoints,
    load_weights,
    model_config,
    read_checkpoint,
    with_eval_weights,
)
from runtime.device import DTYPES, peak_memory_mb, sampling_dtype, select_device
from runtime.flag_checks import check_compiler

SAMPLING = "prompt interactive num_samples max_new_tokens stop temperature top_k top_p seed no_cache compile"
# mode -> flags that do nothing in it
NO_EFFECT = dict(
    perplexity=f"choices {SAMPLING}", choices=SAMPLING, interactive="prompt", no_cache="compile"
)


def find_file(run: str, best: bool = False) -> Path:
    """The checkpoint file to load: the newest or best of a run's folder, or `run` itself. Raises UserError."""
    path = Path(run)
    if path.is_file() and not best:
        return path
    found = list(path.glob(BEST)) if best else list_checkpoints(path)
    if not found:
        name = f"{BEST}, which evaluations during training save" if best else "ckpt_<step>.pt"
        raise UserError(
            f"{path} holds no {name}; give the folder of a run that has saved, or a file without --best"
        )
    return found[0]


def load(path: Path, device: str, dtype: str, int8: bool = False) -> tuple[GPT, object]:
    """The model of a checkpoint file, or of what `export.py --to int8` wrote, for inference, and its tokenizer.

    Raises UserError.
    """
    checkpoint, place = read_checkpoint(path), select_device(device)
    cfg = model_config(checkpoint, GPTConfig, path)
    dtype = DTYPES[sampling_dtype(dtype, checkpoint["config"].get("dtype"), cfg.n_embd, place)]
    with torch.device(place):
        model = GPT(cfg, dtype, loss_chunk=2048)
        if any(name.endswith("_int8") for name in checkpoint["model"]):
            quantize(model)
    load_weights(model, with_eval_weights(checkpoint), path)
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise UserError(f"{path} holds weights that are not finite; use an earlier checkpoint")
    if int8:
        quantize(model)
    return model.freeze(), get_tokenizer(checkpoint["tokenizer"], checkpoint.get("vocabulary"))


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake."""
    style = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        "sample.py", description=__doc__, allow_abbrev=False, formatter_class=style
    )
    add = parser.add_argument
    add(
        "--run",
        required=True,
        help="folder of a run, a checkpoint file, or one from export.py --to int8",
    )
    add("--best", action="store_true", help="the weights of the best evaluation, not the newest")
    add("--prompt", nargs="+", default=[""], help="texts to continue; empty starts a new document")
    add("--interactive", action="store_true", help="continue each line that is typed")
    add(
        "--perplexity", metavar="FILE", help="print this text file's perplexity instead of sampling"
    )
    add(
        "--stride",
        type=int,
        default=0,
        help="step of --perplexity's windows, in tokens; 0 = a context, fastest",
    )
    add(
        "--choices",
        metavar="FILE",
        help="print the accuracy on these questions, as of data/prepare.py hellaswag",
    )
    add("--num_samples", type=int, default=1, help="samples per prompt, generated 32 at a time")
    add("--max_new_tokens", type=int, default=500, help="length of each, in tokens")
    add("--stop", default="", metavar="TEXT", help="end each sample before this text")
    add("--temperature", type=float, default=0.8, help="0 = greedy decoding")
    add("--top_k", type=int, default=200, help="sample from the k most likely tokens; 0 = all")
    add("--top_p", type=float, default=1.0, help="nucleus sampling: total probability to keep")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add(
        "--dtype", default="auto", choices=("auto", *DTYPES), help="auto = as trained, if supported"
    )
    add(
        "--int8",
        action="store_true",
        help="weights in int8; on a CPU without --compile, activations in bf16 too",
    )
    add(
        "--no_cache",
        action="store_true",
        help="re-read the whole context for each token, to compare",
    )
    add("--compile", action="store_true", help="compile the decode step; pays off for long texts")
    args = parser.parse_args(argv)
    try:
        check_arguments(args, parser)
        model, tokenizer = load(find_file(args.run, args.best), args.device, args.dtype, args.int8)
        if args.perplexity is not None:
            print_perplexity(
                model, tokenizer, Path(args.perplexity), args.stride or model.cfg.seq_len
            )
            return 0
        if args.choices is not None:
            print_choices(model, tokenizer, Path(args.choices))
            return 0
        if not args.no_cache:
            check_cache(model)
        step = None
        if args.compile:
            check_compiler(model.device)
            skip_inductor_isa_test()
            step = compile_decode_step(model.device)
        for prompts in typed_lines() if args.interactive else [args.prompt]:
            print_samples(model, tokenizer, prompts, args, step)
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        return report_error(error)
    return 0


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UserError for invalid values, and for flags that would have no effect."""
    for name, least in dict(
        num_samples=1, max_new_tokens=1, temperature=0, top_k=0, stride=0
    ).items():
        if not getattr(args, name) >= least:
            raise UserError(f"--{name} is {getattr(args, name)}; expected at least {least}")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}; expected more than 0 and at most 1")
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if "stride" in given and "perplexity" not in given:
        raise UserError("--stride is for --perplexity, which was not given; remove it")
    for mode, names in NO_EFFECT.items():
        if mode in given and (unused := given & set(names.split())):
            raise UserError(f"--{min(unused)} does nothing for --{mode}; remove one of them")


def typed_lines():
    """Yields each typed line as a list of one prompt, until the end of input (Ctrl-D)."""
    print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin:
        yield [line.removesuffix("\n")]
        print("> ", end="", file=sys.stderr, flush=True)


def print_samples(
    model: GPT, tokenizer, prompts: list[str], args: argparse.Namespace, step
) -> None:
    """Continue the prompts: a single text is streamed; several are generated 32 at a time and printed when done."""
    samples = [(prompt, args.seed + i) for prompt in prompts for i in range(args.num_samples)]
    alone, shown = (
        len(samples) == 1,
        printable if sys.stdout.isatty() else str,
    )  # a file gets the text unchanged
    for first in range(0, len(samples), 32):
        texts, seeds = map(list, zip(*samples[first : first + 32]))
        tokens = [torch.tensor([tokenizer.eot, *tokenizer.encode(text).tolist()]) for text in texts]
        sampling = args.temperature, args.top_k, args.top_p, seeds, step, not args.no_cache
        drawn = generate(model, tokens, args.max_new_tokens, tokenizer.vocab_size, *sampling)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in texts]
        begins, held = (
            [len(text) for text in texts],
            max(0, len(args.stop) - 1),
        )  # what may yet become a stop
        done, count, speed, printed = set(), 0, "", begins[0]
        if alone:
            print(texts[0], end="", flush=True)
        for number, row in enumerate(tokens_to_cpu(drawn), 1):
            for i, token in enumerate(row):
                if token == tokenizer.eot:
                    done.add(i)
                if i in done:
                    continue
                count += 1
                texts[i] += decoders[i].decode(tokenizer.decode_bytes([token]))
                end = texts[i].find(args.stop, begins[i]) if args.stop else -1
                if end >= 0:
                    texts[i] = texts[i][:end]
                    decoders[i].reset()
                    done.add(i)
                elif alone and (safe := len(texts[0]) - held) > printed:
                    print(shown(texts[0][printed:safe]), end="", flush=True)
                    printed = safe
            if (
                number == 4
            ):  # the first step reads the prompts, the second may compile, the next two record CUDA graphs
                start, skipped = time.perf_counter(), count
            if number > 4:
                speed = f"{(count - skipped) / (time.perf_counter() - start):,.0f} tokens/s from the fifth on, "
            if len(done) == len(texts):
                break
        for i, (text, decoder) in enumerate(zip(texts, decoders), first + 1):
            text += decoder.decode(b"", final=True)
            print(shown(text[printed:]) if alone else f"--- sample {i}\n{shown(text)}")
        print(
            f"({count:,} tokens, {speed}{peak_memory_mb(model.device):,.0f} MiB)", file=sys.stderr
        )


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stdin):  # the text may hold what a terminal cannot show
        stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
