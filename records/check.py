"""`bench.py record DIR`: the rules of the tracks as code, and whether a record's folder keeps them."""

import dataclasses
import json
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common import UserError
from records import source
from runtime.flags import parse_flags
from runtime.log import SECTION
from runtime.sources import SOURCE_FILES
from train_gpt import Config, learning_rates, make_config

SHAKESPEARE = {  # what `data/prepare.py shakespeare` makes
    "train_000000.bin": "c991171e6f61b88dae0b0aa9ca8446624e9270fc928f227e31ca5a203ced9d1d",
    "val_000000.bin": "2130c5424137786d6e83983090afb3dda627e81db7f23ece0ea31c72f3b719d9",
}
LAPTOP = dict(
    targets={"shakespeare-1.8857": 1.8857, "shakespeare-1.4697": 1.4697}, device="1 x cpu"
)
FINEWEB = dict(targets={"fineweb-3.28": 3.28}, device="", files=None, val_tokens=10485760)
# folder of records/ -> targets by name, where it runs, its data (None: no hash is known yet, and none is accepted)
TRACKS = {
    "laptop": LAPTOP | dict(files=SHAKESPEARE, val_tokens=111540),
    "single-gpu": FINEWEB | dict(device="1 x cuda"),
    "8-gpus": FINEWEB | dict(device="8 x cuda"),
    "steps": FINEWEB
    | dict(fixed=dict(n_layer=12, n_head=6, n_embd=768, seq_len=1024, batch_tokens=524288)),
}
# The run and its clock: sources whose hashes each log.txt must hold, where its commit has them
OPS = [name for name in SOURCE_FILES if name.startswith("ops/")]
CLOCKS = ("runtime/log.py", "runtime/logger.py")  # of now, and of before
HASHED = ("train_gpt.py", "model.py", "ops.py", *OPS, "data/stream.py", *CLOCKS)
LEFT_OPEN = dict(
    dtype="auto", attn="auto", loss_chunk=-1, ngram=-1, ngram_dropout=-1
)  # by a command, not by log.txt


@dataclass
class Record:
    """A folder of a track, as it stands."""

    folder: Path
    track: dict  # of TRACKS
    runs: list[dict]  # what read_run returns, by name
    commit: str  # of source.patch
    sources: dict[
        str, str | None
    ]  # name -> SHA-256 of the source, rebuilt from it; None for what it has not
    changed: list[str]  # names of sources that are not this repository's


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_run(folder: Path) -> dict:
    """A run's folder as it stands: log, flags, rows, summary, hashes of sources. Raises UserError if one is missing."""
    try:
        log = (folder / "log.txt").read_text(encoding="utf-8")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = [
            json.loads(line)
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        _, *starts = log.split(f"{SECTION} run\n")
        flags, lines = starts[0].split("\n", 1)
        run = dict(name=folder.name, starts=len(starts), flags=json.loads(flags), lines=lines)
        hashes = next((line for line in lines.splitlines() if line.startswith("sources: ")), "")
        run["sources"] = dict(re.findall(r"([\w./-]+) sha256 ([0-9a-f]{64})", hashes))
        if not all(
            math.isfinite(summary[key]) for key in ("val_loss", "train_time_s", "wall_time_s")
        ):
            raise ValueError("a figure of summary.json is not finite")
        return run | dict(rows=rows, summary=summary)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder} is not a finished run ({reason}); its files must be as it left them"
        ) from None


