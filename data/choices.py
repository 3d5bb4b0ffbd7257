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
        if not line.strip():
            continue
        question = _parse_question(line)
        if question is None:
            raise UserError(f"{path}, line {number} is not a question; {EXPECTED}")
        questions.append(question)
    if not questions:
        raise UserError(f"{path} holds no questions; {EXPECTED}")
    return questions


def _parse_question(line):
    """Return the Question in a line of JSON, or None if there is none."""
    try:
        row = json.loads(line)
        if "ctx" in row:
            # HellaSwag's endings lack the space before them: add it, as llm.c does. A space at the
            # end of the context moves to the endings, as in lm-evaluation-harness
            context = row["ctx"].rstrip()
            space = row["ctx"][len(context) :] + " "
            endings = [space + ending for ending in row["endings"]]
        else:
            context = row["context"]
            endings = row["endings"]
        label = row["label"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if type(context) is not str or type(endings) is not list or type(label) is not int:
        return None
    is_text = all(type(ending) is str and ending for ending in endings)
    if not is_text or not 0 <= label < len(endings):
        return None
    return Question(context, endings, label, starts_document="ctx" not in row)
