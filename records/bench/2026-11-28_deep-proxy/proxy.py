"""Score a recipe on a deep, narrow model: the steps that it needs for a reference's final loss.

    python proxy.py --data data/python --width 128 --steps 1500 --seeds 0 1 2 --rows rows.tsv \\
        --side "name=base|../base|" --side "name=new|.|--ngram 2" --reference base

--side: "name=NAME|FOLDER|FLAGS", a checkout and trainer flags; or "name=NAME|COMMAND", another
trainer, with {data}, {width}, {heads}, {batch}, {steps} and {seed} to be filled in, which prints
lines with "val_loss:LOSS" and "train_time:SECONDS". The reference runs all steps; every other side
runs --fractions of them as well, each with its own whole schedule. The fraction at which a side's
loss crosses the reference's final loss, both means over seeds, is interpolated between the logs of
steps; beyond the fractions it is extrapolated from the nearest two, and marked by "~". Finished
runs in --rows are not repeated. Prints one row per dataset and side.
"""

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

BATCH = {64: 4096, 128: 8192, 256: 8192}
HEADS = {64: 1, 128: 2, 256: 4}  # the rows of 2026-11-28: 2 at width 64
COLUMNS = ["side", "command", "data", "width", "steps", "seed", "val_loss", "seconds"]
OURS = (
    "python train_gpt.py --data {data} --n_layer 12 --n_head {heads} --n_embd {width} "
    "--seq_len 512 --window L --short_frac 0 --ngram 0 --batch_tokens {batch} --max_steps {steps} "
    "--eval_every {steps} --eval_tokens 1000000000 --dtype bf16 --compile --seed {seed}"
)


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [dict(zip(COLUMNS, line.split("\t"))) for line in lines[1:]]


def run(side: str, data: Path, width: int, steps: int, seed: int, rows_path: Path) -> dict:
    """Train once, or find the run in the rows. Returns its row."""
    name, *place = side.removeprefix("name=").split("|")
    values = dict(
        data=data.resolve(),
        width=width,
        heads=HEADS[width],
        batch=BATCH[width],
        steps=steps,
        seed=seed,
    )
    folder = "."
    command = place[0]
    if len(place) == 2:  # ours, in a checkout
        folder = place[0]
        out = rows_path.resolve().parent / "runs" / f"{name}-{data.name}-{width}-{steps}-{seed}"
        command = f"{OURS} {place[1]} --out_dir {out}"
    key = dict(side=name, data=data.name, width=str(width), steps=str(steps), seed=str(seed))
    for row in read_rows(rows_path):
        if key.items() <= row.items():
            return row
    command = command.format(**values)
    done = subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, env=os.environ
    )
    losses = re.findall(r"val_loss[ :]([\d.]+)", done.stdout)
    seconds = re.findall(r"train_time[ :]([\d.,]+)", done.stdout)
    if done.returncode or not losses:
        sys.exit(f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    row = dict(
        side=name,
        command=command,
        data=data.name,
        width=str(width),
        steps=str(steps),
        seed=str(seed),
        val_loss=losses[-1],
        seconds=seconds[-1].replace(",", ""),
    )
    if not rows_path.exists():
        rows_path.write_text("\t".join(COLUMNS) + "\n")
    with open(rows_path, "a") as file:
        file.write("\t".join(row[column] for column in COLUMNS) + "\n")
    return row


def crossing(points: list[tuple[float, float]], loss: float) -> tuple[float, bool]:
    """The fraction at which a line through (fraction, loss) points crosses a loss.

    Also whether it lies beyond the points.
    """
    points = sorted(points)
    # The first pair around the loss, else the nearest
    i = 0
    while i < len(points) - 2 and loss < points[i + 1][1]:
        i += 1
    (f1, l1), (f2, l2) = points[i : i + 2]
    share = (l1 - loss) / (l1 - l2)
    fraction = math.exp(math.log(f1) + share * math.log(f2 / f1))
    return fraction, not points[0][1] >= loss >= points[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="+", type=Path, required=True)
    add("--width", type=int, default=128, choices=sorted(BATCH))
    add("--steps", type=int, default=1500)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--fractions", nargs="+", type=float, default=[0.5, 0.7, 1.0])
    add("--side", action="append", required=True)
    add("--reference", required=True)
    add("--rows", type=Path, default=Path("rows.tsv"))
    args = parser.parse_args()

    # Seeds outside, sides inside: neighbouring runs share the machine's state
    results = {}  # (data, side, fraction) -> rows
    for data in args.data:
        for seed in args.seeds:
            for side in args.side:
                name = side.removeprefix("name=").split("|")[0]
                fractions = [1.0] if name == args.reference else args.fractions
                for fraction in fractions:
                    steps = round(args.steps * fraction)
                    row = run(side, data, args.width, steps, seed, args.rows)
                    results.setdefault((data, name, fraction), []).append(row)

    print("| data | side | losses | fraction of steps | fraction of seconds |")
    print("| --- | --- | --- | --- | --- |")
    for data in args.data:
        reference = results[data, args.reference, 1.0]
        target = mean(float(row["val_loss"]) for row in reference)
        reference_seconds = mean(float(row["seconds"]) for row in reference)
        for side in args.side:
            name = side.removeprefix("name=").split("|")[0]
            points, seconds = [], []
            for (d, n, fraction), rows in results.items():
                if (d, n) == (data, name):
                    points.append((fraction, mean(float(row["val_loss"]) for row in rows)))
                    seconds.append(mean(float(row["seconds"]) for row in rows) / fraction)
            losses = ", ".join(f"{loss:.4f} ({fraction:g})" for fraction, loss in points)
            if len(points) == 1:
                print(f"| {data.name} | {name} | {losses} | 1 | 1 |")
                continue
            fraction, beyond = crossing(points, target)
            time = fraction * mean(seconds) / reference_seconds
            mark = "~" if beyond else ""
            print(f"| {data.name} | {name} | {losses} | {mark}{fraction:.3f} | {mark}{time:.3f} |")


main()
