"""`bench.py record DIR`: the rules of the tracks as code, and whether a record's folder keeps them.

A rule is a function of RECORD_RULES or RUN_RULES that returns why it is broken: a sentence, a list of them, or None.
"""

import dataclasses
import json
import math
import re
import shlex
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from data.shards import UserError
from records import source
from runtime.logger import SECTION
from runtime.start import SOURCE_FILES
from train_gpt import make_config, parse_args

SHAKESPEARE = {  # what `data/prepare.py shakespeare` makes
    "train_000000.bin": "c991171e6f61b88dae0b0aa9ca8446624e9270fc928f227e31ca5a203ced9d1d",
    "val_000000.bin": "2130c5424137786d6e83983090afb3dda627e81db7f23ece0ea31c72f3b719d9",
}
OPS = [name for name in SOURCE_FILES if name.startswith("ops/")]
HASHED = ("train_gpt.py", "model.py", "ops.py", *OPS, "data/stream.py", "runtime/logger.py")  # the run and its clock
# folder of records/ -> targets by name, where it runs, its data (None: no hash is known yet, and none is accepted)
TRACKS = {
    "laptop": dict(
        targets={"shakespeare-1.8857": 1.8857, "shakespeare-1.4697": 1.4697},
        device="1 x cpu",
        files=SHAKESPEARE,
        val_tokens=111540,
    ),
    "single-gpu": dict(targets={"fineweb-3.28": 3.28}, device="1 x cuda", files=None, val_tokens=10485760),
    "8-gpus": dict(targets={"fineweb-3.28": 3.28}, device="8 x cuda", files=None, val_tokens=10485760),
    "steps": dict(
        targets={"fineweb-3.28": 3.28},
        device="",
        files=None,
        val_tokens=10485760,
        fixed=dict(n_layer=12, n_head=6, n_embd=768, seq_len=1024, batch_tokens=524288),
    ),
}


@dataclass
class Record:
    """A folder of a track, as it stands."""

    folder: Path
    track: dict  # of TRACKS
    runs: list[dict]  # what read_run returns, by name
    commit: str  # of source.patch
    sources: dict[str, str | None]  # name -> SHA-256 of the source, rebuilt from it; None for what it has not
    changed: list[str]  # names of sources that are not this repository's


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_run(folder: Path) -> dict:
    """A run's folder as it stands: log, flags, rows, summary, hashes of sources. Raises UserError if one is missing."""
    try:
        log = (folder / "log.txt").read_text(encoding="utf-8")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        _, *starts = log.split(f"{SECTION} run\n")
        flags, lines = starts[0].split("\n", 1)
        run = dict(name=folder.name, starts=len(starts), flags=json.loads(flags), lines=lines)
        hashes = next((line for line in lines.splitlines() if line.startswith("sources: ")), "")
        run["sources"] = dict(re.findall(r"([\w./-]+) sha256 ([0-9a-f]{64})", hashes))
        if not all(math.isfinite(summary[key]) for key in ("val_loss", "train_time_s", "wall_time_s")):
            raise ValueError("a figure of summary.json is not finite")
        return run | dict(rows=rows, evaluations=[row for row in rows if "val_loss" in row], summary=summary)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is not a finished run ({reason}); its files must be as it left them") from None