def parse_command_sh(path: Path) -> dict:
    """The flags in command.sh's call of train_gpt.py. Raises UserError, OSError or ValueError when there is no such."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    calls = re.findall(r"train_gpt\.py[\"']?(?=\s|$)(.*)", "\n".join(lines).replace("\\\n", " "))
    if len(calls) != 1:
        raise UserError(f"expected one call of train_gpt.py, found {len(calls)}")
    words = shlex.split(
        re.split(r"\s\d?[<>|&;]|;", calls[0])[0], comments=True
    )  # up to "2>&1 | tee log"
    return parse_flags(words, dataclasses.fields(Config), {}, "")


def comparable(flags: dict) -> dict:
    """The flags that all runs of a record have in common."""
    return {k: v for k, v in flags.items() if k not in ("seed", "out_dir", "data", "trials")}


def open_record(path: str) -> tuple[Record, float]:
    """The record in a folder, and its target. Raises UserError for what is not the folder of a record."""
    folder = Path(path).resolve()
    track, target = TRACKS.get(folder.parent.name, {}), folder.name.partition("_")[2]
    if target not in track.get("targets", ()):
        known = ", ".join(
            f"records/{t}/DATE_{name}" for t, spec in TRACKS.items() for name in spec["targets"]
        )
        raise UserError(f"{path or 'nothing'} is not a folder of a track; expected one of {known}")
    runs = [
        read_run(log.parent)
        for log in sorted(folder.glob("*/log.txt"))
        if log.parent.name != "baseline"
    ]
    if not runs:
        raise UserError(
            f"{path} holds no runs; expected folders with log.txt, metrics.jsonl and summary.json"
        )
    names = dict.fromkeys(name for run in runs for name in (*run["sources"], *HASHED))
    commit, sources = source.read_source(folder, names)
    logged = runs[0]["sources"]
    changed = [
        name
        for name in logged | SOURCE_FILES
        if logged.get(name) != source.sha256(source.REPOSITORY / name)
    ]
    return Record(folder, track, runs, commit, sources, changed), track["targets"][target]


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def record_violations(record: Record) -> Iterator[str]:
    """Why a record breaks the rules, except for those of each run."""
    if not (record.folder / "README.md").is_file():
        yield "README.md is missing"
    yield from command_violations(record)
    seeds = sorted(run["flags"]["seed"] for run in record.runs)
    if seeds != list(range(len(seeds))):
        yield f"the seeds are {seeds}, not 0, 1, 2, ...: every run counts"
    if len(seeds) < 3:
        yield f"{len(seeds)} runs; a record needs at least 3"
    if record.track["files"] is None:
        yield "no hash of the track's data is known yet; add those of a verified download to TRACKS"


def command_violations(record: Record) -> Iterator[str]:
    """Why command.sh does not give the flags of the first run."""
    first = record.runs[0]
    try:
        flags = parse_command_sh(record.folder / "command.sh")
        if not record.changed:  # else defaults, rules and flags may be others than then
            cfg = make_config(**flags)
            flags = dataclasses.asdict(cfg) | dict(zip(("muon_lr", "adam_lr"), learning_rates(cfg)))
    except (UserError, OSError, ValueError) as error:
        if not record.changed or "unknown flag" not in str(error):
            yield f"command.sh does not say how to run it again: {error}"
        return
    given = {key: value for key, value in comparable(flags).items() if LEFT_OPEN.get(key) != value}
    other = [key for key, value in given.items() if first["flags"].get(key) != value]
    if other:
        yield f"command.sh gives other flags than {first['name']} was run with: {', '.join(other)}"


def run_violations(record: Record, run: dict) -> Iterator[str]:
    """Why a run breaks the rules of its record and track."""
    first, track, flags, summary, rows = (
        record.runs[0],
        record.track,
        run["flags"],
        run["summary"],
        run["rows"],
    )
    steps, batch_tokens, machine = flags["max_steps"], flags["batch_tokens"], summary["machine"]
    for name, sha256 in record.sources.items():
        if sha256 != run["sources"].get(name):
            yield f"log.txt does not hold the hash of {name} as source.patch gives it"
    if run["sources"] != first["sources"]:
        yield f"another source than {first['name']}"
    if comparable(flags) != comparable(first["flags"]):
        yield f"other flags than {first['name']}"
    if machine != first["summary"]["machine"]:
        yield f"another machine than {first['name']}"
    if not machine.startswith(track["device"]):
        yield f"on {machine}, not {track['device']}"
    if run["starts"] != 1 or flags["resume"] + flags["init_from"]:
        yield "resumed, or not from scratch"
    if summary["stopped_by"] != "max_steps" or summary["step"] != steps:
        yield f"stopped by {summary['stopped_by']} at step {summary['step']}, not {steps}"
    if wrong := [key for key, value in track.get("fixed", {}).items() if flags[key] != value]:
        yield f"the track fixes {', '.join(wrong)}"
    if track["files"] not in (None, summary["files"]):
        yield "trained or validated on other data than the track's"
    tokens, expected = summary["val_tokens"], track["val_tokens"]
    if not 0 <= expected - tokens < min(flags["seq_len"], expected // 100):
        yield f"validated on {tokens:,} tokens of {expected:,}"

    last = ([row for row in rows if "val_loss" in row] or [{}])[-1]
    if any(last.get(key) != summary[key] for key in ("step", "val_loss", "train_time_s", "tokens")):
        yield "summary.json and the last evaluation in metrics.jsonl disagree"
    loss, seconds = (
        f"val_loss {summary['val_loss']:.4f} | ",
        f"train_time {summary['train_time_s']:.1f} s",
    )
    if not any(loss in line and line.endswith(seconds) for line in run["lines"].splitlines()):
        yield "summary.json and log.txt disagree"
    logged = [row for row in rows if "tokens_per_s" in row]
    if [row["step"] for row in logged] != sorted(
        {1, *range(flags["log_every"], steps, flags["log_every"]), steps}
    ):
        yield "rows of metrics.jsonl are missing"
    times = [(0.0, 0.0)] + [(row["train_time_s"], row["wall_time_s"]) for row in rows]
    if not all(a[0] <= b[0] and a[1] <= b[1] and b[0] <= b[1] for a, b in zip(times, times[1:])):
        yield "the clock runs backwards, or train_time is above the wall time"
    for before, row in zip([dict(step=0, train_time_s=0.0), *logged], logged):
        tokens = batch_tokens * (row["step"] - before["step"])
        counted = row["tokens_per_s"] * (row["train_time_s"] - before["train_time_s"])
        if row["tokens"] != batch_tokens * row["step"] or not abs(counted / tokens - 1) < 0.01:
            yield f"tokens and seconds of step {row['step']} do not fit together"


def t_test(values: list[float], target: float) -> float:
    """One-sided p-value of "the mean is below the target" by Student's t-test; 1 for fewer than two values."""
    n = len(values)
    if n < 2:
        return 1.0
    deviation, gap = statistics.stdev(values), target - statistics.mean(values)
    if deviation == 0:
        return 0.0 if gap > 0 else 1.0
    t, df = gap / deviation * math.sqrt(n), n - 1
    # P(T > t) = P(0 < angle of the tail), with T = sqrt(df) tan(angle): an integral of cos^(df - 1) over a finite range
    angles = torch.linspace(math.atan(t / math.sqrt(df)), math.pi / 2, 100_001, dtype=torch.float64)
    area = torch.trapezoid(angles.cos() ** (df - 1), angles).item()
    return area * math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi))


