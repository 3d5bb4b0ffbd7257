"""Evaluation of a trained model: perplexity on a text, and multiple-choice questions."""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common import UserError
from data.choices import Question, read_questions
from data.prepare import encode_file
from model import GPT

# ---------------------------------------------------------------------------------------------------------------------
# Perplexity


@torch.no_grad()
def summed_loss(model: GPT, tokens: np.ndarray, eot: int, stride: int) -> float:
    """Summed loss of the tokens in nats; each is predicted once, the first from an `eot` before it.

    Windows of the model's context length advance by `stride` tokens; all but the first score only their last `stride`.
    """
    seq_len, device, n, total = model.cfg.seq_len, model.device, len(tokens), 0.0
    stream = torch.from_numpy(np.concatenate(([eot], tokens)).astype(np.int64))
    ends = [*range(min(seq_len, n), n, stride), n]
    windows, rows = list(zip([0, *ends], ends)), max(1, 8192 // seq_len)
    for first in range(0, len(windows), rows):
        part = windows[first : first + rows]
        x, y = (
            torch.zeros(len(part), seq_len, dtype=torch.int64),
            torch.full((len(part), seq_len), -1),
        )
        for i, (counted, end) in enumerate(part):
            start = max(0, end - seq_len)
            x[i, : end - start], y[i, counted - start : end - start] = (
                stream[start:end],
                stream[counted + 1 : end + 1],
            )
        total += model(x.to(device), y.to(device)).item() * int((y >= 0).sum())
        print(
            f"\r{end:,} of {n:,} tokens, {total / end:.4f} nats per token", end="", file=sys.stderr
        )
    print(file=sys.stderr)
    return total


def print_perplexity(model: GPT, tokenizer, path: Path, stride: int) -> None:
    """Print a file's perplexity per token, byte and word of the text that data/prepare.py would tokenize."""
    if not path.is_file() or path.suffix in (".csv", ".jsonl", ".gz"):
        raise UserError(
            f"{path} is not a file of plain text, as --perplexity needs; write its texts into one"
        )
    if stride > model.cfg.seq_len:
        raise UserError(
            f"--stride is {stride}; expected at most the model's context of {model.cfg.seq_len}"
        )
    tokens, n_bytes = encode_file(path, tokenizer)
    if not len(tokens):
        raise UserError(f"{path} is empty; --perplexity needs some text")
    loss = summed_loss(model, tokens, tokenizer.eot, stride)
    n_words = len(tokenizer.decode_bytes(tokens.tolist()).split())
    print(
        f"{path}: windows of {model.cfg.seq_len} tokens, stride {stride}; the first token follows an end-of-text token"
    )
    print(f"{'':10}{'count':>14}{'perplexity':>16}{'nats':>12}{'bits':>12}")
    for name, n in (("token", len(tokens)), ("byte", n_bytes), ("word", n_words)):
        if n:
            nats = loss / n
            shown = f"{math.exp(nats):,.4f}" if nats < 13 else f"e^{nats:.4f}"
            print(f"{'per ' + name:10}{n:>14,}{shown:>16}{nats:>12.4f}{nats / math.log(2):>12.4f}")


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice


@torch.no_grad()
def score_endings(
    model: GPT, contexts: list[Tensor], endings: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each ending after its context, in nats, fp64 (N,), and whether greedy decoding produces it.

    contexts, endings: tokens, int64, at least one each; an ending must fit into the model's context, and its context
    is truncated on the left to what fits.
    """
    seq_len, device = model.cfg.seq_len, model.device
    scores, greedy = (
        torch.zeros(len(endings), dtype=torch.float64),
        torch.ones(len(endings), dtype=torch.bool),
    )
    texts = [torch.cat(pair)[-seq_len - 1 :] for pair in zip(contexts, endings)]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    while order:
        length = len(texts[order[0]]) - 1
        part, order = (
            order[: max(1, 2048 // length)],
            order[max(1, 2048 // length) :],
        )  # whose logits exist at once
        x, y = (
            torch.zeros(len(part), length, dtype=torch.int64),
            torch.full((len(part), length), -1),
        )
        for row, i in enumerate(part):
            end = len(texts[i]) - 1
            x[row, :end], y[row, end - len(endings[i]) : end] = texts[i][:-1], endings[i]
        logits, y = model(x.to(device)), y.to(device)
        losses = F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none"
        ).view(y.shape)
        scores[part] = -losses.cpu().double().sum(1)
        greedy[part] = ((logits.argmax(-1) == y) | (y < 0)).all(1).cpu()
    return scores, greedy


def tokens_of(
    question: Question, tokenizer, seq_len: int, place: str
) -> list[tuple[Tensor, Tensor]]:
    """Context and ending, int64, for each ending of a question; a context has at least one token.

    Trailing whitespace of the context moves to the ending, as in lm-evaluation-harness: it is part of the word's token.
    Raises UserError when an ending does not fit into the model's context.
    """
    before = question.context.rstrip()
    blanks = question.context[len(before) :]
    context = torch.tensor(tokenizer.encode(before).tolist() or [tokenizer.eot])
    pairs = [
        (context, torch.tensor(tokenizer.encode(blanks + text).tolist()))
        for text in question.endings
    ]
    longest = max(len(ending) for _, ending in pairs)
    if longest > seq_len:
        raise UserError(
            f"{place} has an ending of {longest} tokens; expected at most the model's context, {seq_len}"
        )
    return pairs


def is_chosen(
    question: Question, scores: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> dict[str, bool]:
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
        raise UserError(
            f"there is no file {path}; --choices needs lines of JSON (`python data/prepare.py hellaswag`)"
        )
    questions, seq_len = read_questions(path), model.cfg.seq_len
    n, alone, results, nats = len(questions), len(questions[0].endings) == 1, [], 0.0
    if any((len(question.endings) == 1) != alone for question in questions):
        raise UserError(
            f"{path} holds questions with one ending and with more; put them into two files"
        )
    pairs = [
        tokens_of(q, tokenizer, seq_len, f"{path}, question {i}")
        for i, q in enumerate(questions, 1)
    ]
    for start in range(0, n, 64):  # sorted by length within, so that little is padded
        part, inputs = questions[start : start + 64], pairs[start : start + 64]
        scores, greedy = score_endings(model, *zip(*sum(inputs, [])))
        if not scores.isfinite().all():
            raise UserError(
                "the model gives likelihoods that are not finite; try --dtype fp32, or another checkpoint"
            )
        nats -= scores.sum().item()
        if alone:
            results += [{"drawn greedily": drawn} for drawn in greedy.tolist()]
        else:
            results += map(is_chosen, part, scores.split([len(each) for each in inputs]), inputs)
        print(f"\r{len(results):,} of {n:,} questions", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"{path}: {n:,} questions, contexts of {seq_len} tokens at most")
    print(f"{'':38}{'accuracy':>10}{'std error':>12}")
    for name in results[0]:
        accuracy = sum(result[name] for result in results) / n
        print(
            f"{name:38}{accuracy:>10.4f}{math.sqrt(accuracy * (1 - accuracy) / max(1, n - 1)):>12.4f}"
        )
    if alone:
        print(f"{'perplexity of an ending':38}{math.exp(min(nats / n, 700)):>10,.2f}")