def parse_command_sh(path: Path) -> dict:
    """The flags in command.sh's call of train_gpt.py. Raises UserError, OSError or ValueError when there is no such."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    calls = re.findall(r"train_gpt\.py[\"']?(?=\s|$)(.*)", "\n".join(lines).replace("\\\n", " "))
    if len(calls) != 1:
        raise UserError(f"expected one call of train_gpt.py, found {len(calls)}")
    return parse_args(shlex.split(re.split(r"\s\d?[<>|&;]|;", calls[0])[0], comments=True))  # up to "2>&1 | tee log"


def comparable(flags: dict) -> dict:
    """The flags that all runs of a record have in common."""
    return {k: v for k, v in flags.items() if k not in ("seed", "out_dir", "data", "trials")}


# ---------------------------------------------------------------------------------------------------------------------
# Rules of a record


def has_readme(record: Record):
    return None if (record.folder / "README.md").is_file() else "README.md is missing"


def command_gives_the_flags(record: Record):
    first = record.runs[0]
    try:
        flags = parse_command_sh(record.folder / "command.sh")
        if not record.changed:  # else defaults and flags may be others than then
            flags = dataclasses.asdict(make_config(**flags))
    except (UserError, OSError, ValueError) as error:
        if record.changed and "unknown flag" in str(error):
            return None
        return f"command.sh does not say how to run it again: {error}"
    if flags.get("dtype") == "auto" and first["flags"].get("dtype") in ("bf16", "fp32"):  # what auto became there
        flags["dtype"] = first["flags"]["dtype"]
    other = [key for key, value in comparable(flags).items() if first["flags"].get(key) != value]
    return other and f"command.sh gives other flags than {first['name']} was run with: {', '.join(other)}"


def seeds_are_complete(record: Record):
    seeds = sorted(run["flags"]["seed"] for run in record.runs)
    if seeds != list(range(len(seeds))):
        return f"the seeds are {seeds}, not 0, 1, 2, ...: every run counts"


def runs_are_enough(record: Record):
    return None if len(record.runs) >= 3 else f"{len(record.runs)} runs; a record needs at least 3"


def data_are_known(record: Record):
    if record.track["files"] is None:
        return "no hash of the track's data is known yet; add those of a verified download to TRACKS"


RECORD_RULES = (has_readme, command_gives_the_flags, seeds_are_complete, runs_are_enough, data_are_known)

# ---------------------------------------------------------------------------------------------------------------------
# Rules of each run


def source_is_what_ran(record: Record, run: dict):
    sources, logged = record.sources, run["sources"]
    wrong = [name for name in sources if sources[name] != logged.get(name)]
    return [f"{run['name']}: log.txt does not hold the hash of {name} as source.patch gives it" for name in wrong]


def source_is_the_same(record: Record, run: dict):
    first = record.runs[0]
    return None if run["sources"] == first["sources"] else f"{run['name']}: another source than {first['name']}"


def flags_are_the_same(record: Record, run: dict):
    first = record.runs[0]
    if comparable(run["flags"]) != comparable(first["flags"]):
        return f"{run['name']}: other flags than {first['name']}"


def machine_is_the_same(record: Record, run: dict):
    first = record.runs[0]
    if run["summary"]["machine"] != first["summary"]["machine"]:
        return f"{run['name']}: another machine than {first['name']}"


def machine_is_the_tracks(record: Record, run: dict):
    machine, expected = run["summary"]["machine"], record.track["device"]
    return None if machine.startswith(expected) else f"{run['name']}: on {machine}, not {expected}"


def started_from_scratch(record: Record, run: dict):
    if run["starts"] != 1 or run["flags"]["resume"] + run["flags"]["init_from"]:
        return f"{run['name']}: resumed, or not from scratch"


def ran_to_the_end(record: Record, run: dict):
    summary, steps = run["summary"], run["flags"]["max_steps"]
    if summary["stopped_by"] != "max_steps" or summary["step"] != steps:
        return f"{run['name']}: stopped by {summary['stopped_by']} at step {summary['step']}, not {steps}"


def keeps_fixed_flags(record: Record, run: dict):
    wrong = [key for key, value in record.track.get("fixed", {}).items() if run["flags"][key] != value]
    return wrong and f"{run['name']}: the track fixes {', '.join(wrong)}"


def data_are_the_tracks(record: Record, run: dict):
    if record.track["files"] not in (None, run["summary"]["files"]):
        return f"{run['name']}: trained or validated on other data than the track's"


def validated_on_all(record: Record, run: dict):
    tokens, expected = run["summary"]["val_tokens"], record.track["val_tokens"]
    if not 0 <= expected - tokens < min(run["flags"]["seq_len"], expected // 100):
        return f"{run['name']}: validated on {tokens:,} tokens of {expected:,}"


def metrics_agree(record: Record, run: dict):
    last, summary = run["evaluations"][-1] if run["evaluations"] else {}, run["summary"]
    if any(last.get(key) != summary[key] for key in ("step", "val_loss", "train_time_s", "tokens")):
        return f"{run['name']}: summary.json and the last evaluation in metrics.jsonl disagree"


def log_agrees(record: Record, run: dict):
    loss = f"val_loss {run['summary']['val_loss']:.4f} | "
    seconds = f"train_time {run['summary']['train_time_s']:.1f} s"
    if not any(loss in line and line.endswith(seconds) for line in run["lines"].splitlines()):
        return f"{run['name']}: summary.json and log.txt disagree"


def rows_are_complete(record: Record, run: dict):
    every, steps = run["flags"]["log_every"], run["flags"]["max_steps"]
    due = sorted({1, *range(every, steps, every), steps})
    if [row["step"] for row in logged_steps(run)] != due:
        return f"{run['name']}: rows of metrics.jsonl are missing"


def clock_runs_forward(record: Record, run: dict):
    times = [(0.0, 0.0)] + [(row["train_time_s"], row["wall_time_s"]) for row in run["rows"]]
    if not all(a[0] <= b[0] and a[1] <= b[1] and b[0] <= b[1] for a, b in zip(times, times[1:])):
        return f"{run['name']}: the clock runs backwards, or train_time is above the wall time"


def speed_fits_the_clock(record: Record, run: dict):
    reasons, rows, batch_tokens = [], logged_steps(run), run["flags"]["batch_tokens"]
    for before, row in zip([dict(step=0, train_time_s=0.0), *rows], rows):
        tokens = batch_tokens * (row["step"] - before["step"])
        counted = row["tokens_per_s"] * (row["train_time_s"] - before["train_time_s"])
        if row["tokens"] != batch_tokens * row["step"] or not abs(counted / tokens - 1) < 0.01:
            reasons.append(f"{run['name']}: tokens and seconds of step {row['step']} do not fit together")
    return reasons


def logged_steps(run: dict) -> list[dict]:
    """The rows of training steps."""
    return [row for row in run["rows"] if "tokens_per_s" in row]


RUN_RULES = (
    source_is_what_ran,
    source_is_the_same,
    flags_are_the_same,
    machine_is_the_same,
    machine_is_the_tracks,
    started_from_scratch,
    ran_to_the_end,
    keeps_fixed_flags,
    data_are_the_tracks,
    validated_on_all,
    metrics_agree,
    log_agrees,
    rows_are_complete,
    clock_runs_forward,
    speed_fits_the_clock,
)


def rule_violations(record: Record) -> list[str]:
    """Why this is not a record of its track; empty when it is one."""
    found = [rule(record) for rule in RECORD_RULES]
    found += [rule(record, run) for run in record.runs for rule in RUN_RULES]
    reasons = [reason for each in found for reason in ([each] if isinstance(each, str) else each or [])]
    return list(dict.fromkeys(reasons))


# ---------------------------------------------------------------------------------------------------------------------
# The verdict


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
    begin, steps = math.atan(t / math.sqrt(df)), 2000
    width = (math.pi / 2 - begin) / steps
    heights = [math.cos(begin + i * width) ** (df - 1) for i in range(steps + 1)]
    area = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))  # Simpson
    return area * math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi))


def track_of(path: str) -> tuple[Path, dict, float]:
    """A record's folder, its track (of TRACKS) and its target. Raises UserError for what is not named like a record."""
    folder = Path(path).resolve()
    track, (_, _, target_name) = folder.parent.name, folder.name.partition("_")
    if track not in TRACKS or target_name not in TRACKS[track]["targets"]:
        known = ", ".join(f"records/{t}/DATE_{name}" for t, spec in TRACKS.items() for name in spec["targets"])
        raise UserError(f"{path or 'nothing'} is not a folder of a track; expected one of {known}")
    return folder, TRACKS[track], TRACKS[track]["targets"][target_name]


