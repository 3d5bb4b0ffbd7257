"""Multiple-choice questions: HellaSwag, and your own files in the same format.

A file has one JSON object per line: `context`, a string; `endings`, a list of strings that are appended to it as they
are (so with a leading space, if there is one); `label`, the index of the right one, from 0.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from data.download import download
from data.shards import UserError, atomic_write

HELLASWAG = (
    "https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/"
    "hellaswag_val.jsonl"
)
HELLASWAG_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # that file's object name in git


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int


def read_questions(path):
    """The questions of a file, a list of Question. Raises UserError, which names the line."""
    questions = []
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    questions.append(_question(line, f"{path}, line {number}"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not text in UTF-8 ({error.reason}); give lines of JSON") from None
    if not questions:
        raise UserError(f"{path} holds no questions; expected one JSON object per line with context, endings, label")
    return questions


def _question(line, place):
    expected = 'expected {"context": TEXT, "endings": [TEXT, ...], "label": NUMBER}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not JSON; {expected}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a JSON object; {expected}")
    if missing := [key for key in Question._fields if key not in row]:
        hint = "; `python data/prepare.py hellaswag` makes such a file of HellaSwag's" if "ctx" in row else ""
        raise UserError(f"{place} has no {' and no '.join(missing)}; {expected}{hint}")
    context, endings, label = (row[key] for key in Question._fields)
    if not isinstance(context, str) or not isinstance(endings, list) or not all(isinstance(e, str) for e in endings):
        raise UserError(f"{place} holds something else than texts in context or endings; {expected}")
    if not endings or not all(endings):
        raise UserError(f"{place} has {'an empty ending' if endings else 'no endings'}, which has no likelihood")
    if type(label) is not int or not 0 <= label < len(endings):
        raise UserError(f"{place} has the label {label!r}; expected the number of an ending, 0 to {len(endings) - 1}")
    return Question(context, endings, label)


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
    rows = [json.loads(line) for line in raw.splitlines()]
    for name, shown in (("llmc", _as_llmc), ("harness", _as_harness)):
        path = folder / f"{name}.jsonl"
        with atomic_write(path) as file:
            for row in rows:
                context, endings = shown(row)
                question = Question(context, [f" {ending}" for ending in endings], int(row["label"]))
                file.write(json.dumps(question._asdict(), ensure_ascii=False).encode() + b"\n")
        say(f"{path}: {len(rows):,} questions")
    say(f"next: python sample.py --run RUN --choices {folder / 'llmc.jsonl'}")


def _as_llmc(row):
    return row["ctx"], row["endings"]


def _as_harness(row):
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _without_marks(context), [_without_marks(ending) for ending in row["endings"]]


def _without_marks(text):
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
