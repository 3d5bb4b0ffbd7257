"""`bench.py loss`: whether a change of the recipe, in flags or in code, reaches a loss sooner, over texts and seeds."""

import functools
import itertools
import json
import math
import reprlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Bench, CaseFailed, median_min_max, progress, table
from data.prepare import prepare
from data.shards import UserError, find_shards
from train_gpt import HERE, data_folder, make_config

# Changes to the recipe; the first is the baseline
RECIPES = {
    "AdamW, no n-grams": dict(optimizer="adamw", ngram=0),
    "AdamW": dict(optimizer="adamw"),
    "Muon + Adam": {},
    "without n-grams": dict(ngram=0),
    "without weight decay": dict(weight_decay=0.0),
    "without soft-cap": dict(softcap=0.0),
    "without cooldown": dict(cooldown_frac=0.0),
    "with 5 % warm-up": dict(warmup_frac=0.05),
    "with gradients clipped at 1": dict(grad_clip=1.0),
}
SET_HERE = ("seed", "trials", "eval_every", "out_dir", "resume", "minutes", "max_minutes", "target_val_loss")
EXPECTED = {  # keys of a file of recipes
    "recipes": "two or more of a name and its flags, the baseline first",
    "data": "a list of folders from data/prepare.py",
    "sizes": "names and their flags",
    "seeds": "a whole number of at least 1",
}
EVALUATION = ("step", "train_time_s", "val_loss")  # what is kept of a row of metrics.jsonl

# ---------------------------------------------------------------------------------------------------------------------
# What to compare


def read_recipes(path: str) -> dict:
    """What a file of recipes holds: keys of EXPECTED, their types checked. Raises UserError."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=functools.partial(no_twins, path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a JSON file of recipes") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); docs/benchmarks.md shows a file of recipes") from None
    if type(given) is not dict:
        raise UserError(f"{path} holds {reprlib.repr(given)}; expected an object with the key recipes")
    for key in {"recipes": None, **given}:
        if key not in EXPECTED:
            raise UserError(f"{path} has the key {key!r}; expected {', '.join(EXPECTED)}")
        if not is_expected(key, given.get(key)):
            found = reprlib.repr(given[key]) if key in given else "missing"
            raise UserError(f"{path}: {key} is {found}; expected {EXPECTED[key]}")
    return given


def no_twins(path: str, pairs: list[tuple[str, object]]) -> dict:
    """An object of a JSON file, whose names must differ: Python would keep the last. Raises UserError."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} names {name!r} twice; give each a name of its own")
    return dict(pairs)


def is_expected(key: str, value) -> bool:
    if key == "seeds":
        return type(value) is int and value >= 1
    if key == "data":
        return type(value) is list and bool(value) and all(type(folder) is str and folder for folder in value)
    return type(value) is dict and len(value) >= 1 + (key == "recipes") and all(type(v) is dict for v in value.values())


def make_plan(path: str, bench: Bench) -> dict:
    """`recipes`, `sizes` and `seeds` as in a file of recipes, and `texts` (name -> folder); all checked.

    Raises UserError.
    """
    given = read_recipes(path) if path else {}
    plan = dict(recipes=RECIPES, sizes={"": {}}, seeds=2 if bench.quick else 3) | given
    built_in = {"adam_lr", *(key for change in RECIPES.values() for key in change)}
    bench.reject_flags(*SET_HERE, *(given.keys() & {"data"} if path else built_in))
    same = {"data", *SET_HERE}
    for changes, keys in ((plan["sizes"], same), (plan["recipes"], same | {"eval_tokens"})):
        for name, key in ((name, key) for name, change in changes.items() for key in change.keys() & keys):
            raise UserError(f"{path}: {name!r} sets {key}, which must be the same for all recipes; remove it")
    for (size, flags), (name, change) in itertools.product(plan["sizes"].items(), plan["recipes"].items()):
        try:
            check_recipe(run_flags(bench, flags, change), change.get("repository"))
        except UserError as error:
            raise UserError(f"{name!r}{size and f' at size {size!r}'}: {error}") from None
    plan["texts"] = find_texts(plan.pop("data", [bench.flags.get("data", "")]))
    return plan


def find_texts(folders: list[str]) -> dict[str, Path]:
    """Name -> folder, absolute: another repository has data of its own. Makes the default corpus. Raises UserError."""
    if folders == [""]:
        return {"default corpus": prepare("python", out=data_folder(make_config()), say=progress).resolve()}
    texts = {folder: Path(folder).resolve() for folder in folders}
    if len(set(texts.values())) < len(folders):
        raise UserError(f"data names a folder twice in {', '.join(folders)}; name each once")
    for folder, split in itertools.product(folders, ("train", "val")):
        find_shards(folder, split)
    return texts


