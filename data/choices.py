"""Multiple-choice questions: HellaSwag's file, and your own in a like format, which docs/data.md describes."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from data.download import GITHUB, download
from runtime.errors import UserError

COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
HELLASWAG = f"{GITHUB}/rowanz/hellaswag/{COMMIT}/data/hellaswag_val.jsonl"
HELLASWAG_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # that file's object name in git
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
                    row |= dict(context=row["ctx"], endings=[f" {ending}" for ending in row["endings"]])
                question = Question(*(row[key] for key in Question._fields))
                valid = all(type(text) is str and text for text in question.endings) and type(question.context) is str
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


def prepare_hellaswag(folder, say=print):
    """Downloads HellaSwag's validation questions (Zellers et al. 2019) into `folder`. Raises UserError."""
    path = Path(folder) / HELLASWAG.rpartition("/")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    download(HELLASWAG, path, say=say)
    raw = path.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest() != HELLASWAG_BLOB:
        raise UserError(f"{path} is not HellaSwag's validation file: delete it and run the same command again")
    say(f"next: python sample.py --run RUN --choices {path}")
