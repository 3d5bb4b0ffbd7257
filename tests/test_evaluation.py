"""The choice among endings: `sample.py --choices`, and the questions of data/questions.py."""

import json
import math

import pytest
import torch

import data.questions
import sample
from common.errors import UserError, run_command
from conftest import random_gpt
from data.tokenizers import get_tokenizer
from inference.evaluation import answer_choices, encode_question

BYTES = get_tokenizer("bytes")
QUESTIONS = [
    {"context": "A man walks", "endings": [" home.", " into the sea and swims", " x"], "label": 1},
    {"context": "", "endings": ["yes", "no"], "label": 0},
    {"context": "long " * 20, "endings": [" a", " bb", " ccc", " dddd"], "label": 2},
    {"context": "same", "endings": [" end", " end"], "label": 1},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log_likelihood(model, context: str, ending: str) -> tuple[float, bool]:
    """Of one ending, by a forward pass of its own; and whether each letter is the likeliest."""
    letters = torch.tensor([*ending.encode()])
    window = [BYTES.eot, *context.encode()]
    window = window[-(65 - len(letters)) :]  # the newest that fit before it
    logits = model(torch.tensor([[*window, *letters][:-1]]))[0, -len(letters) :]
    log_probs = logits.double().log_softmax(-1)
    is_likeliest = bool((logits.argmax(-1) == letters).all())
    return log_probs.gather(1, letters[:, None]).sum().item(), is_likeliest


def test_choices_are_those_of_a_plain_loop(tmp_path):
    model, n = random_gpt(vocab_size=257, seq_len=64, ngram=3, std=0.3), len(QUESTIONS)
    table = answer_choices(model, BYTES, write(tmp_path / "q.jsonl", QUESTIONS))
    measures = {"summed": lambda ending: 1, "per character": lambda ending: len(ending.strip())}
    assert table.keys() == measures.keys()
    for name, length_of in measures.items():
        right = 0
        for row in QUESTIONS:
            scores = []
            for ending in row["endings"]:
                score, _ = log_likelihood(model, row["context"], ending)
                scores.append(score / length_of(ending))
            right += scores.index(max(scores)) == row["label"]
        deviation = math.sqrt(right * (n - right) / n**2 / (n - 1))
        assert table[name] == pytest.approx({"accuracy": right / n, "std error": deviation})


def test_last_words(tmp_path):
    """One ending per question, in several batches of rows of different lengths."""
    model = random_gpt(vocab_size=257, seq_len=64, ngram=3, std=0.25)
    text = "What is 3 plus 5?\n"  # the end is part of the question
    likeliest = max(map(chr, range(128)), key=lambda end: log_likelihood(model, text, end))
    pairs = [(text, likeliest)]
    for row in QUESTIONS:
        pairs += [(row["context"], ending) for ending in row["endings"]]
    rows = [{"context": text, "endings": [ending], "label": 0} for text, ending in pairs] * 40
    found = answer_choices(model, BYTES, write(tmp_path / "q.jsonl", rows))["greedy decoding"]
    scores, is_greedy = zip(*[log_likelihood(model, *pair) for pair in pairs])
    assert found["accuracy"] == pytest.approx(sum(is_greedy) / len(pairs)) and any(is_greedy)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(pairs)), rel=1e-5)
    with pytest.raises(UserError, match="two files"):
        answer_choices(model, BYTES, write(tmp_path / "both.jsonl", rows + QUESTIONS))


def test_wrong_lines_are_named(tmp_path):
    model, path = random_gpt(vocab_size=257, seq_len=64), tmp_path / "q.jsonl"
    for line in (
        '{"context": "a", "label": 0}',
        '{"context": "a", "endings": ["b", ""], "label": 0}',
        '{"context": "a", "endings": ["b"], "label": 1}',
        "\udce4",
    ):
        path.write_bytes(f"{json.dumps(QUESTIONS[0])}\n{line}\n".encode(errors="surrogateescape"))
        with pytest.raises(UserError, match="line 2 is not a question; expected lines of"):
            answer_choices(model, BYTES, path)


def test_choices_on_the_command_line(noisy, tmp_path, capsys):
    path = write(tmp_path / "q.jsonl", QUESTIONS)
    assert run_command(sample.main, [str(noisy), "--choices", str(path)]) == 0
    title, columns, *rows = capsys.readouterr().out.splitlines()
    assert title == str(path) and columns.split() == ["accuracy", "std", "error"] and len(rows) == 2
    write(path, [*QUESTIONS, QUESTIONS[0] | dict(endings=["b" * 65, "c"])])
    with pytest.raises(UserError, match="the ending 'bbb.* has 65 tokens"):
        answer_choices(random_gpt(vocab_size=257, seq_len=64), BYTES, path)


def test_hellaswags_rows_are_scored_as_elsewhere(tmp_path):
    row = dict(ctx="A man. he", endings=["stops.", "goes."], label=1, activity_label="Ice")
    path = write(tmp_path / "q.jsonl", [row, row | dict(ctx="A man. he  ")])
    for question, space in zip(data.questions.read_questions(path), (" ", "   ")):
        pairs = encode_question(question, BYTES, 64)
        texts = [[bytes(tokens).decode() for tokens in pair] for pair in pairs]
        assert texts == [["A man. he", space + "stops."], ["A man. he", space + "goes."]]