# ---------------------------------------------------------------------------------------------------------------------
# The verdict

# Of the row that check_record returns: key -> heading, format
COLUMNS = dict(
    record=("record", ""),
    target=("target", ""),
    mean=("mean val_loss", ".4f"),
    deviation=("sd", ".4f"),
)
COLUMNS |= dict(
    p=("p", ".1e"), runs=("runs", "d"), steps=("steps", ",d"), train_time_s=("train_time, s", ".1f")
)
COLUMNS |= dict(wall_time_s=("wall time, s", ".1f"), machine=("machine", ""), verdict=("", ""))


def check_record(path: str) -> tuple[dict, list[str]]:
    """Check a record's folder against its track's rules. Raises UserError for what is not such a folder.

    Returns a row of figures, with `verdict` PASS or FAIL and the reasons in `broken`, and what a person must look at.
    """
    record, target = open_record(path)
    reasons, summaries = [*record_violations(record)], [run["summary"] for run in record.runs]
    reasons += [
        f"{run['name']}: {reason}" for run in record.runs for reason in run_violations(record, run)
    ]
    losses = [summary["val_loss"] for summary in summaries]
    p = t_test(losses, target)
    if p >= 0.01:
        reasons.append(f"the mean is not below {target} with p < 0.01 (p = {p:.4f})")
    row = dict(
        track=record.folder.parent.name,
        record=record.folder.name,
        runs=len(losses),
        target=target,
        p=p,
    )
    row |= dict(
        mean=statistics.mean(losses),
        deviation=statistics.stdev(losses) if len(losses) > 1 else None,
    )
    for key in ("train_time_s", "wall_time_s"):
        seconds = [summary[key] for summary in summaries]
        row |= {
            key: statistics.median(seconds),
            f"{key}_min": min(seconds),
            f"{key}_max": max(seconds),
        }
    row |= dict(steps=summaries[0]["step"], machine=summaries[0]["machine"])
    row |= dict(verdict="FAIL" if reasons else "PASS", broken=reasons)
    notes = []  # what the rules cannot judge
    if any(re.search(r"git \S+-dirty", run["lines"]) for run in record.runs):
        notes.append(
            "A person must ask what was changed: the runs were made from files that were not committed."
        )
    if record.changed:
        names, where = ", ".join(record.changed), f"commit {record.commit[:12]} with source.patch"
        notes.append(
            f"A person must read the source, {where}; these files are not this repository's: {names}."
        )
    return row, notes


def pack(path: str, commit: str) -> None:
    """Put source.patch, the difference to a commit, in place of the runs' source/ folders in a record's folder.

    Raises UserError, also where it does not give every run's source; their folders then stay.
    """
    copies = source.write_source(Path(path), commit)
    record, _ = open_record(path)
    for run in record.runs:
        if wrong := [
            name for name, sha256 in record.sources.items() if sha256 != run["sources"].get(name)
        ]:
            found = f"{run['name']}: source.patch does not give {wrong[0]} as it ran"
            raise UserError(
                f"{found}; every source/ stays: give runs of one source, as they were left"
            )
    for copy in copies:
        shutil.rmtree(copy)
