"""Evaluation of a trained model: perplexity on a text, and multiple-choice questions."""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from common.errors import UserError
from data.prepare import encode_file
from data.questions import Question, read_questions
from model import GPT

# --------------------------------------------------------------------------------------------------
# Perplexity


@torch.no_grad()
def summed_loss(model: GPT, tokens: np.ndarray, eot: int, stride: int) -> float:
    """Return the summed loss of the tokens in nats; the first is predicted from a preceding `eot`.

    Windows of the model's context length advance by `stride` tokens. Each scores the tokens that no
    earlier window has scored.
    """
    n = len(tokens)
    seq_len = model.cfg.seq_len
    stream = torch.from_numpy(np.concatenate(([eot], tokens)).astype(np.int64))
    ends = [*range(min(seq_len, n), n, stride), n]
    batch_size = max(1, 8192 // seq_len)
    total = 0.0
    first_scored = 0
    for i in range(0, len(ends), batch_size):
        batch = ends[i : i + batch_size]
        windows = torch.stack([stream[max(0, end - seq_len) : end + 1] for end in batch])
        x, y = windows[:, :-1], windows[:, 1:].clone()
        for row, end in enumerate(batch):
            y[row, : first_scored - end] = -1
            first_scored = end
        mean_loss = model(x.to(model.device), y.to(model.device)).item()
        total += mean_loss * int((y >= 0).sum())
        progress = f"\r{end:,} of {n:,} tokens, {total / end:.4f} nats per token"
        print(progress, end="", file=sys.stderr)
    print(file=sys.stderr)
    return total


def print_perplexity(model: GPT, tokenizer, path: Path, stride: int) -> None:
    """Print a text file's perplexity per token, byte and word.

    The text is tokenized as in data/prepare.py. Raises UserError.
    """
    seq_len = model.cfg.seq_len
    if not path.is_file() or path.suffix in (".csv", ".jsonl", ".gz"):
        raise UserError(
            f"{path} is not a plain text file; --perplexity needs one, so write its texts into one"
        )
    if stride > seq_len:
        raise UserError(f"--stride is {stride}; expected at most the context length of {seq_len}")
    tokens, n_bytes = encode_file(path, tokenizer)
    if len(tokens) == 0:
        raise UserError(f"{path} is empty; --perplexity needs some text")
    loss = summed_loss(model, tokens, tokenizer.eot, stride)

    n_words = len(tokenizer.decode_bytes(tokens.tolist()).split())
    print(
        f"{path}: windows of {seq_len} tokens, stride {stride}; "
        "the first token follows an end-of-text token"
    )
    print(f"{'':10}{'count':>14}{'perplexity':>16}{'nats':>12}{'bits':>12}")
    for unit, count in (("token", len(tokens)), ("byte", n_bytes), ("word", n_words)):
        if count == 0:
            continue
        nats = loss / count
        bits = nats / math.log(2)
        perplexity = f"{math.exp(nats):,.4f}" if nats < 13 else f"e^{nats:.4f}"
        print(f"{'per ' + unit:10}{count:>14,}{perplexity:>16}{nats:>12.4f}{bits:>12.4f}")


# --------------------------------------------------------------------------------------------------
# Multiple choice

Pairs = list[tuple[Tensor, Tensor]]  # tokens of context and ending, int64


@torch.no_grad()
def score_endings(model: GPT, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Score each ending after its context.

    Both have at least one token. An ending must fit into the model's context length; its context is
    truncated on the left to what fits.

    Returns the log-likelihoods of the endings in nats, fp64 (N,), and a mask of those that greedy
    decoding produces, bool (N,).
    """
    inputs, targets = [], []
    for context, ending in pairs:
        tokens = torch.cat((context, ending))[-model.cfg.seq_len - 1 :]
        target = tokens[1:].clone()
        target[: -len(ending)] = -1  # the context is not scored
        inputs.append(tokens[:-1])
        targets.append(target)
    scores = torch.zeros(len(pairs), dtype=torch.float64)
    is_greedy = torch.zeros(len(pairs), dtype=torch.bool)

    # The longest first, to pad little; 2,048 tokens at once, to limit the memory of the logits
    order = sorted(range(len(pairs)), key=lambda i: len(inputs[i]), reverse=True)
    while order:
        batch_size = max(1, 2048 // len(inputs[order[0]]))
        batch = order[:batch_size]
        order = order[batch_size:]
        x = pad_sequence([inputs[i] for i in batch], batch_first=True)
        y = pad_sequence([targets[i] for i in batch], batch_first=True, padding_value=-1)
        y = y.to(model.device)
        logits = model(x.to(model.device))
        losses = F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none"
        )
        scores[batch] = -losses.view(y.shape).cpu().double().sum(1)
        is_greedy[batch] = ((logits.argmax(-1) == y) | (y == -1)).all(1).cpu()
    return scores, is_greedy


def encode_question(question: Question, tokenizer, seq_len: int, place: str) -> Pairs:
    """Return the tokens of the context with those of each ending; a context has at least one token.

    Raises UserError, naming the place, if an ending is longer than seq_len.
    """
    context = tokenizer.encode(question.context).tolist()
    if question.starts_document or not context:
        context.insert(0, tokenizer.eot)
    pairs = []
    for text in question.endings:
        ending = torch.tensor(tokenizer.encode(text).tolist())
        if len(ending) > seq_len:
            raise UserError(
                f"{place} has an ending of {len(ending)} tokens; "
                f"expected at most the context length of {seq_len}"
            )
        pairs.append((torch.tensor(context), ending))
    return pairs


def is_chosen(question: Question, scores: Tensor, pairs: Pairs) -> dict[str, bool]:
    """Return, for each measure, True if the right ending scores highest; ties go to the first.

    scores: log-likelihoods of the endings, fp64.
    """
    n_tokens = torch.tensor([len(ending) for _, ending in pairs])
    n_characters = torch.tensor([len(text.lstrip()) or 1 for text in question.endings])
    measures = {
        "summed": scores,
        "per token (llm.c)": scores / n_tokens,
        "per character (lm-evaluation-harness)": scores / n_characters,
    }
    return {name: values.argmax().item() == question.label for name, values in measures.items()}


def print_choices(model: GPT, tokenizer, path: Path) -> None:
    """Print the accuracy of a file's questions (data/choices.py), with its standard error.

    An ending's log-likelihood is summed, or divided by its length as in llm.c and
    lm-evaluation-harness for GPT-2's figures on HellaSwag. If every question has one ending, as in
    LAMBADA, print the fraction that greedy decoding produces, and their perplexity. Raises
    UserError.
    """
    if not path.is_file():
        raise UserError(
            f"there is no file {path}; --choices needs lines of JSON "
            "(`python data/prepare.py hellaswag`)"
        )
    seq_len = model.cfg.seq_len
    questions = read_questions(path)
    n = len(questions)
    n_endings = {len(question.endings) for question in questions}
    one_ending = n_endings == {1}
    if 1 in n_endings and not one_ending:
        raise UserError(
            f"{path} mixes questions with one ending and with several; split it into two files"
        )
    encoded = []
    for number, question in enumerate(questions, 1):
        pairs = encode_question(question, tokenizer, seq_len, place=f"{path}, question {number}")
        encoded.append(pairs)

    results = []
    nats = 0.0
    for start in range(0, n, 64):
        batch = encoded[start : start + 64]
        scores, is_greedy = score_endings(model, list(itertools.chain.from_iterable(batch)))
        if not scores.isfinite().all():
            raise UserError(
                "the model's likelihoods are not finite; "
                "try --dtype fp32, or a different checkpoint"
            )
        nats -= scores.sum().item()
        if one_ending:
            results += [{"produced by greedy decoding": correct} for correct in is_greedy.tolist()]
        else:
            scores_by_question = scores.split([len(pairs) for pairs in batch])
            for i, pairs in enumerate(batch):
                results.append(is_chosen(questions[start + i], scores_by_question[i], pairs))
        print(f"\r{len(results):,} of {n:,} questions", end="", file=sys.stderr)
    print(file=sys.stderr)

    print(f"{path}: {n:,} questions, contexts of {seq_len} tokens at most")
    print(f"{'':38}{'accuracy':>10}{'std error':>12}")
    for name in results[0]:
        accuracy = sum(result[name] for result in results) / n
        std_error = math.sqrt(accuracy * (1 - accuracy) / max(1, n - 1))
        print(f"{name:38}{accuracy:>10.4f}{std_error:>12.4f}")
    if one_ending:
        print(f"{'perplexity of an ending':38}{math.exp(min(nats / n, 700)):>10,.2f}")
