"""`bench.py record DIR --rerun SEED`: repeat one seed of a record, from its folder alone."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import UserError
from records import source
from records.check import command_words, read_run

# Flags that a run may have chosen by its own measurements
MEASURED = ("dtype", "attn", "loss_chunk")


def rerun(folder: str, seed: int, data: str, reference: str) -> None:
    """Repeat a seed with the record's source and command.sh, into DIR/rerun_SEED.

    This executes the record's source, and first that of the reference, if a record is given to be
    timed as well. data: folder of the dataset, by default the run's. Two values are added to the
    summary: system_s, the seconds by the operating system's clock, and slowdown, the reference's
    train_time here as a multiple of its own. Raises UserError, OSError or ValueError.
    """
    slowdown = None
    if reference:
        first = read_run(Path(reference, "seed_0"))["summary"]["machine"]
        machine = read_run(Path(folder, f"seed_{seed}"))["summary"]["machine"]
        if first != machine:
            raise UserError(f"{reference} is from {first}; give a record from {machine}")
        with tempfile.TemporaryDirectory() as work:
            slowdown = run_again(Path(reference), 0, Path(work, "seed_0"), data)
    out_dir = Path(folder).resolve() / f"rerun_{seed}"
    run_again(Path(folder), seed, out_dir, data)

    # The operating system dates files independently of the run's clock
    path = out_dir / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary |= dict(reference=reference, slowdown=slowdown)
    summary["system_s"] = path.stat().st_mtime - (out_dir / ".lock").stat().st_mtime
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def run_again(record: Path, seed: int, out_dir: Path, data: str) -> float:
    """Repeat a record's seed in a folder; return its train_time as a multiple of the record's.

    Values that the run chose by measuring are taken from its log.
    """
    run = read_run(record / f"seed_{seed}")
    flags = {name: run["flags"][name] for name in MEASURED}
    data_path = Path(data or run["flags"]["data"]).resolve()
    flags |= dict(seed=seed, trials=1, out_dir=out_dir, data=data_path)
    words = command_words(record / "command.sh")
    words += [f"--{name}={value}" for name, value in flags.items()]
    with tempfile.TemporaryDirectory() as work:
        source.rebuild(record, Path(work))
        # -E: without the user's PYTHONPATH
        done = subprocess.run([sys.executable, "-E", "train_gpt.py", *words], cwd=work)
    if done.returncode:
        raise UserError(
            f"the rerun of {run['name']} ended with exit code {done.returncode}; resolve the "
            "error above, and start again"
        )
    again = read_run(out_dir)
    return again["summary"]["train_time_s"] / run["summary"]["train_time_s"]
