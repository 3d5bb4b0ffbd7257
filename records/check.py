"""`bench.py record DIR`: the rules of the tracks, and whether a record's folder keeps them."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

import torch

from common import SOURCE_FILES, UserError
from records import source
from runtime.flags import parse_flags
from runtime.run import SECTION
from train_gpt import Config, learning_rates, make_config

SHAKESPEARE = {  # what `data/prepare.py shakespeare` makes
    "train_000000.bin": "c991171e6f61b88dae0b0aa9ca8446624e9270fc928f227e31ca5a203ced9d1d",
    "val_000000.bin": "2130c5424137786d6e83983090afb3dda627e81db7f23ece0ea31c72f3b719d9",
}
FINEWEB = dict(targets={"fineweb-3.28": 3.28}, files=None, val_tokens=10485760)
GPT2_SMALL = dict(n_layer=12, n_head=6, n_embd=768, seq_len=1024, batch_tokens=524288)
# Folder of records/ -> targets by name, SHA-256 of the data (None: not known yet, and no record is
# accepted), tokens of a validation, how the machine's name begins, flags that are fixed
TRACKS = {
    "laptop": dict(
        targets={"shakespeare-1.8857": 1.8857, "shakespeare-1.4697": 1.4697},
        files=SHAKESPEARE,
        val_tokens=111540,
        device="1 x cpu",
    ),
    "single-gpu": FINEWEB | dict(device="1 x cuda"),
    "8-gpus": FINEWEB | dict(device="8 x cuda"),
    "steps": FINEWEB | dict(device="", fixed=GPT2_SMALL),
}
# Sources whose hashes each log.txt must hold, if its commit has them: the run and its clock, which
# was runtime/logger.py before
OPS = [name for name in SOURCE_FILES if name.startswith("ops/")]
CLOCKS = ("runtime/log.py", "runtime/logger.py")
HASHED = ("train_gpt.py", "model.py", "ops.py", *OPS, "data/stream.py", *CLOCKS)
# Values that a command may leave to the run, which logs what it chose
AUTO = dict(dtype="auto", attn="auto", loss_chunk=-1, ngram=-1, ngram_dropout=-1)


@dataclass
class Record:
    """A folder of a track, with its runs and the source that source.patch gives."""

    folder: Path
    track: dict  # of TRACKS
    runs: list[dict]  # of read_run, by name
    commit: str  # of source.patch
    sources: dict[str, str | None]  # name -> SHA-256; None if missing
    changed: list[str]  # names of sources that are not this repository's


# --------------------------------------------------------------------------------------------------
# Reading


def read_run(folder: Path) -> dict:
    """Read a run's folder: its log, flags, rows, summary, hashes of sources. Raises UserError."""
    try:
        log = (folder / "log.txt").read_text(encoding="utf-8")
        metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for key in ("val_loss", "train_time_s", "wall_time_s"):
            if not math.isfinite(summary[key]):
                raise ValueError(f"{key} of summary.json is not finite")
        # Each start of the run begins a section of log.txt, whose first line holds the flags
        starts = log.split(f"{SECTION} run\n")[1:]
        flags, lines = starts[0].split("\n", 1)
        hashes = re.findall(r"^sources: .*", lines, re.MULTILINE)[:1]
        sources = re.findall(r"([\w./-]+) sha256 ([0-9a-f]{64})", "".join(hashes))
        return dict(
            name=folder.name,
            starts=len(starts),
            flags=json.loads(flags),
            log=lines,
            sources=dict(sources),
            rows=[json.loads(line) for line in metrics.splitlines()],
            summary=summary,
        )
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        wrong = f"{folder} is not a finished run ({type(error).__name__}: {error})"
        raise UserError(f"{wrong}; its files must be as it left them") from None


def parse_command_sh(path: Path) -> dict:
    """Read the flags in command.sh's call of train_gpt.py.

    Raises UserError, OSError or ValueError if it has no such call.
    """
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^[ \t]*#.*\n?", "", text, flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    calls = re.findall(r"train_gpt\.py[\"']?(?=\s|$)(.*)", text)
    if len(calls) != 1:
        raise UserError(f"expected one call of train_gpt.py, found {len(calls)}")
    # Up to what the shell reads, as in `2>&1 | tee log`
    arguments = re.split(r"\s\d?[<>|&;]|;", calls[0])[0]
    words = shlex.split(arguments, comments=True)
    return parse_flags(words, dataclasses.fields(Config), {}, "")


def comparable(flags: dict) -> dict:
    """The flags that must be the same in all runs of a record."""
    own = ("seed", "out_dir", "data", "trials")
    return {name: value for name, value in flags.items() if name not in own}