def run_flags(bench: Bench, size: dict, recipe: dict) -> dict:
    """Flags of the runs of a recipe at a size, without data and seed: its own over the size's over those given.

    Raises UserError.
    """
    small = dict(max_steps=150, eval_tokens=32768)
    small |= dict(n_layer=2, max_steps=40, batch_tokens=2048, eval_tokens=8192) if bench.quick else {}
    flags = {**small, **bench.flags, **size, **recipe}
    flags.pop("repository", None)
    steps = make_config(max_steps=flags["max_steps"]).max_steps
    return flags | dict(eval_every=max(1, steps // (10 if bench.quick else 20)))


def check_recipe(flags: dict, repository) -> None:
    """Raises UserError for flags that cannot be given; what they mean in another repository only its trainer knows."""
    if repository is None:
        make_config(**flags)
        return
    if type(repository) is not str or not Path(repository, "train_gpt.py").is_file():
        raise UserError(f"repository is {repository!r}; expected a checkout of this repository, with its train_gpt.py")
    for key, value in flags.items():
        if type(value) not in (str, int, float, bool):
            raise UserError(f"{key} is {reprlib.repr(value)}; expected a number, a text, true or false")


# ---------------------------------------------------------------------------------------------------------------------
# Running


def train_once(repository: str | Path, flags: dict) -> dict:
    """A run of a repository's train_gpt.py in a process of its own: final val_loss, train_time_s, steps, evaluations.

    Raises CaseFailed, for a run that diverged too.
    """
    with tempfile.TemporaryDirectory() as folder:  # its checkpoints go with it
        argv = [*(f"--{key}={value}" for key, value in flags.items()), f"--out_dir={folder}"]
        argv = [sys.executable, str(Path(repository).resolve() / "train_gpt.py"), *argv]
        done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        if done.returncode:
            raise explain_exit(done.returncode, done.stderr)
        try:
            summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
            rows = map(json.loads, Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            evaluations = [{key: row[key] for key in EVALUATION} for row in rows if "val_loss" in row]
            stopped_by, last = summary["stopped_by"], evaluations[-1]
            if stopped_by != "max_steps" or last["val_loss"] != summary["val_loss"]:
                raise ValueError(f"stopped by {stopped_by}, last evaluated at step {last['step']}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CaseFailed(f"FAILED: left no whole run ({type(error).__name__}: {error})") from None
    if last["val_loss"] is None:
        raise CaseFailed(f"diverged with seed {flags['seed']}")
    return dict(val_loss=last["val_loss"], train_time_s=last["train_time_s"], steps=last["step"],
                dtype=summary.get("dtype", "auto"), evaluations=evaluations)  # fmt: skip


def explain_exit(code: int, stderr: str) -> CaseFailed:
    """Why the trainer ended with an exit code other than 0: the last line that it wrote."""
    said = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "").removeprefix("error: ")
    if code == 2:
        return CaseFailed(said, kind="refused")
    if code == -9:
        return CaseFailed("out of memory: killed by the system")
    out_of_memory = said.startswith("memory ran out")
    return CaseFailed(said if out_of_memory else f"FAILED: {said or f'died with exit code {code}'}")


def train_text(recipes: dict[str, tuple], seeds: int, label: str) -> tuple[dict[str, list[dict]], dict]:
    """The runs of each recipe on a text, interleaved, and the CaseFailed of those recipes that failed and ended there.

    recipes: name -> (repository, flags without seed). No recipe is always first; all of them end with the baseline.
    """
    names, failed, runs, auto = list(recipes), {}, {name: [] for name in recipes}, {}
    for seed in range(seeds):
        for name in (names * 2)[seed % len(names) :][: len(names)]:
            if failed.keys() & {name, names[0]}:
                continue
            repository, flags = recipes[name]
            names_dtype = flags.keys() & {"dtype", "bf16"}
            try:
                run = train_once(repository, flags | dict(seed=seed) | ({} if names_dtype else auto))
            except CaseFailed as error:
                failed[name] = error
                progress(f"{label}seed {seed}, {name}: {error}")
                continue
            runs[name].append(run | dict(seed=seed))
            if not names_dtype and run["dtype"] != "auto":
                auto = dict(dtype=run["dtype"])  # the first run settles it, or noise might give a pair two of them
            progress(f"{label}seed {seed}, {name}: {run['val_loss']:.4f} in {run['train_time_s']:.1f} s")
    return runs, failed


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def time_to(rows: list[dict], target: float, key: str) -> float | None:
    """Where the validation loss first reaches the target, linear between evaluations; None if never."""
    for before, row in zip([None, *rows], rows):
        if row["val_loss"] is not None and row["val_loss"] <= target:
            if before is None or before["val_loss"] is None:
                return row[key]
            fraction = (before["val_loss"] - target) / (before["val_loss"] - row["val_loss"])
            return before[key] + fraction * (row[key] - before[key])
    return None


def paired_ratio(run: dict, base: dict, key: str) -> float:
    """`key` of a run over the baseline's of the same seed, each up to the higher of the two final losses."""
    target = max(run["val_loss"], base["val_loss"])  # both reach it
    return time_to(run["evaluations"], target, key) / time_to(base["evaluations"], target, key)


def mean_and_error(values: list[float], name: str) -> dict:
    """Mean and, of two or more, its standard error, under the names name and name_se."""
    error = {f"{name}_se": statistics.stdev(values) / math.sqrt(len(values))} if len(values) > 1 else {}
    return {name: statistics.mean(values), **error}


def mean_factor(ratios: list[float], sign: int, name: str) -> dict:
    """The geometric mean of ratios**sign, and its standard error, under the names name and name_se."""
    logs = mean_and_error([sign * math.log(ratio) for ratio in ratios], "mean")
    factor = math.exp(logs["mean"])
    return {name: factor} | ({f"{name}_se": factor * logs["mean_se"]} if "mean_se" in logs else {})


def judge_text(runs: dict[str, list[dict]], failed: dict) -> list[dict]:
    """A row for each recipe on a text: final loss, time and steps against the baseline's, seed by seed.

    Times are train_time in s. A recipe that failed has its reason and no figures; without a baseline nobody has any.
    """
    base, rows = next(iter(runs)), []
    if base not in failed:
        target = statistics.mean(run["val_loss"] for run in runs[base])
        base_s = statistics.median(run["train_time_s"] for run in runs[base])
    for name, own in runs.items():
        if name in failed or base in failed:
            rows.append(dict(name=name, note=str(failed.get(name, f"nothing to compare with: {base} failed"))))
            continue
        row = dict(name=name, seeds=len(own), steps=own[-1]["steps"], target=target)
        row |= mean_and_error([run["val_loss"] for run in own], "val_loss")
        row |= median_min_max([run["train_time_s"] for run in own], "train_time_s")
        if name != base:
            row["time_ratios"] = [paired_ratio(*pair, "train_time_s") for pair in zip(own, runs[base])]
            row["step_ratios"] = [paired_ratio(*pair, "step") for pair in zip(own, runs[base])]
            row |= mean_factor(row["time_ratios"], -1, "sooner") | mean_factor(row["step_ratios"], -1, "fewer")
        reached = [time_to(run["evaluations"], target, "train_time_s") for run in own]
        reached = [seconds for seconds in reached if seconds is not None]
        row["reached"] = f"{len(reached)} of {len(own)}"
        if 2 * len(reached) > len(own):
            steps = [time_to(run["evaluations"], target, "step") for run in own]
            row |= median_min_max(reached, "to_target_s")
            row["steps_to_target"] = statistics.median(step for step in steps if step is not None)
            row["speedup"] = base_s / row["to_target_s"]
        rows.append(row)
    return rows


def judge_recipe(rows: list[dict], p_value) -> dict:
    """A recipe over its rows on all texts: the share of the baseline's time and steps that it saves.

    p_value(values, target): one-sided, of "their mean is below the target"; here of the logarithms of the ratios.
    """
    done, broken = [row for row in rows if "note" not in row], [row for row in rows if "note" in row]
    verdict = dict(name=rows[0]["name"], pairs=sum(len(row["time_ratios"]) for row in done))
    for key in ("time", "step") if done else ():
        ratios = [ratio for row in done for ratio in row[f"{key}_ratios"]]
        factor = mean_factor(ratios, 1, key)
        verdict[f"{key}_saved"] = 1 - factor[key]
        if len(ratios) > 1:
            verdict[f"{key}_saved_se"] = factor[f"{key}_se"]
            verdict[f"{key}_p"] = p_value([math.log(ratio) for ratio in ratios], 0.0)
    if broken:
        verdict["worst"] = "; ".join(f"{row['data']}: {row['note']}" for row in broken)
    elif len(done) > 1:
        worst = min(done, key=lambda row: row["sooner"])
        verdict["worst"] = f"{worst['data']}: {1 - 1 / worst['sooner']:.1%}"
    return verdict


# ---------------------------------------------------------------------------------------------------------------------
# Reporting


def with_errors(row: dict, **formats: str) -> dict:
    """The row with the figures named as text, each with its standard error if it has one."""
    texts = {}
    for key, form in formats.items():
        if key in row:
            error = f" +- {row[f'{key}_se']:{form}}" if f"{key}_se" in row else ""
            texts[key] = f"{row[key]:{form}}{error}"
    return row | texts


def how(rows: list[dict], seeds: int) -> str:
    """Steps, seeds and order, for the line under a table."""
    steps = sorted({row["steps"] for row in rows if "steps" in row})
    return f"{' or '.join(map(str, steps))} steps a run, {seeds} seeds, interleaved, +- one standard error."


def text_table(rows: list[dict], title: str, seeds: int) -> str:
    base = rows[0]
    columns = {
        "name": ("Config", ""), "val_loss": ("final val_loss", ""), "sooner": ("times sooner (time)", ""),
        "fewer": ("times sooner (steps)", ""), "reached": ("seeds at target", ""),
        "to_target_s": ("train_time to target, s", ".1f"), "steps_to_target": ("steps to target", ".0f"),
        "speedup": (f"speedup vs {base['name']}", ".2f"), "note": ("", ""),
    }  # fmt: skip
    note = (
        f"{how(rows, seeds)} Times sooner: {base['name']}'s train_time (steps) over the recipe's, seed by seed, each "
        "up to the higher of the two final losses; the geometric mean."
    )
    if "target" in base:
        note += (
            f" Target: {base['target']:.4f}, the mean of {base['name']}'s final losses; speedup: its whole train_time "
            "over the time to the target."
        )
    rows = [with_errors(row, val_loss=".4f", sooner=".3f", fewer=".3f") for row in rows]
    return table(f"Time to a validation loss: {title}", rows, columns, (note,))


def verdict_table(verdicts: list[dict], rows: list[dict], title: str, seeds: int) -> str:
    columns = {
        "name": ("Config", ""), "time_saved": ("saves of the time", ""), "time_p": ("p (time)", ".2g"),
        "step_saved": ("saves of the steps", ""), "step_p": ("p (steps)", ".2g"),
        "pairs": ("pairs", "d"), "worst": ("worst text (time)", ""),
    }  # fmt: skip
    note = (
        f"Against {rows[0]['name']}; {how(rows, seeds)} Pairs: texts x seeds. p: one-sided t-test of the logarithms of "
        "the pairs' ratios, that nothing is saved."
    )
    verdicts = [with_errors(verdict, time_saved=".1%", step_saved=".1%") for verdict in verdicts]
    return table(f"What is saved over all texts{title}", verdicts, columns, (note,))


def bench_loss(bench: Bench, path: str, p_value) -> dict:
    """What each recipe saves of the time to the baseline's loss. path: of a file of recipes, or "" for RECIPES.

    p_value: as judge_recipe takes it. Raises UserError, or CaseFailed if the baseline fails on the first text.
    """
    if bench.limit_mb:
        raise UserError("loss starts train_gpt.py as it is, without a limit of its memory; remove --limit_mb")
    plan = make_plan(path, bench)
    texts, recipes, seeds, base = plan["texts"], plan["recipes"], plan["seeds"], next(iter(plan["recipes"]))
    rows, verdicts, all_runs = [], [], []
    for size, size_flags in plan["sizes"].items():
        here, flags = [], {name: run_flags(bench, size_flags, recipe) for name, recipe in recipes.items()}
        for text, folder in texts.items():
            todo = {name: (recipe.get("repository", HERE), flags[name] | dict(data=str(folder)))
                    for name, recipe in recipes.items()}  # fmt: skip
            title, place = ", ".join(filter(None, [text, size])), dict(size=size, data=text)
            runs, failed = train_text(todo, seeds, f"{title}: " if len(texts) * len(plan["sizes"]) > 1 else "")
            if base in failed and not rows + here:
                reason = f"{base} did not finish, so there is nothing to compare with ({failed[base]})"
                raise CaseFailed(reason, kind=failed[base].kind)
            all_runs += [place | dict(name=name) | run for name, own in runs.items() for run in own]
            here += (judged := [place | row for row in judge_text(runs, failed)])
            print(text_table(judged, title, seeds), flush=True)
        over = [judge_recipe([row for row in here if row["name"] == name], p_value) for name in recipes if name != base]
        print(verdict_table(over, here, size and f", {size}", seeds), flush=True)
        rows, verdicts = rows + here, verdicts + [dict(size=size) | verdict for verdict in over]
    return dict(loss=rows, verdicts=verdicts, runs=all_runs, recipes=recipes, sizes=plan["sizes"])
