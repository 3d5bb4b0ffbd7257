"""The choice among endings: `sample.py --choices`, and the questions of data/choices.py."""

import json
import math

import pytest
import torch

import data.choices
import data.prepare
import evaluation
import sample
from conftest import random_gpt
from data.tokenizers import get_tokenizer
from evaluation import is_chosen, print_choices, score_endings
from runtime.errors import UserError

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
    """Of one ending, by a forward pass of its own in float64, and whether each letter is the likeliest."""
    letters = torch.tensor([*ending.encode()])
    window = ([*context.encode()] or [BYTES.eot])[-(65 - len(letters)) :]  # the newest that fit before it
    logits = model(torch.tensor([[*window, *letters][:-1]]))[0].double().log_softmax(-1)[-len(letters) :]
    return logits.gather(1, letters[:, None]).sum().item(), bool((logits.argmax(-1) == letters).all())


def printed(capsys) -> dict[str, list[float]]:
    rows = capsys.readouterr().out.splitlines()[2:]
    return {row[:38].strip(): [float(x.replace(",", "")) for x in row[38:].split()] for row in rows}


def test_choices_are_those_of_a_plain_loop(tmp_path, capsys):
    model = random_gpt(vocab_size=257, seq_len=64, ngram=3, std=0.3)
    print_choices(model, BYTES, write(tmp_path / "q.jsonl", QUESTIONS))
    shown, n = printed(capsys), len(QUESTIONS)
    for name, length_of in (
        ("summed", lambda ending: 1),
        ("per token (llm.c)", lambda ending: len(ending.encode())),
        ("per character (lm-evaluation-harness)", lambda ending: len(ending.strip())),
    ):
        right = 0
        for row in QUESTIONS:
            scores = [log_likelihood(model, row["context"].rstrip(), end)[0] / length_of(end) for end in row["endings"]]
            right += scores.index(max(scores)) == row["label"]
        p = right / n
        assert shown[name] == pytest.approx([p, math.sqrt(p * (1 - p) / (n - 1))], abs=1e-4)
    assert len(shown) == 3


def test_scores_do_not_depend_on_what_they_are_batched_with():
    model = random_gpt(vocab_size=257, seq_len=64, ngram=3, std=0.3)
    pairs = [(row["context"], ending) for row in QUESTIONS for ending in row["endings"]] * 40  # several batches
    encoded = [[torch.tensor(list(t.encode()) or [BYTES.eot]) for t in pair] for pair in pairs]
    scores, greedy = score_endings(model, *zip(*encoded))
    expected = [log_likelihood(model, *pair) for pair in pairs[: len(pairs) // 40]] * 40
    assert scores.tolist() == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert greedy.tolist() == [drawn for _, drawn in expected]


def test_of_equal_scores_the_first_is_chosen():
    question = data.choices.Question("", ["ab", "ab", "c"], 1)
    pairs = [(torch.tensor([256]), torch.tensor([1] * n)) for n in (2, 2, 1)]
    assert not any(is_chosen(question, torch.tensor([-2.0, -2.0, -3.0]), pairs).values())
    assert all(is_chosen(question._replace(label=0), torch.tensor([-2.0, -2.0, -3.0]), pairs).values())


def test_last_words(tmp_path, capsys):
    model = random_gpt(vocab_size=257, seq_len=64, std=0.3)
    text = "A man walks"
    likeliest = bytes(sample.generate(model, [torch.tensor([*text.encode()])], 1, 257, 0)).decode("latin-1")
    rows = [{"context": text, "endings": [ending], "label": 0} for ending in (likeliest, "zz") if ending.isascii()]
    print_choices(model, BYTES, write(tmp_path / "q.jsonl", rows))
    shown = printed(capsys)
    found = [log_likelihood(model, text, row["endings"][0]) for row in rows]
    assert shown["drawn greedily"][0] == pytest.approx(sum(drawn for _, drawn in found) / len(rows), abs=1e-4)
    assert shown["perplexity of an ending"] == [
        pytest.approx(math.exp(-sum(x for x, _ in found) / len(rows)), rel=1e-2)
    ]
    both = write(tmp_path / "both.jsonl", rows + QUESTIONS)
    with pytest.raises(UserError, match="two files"):
        print_choices(model, BYTES, both)


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", 'line 2 is not a question; expected lines of {"context": TEXT'),
        ("[1]", "line 2 is not a question"),
        ('{"context": "a", "label": 0}', "line 2 is not a question"),
        ('{"context": "a", "endings": ["b", ""], "label": 0}', "line 2 is not a question"),
        ('{"context": "a", "endings": [], "label": 0}', "line 2 is not a question"),
        ('{"context": "a", "endings": "bc", "label": 0}', "line 2 is not a question"),
        ('{"context": "a", "endings": ["b"], "label": 1}', "line 2 is not a question"),
        ('{"context": "a", "endings": ["b"], "label": "0"}', "line 2 is not a question"),
        ('{"context": "a", "endings": ["b"], "label": true}', "line 2 is not a question"),
        (json.dumps({"context": "a", "endings": ["b" * 65, "c"], "label": 0}), "question 2 has an ending of 65 tokens"),
        ("\udce4", "line 2 is not a question"),
    ],
)
def test_wrong_lines_are_named(line, says, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes((json.dumps(QUESTIONS[0]) + "\n" + line + "\n").encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=says):
        print_choices(random_gpt(vocab_size=257, seq_len=64), BYTES, path)


def test_choices_on_the_command_line(noisy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "say_every", lambda seconds: print)
    path = write(tmp_path / "q.jsonl", [row | {"context": "x"} for row in QUESTIONS] * 30)
    assert sample.main(["--run", str(noisy), "--choices", str(path), "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "64 of 120 questions" in out and "120 questions, contexts of 32" in out
    (tmp_path / "empty").write_text("\n")
    for flags, says in (
        (["--choices", path, "--perplexity", path], "one by one"),
        (["--choices", path, "--top_k", "5"], "--top_k does nothing for --choices"),
        (["--choices", tmp_path / "none"], "there is no file"),
        (["--choices", tmp_path / "empty"], "holds no questions"),
    ):
        assert sample.main(["--run", str(noisy), *map(str, flags)]) == 2 and says in capsys.readouterr().err


def test_hellaswag_is_read_as_it_is(tmp_path):
    row = dict(ctx="A man [header] scrapes. then he", endings=["stops.", "goes on."], label=1, activity_label="Ice")
    path = write(tmp_path / "hellaswag_val.jsonl", [row])
    assert data.choices.read_questions(path) == [(row["ctx"], [" stops.", " goes on."], 1)]