def open_record(path: str) -> tuple[Record, float]:
    """Read a record's folder; returns it and its target. Raises UserError for any other folder."""
    folder = Path(path).resolve()
    track = TRACKS.get(folder.parent.name, dict(targets={}))
    target = folder.name.partition("_")[2]
    if target not in track["targets"]:
        known = []
        for name, spec in TRACKS.items():
            known += [f"records/{name}/DATE_{target_name}" for target_name in spec["targets"]]
        wrong = f"{path} is not a folder of a track"
        raise UserError(f"{wrong}; expected one of {', '.join(known)}")
    logs = sorted(folder.glob("*/log.txt"))
    runs = [read_run(log.parent) for log in logs if log.parent.name != "baseline"]
    if not runs:
        expected = "folders with log.txt, metrics.jsonl and summary.json"
        raise UserError(f"{path} holds no runs; expected {expected}")

    names = []
    for run in runs:
        names += run["sources"]
    names += HASHED
    commit, sources = source.read_source(folder, names)
    logged = runs[0]["sources"]
    changed = []
    for name in logged | SOURCE_FILES:
        if logged.get(name) != source.sha256(source.REPOSITORY / name):
            changed.append(name)
    record = Record(
        folder=folder,
        track=track,
        runs=runs,
        commit=commit,
        sources=sources,
        changed=changed,
    )
    return record, track["targets"][target]


# --------------------------------------------------------------------------------------------------
# Rules


def record_violations(record: Record) -> Iterator[str]:
    """Yield why a record breaks the rules, except for those of each run."""
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
    """Yield why command.sh does not give the flags of the first run."""
    first = record.runs[0]
    try:
        flags = parse_command_sh(record.folder / "command.sh")
        # With this repository's source, also what follows from the flags; another may have had
        # other flags, defaults and rules
        if not record.changed:
            cfg = make_config(**flags)
            flags = dataclasses.asdict(cfg)
            flags["muon_lr"], flags["adam_lr"] = learning_rates(cfg)
    except (UserError, OSError, ValueError) as error:
        if not record.changed or "unknown flag" not in str(error):
            yield f"command.sh does not say how to run it again: {error}"
        return
    other = []
    for name, value in comparable(flags).items():
        is_auto = AUTO.get(name) == value
        if not is_auto and first["flags"].get(name) != value:
            other.append(name)
    if other:
        yield f"command.sh gives other flags than {first['name']} was run with: {', '.join(other)}"


def run_violations(record: Record, run: dict) -> Iterator[str]:
    """Yield why a run breaks the rules of its record and track."""
    first = record.runs[0]
    track = record.track
    flags = run["flags"]
    summary = run["summary"]
    steps = flags["max_steps"]
    machine = summary["machine"]

    # The same source, flags and machine as the other runs, all of the track
    for name in wrong_sources(record, run):
        yield f"log.txt does not hold the hash of {name} as source.patch gives it"
    if run["sources"] != first["sources"]:
        yield f"another source than {first['name']}"
    if comparable(flags) != comparable(first["flags"]):
        yield f"other flags than {first['name']}"
    if machine != first["summary"]["machine"]:
        yield f"another machine than {first['name']}"
    if not machine.startswith(track["device"]):
        yield f"on {machine}, not {track['device']}"
    if run["starts"] != 1 or flags["resume"] or flags["init_from"]:
        yield "resumed, or not from scratch"
    if summary["stopped_by"] != "max_steps" or summary["step"] != steps:
        yield f"stopped by {summary['stopped_by']} at step {summary['step']}, not {steps}"
    fixed = track.get("fixed", {})
    wrong = [name for name, value in fixed.items() if flags[name] != value]
    if wrong:
        yield f"the track fixes {', '.join(wrong)}"
    if track["files"] not in (None, summary["files"]):
        yield "trained or validated on other data than the track's"
    missing = track["val_tokens"] - summary["val_tokens"]
    if not 0 <= missing < min(flags["seq_len"], track["val_tokens"] // 100):
        yield f"validated on {summary['val_tokens']:,} tokens of {track['val_tokens']:,}"

    # summary.json, metrics.jsonl and log.txt agree
    last_evaluation = {}
    for row in run["rows"]:
        if "val_loss" in row:
            last_evaluation = row
    keys = ("step", "val_loss", "train_time_s", "tokens")
    if any(last_evaluation.get(key) != summary[key] for key in keys):
        yield "summary.json and the last evaluation in metrics.jsonl disagree"
    loss = f"val_loss {summary['val_loss']:.4f} | "
    seconds = f"train_time {summary['train_time_s']:.1f} s"
    lines = run["log"].splitlines()
    if not any(loss in line and line.endswith(seconds) for line in lines):
        yield "summary.json and log.txt disagree"
    yield from metrics_violations(run["rows"], flags)


def metrics_violations(rows: list[dict], flags: dict) -> Iterator[str]:
    """Yield why the rows of metrics.jsonl cannot be those of a whole run."""
    steps = flags["max_steps"]
    logged = [row for row in rows if "tokens_per_s" in row]
    expected = {1, steps} | set(range(flags["log_every"], steps, flags["log_every"]))
    if [row["step"] for row in logged] != sorted(expected):
        yield "rows of metrics.jsonl are missing"

    clock_is_wrong = False
    before = dict(train_time_s=0.0, wall_time_s=0.0)
    for row in rows:
        train_s = row["train_time_s"]
        wall_s = row["wall_time_s"]
        if not before["train_time_s"] <= train_s <= wall_s or not before["wall_time_s"] <= wall_s:
            clock_is_wrong = True
        before = row
    if clock_is_wrong:
        yield "the clock runs backwards, or train_time is above the wall time"

    before = dict(step=0, train_time_s=0.0)
    for row in logged:
        tokens = flags["batch_tokens"] * (row["step"] - before["step"])
        counted = row["tokens_per_s"] * (row["train_time_s"] - before["train_time_s"])
        speed_fits = abs(counted - tokens) < 0.01 * tokens
        if row["tokens"] != flags["batch_tokens"] * row["step"] or not speed_fits:
            yield f"tokens and seconds of step {row['step']} do not fit together"
        before = row


def wrong_sources(record: Record, run: dict) -> list[str]:
    """Names of sources whose hash in a run's log.txt is not that of the record's source."""
    logged = run["sources"]
    return [name for name, sha256 in record.sources.items() if sha256 != logged.get(name)]


def t_test(values: list[float], target: float) -> float:
    """One-sided p-value of "the mean is below the target" by Student's t-test.

    1 for fewer than two values.
    """
    n = len(values)
    if n < 2:
        return 1.0
    deviation = stdev(values)
    gap = target - mean(values)
    if deviation == 0:
        return 0.0 if gap > 0 else 1.0
    t = gap / deviation * math.sqrt(n)
    df = n - 1
    # P(T > t) by substituting T = sqrt(df) tan(angle): cos^(df - 1) over a finite range of angles
    start = math.atan(t / math.sqrt(df))
    angles = torch.linspace(start, math.pi / 2, 100_001, dtype=torch.float64)
    area = torch.trapezoid(angles.cos() ** (df - 1), angles).item()
    return area * math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi))