def open_record(path: str) -> tuple[Record, float]:
    """The record in a folder, and its target. Raises UserError for what is not the folder of a record."""
    folder, track, target = track_of(path)
    runs = [read_run(log.parent) for log in sorted(folder.glob("*/log.txt")) if log.parent.name != "baseline"]
    if not runs:
        raise UserError(f"{path} holds no runs; expected folders with log.txt, metrics.jsonl and summary.json")
    names = dict.fromkeys(name for run in runs for name in (*run["sources"], *HASHED))
    commit, sources = source.read_source(folder, names)
    logged = runs[0]["sources"]
    changed = [name for name in logged | SOURCE_FILES if logged.get(name) != source.sha256(source.REPOSITORY / name)]
    return Record(folder, track, runs, commit, sources, changed), target


def pack(path: str, commit: str) -> None:
    """Put source.patch, the difference to a commit, in place of the runs' source/ folders in a record's folder.

    Raises UserError, also where it does not give every run's source; their folders then stay.
    """
    folder, _, _ = track_of(path)
    copies = source.write_source(folder, commit)
    record, _ = open_record(path)
    for run in record.runs:
        for reason in source_is_what_ran(record, run):
            raise UserError(f"{reason}; every source/ stays: give runs of one source, as they were left")
    for copy in copies:
        shutil.rmtree(copy)


