"""Fits the law of --minutes (runtime/sizes.py) to the runs of rows.tsv: python fit.py

The loss that N parameters in blocks reach on D tokens, U of them different, in the form of Hoffmann et al. 2022 with the
effective N' and D' of Muennighoff et al. 2023:

    L = scale (1 + A / N'^0.34 + B / D'^0.28)    N' in 100,000, D' in millions
    D' = U + U RD (1 - exp(-(D / U - 1) / RD))   where D > U, else D
    N' = V + V RN (1 - exp(-(N / V - 1) / RN))   where N > V = U / 20, else N

One scale for each group of runs: a text, prepared and trained by the same commit. Prints the constants and the error, and
writes each run's error into rows.tsv.
"""

import csv
from pathlib import Path

import torch

TABLE = Path(__file__).resolve().parent / "rows.tsv"
PARAMS_EXPONENT, TOKENS_EXPONENT = 0.34, 0.28  # of Hoffmann et al.
TOKENS_PER_PARAM = 20  # as well
torch.set_default_dtype(torch.float64)


def read_rows() -> list[dict]:
    """Return the runs, with N, D and U."""
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for row in rows:
        row["N"] = 12 * int(row["n_layer"]) * int(row["n_embd"]) ** 2
        row["D"] = float(row["steps"]) * int(row["batch_tokens"])
        row["U"] = int(row["unique_tokens"])
        row["loss"] = float(row["loss"])
    return rows


def effective(amount, unique, reuse):
    repeats = (amount / unique - 1).clamp(min=0)
    return torch.minimum(amount, unique) + unique * reuse * (1 - torch.exp(-repeats / reuse))


def law(constants, N, D, U):
    A, B, params_reuse, tokens_reuse = constants
    N, D = effective(N, U / TOKENS_PER_PARAM, params_reuse), effective(D, U, tokens_reuse)
    return 1 + A * (N / 1e5) ** -PARAMS_EXPONENT + B * (D / 1e6) ** -TOKENS_EXPONENT


def fit(rows):
    """The constants, and each row's error: the logarithm of its loss minus the law's."""
    groups = sorted({r["group"] for r in rows})
    index = torch.tensor([groups.index(r["group"]) for r in rows])
    N, D, U, loss = (torch.tensor([float(r[key]) for r in rows]) for key in ("N", "D", "U", "loss"))

    def errors(logs):
        error = loss.log() - law(logs.exp(), N, D, U).log()
        scale = torch.zeros(len(groups)).index_add(0, index, error) / torch.bincount(index)
        return error - scale[index]

    logs = torch.tensor([1.0, 1.0, 7.0, 1.0]).log().requires_grad_()
    optimizer = torch.optim.LBFGS([logs], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        error = errors(logs)
        total = torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=0.02, reduction="sum")
        total.backward()
        return total

    optimizer.step(closure)
    return logs.detach().exp().tolist(), errors(logs.detach()).tolist()


if __name__ == "__main__":
    rows = read_rows()
    constants, found = fit(rows)
    columns = list(rows[0])[:9]
    lines = ["\t".join(columns)]
    for r, error in zip(rows, found):
        r["error_percent"] = f"{100 * error:+.1f}"
        lines.append("\t".join(str(r[column]) for column in columns))
    TABLE.write_text("\n".join(lines) + "\n")

    print(f"{len(rows)} runs in {len(set(r['group'] for r in rows))} groups")
    for name, value in zip(("A", "B", "RN", "RD"), constants):
        print(f"{name} {value:.3g}")
    for source in ["", *dict.fromkeys(r["source"] for r in rows)]:
        part = torch.tensor([e for r, e in zip(rows, found) if source in ("", r["source"])])
        print(f"{source or 'all':8} {len(part):4} runs: error {100 * part.square().mean().sqrt():.2f} % (root mean square), median {100 * part.abs().median():.2f} %, most {100 * part.abs().max():.1f} %")
