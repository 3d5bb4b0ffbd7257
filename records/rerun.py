"""`bench.py record DIR --rerun SEED`: run a seed of a record again, from its folder alone."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import UserError
from records import source
from records.check import command_words, read_run

# Flags that a run may have chosen by its own measurements
MEASURED = ("dtype", "attn", "loss_chunk")


def rerun(path: str, seed: int, data: str) -> None:
    """Run a seed again with the record's source and command.sh, into DIR/rerun_SEED.

    This executes the source. What a run measures to choose is taken from its log. data: folder of
    the dataset, by default the run's. The summary also gets system_s, seconds by the operating
    system's clock. Raises UserError, OSError or ValueError.
    """
    record = Path(path)
    folder = record / f"rerun_{seed}"
    if folder.exists():
        raise UserError(f"{folder} exists already; delete it to run seed {seed} once more")
    run = read_run(record / f"seed_{seed}")
    with tempfile.TemporaryDirectory() as work:
        source.rebuild(record, Path(work, "source"))
        out_dir = Path(work, f"seed_{seed}")
        data = Path(data or run["flags"]["data"]).resolve()
        flags = {name: run["flags"][name] for name in MEASURED}
        flags |= dict(seed=seed, trials=1, out_dir=out_dir, data=data)
        words = command_words(record / "command.sh")
        words += [f"--{name}={value}" for name, value in flags.items()]
        # -E: without the user's PYTHONPATH
        command = [sys.executable, "-E", "train_gpt.py", *words]
        done = subprocess.run(command, cwd=Path(work, "source"))
        if done.returncode:
            wrong = f"the rerun of {run['name']} ended with exit code {done.returncode}"
            raise UserError(f"{wrong}; mend what is said above, and begin again")

        # Files are dated by the operating system: the first at the start of the run's clock, the
        # summary at its end
        summary_path = out_dir / "summary.json"
        dates = [file.stat().st_mtime for file in out_dir.rglob("*")]
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        summary["system_s"] = summary_path.stat().st_mtime - min(dates)
        summary_path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        folder.mkdir()
        for name in ("log.txt", "metrics.jsonl", "summary.json"):
            shutil.copyfile(out_dir / name, folder / name)