def for_a_person(record: Record) -> list[str]:
    """What the rules cannot judge."""
    notes = []
    if any(re.search(r"git \S+-dirty", run["lines"]) for run in record.runs):
        notes.append("A person must ask what was changed: the runs were made from files that were not committed.")
    if record.changed:
        *others, last = record.changed
        names = f"{', '.join(others)} and {last}" if others else last
        where = f"commit {record.commit[:12]} with source.patch"
        notes.append(f"A person must read the source, {where}: it is not this repository's {names}.")
    return notes


COLUMNS = {  # of the row that check_record returns: key -> heading, format
    "record": ("record", ""),
    "target": ("target", ""),
    "mean": ("mean val_loss", ".4f"),
    "deviation": ("sd", ".4f"),
    "p": ("p", ".1e"),
    "runs": ("runs", "d"),
    "steps": ("steps", ",d"),
    "train_time_s": ("train_time, s", ".1f"),
    "wall_time_s": ("wall time, s", ".1f"),
    "machine": ("machine", ""),
    "verdict": ("", ""),
}


def check_record(path: str) -> tuple[dict, list[str]]:
    """Check a record's folder against its track's rules. Raises UserError for what is not such a folder.

    Returns a row of figures, with `verdict` PASS or FAIL and the reasons in `broken`, and what a person must look at.
    """
    record, target = open_record(path)
    reasons, summaries = rule_violations(record), [run["summary"] for run in record.runs]
    losses, p = [summary["val_loss"] for summary in summaries], 1.0
    if all(isinstance(loss, float) for loss in losses):
        p = t_test(losses, target)
    if p >= 0.01:
        reasons.append(f"the mean is not below {target} with p < 0.01 (p = {p:.4f})")
    row = dict(
        track=record.folder.parent.name,
        record=record.folder.name,
        runs=len(record.runs),
        mean=statistics.mean(losses),
        p=p,
        target=target,
        deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        steps=summaries[0]["step"],
        machine=summaries[0]["machine"],
    )
    for key in ("train_time_s", "wall_time_s"):
        seconds = [summary[key] for summary in summaries]
        row |= {key: statistics.median(seconds), f"{key}_min": min(seconds), f"{key}_max": max(seconds)}
    row |= dict(verdict="FAIL" if reasons else "PASS", broken=reasons)
    return row, for_a_person(record)
