"""Read multiple-choice questions, HellaSwag's or your own (docs/using.md describes the format)."""

import json
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

EXPECTED = (
    'expected lines of {"context": TEXT, "endings": [TEXT, ...], '
    '"label": INDEX OF THE RIGHT ENDING}'
)


class Question(NamedTuple):
    """A context, its possible endings, and the index of the right one."""

    context: str
    endings: list[str]
    label: int
    starts_document: bool  # an end-of-text token precedes it; not for HellaSwag, as in llm.c


def read_questions(path: str | Path) -> list[Question]:
    """Read the questions of a .jsonl file. Raises UserError, with the number of the line."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            if line.strip():
                questions.append(parse_question(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}, line {number} is not a question; {EXPECTED}") from None
    if not questions:
        raise UserError(f"{path} has no questions; {EXPECTED}")
    return questions


def parse_question(row: dict) -> Question:
    """Make a Question of a row. Raises ValueError, TypeError or KeyError."""
    starts_document = "ctx" not in row
    context = row["context" if starts_document else "ctx"]
    endings = row["endings"]
    label = row["label"]
    is_typed = isinstance(context, str) and isinstance(endings, list)
    if not is_typed or not all(endings) or label not in range(len(endings)):
        raise ValueError
    space = ""
    if not starts_document:
        # HellaSwag's endings lack the space before them: add it, as llm.c does. A space at the end
        # of the context moves to the endings, as in lm-evaluation-harness
        stripped = context.rstrip()
        space = context[len(stripped) :] + " "
        context = stripped
    endings = [space + ending for ending in endings]
    return Question(context, endings, label, starts_document)
