"""Read multiple-choice questions, HellaSwag's or your own (docs/data.md describes the format)."""

import json
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

EXPECTED = (
    'expected lines of {"context": TEXT, "endings": [TEXT, ...], '
    '"label": INDEX OF THE RIGHT ENDING}'
)


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int
    starts_document: bool  # an end-of-text token precedes it; not for HellaSwag, as in llm.c


def read_questions(path):
    """Return the questions of a .jsonl file as a list of Question.

    Raises UserError, with the number of the line.
    """
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            if line.strip():
                questions.append(_parse_question(json.loads(line)))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise UserError(f"{path}, line {number} is not a question; {EXPECTED}") from None
    if not questions:
        raise UserError(f"{path} has no questions; {EXPECTED}")
    return questions


def _parse_question(row):
    """Return the Question in a row. Raises ValueError, TypeError, KeyError or IndexError."""
    starts_document = "ctx" not in row
    context = row["context" if starts_document else "ctx"]
    endings = row["endings"]
    label = row["label"]
    if [type(context), type(endings), type(label)] != [str, list, int]:
        raise TypeError
    if not all(type(ending) is str and ending for ending in endings):
        raise TypeError
    if not 0 <= label < len(endings):
        raise IndexError
    if not starts_document:
        # HellaSwag's endings lack the space before them: add it, as llm.c does. A space at the end
        # of the context moves to the endings, as in lm-evaluation-harness
        stripped = context.rstrip()
        space = context[len(stripped) :] + " "
        context = stripped
        endings = [space + ending for ending in endings]
    return Question(context, endings, label, starts_document)
