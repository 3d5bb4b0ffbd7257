"""`bench.py record DIR --rerun SEED`: repeat one seed of a record, from its folder alone."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.shards import HEADER_BYTES, meta_or_gpt2, recorded_hashes, write_meta
from records import source
from records.check import command_words, open_record, read_run

# Flags that a run may have chosen by its own measurements
MEASURED = ("dtype", "attn", "loss_chunk")

# Prints a hash of the weights and buffers before the first training step, and ends
HASH_START = """
import hashlib, sys
import train_gpt

def end(state, *_):
    digest = hashlib.sha256()
    for name, tensor in sorted([*state.model.named_parameters(), *state.model.named_buffers()]):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    print(digest.hexdigest())
    sys.exit()

train_gpt.train_step = end
train_gpt.main(sys.argv[1:])
"""


def rerun(folder: str, seed: int, data: str) -> None:
    """Repeat a seed with the record's source and command.sh, into DIR/rerun_SEED.

    This executes the record's source. data: folder of the dataset, by default the run's. Values
    that the run chose by measuring are taken from its log. Two values are added to the summary:
    system_s, the seconds by the operating system's clock, and same_start of is_same_start. Raises
    UserError, OSError or ValueError.
    """
    record, _ = open_record(folder)
    out_dir = record.folder / f"rerun_{seed}"
    run = read_run(record.folder / f"seed_{seed}")
    dataset = Path(data or run["flags"]["data"]).resolve()
    if out_dir.exists():
        raise UserError(f"{out_dir} exists; remove it to repeat seed {seed} again")
    if recorded_hashes(meta_or_gpt2(dataset)) != run["summary"]["files"]:
        raise UserError(f"{dataset} is not the dataset of the record; give its folder by --data")
    flags = {name: run["flags"][name] for name in MEASURED if name in run["flags"]}
    flags |= dict(seed=seed, trials=1)
    # As many ranks as the track requires; where it requires none, one has the same losses
    launcher = ["train_gpt.py"]
    n_ranks = record.track["device"].partition(" x ")[0]
    if n_ranks not in ("", "1"):
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={n_ranks}"
        launcher = [*torchrun.split(), *launcher]
    words = command_words(record.folder / "command.sh")
    words += [f"--{name}={value}" for name, value in flags.items()]
    with tempfile.TemporaryDirectory() as work:
        source.rebuild(record.folder, Path(work))
        same_start = is_same_start(Path(work), words, dataset)
        execute(Path(work), *launcher, *words, f"--data={dataset}", f"--out_dir={out_dir}")

    # The operating system dates files independently of the run's clock
    path = out_dir / "summary.json"
    system_s = path.stat().st_mtime - (out_dir / ".lock").stat().st_mtime
    summary = json.loads(path.read_text(encoding="utf-8"))
    summary |= dict(system_s=system_s, same_start=same_start)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def execute(folder: Path, *argv: str, **options: object) -> subprocess.CompletedProcess:
    """Run Python in the folder of a source. Raises UserError if it fails."""
    # Without the user's PYTHONPATH, here and in the processes that torchrun starts
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([sys.executable, *argv], cwd=folder, text=True, env=env, **options)
    if done.returncode:
        raise UserError(
            f"the record's source ended with exit code {done.returncode}; resolve the error above, "
            "and start again"
        )
    return done


def is_same_start(folder: Path, words: list[str], dataset: Path) -> bool:
    """Return whether a source starts from the same weights with another dataset.

    The other one is the same text with the vocabulary in another order, so that whatever is counted
    in it differs, and the flags that are chosen by its size and repetitions do not. What a source
    keeps outside of its parameters and buffers is not seen.
    """
    with tempfile.TemporaryDirectory() as work:
        other = Path(shutil.copytree(dataset, Path(work, "other")))
        meta = meta_or_gpt2(other)
        new_ids = np.random.default_rng(0).permutation(meta["vocab_size"]).astype("<u2")
        for path in other.glob("*.bin"):
            shard = np.fromfile(path, "<u2")
            tokens = shard[HEADER_BYTES // 2 :]
            tokens[:] = new_ids[tokens]
            shard.tofile(path)
        if "assumed" not in meta:
            meta["files"] = {}  # whose hashes no longer hold
            write_meta(other, meta)
        hashes = set()
        for data in (dataset, other):
            argv = [*words, "--compile=off", "--parallel=ddp"]  # of one process
            argv += [f"--data={data}", f"--out_dir={work}/run"]
            done = execute(folder, "-c", HASH_START, *argv, stdout=subprocess.PIPE)
            hashes.add(done.stdout.split()[-1])
    return len(hashes) == 1
