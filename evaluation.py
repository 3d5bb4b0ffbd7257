"""Evaluation of a trained model: perplexity on a text, and multiple-choice questions."""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.choices import Question, read_questions
from data.prepare import encode_file
from model import GPT
from runtime.errors import UserError


def say_every(seconds: float):
    """A function that prints a text to stderr, at most once every `seconds` seconds."""
    said = time.perf_counter()

    def say(text: str) -> None:
        nonlocal said
        if time.perf_counter() > said + seconds:
            said = time.perf_counter()
            print(text, file=sys.stderr)

    return say


# ---------------------------------------------------------------------------------------------------------------------
# Perplexity


def summed_loss(model: GPT, tokens: np.ndarray, eot: int, stride: int, report=lambda done, loss: None) -> float:
    """Summed loss of the tokens in nats; each is predicted once, the first from an `eot` before it.

    Windows of the model's context length advance by `stride` tokens; all but the first score only their last `stride`.
    """
    seq_len, device = model.cfg.seq_len, model.device
    stream = torch.from_numpy(np.concatenate(([eot], tokens)).astype(np.int64))
    ends = [min(seq_len, len(tokens))]
    while ends[-1] < len(tokens):
        ends.append(min(ends[-1] + stride, len(tokens)))
    total, rows = 0.0, max(1, 8192 // seq_len)
    for first in range(0, len(ends), rows):
        part = ends[first : first + rows]
        x, y = torch.zeros(len(part), seq_len, dtype=torch.int64), torch.full((len(part), seq_len), -1)
        for i, end in enumerate(part):
            start, counted = max(0, end - seq_len), ends[first + i - 1] if first + i else 0
            x[i, : end - start], y[i, counted - start : end - start] = stream[start:end], stream[counted + 1 : end + 1]
        with torch.no_grad():
            total += model(x.to(device), y.to(device)).item() * int((y >= 0).sum())
        report(part[-1], total)
    return total


def print_perplexity(model: GPT, tokenizer, path: Path, stride: int) -> None:
    """Print a file's perplexity per token, byte and word of the text that data/prepare.py would tokenize."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; --perplexity needs a text file")
    if path.suffix in (".csv", ".jsonl", ".gz"):
        raise UserError(f"{path} is not plain text, as --perplexity needs; write its texts into one file")
    if stride > model.cfg.seq_len:
        raise UserError(f"--stride is {stride}; expected at most the model's context of {model.cfg.seq_len}")
    tokens, n_bytes = encode_file(path, tokenizer)
    if not len(tokens):
        raise UserError(f"{path} is empty; --perplexity needs some text")
    say = say_every(5)

    def report(done: int, loss: float) -> None:
        say(f"{done:,} of {len(tokens):,} tokens, perplexity {math.exp(min(loss / done, 700)):.4f}")

    loss = summed_loss(model, tokens, tokenizer.eot, stride, report)
    n_words = len(tokenizer.decode_bytes(tokens.tolist()).split())
    windows = f"windows of {model.cfg.seq_len} tokens, stride {stride}"
    print(f"{path}: {windows}; each token is predicted once, the first from an end-of-text token")
    print(f"{'':10}{'count':>14}{'perplexity':>16}{'nats':>12}{'bits':>12}")
    for name, n in (("token", len(tokens)), ("byte", n_bytes), ("word", n_words)):
        if n:
            nats = loss / n
            shown = f"{math.exp(nats):,.4f}" if nats < 13 else f"e^{nats:.4f}"
            print(f"{'per ' + name:10}{n:>14,}{shown:>16}{nats:>12.4f}{nats / math.log(2):>12.4f}")


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice


@torch.no_grad()
def score_endings(model: GPT, contexts: list[Tensor], endings: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each ending after its context, in nats, fp64 (N,), and whether greedy decoding produces it.

    contexts, endings: tokens, int64, at least one each; an ending must fit into the model's context, and its context
    is truncated on the left to what fits.
    """
    seq_len, device = model.cfg.seq_len, model.device
    scores, greedy = torch.zeros(len(endings), dtype=torch.float64), torch.ones(len(endings), dtype=torch.bool)
    texts = [torch.cat(pair)[-seq_len - 1 :] for pair in zip(contexts, endings)]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    while order:
        length = len(texts[order[0]]) - 1
        part, order = order[: max(1, 2048 // length)], order[max(1, 2048 // length) :]  # whose logits exist at once
        x, y = torch.zeros(len(part), length, dtype=torch.int64), torch.full((len(part), length), -1)
        for row, i in enumerate(part):
            end = len(texts[i]) - 1
            x[row, :end], y[row, end - len(endings[i]) : end] = texts[i][:-1], endings[i]
        y = y.to(device)
        logits = model(x.to(device))[y >= 0]
        losses = F.cross_entropy(logits, y[y >= 0], reduction="none").cpu().double()
        ending = torch.tensor(part)[(y >= 0).nonzero()[:, 0].cpu()]
        scores.index_add_(0, ending, -losses)
        greedy[ending[(logits.argmax(-1) != y[y >= 0]).cpu()]] = False
    return scores, greedy


def tokens_of(question: Question, tokenizer, seq_len: int, place: str) -> list[tuple[Tensor, Tensor]]:
    """Context and ending, int64, for each ending of a question; a context has at least one token.

    Trailing whitespace of the context moves to the ending, as in lm-evaluation-harness: it is part of the word's token.
    Raises UserError when an ending does not fit into the model's context.
    """
    before = question.context.rstrip()
    blanks = question.context[len(before) :]
    context = torch.tensor(tokenizer.encode(before).tolist() or [tokenizer.eot])
    pairs = [(context, torch.tensor(tokenizer.encode(blanks + text).tolist())) for text in question.endings]
    longest = max(len(ending) for _, ending in pairs)
    if longest > seq_len:
        found = f"{place} has an ending of {longest} tokens, and the model's context is {seq_len}"
        raise UserError(f"{found}; shorten it, or take a model with a longer context")
    return pairs


def is_chosen(question: Question, scores: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> dict[str, bool]:
    """Whether the right ending scores highest, by each measure; ties go to the first.

    scores: log-likelihoods of the endings, fp64.
    """
    tokens = torch.tensor([len(ending) for _, ending in pairs])
    characters = torch.tensor([len(text.removeprefix(" ")) or 1 for text in question.endings])
    measures = {"summed": scores, "per token (llm.c)": scores / tokens}
    measures["per character (lm-evaluation-harness)"] = scores / characters
    return {name: values.argmax().item() == question.label for name, values in measures.items()}


def print_choices(model: GPT, tokenizer, path: Path) -> None:
    """Print the accuracy of a file's questions (data/choices.py), with its standard error.

    An ending's log-likelihood is summed, or normalized by its length, as llm.c and lm-evaluation-harness do for GPT-2's
    figures on HellaSwag. If every question has one ending, as with LAMBADA's last words: how many of them greedy
    decoding produces, and their perplexity. Raises UserError.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}; --choices needs lines of JSON (`python data/prepare.py hellaswag`)")
    questions = read_questions(path)
    alone = len(questions[0].endings) == 1
    if any((len(question.endings) == 1) != alone for question in questions):
        raise UserError(f"{path} holds questions with one ending and with more; put them into two files")
    places = [f"{path}, question {number}" for number in range(1, len(questions) + 1)]
    pairs = [tokens_of(q, tokenizer, model.cfg.seq_len, place) for q, place in zip(questions, places)]
    say, results, nats = say_every(5), [], 0.0
    for start in range(0, len(questions), 64):  # sorted by length within, so that little is padded
        part, inputs = questions[start : start + 64], pairs[start : start + 64]
        scores, greedy = score_endings(model, *zip(*[pair for each in inputs for pair in each]))
        if not scores.isfinite().all():
            raise UserError("the model gives likelihoods that are not finite; try --dtype fp32, or another checkpoint")
        nats -= scores.sum().item()
        if alone:
            results += [{"drawn greedily": drawn} for drawn in greedy.tolist()]
        else:
            results += map(is_chosen, part, scores.split([len(each) for each in inputs]), inputs)
        right = sum(next(iter(result.values())) for result in results)
        say(f"{len(results):,} of {len(questions):,} questions, {right / len(results):.4f} right")
    n = len(questions)
    print(f"{path}: {n:,} questions, contexts of {model.cfg.seq_len} tokens at most")
    print(f"{'':38}{'accuracy':>10}{'std error':>12}")
    for name in results[0]:
        accuracy = sum(result[name] for result in results) / n
        print(f"{name:38}{accuracy:>10.4f}{math.sqrt(accuracy * (1 - accuracy) / max(1, n - 1)):>12.4f}")
    if alone:
        print(f"{'perplexity of an ending':38}{math.exp(min(nats / n, 700)):>10,.2f}")
