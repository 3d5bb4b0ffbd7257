"""`bench.py record DIR`: the rules of the tracks, and a check of a record's folder against them."""

import itertools
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

from common.errors import UserError
from data.download import fineweb_hashes
from records import source
from runtime.log import SECTION

SHAKESPEARE = {  # files made by `data/prepare.py shakespeare`
    "train_000000.bin": "c991171e6f61b88dae0b0aa9ca8446624e9270fc928f227e31ca5a203ced9d1d",
    "val_000000.bin": "2130c5424137786d6e83983090afb3dda627e81db7f23ece0ea31c72f3b719d9",
}
FINEWEB = dict(
    targets={"fineweb-3.28": 3.28},
    files=fineweb_hashes(),
    tokens="",
    val_tokens=10485760,
    rows=50304,
)
GPT2_SMALL = dict(n_layer=12, n_head=6, n_embd=768, seq_len=1024, batch_tokens=524288)
# Folder of records/ -> targets by name, SHA-256 of the shards that may be used, the token counts as
# in log.txt, tokens per validation, rows of the head, beginning of the machine's name, fixed flags
TRACKS = {
    "laptop": dict(
        targets={"shakespeare-1.8857": 1.8857, "shakespeare-1.4697": 1.4697},
        files=SHAKESPEARE,
        tokens=", 1,003,855 + 111,541 tokens, ",
        val_tokens=111540,
        rows=320,
        device="1 x cpu",
    ),
    "gpu-1": FINEWEB | dict(device="1 x cuda"),
    "8-gpus": FINEWEB | dict(device="8 x cuda"),
    "steps": FINEWEB | dict(device="", fixed=GPT2_SMALL),
}
# The largest difference of a rerun: in losses, relative to the run's (other CPUs and dtypes round
# differently, by 9e-4); and in train_time, as a multiple, on the same machine
ROUNDING = 3e-3
SLOWER = 1.5
UNKNOWN = (
    "Files cannot show who made a run or a rerun, which other seeds were left out, or how the "
    "source uses validation tokens and the time outside of the clock."
)


@dataclass
class Record:
    """A folder of a track, with its runs and the source that source.patch describes."""

    folder: Path
    track: dict  # from TRACKS
    runs: list[dict]  # from read_run, in the order of their names
    sources: dict[str, str | None]  # name -> SHA-256; None if missing
    changes: dict[str, str]  # names of files that differ from the history's -> lines changed
    base: str  # the commit in the history that they are compared with


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
        for key in ("machine", "stopped_by", "step", "tokens", "files", "val_tokens"):
            if key not in summary:
                raise ValueError(f"summary.json has no {key}")
        # Each start of the run begins a section of log.txt, whose first line holds the flags
        starts = log.split(f"{SECTION} run\n")[1:]
        flags, lines = starts[0].split("\n", 1)
        sources = re.findall(r"([\w./-]+) sha256 ([0-9a-f]{64})", lines)
        rows = [json.loads(line) for line in metrics.replace("null", "NaN").splitlines()]
        if not rows:
            raise ValueError("metrics.jsonl is empty")
        losses = {}  # named as in log.txt
        for row in rows:
            key = "val_loss" if "val_loss" in row else "train_loss"
            losses[str(row["step"]), key.removeprefix("train_")] = row[key]
        return dict(
            name=folder.name,
            starts=len(starts),
            flags=json.loads(flags),
            log=lines,
            sources=dict(sources),
            rows=rows,
            losses=losses,
            summary=summary,
        )
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        wrong = f"{folder} is not a finished run ({type(error).__name__}: {error})"
        raise UserError(f"{wrong}; give a folder with the files as the run left them") from None


def command_words(path: Path) -> list[str]:
    """Return the arguments of the one call of train_gpt.py in command.sh, split as by a shell.

    Raises UserError, OSError or ValueError if there is no such call.
    """
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^[ \t]*#.*\n?", "", text, flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    calls = re.findall(r"train_gpt\.py[\"']?(?=\s|$)(.*)", text)
    if len(calls) != 1:
        raise UserError(f"expected one call of train_gpt.py, found {len(calls)}")
    # Up to redirections and pipes, as in `2>&1 | tee log`
    arguments = re.split(r"\s\d?[<>|&;]|;", calls[0])[0]
    return shlex.split(arguments, comments=True)


def different_flags(flags: dict, others: dict) -> str:
    """List the flags that differ, among those that all runs of a record must share."""
    own = ("seed", "out_dir", "data", "trials", "given")
    different = []
    for name, value in flags.items():
        if name not in own and others.get(name) != value:
            different.append(f"{name} {value!r}, not {others.get(name)!r}")
    return ", ".join(different)


