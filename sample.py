"""Text or perplexity from a checkpoint: `python sample.py --run DIR|CKPT [--prompt TEXT] [--perplexity FILE]`."""

import argparse
import codecs
import math
import os
import sys
import time
from pathlib import Path

from runtime import set_environment

if __name__ == "__main__":
    set_environment()

import numpy as np
import torch

from data.prepare import encode_file
from data.shards import TrainerError, UserError
from data.tokenizers import get_tokenizer
from generation import generate
from model import GPT, GPTConfig
from runtime.checkpoint import BEST, list_checkpoints, load_weights, model_config, read_checkpoint
from runtime.dtype import sampling_dtype
from runtime.launch import DTYPES, select_device
from runtime.logger import printable


def load(run: str, device: str, dtype: str, best: bool = False) -> tuple[GPT, object]:
    """The model and tokenizer of a run's folder (its newest or best checkpoint) or of a checkpoint file.

    Raises UserError.
    """
    path = Path(run)
    if best and not (path / BEST).is_file():
        raise UserError(f"{path} holds no {BEST}; it is kept by runs that evaluate on the way: remove --best")
    if best:
        path = path / BEST
    if path.is_dir():
        newest = list_checkpoints(path)
        if not newest:
            raise UserError(f"{path} holds no ckpt_<step>.pt; give the folder of a run that has saved, or a file")
        path = newest[0]
    checkpoint, place = read_checkpoint(path), select_device(device)
    cfg = model_config(checkpoint, GPTConfig, path)
    dtype = sampling_dtype(dtype, checkpoint["config"], cfg.n_embd, place)
    with torch.device(place):
        model = GPT(cfg, DTYPES[dtype], loss_chunk=2048)
    load_weights(model, checkpoint, path)
    return model.eval(), get_tokenizer(checkpoint["tokenizer"])


def mean_loss(model: GPT, tokens: np.ndarray, eot: int) -> float:
    """Mean loss of the tokens in nats, each predicted once, in sequences of the model's context."""
    seq_len, device = model.cfg.seq_len, model.wte.weight.device
    stream = torch.from_numpy(np.concatenate(([eot], tokens)).astype(np.int64))
    n_seqs = -(-(len(stream) - 1) // seq_len)
    x, y = torch.zeros(n_seqs * seq_len, dtype=torch.int64), torch.full((n_seqs * seq_len,), -1)
    x[: len(stream) - 1], y[: len(stream) - 1] = stream[:-1], stream[1:]
    total, rows = 0.0, max(1, 8192 // seq_len)
    with torch.no_grad():
        for x_part, y_part in zip(x.view(n_seqs, seq_len).split(rows), y.view(n_seqs, seq_len).split(rows)):
            total += model(x_part.to(device), y_part.to(device)).item()
    return total / len(tokens)


def main(argv: list[str]) -> int:
    """The command line; returns the exit code: 0 done, 2 the user's mistake."""
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--run", required=True, help="folder of a run, or a checkpoint file")
    parser.add_argument("--best", action="store_true", help="the weights of the best evaluation, not the newest")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    parser.add_argument("--perplexity", metavar="FILE", help="print this text file's perplexity instead of sampling")
    parser.add_argument("--num_samples", type=int, default=1, help="texts to write")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="length of each, in tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=200, help="draw from the k likeliest tokens; 0 = all")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest tokens with this probability")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="auto is what it was trained in")
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # the text may hold what a terminal cannot show
    try:
        for name, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0).items():
            if not getattr(args, name) >= least:
                raise UserError(f"--{name} is {getattr(args, name)}; expected at least {least}")
        if not 0 < args.top_p <= 1:
            raise UserError(f"--top_p is {args.top_p}; expected more than 0 and at most 1")
        if not 0 <= args.seed < 2**48:
            raise UserError(f"--seed is {args.seed}; expected at least 0 and below 2**48")
        model, tokenizer = load(args.run, args.device, args.dtype, args.best)
        if args.perplexity:
            print_perplexity(model, tokenizer, Path(args.perplexity))
        else:
            for i in range(args.num_samples):
                print_sample(model, tokenizer, args, i)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_perplexity(model: GPT, tokenizer, path: Path) -> None:
    """Print a file's perplexity per token and per byte of the text that data/prepare.py would tokenize."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; --perplexity wants a text file")
    if path.suffix in (".jsonl", ".gz"):
        raise UserError(f"{path} is not plain text, as --perplexity wants; write its texts into one file")
    tokens, n_bytes = encode_file(path, tokenizer)
    if not len(tokens):
        raise UserError(f"{path} is empty; --perplexity wants some text")
    loss = mean_loss(model, tokens, tokenizer.eot)
    bits = loss * len(tokens) / n_bytes / math.log(2)
    print(f"{path}: {len(tokens):,} tokens, {n_bytes:,} bytes")
    print(f"perplexity per token {math.exp(loss):.4f} ({loss:.4f} nats)")
    print(f"perplexity per byte {2**bits:.4f} ({bits:.4f} bits)")


def print_sample(model: GPT, tokenizer, args: argparse.Namespace, number: int) -> None:
    """Write one text to standard output, character by character as it is drawn."""
    device = model.wte.weight.device
    generator = torch.Generator(device).manual_seed(args.seed + number)
    prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode(args.prompt).tolist()]], device=device)
    if args.num_samples > 1:
        print(f"--- sample {number + 1}")
    print(args.prompt, end="", flush=True)
    started, text, count = time.perf_counter(), codecs.getincrementaldecoder("utf-8")("replace"), 0
    shown = printable if sys.stdout.isatty() else str  # a file gets what was drawn
    for token in generate(model, prompt, args.max_new_tokens, tokenizer.vocab_size, args.temperature, args.top_k,
                          args.top_p, generator):  # fmt: skip
        if token.item() == tokenizer.eot:
            break
        count += 1
        print(shown(text.decode(tokenizer.decode_bytes([token.item()]))), end="", flush=True)
    print(text.decode(b"", final=True))
    print(f"({count / (time.perf_counter() - started):,.0f} tokens/s)", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
