"""Evaluation of a trained model: perplexity on a text, and multiple-choice questions.

Both return a table: rows by name, each a dict from columns to numbers.
"""

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
from data.tokenizers import END_OF_TEXT, Tokenizer
from model import GPT

Table = dict[str, dict[str, float]]


def show_progress(done: int, total: int, unit: str) -> None:
    """Print how far an evaluation is, over the line before."""
    end = "\n" if done == total else ""
    print(f"\r{done:,} of {total:,} {unit}", end=end, file=sys.stderr)


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
        show_progress(batch[-1], n, "tokens")
    return total


def perplexity(model: GPT, tokenizer: Tokenizer, path: Path, stride: int) -> Table:
    """Compute a text file's perplexity per token, byte and word.

    The text is tokenized as in data/prepare.py, and follows an end-of-text token. stride: of
    summed_loss. Raises UserError.
    """
    seq_len = model.cfg.seq_len
    if not path.is_file():
        raise UserError(f"there is no file {path}; --perplexity needs a text")
    if stride > seq_len:
        raise UserError(f"--stride is {stride}; expected at most the context length of {seq_len}")
    tokens, n_bytes = encode_file(path, tokenizer)
    loss = summed_loss(model, tokens, tokenizer.eot, stride)

    text = tokenizer.decode_bytes(tokens.tolist()).replace(END_OF_TEXT, b" ")
    n_words = len(text.split())
    counts = {"per token": len(tokens), "per byte": n_bytes, "per word": n_words}
    table = {}
    for unit, count in counts.items():
        if count:
            nats = loss / count
            # Below the largest float, e^709
            table[unit] = dict(
                count=count, perplexity=math.exp(min(nats, 700)), nats=nats, bits=nats / math.log(2)
            )
    return table


# --------------------------------------------------------------------------------------------------
# Multiple choice

Pairs = list[tuple[Tensor, Tensor]]  # tokens of context and ending, int64


@torch.no_grad()
def score_endings(model: GPT, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Score each ending after its context.

    Both have at least one token. An ending must fit into the model's context length; its context is
    truncated on the left to what fits.

    Returns the log-likelihoods of the endings in nats, fp64 (N,), and a mask of those that greedy
    decoding produces, bool (N,). Raises UserError if a likelihood is not finite.
    """
    rows = [torch.cat(pair)[-model.cfg.seq_len - 1 :] for pair in pairs]
    scores = torch.zeros(len(pairs), dtype=torch.float64)
    is_greedy = torch.zeros(len(pairs), dtype=torch.bool)

    # The longest first, to pad little; 2,048 tokens at once, to limit the memory of the logits
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
    while order:
        batch_size = max(1, 2048 // len(rows[order[0]]))
        batch = order[:batch_size]
        order = order[batch_size:]
        tokens = pad_sequence([rows[i] for i in batch], batch_first=True).to(model.device)
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:]
        losses = F.cross_entropy(logits.mT, targets, reduction="none")  # (B, T)
        is_likeliest = logits.argmax(-1) == targets
        for row, i in enumerate(batch):
            end = len(rows[i]) - 1
            ending = slice(end - len(pairs[i][1]), end)
            scores[i] = -losses[row, ending].double().sum()
            is_greedy[i] = is_likeliest[row, ending].all()
        show_progress(len(rows) - len(order), len(rows), "endings")
    if not scores.isfinite().all():
        raise UserError(
            "the model's likelihoods are not finite; try --dtype fp32, or a different checkpoint"
        )
    return scores, is_greedy


def encode_question(question: Question, tokenizer: Tokenizer, seq_len: int) -> Pairs:
    """Return the tokens of the context with those of each ending; a context has at least one token.

    Raises UserError if an ending is longer than seq_len.
    """
    context = tokenizer.encode(question.context).tolist()
    if question.starts_document or not context:
        context.insert(0, tokenizer.eot)
    pairs = []
    for text in question.endings:
        ending = torch.tensor(tokenizer.encode(text).tolist())
        if len(ending) > seq_len:
            raise UserError(
                f"the ending {text[:40]!r} has {len(ending)} tokens; "
                f"expected at most the context length of {seq_len}"
            )
        pairs.append((torch.tensor(context), ending))
    return pairs


def accuracy(results: list[bool]) -> dict[str, float]:
    """Return the fraction that is right, and its standard error."""
    n = len(results)
    mean = sum(results) / n
    return {"accuracy": mean, "std error": math.sqrt(mean * (1 - mean) / max(1, n - 1))}


def answer_choices(model: GPT, tokenizer: Tokenizer, path: Path) -> Table:
    """Compute the accuracy on a file's questions (data/questions.py), with its standard error.

    The ending with the highest log-likelihood is chosen, summed or per character, which are acc and
    acc_norm of lm-evaluation-harness; ties go to the first. If every question has one ending, as in
    LAMBADA, it is right if greedy decoding produces it. Raises UserError.
    """
    if not path.is_file():
        raise UserError(
            f"there is no file {path}; --choices needs lines of JSON "
            "(`python data/prepare.py hellaswag`)"
        )
    questions = read_questions(path)
    n_endings = {len(question.endings) for question in questions}
    if 1 in n_endings and len(n_endings) > 1:
        raise UserError(
            f"{path} mixes questions with one ending and with several; split it into two files"
        )
    encoded = [encode_question(q, tokenizer, model.cfg.seq_len) for q in questions]

    scores, is_greedy = score_endings(model, list(itertools.chain.from_iterable(encoded)))
    if n_endings == {1}:
        nats = -scores.mean().item()
        row = accuracy(is_greedy.tolist()) | {"perplexity": math.exp(min(nats, 700))}
        return {"greedy decoding": row}
    summed, per_character = [], []
    by_question = scores.split([len(pairs) for pairs in encoded])
    for question, sums in zip(questions, by_question):
        n_characters = torch.tensor([len(text.lstrip()) or 1 for text in question.endings])
        summed.append(sums.argmax().item() == question.label)
        per_character.append((sums / n_characters).argmax().item() == question.label)
    return {"summed": accuracy(summed), "per character": accuracy(per_character)}