def open_record(path: str) -> tuple[Record, float]:
    """Read a record's folder; return it and its target. Raises UserError for any other folder."""
    folder = Path(path).resolve()
    track = TRACKS.get(folder.parent.name, dict(targets={}))
    target = folder.name.partition("_")[2]
    if target not in track["targets"]:
        expected = "records/TRACK/DATE-YOURWORD_TARGET, such as gpu-1/2026-12-01-mine_fineweb-3.28"
        raise UserError(f"{path} is not a folder of a track; expected {expected}")
    runs = [read_run(log.parent) for log in sorted(folder.glob("seed_*/log.txt"))]
    if not runs:
        expected = "folders seed_0, seed_1, ... with log.txt, metrics.jsonl and summary.json"
        raise UserError(f"{path} holds no runs; expected {expected}")
    names = ["train_gpt.py", "model.py"]
    for run in runs:
        names += run["sources"]
    sources, changes, base = source.read_source(folder, names)
    record = Record(
        folder=folder,
        track=track,
        runs=runs,
        sources=sources,
        changes=changes,
        base=base,
    )
    return record, track["targets"][target]


# --------------------------------------------------------------------------------------------------
# Rules


def record_violations(record: Record) -> Iterator[str]:
    """Yield each violation of the rules by the record as a whole."""
    if not (record.folder / "README.md").is_file():
        yield "README.md is missing"
    try:
        command_words(record.folder / "command.sh")
    except (UserError, OSError, ValueError) as error:
        yield f"command.sh does not say how to run it again: {error}"
    seeds = sorted(run["flags"]["seed"] for run in record.runs)
    if seeds != list(range(len(seeds))):
        yield f"the seeds are {seeds}; expected 0, 1, 2, ... without gaps"
    if len(seeds) < 3:
        yield f"{len(seeds)} runs; a record needs at least 3"
    first = record.runs[0]
    for run in record.runs[1:]:
        other_flags = different_flags(run["flags"], first["flags"])
        if other_flags:
            yield (
                f"{run['name']}: flags differ from {first['name']}: {other_flags}; give all runs "
                "the same ones"
            )
        if run["summary"]["machine"] != first["summary"]["machine"]:
            yield f"{run['name']}: a different machine than {first['name']}"
    for run, other in itertools.combinations(record.runs, 2):
        # All untrained models have the same first loss, and one more may be equal by chance
        equal = run["losses"].items() & other["losses"].items()
        if len(equal) > 2:
            yield f"{run['name']} and {other['name']} share {len(equal)} losses: one is a copy"