# --------------------------------------------------------------------------------------------------
# The verdict


def check_record(path: str) -> tuple[dict, list[str]]:
    """Check a record's folder against its track's rules. Raises UserError for any other folder.

    Returns a row of figures, with `verdict` PASS or FAIL and the reasons in `broken`, and notes on
    what a person must look at, because the rules cannot judge it.
    """
    record, target = open_record(path)
    broken = list(record_violations(record))
    for run in record.runs:
        broken += [f"{run['name']}: {reason}" for reason in run_violations(record, run)]
    summaries = [run["summary"] for run in record.runs]
    losses = [summary["val_loss"] for summary in summaries]
    p = t_test(losses, target)
    if p >= 0.01:
        broken.append(f"the mean is not below {target} with p < 0.01 (p = {p:.4f})")
    row = dict(
        track=record.folder.parent.name,
        record=record.folder.name,
        runs=len(losses),
        target=target,
        p=p,
        mean=mean(losses),
        deviation=stdev(losses) if len(losses) > 1 else None,
        steps=summaries[0]["step"],
        machine=summaries[0]["machine"],
        verdict="FAIL" if broken else "PASS",
        broken=broken,
    )
    for key in ("train_time_s", "wall_time_s"):
        seconds = [summary[key] for summary in summaries]
        row[key] = median(seconds)
        row[f"{key}_min"] = min(seconds)
        row[f"{key}_max"] = max(seconds)

    notes = []
    if any(re.search(r"git \S+-dirty", run["log"]) for run in record.runs):
        why = "the runs were made from files that were not committed"
        notes.append(f"A person must ask what was changed: {why}.")
    if record.changed:
        where = f"commit {record.commit[:12]} with source.patch"
        why = f"these files are not this repository's: {', '.join(record.changed)}"
        notes.append(f"A person must read the source, {where}; {why}.")
    return row, notes


def pack(path: str, commit: str) -> None:
    """Replace the runs' source/ folders of a record by source.patch, the difference to a commit.

    Raises UserError, also if it does not give every run's source; their folders then stay.
    """
    copies = source.write_source(Path(path), commit)
    record, _ = open_record(path)
    for run in record.runs:
        names = wrong_sources(record, run)
        if names:
            wrong = f"{run['name']}: source.patch does not give {names[0]} as it ran"
            advice = "give runs of one source, as they were left"
            raise UserError(f"{wrong}; every source/ stays: {advice}")
    for copy in copies:
        shutil.rmtree(copy)
