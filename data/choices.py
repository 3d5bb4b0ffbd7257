"""Multiple-choice questions: HellaSwag's file, and your own in a like format, which docs/data.md describes."""

import json
from pathlib import Path
from typing import NamedTuple

from common import UserError

EXPECTED = 'expected lines of {"context": TEXT, "endings": [TEXT, ...], "label": INDEX OF THE RIGHT ENDING}'


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int


def read_questions(path):
    """The questions of a file, a list of Question. Raises UserError, which names the line.

    HellaSwag's own rows have "ctx", and no space before the endings: it is added, as llm.c does.
    """
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                if "ctx" in row:
                    row |= dict(
                        context=row["ctx"], endings=[f" {ending}" for ending in row["endings"]]
                    )
                question = Question(*(row[key] for key in Question._fields))
                valid = (
                    all(type(text) is str and text for text in question.endings)
                    and type(question.context) is str
                )
                valid = valid and type(question.endings) is list and type(question.label) is int
                valid = valid and 0 <= question.label < len(question.endings)
            except (ValueError, TypeError, KeyError, RecursionError):
                valid = False
            if not valid:
                raise UserError(f"{path}, line {number} is not a question; {EXPECTED}")
            questions.append(question)
    if not questions:
        raise UserError(f"{path} holds no questions; {EXPECTED}")
    return questions