def run_violations(record: Record, run: dict) -> Iterator[str]:
    """Yield each violation of the rules of its record and track by a run, or a rerun of one."""
    track = record.track
    flags = run["flags"]
    summary = run["summary"]
    steps = flags["max_steps"]
    machine = summary["machine"]

    # The record's source, and all as the track requires
    for name in wrong_sources(record, run):
        yield f"log.txt does not hold the hash of {name} that source.patch gives"
    if run["name"].partition("_")[2] != str(flags["seed"]):
        yield f"its seed is {flags['seed']}"
    if not machine.startswith(track["device"]):
        yield f"on {machine}, not {track['device']}"
    if run["starts"] != 1 or flags["resume"] or flags["init_from"]:
        yield "resumed, or not from scratch"
    if summary["stopped_by"] != "max_steps" or summary["step"] != steps:
        yield f"stopped by {summary['stopped_by']} at step {summary['step']}, not {steps}"
    head_rows = flags.get("vocab_size") or track["rows"]
    first_loss = run["losses"].get(("1", "loss"), 0.0)
    # An edit may weight the loss; a person reads it
    if first_loss < math.log(head_rows) - 0.01 and not record.changes:
        yield f"the first loss is {first_loss:.4f}, below an untrained model's ln({head_rows})"
    fixed = track.get("fixed", {})
    used = flags | dict(batch_tokens=summary["tokens"] / max(1, steps))  # edits may change the flag
    wrong = [name for name, value in fixed.items() if used[name] != value]
    if wrong:
        yield f"the track fixes {', '.join(wrong)}"
    if track["tokens"] not in run["log"]:
        yield f"log.txt does not say {track['tokens']!r} about the data"
    used = summary["files"]
    if not used.items() <= track["files"].items() or not any("val" in name for name in used):
        yield "trained or validated on data that are not the track's"
    missing = track["val_tokens"] - summary["val_tokens"]
    if not 0 <= missing < min(flags["seq_len"], track["val_tokens"] // 100):
        yield f"validated on {summary['val_tokens']:,} tokens of {track['val_tokens']:,}"
    rows = run["rows"]
    expected = {1, steps} | set(range(flags["log_every"], steps, flags["log_every"]))
    if [row["step"] for row in rows if "tokens_per_s" in row] != sorted(expected):
        yield "rows of metrics.jsonl are missing"
    keys = ("step", "val_loss", "train_time_s", "tokens")
    if any(rows[-1].get(key) != summary[key] for key in keys):
        yield "summary.json and the last row of metrics.jsonl disagree"


def rerun_violations(run: dict, rerun: dict) -> Iterator[str]:
    """Yield each disagreement between a rerun and the run of its seed."""
    other = different_flags(rerun["flags"], run["flags"])
    if other:
        yield f"the flags of command.sh differ from those of {run['name']}: {other}"
    for (step, name), loss in run["losses"].items():
        again = rerun["losses"].get((step, name), math.nan)
        if not abs(again - loss) <= ROUNDING * loss:
            yield f"{name} {again:.4f} at step {step}, not {loss:.4f}"
            break
    summary = rerun["summary"]
    seconds = summary["train_time_s"]
    expected = run["summary"]["train_time_s"]
    if seconds == expected:
        yield f"its train_time equals that of {run['name']}: a copy"
    same_machine = summary["machine"] == run["summary"]["machine"]
    if same_machine and seconds > SLOWER * expected:
        yield f"train_time {seconds:.1f} s, not {expected:.1f} s; rerun it on an idle machine"
    wall_s = summary["wall_time_s"]
    system_s = summary.get("system_s", math.inf)
    if system_s > 1 + 1.05 * wall_s:
        yield f"{wall_s:.1f} s by its own clock, {system_s:.1f} s by the system's"
    if not summary.get("same_start"):
        yield "the initial weights are not a function of the seed alone: they differ by dataset"


def wrong_sources(record: Record, run: dict) -> list[str]:
    """List the sources whose hash in a run's log.txt is not that of the record's source."""
    return [name for name, sha256 in record.sources.items() if sha256 != run["sources"].get(name)]


def t_test(values: list[float], target: float) -> float:
    """Compute the p-value of "the mean is below the target" by a one-sided Student's t-test.

    It is 1 for fewer than two values.
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
    # P(T > t): T = sqrt(df) tan(angle) gives cos^(df - 1) over a finite range of angles
    start = math.atan(t / math.sqrt(df))
    angles = torch.linspace(start, math.pi / 2, 100_001, dtype=torch.float64)
    area = torch.trapezoid(angles.cos() ** (df - 1), angles).item()
    return area * math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi))


# --------------------------------------------------------------------------------------------------
# The verdict


def check_record(path: str) -> tuple[dict, list[str]]:
    """Check a record's folder against its track's rules. Raises UserError for any other folder.

    Returns a row of figures, and notes for the person who judges the rest. `verdict` is PASS, FAIL
    (with the reasons in `broken`), or the reason why it is not confirmed.
    """
    record, target = open_record(path)
    broken = list(record_violations(record))
    rerun_losses = []
    for run in record.runs:
        broken += [f"{run['name']}: {reason}" for reason in run_violations(record, run)]
        again = record.folder / run["name"].replace("seed", "rerun")
        if again.is_dir():
            rerun = read_run(again)
            rerun_losses.append(rerun["summary"]["val_loss"])
            reasons = [*run_violations(record, rerun), *rerun_violations(run, rerun)]
            broken += [f"{again.name}: {reason}" for reason in reasons]
    summaries = [run["summary"] for run in record.runs]
    losses = [summary["val_loss"] for summary in summaries]
    p = t_test(losses, target)
    if p >= 0.01:
        broken.append(f"the mean is not below {target} with p < 0.01 (p = {p:.4f})")
    if rerun_losses:
        p = t_test(rerun_losses, target)
    n = len(rerun_losses)
    verdict = "PASS"
    if n < len(losses) or p >= 0.01:
        verdict = f"not confirmed: {n} of {len(losses)} seeds have a rerun, p = {p:.4f}"
    if broken:
        verdict = "FAIL"
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
        verdict=verdict,
        broken=broken,
    )
    for key in ("train_time_s", "wall_time_s"):
        seconds = [summary[key] for summary in summaries]
        row[key] = median(seconds)
        row[f"{key}_min"] = min(seconds)
        row[f"{key}_max"] = max(seconds)

    note = f"The source is commit {record.base[:7]} of this history"
    if record.changes:
        changes = ", ".join(f"{name} ({lines})" for name, lines in record.changes.items())
        note += f", with changes that a person must read: {changes}"
    return row, [f"{note}.", UNKNOWN]


def pack(path: str, commit: str) -> None:
    """Replace the runs' source/ folders of a record by source.patch, the difference from a commit.

    Raises UserError, and keeps the folders, if that does not give every run's source.
    """
    copies = source.write_source(Path(path), commit)
    record, _ = open_record(path)
    for run in record.runs:
        names = wrong_sources(record, run)
        if names:
            wrong = f"{run['name']} ran a different {names[0]} than source.patch describes"
            raise UserError(f"{wrong}; every source/ is kept: pack unchanged runs of one source")
    for copy in copies:
        shutil.rmtree(copy)
