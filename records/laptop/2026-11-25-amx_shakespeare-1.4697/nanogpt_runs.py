"""Convert the logs of nanoGPT in baseline/ to runs that bench.py reads: python nanogpt_runs.py OUT

    python records/laptop/2026-11-25-amx_shakespeare-1.4697/nanogpt_runs.py OUT
    python bench.py plot records/laptop/2026-11-25-amx_shakespeare-1.8857 \
        records/laptop/2026-11-25-amx_shakespeare-1.4697 OUT --log --target 1.8857 --target 1.4697 \
        --label "train_gpt, 1 x 64, 2.2M parameters" --label "train_gpt, 4 x 128, 9.3M parameters" \
        --label "nanoGPT's recipe for CPUs, 4 x 128, 0.8M parameters" \
        --title "tinyshakespeare, 2 cores of an Intel Xeon" --out docs/race.png

"iter N" in a log is the loss before update N + 1, "step N" an evaluation after N updates. Some
iterations include an evaluation, so the time per update is the mean of the others.
"""

import gzip
import json
import re
import sys
from pathlib import Path
from statistics import mean


def read_rows(log: str) -> list[dict]:
    """Return the rows of metrics.jsonl that a log amounts to, without step 0."""
    iterations = re.findall(r"^iter (\d+): loss (\d+\.\d+), time (\d+\.\d+)ms", log, re.M)
    evaluations = dict(re.findall(r"^step (\d+): train loss \S+, val loss (\d+\.\d+)", log, re.M))
    (batch,) = re.findall(r"^tokens per iteration will be: ([\d,]+)", log, re.M)
    update_s = mean(float(ms) for step, _, ms in iterations if step not in evaluations) / 1000
    evaluations.pop("0")  # the loss of an untrained model stretches the axes
    rows = [dict(step=int(step), val_loss=float(loss)) for step, loss in evaluations.items()]
    rows += [dict(step=int(step) + 1, train_loss=float(loss)) for step, loss, _ in iterations]
    for row in rows:
        row["train_time_s"] = row["step"] * update_s
        row["tokens"] = row["step"] * int(batch.replace(",", ""))
    return rows


for path in sorted(Path(__file__).parent.glob("baseline/*.txt.gz")):
    run = Path(sys.argv[1], path.name.removesuffix(".txt.gz"))
    run.mkdir(parents=True)
    lines = [json.dumps(row) for row in read_rows(gzip.decompress(path.read_bytes()).decode())]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
