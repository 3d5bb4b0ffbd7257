"""Multiple-choice questions: HellaSwag, and your own files in the same format, which docs/data.md describes."""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from data.download import download
from data.shards import atomic_write
from runtime.errors import UserError

HELLASWAG = (
    "https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/"
    "hellaswag_val.jsonl"
)
HELLASWAG_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # that file's object name in git
EXPECTED = 'expected lines of {"context": TEXT, "endings": [TEXT, ...], "label": INDEX OF THE RIGHT ENDING}'


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int


def read_questions(path):
    """The questions of a file, a list of Question. Raises UserError, which names the line."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                question = Question(*(row[key] for key in Question._fields))
                valid = type(question.endings) is list and all(question.endings) and type(question.label) is int
                valid = valid and all(type(text) is str for text in (question.context, *question.endings))
            except (ValueError, TypeError, KeyError, RecursionError):
                valid = False
            if not valid or not 0 <= question.label < len(question.endings):
                raise UserError(f"{path}, line {number} is not a question; {EXPECTED}")
            questions.append(question)
    if not questions:
        raise UserError(f"{path} holds no questions; {EXPECTED}")
    return questions


def prepare_hellaswag(folder, say=print):
    """Downloads HellaSwag's validation questions (Zellers et al. 2019) and writes two files of them into `folder`.

    llmc.jsonl formats them as llm.c does, harness.jsonl as lm-evaluation-harness does: with the activity before the
    context, and without WikiHow's markup. Raises UserError.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    original = folder / HELLASWAG.rpartition("/")[2]
    download(HELLASWAG, original, say=say)
    raw = original.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest() != HELLASWAG_BLOB:
        raise UserError(f"{original} is not HellaSwag's validation file: delete it and run the same command again")
    for name in ("llmc", "harness"):
        with atomic_write(folder / f"{name}.jsonl") as file:
            for row in map(json.loads, raw.splitlines()):
                context, endings = row["ctx"], row["endings"]
                if name == "harness":
                    context = _without_marks(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
                    endings = map(_without_marks, endings)
                question = Question(context, [f" {ending}" for ending in endings], int(row["label"]))
                file.write(json.dumps(question._asdict(), ensure_ascii=False).encode() + b"\n")
    say(f"next: python sample.py --run RUN --choices {folder / 'llmc.jsonl'}")


def _without_marks(text):
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
