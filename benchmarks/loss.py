"""`bench.py loss`: whether a change of the recipe, in flags or in code, reaches a loss sooner, over texts and seeds."""

import itertools
import json
import math
import reprlib
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import COLUMNS, Bench, CaseFailed, median_min_max, progress, run_script, table
from data.prepare import prepare
from data.shards import UserError, find_shards
from records.check import t_test
from runtime.start import HERE, data_folder
from train_gpt import make_config

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
SET_HERE = {"seed", "trials", "eval_every", "out_dir", "resume", "minutes", "max_minutes", "target_val_loss"}
EVALUATION = ("step", "train_time_s", "val_loss", "val_bpb")  # what is kept of a row of metrics.jsonl

# ---------------------------------------------------------------------------------------------------------------------
# What to compare


def names_flags(value) -> bool:
    return type(value) is dict and bool(value) and all(type(flags) is dict for flags in value.values())


def names_folders(value) -> bool:
    return type(value) is list and bool(value) and all(type(folder) is str and folder for folder in value)


EXPECTED = {  # key of a file of recipes -> whether a value is right, and what is
    "recipes": (
        lambda value: names_flags(value) and len(value) >= 2,
        "two or more of a name and its flags, the baseline first",
    ),
    "data": (names_folders, "a list of folders from data/prepare.py"),
    "sizes": (names_flags, "names and their flags"),
    "seeds": (lambda value: type(value) is int and value >= 1, "a whole number of at least 1"),
}


def read_recipes(path: str) -> dict:
    """What a file of recipes holds: keys of EXPECTED, their types checked. Raises UserError."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:  # Python would keep the last
                raise UserError(f"{path} names {name!r} twice; give each a name of its own")
        return dict(pairs)

    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a JSON file of recipes") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); docs/benchmarks.md shows a file of recipes") from None
    if type(given) is not dict:
        raise UserError(f"{path} holds {reprlib.repr(given)}; expected an object with the key recipes")
    for key in {"recipes": None, **given}:
        if key not in EXPECTED:
            raise UserError(f"{path} has the key {key!r}; expected {', '.join(EXPECTED)}")
        is_right, expected = EXPECTED[key]
        if not is_right(given.get(key)):
            found = reprlib.repr(given[key]) if key in given else "missing"
            raise UserError(f"{path}: {key} is {found}; expected {expected}")
    return given


def make_plan(bench: Bench) -> dict:
    """`recipes`, `sizes` and `seeds` as in a file of recipes; `texts`: name -> folder; `runs`: what to train.

    runs: (size, recipe) -> the repository, and flags without data and seed. All are checked. Raises UserError.
    """
    given = read_recipes(bench.recipes) if bench.recipes else {}
    plan = dict(recipes=RECIPES, sizes={"": {}}, seeds=2 if bench.quick else 3, runs={}) | given
    built_in = {"adam_lr", *(key for change in RECIPES.values() for key in change)}
    bench.reject_flags(*SET_HERE, *(given.keys() & {"data"} if bench.recipes else built_in))
    same = SET_HERE | {"data"}
    for changes, keys in ((plan["sizes"], same), (plan["recipes"], same | {"eval_tokens"})):
        for name, key in ((name, key) for name, change in changes.items() for key in change.keys() & keys):
            reason = f"{bench.recipes}: {name!r} sets {key}, which must be the same for all recipes; remove it"
            raise UserError(reason)
    for size, name in itertools.product(plan["sizes"], plan["recipes"]):
        try:
            plan["runs"][size, name] = plan_runs(bench, plan["sizes"][size] | plan["recipes"][name])
        except UserError as error:
            raise UserError(f"{name!r}{size and f' at size {size!r}'}: {error}") from None
    plan["texts"] = find_texts(plan.pop("data", [bench.flags.get("data", "")]))
    return plan


def plan_runs(bench: Bench, changes: dict) -> tuple[str | Path, dict]:
    """The repository and the flags of runs with these changes. Raises UserError for flags that cannot be given."""
    flags = dict(max_steps=150, eval_tokens=32768)
    if bench.quick:
        flags |= dict(n_layer=2, max_steps=40, batch_tokens=2048, eval_tokens=8192)
    flags |= bench.flags | changes
    repository = flags.pop("repository", None)
    steps = make_config(max_steps=flags["max_steps"]).max_steps
    flags["eval_every"] = max(1, steps // (10 if bench.quick else 20))
    if repository is None:
        make_config(**flags)
        return HERE, flags
    if type(repository) is not str or not Path(repository, "train_gpt.py").is_file():
        raise UserError(f"repository is {repository!r}; expected a checkout of this repository, with its train_gpt.py")
    for key, value in flags.items():  # only its own trainer knows what they mean
        if type(value) not in (str, int, float, bool):
            raise UserError(f"{key} is {reprlib.repr(value)}; expected a number, a text, true or false")
    return repository, flags


def find_texts(folders: list[str]) -> dict[str, Path]:
    """Name -> absolute folder, as another repository has its own data. Makes the default corpus. Raises UserError."""
    if folders == [""]:
        return {"default corpus": prepare("python", out=data_folder(make_config()), say=progress).resolve()}
    texts = {folder: Path(folder).resolve() for folder in folders}
    if len(set(texts.values())) < len(folders):
        raise UserError(f"data names a folder twice in {', '.join(folders)}; name each once")
    for folder, split in itertools.product(folders, ("train", "val")):
        find_shards(folder, split)
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Running


def train_once(repository: str | Path, flags: dict) -> dict:
    """A run of a repository's train_gpt.py in a process of its own: final val_loss, train_time_s, steps, evaluations.

    Raises CaseFailed, for a run that diverged too.
    """
    with tempfile.TemporaryDirectory() as folder:  # its checkpoints are deleted with it
        given = [f"--{key}={value}" for key, value in flags.items()]
        run_script(Path(repository).resolve() / "train_gpt.py", *given, f"--out_dir={folder}")
        try:
            summary = json.loads(Path(folder, "summary.json").read_text(encoding="utf-8"))
            rows = map(json.loads, Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            evaluations = [{key: row.get(key) for key in EVALUATION} for row in rows if "val_loss" in row]
            stopped_by, last = summary["stopped_by"], evaluations[-1]
            if stopped_by != "max_steps" or last["val_loss"] != summary["val_loss"]:
                raise ValueError(f"stopped by {stopped_by}, last evaluated at step {last['step']}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CaseFailed(f"FAILED: left no whole run ({type(error).__name__}: {error})") from None
    if last["val_loss"] is None:
        raise CaseFailed(f"diverged with seed {flags['seed']}")
    run = {key: last[key] for key in ("val_loss", "val_bpb", "train_time_s")} | dict(steps=last["step"])
    return run | dict(dtype=summary.get("dtype", "auto"), evaluations=evaluations)


def train_text(recipes: dict[str, tuple], seeds: int, label: str) -> tuple[dict[str, list[dict]], dict]:
    """The runs of each recipe on a text, interleaved, and the CaseFailed of each recipe that failed and so stopped.

    recipes: name -> (repository, flags without seed). The order rotates with the seed; if the baseline fails, all stop.
    """
    names, failed, runs, auto = list(recipes), {}, {name: [] for name in recipes}, {}
    for seed in range(seeds):
        first = seed % len(names)
        for name in names[first:] + names[:first]:
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
                auto = dict(dtype=run["dtype"])  # the first run decides: noise could make a pair's runs differ
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


def geometric_mean(factors: list[float], name: str) -> dict:
    """The same for the geometric mean."""
    logs = mean_and_error([math.log(factor) for factor in factors], name)
    mean = math.exp(logs.pop(name))
    return {name: mean} | {key: mean * error for key, error in logs.items()}


def judge_text(runs: dict[str, list[dict]], failed: dict) -> list[dict]:
    """A row for each recipe on a text: final loss, time and steps against the baseline's, seed by seed.

    Times are train_time in s. A failed recipe gets its reason and no figures; if the baseline failed, none has figures.
    """
    base, rows = next(iter(runs)), []
    for name, own in runs.items():
        row = dict(name=name)
        rows.append(row)
        if name in failed or base in failed:
            row["note"] = str(failed.get(name, f"nothing to compare with: {base} failed"))
            continue
        target = statistics.mean(run["val_loss"] for run in runs[base])
        row |= dict(seeds=len(own), steps=own[-1]["steps"], target=target)
        row |= mean_and_error([run["val_loss"] for run in own], "val_loss")
        if all(run.get("val_bpb") for run in own):  # the bytes of foreign shards are not known
            row |= mean_and_error([run["val_bpb"] for run in own], "val_bpb")
        row |= median_min_max([run["train_time_s"] for run in own], "train_time_s")
        if name != base:
            row["time_ratios"] = [paired_ratio(*pair, "train_time_s") for pair in zip(own, runs[base])]
            row["step_ratios"] = [paired_ratio(*pair, "step") for pair in zip(own, runs[base])]
            row |= geometric_mean([1 / ratio for ratio in row["time_ratios"]], "sooner")
            row |= geometric_mean([1 / ratio for ratio in row["step_ratios"]], "fewer")
        there = [run["evaluations"] for run in own if time_to(run["evaluations"], target, "step") is not None]
        row["reached"] = f"{len(there)} of {len(own)}"
        if 2 * len(there) > len(own):
            row |= median_min_max([time_to(rows, target, "train_time_s") for rows in there], "to_target_s")
            row["steps_to_target"] = statistics.median(time_to(rows, target, "step") for rows in there)
            row["speedup"] = rows[0]["train_time_s"] / row["to_target_s"]
    return rows


def judge_recipe(rows: list[dict]) -> dict:
    """A recipe over its rows on all texts: the fraction of the baseline's time and steps that it saves.

    p: of a one-sided t-test on the log ratios, with the null hypothesis that nothing is saved.
    """
    done = [row for row in rows if "note" not in row]
    failed = [f"{row['data']}: {row['note']}" for row in rows if "note" in row]
    verdict = dict(name=rows[0]["name"], pairs=sum(len(row["time_ratios"]) for row in done))
    for key in ("time", "step") if done else ():
        ratios = [ratio for row in done for ratio in row[f"{key}_ratios"]]
        verdict |= geometric_mean(ratios, f"{key}_saved")
        verdict[f"{key}_saved"] = 1 - verdict[f"{key}_saved"]
        if len(ratios) > 1:
            verdict[f"{key}_p"] = t_test([math.log(ratio) for ratio in ratios], 0.0)
    if failed:
        verdict["worst"] = "; ".join(failed)
    elif len(done) > 1:
        worst = min(done, key=lambda row: row["sooner"])
        verdict["worst"] = f"{worst['data']}: {1 - 1 / worst['sooner']:.1%}"
    return verdict


# ---------------------------------------------------------------------------------------------------------------------
# Reporting


def how(rows: list[dict], seeds: int) -> str:
    """Steps, seeds and order, for the line under a table."""
    steps = sorted({row["steps"] for row in rows if "steps" in row})
    return f"{' or '.join(map(str, steps))} steps a run, {seeds} seeds, interleaved, +- one standard error."


def text_table(rows: list[dict], title: str, seeds: int) -> str:
    base = rows[0]["name"]
    note = (
        f"{how(rows, seeds)} Paired speedup: {base}'s train_time (steps) over the recipe's, seed by seed, each up to "
        "the higher of the two final losses; the geometric mean."
    )
    if "target" in rows[0]:
        note += (
            f" Target: {rows[0]['target']:.4f}, the mean of {base}'s final losses; speedup: its whole train_time over "
            "the time to the target."
        )
    columns = COLUMNS | {"speedup": (f"speedup vs {base}", ".2f")}
    keys = "name val_bpb val_loss sooner fewer reached to_target_s steps_to_target speedup note".split()
    return table(f"Time to a validation loss: {title}", rows, keys, note, columns)


def verdict_table(verdicts: list[dict], rows: list[dict], title: str, seeds: int) -> str:
    note = (
        f"Against {rows[0]['name']}; {how(rows, seeds)} Pairs: texts x seeds. p: one-sided t-test on the pairs' log "
        "ratios (null hypothesis: nothing is saved)."
    )
    keys = "name time_saved time_p step_saved step_p pairs worst".split()
    return table(f"What is saved over all texts{title}", verdicts, keys, note)


def bench_loss(bench: Bench) -> dict:
    """How much of the time to the baseline's loss each recipe saves.

    Raises UserError, or CaseFailed if the baseline fails on the first text.
    """
    if bench.limit_mb:
        raise UserError("loss runs train_gpt.py itself, and cannot limit its memory; remove --limit_mb")
    plan = make_plan(bench)
    seeds, (base, *others) = plan["seeds"], plan["recipes"]
    rows, verdicts, all_runs = [], [], []
    for size in plan["sizes"]:
        here = []
        for text, folder in plan["texts"].items():
            title, place = ", ".join(filter(None, [text, size])), dict(size=size, data=text)
            todo = {}
            for name in plan["recipes"]:
                repository, flags = plan["runs"][size, name]
                todo[name] = repository, flags | dict(data=str(folder))
            runs, failed = train_text(todo, seeds, f"{title}: " if len(plan["texts"]) * len(plan["sizes"]) > 1 else "")
            if base in failed and not rows + here:
                reason = f"{base} did not finish, so there is nothing to compare with ({failed[base]})"
                raise CaseFailed(reason, failed[base].kind)
            all_runs += [place | dict(name=name) | run for name, own in runs.items() for run in own]
            judged = [place | row for row in judge_text(runs, failed)]
            print(text_table(judged, title, seeds), flush=True)
            here += judged
        over = [judge_recipe([row for row in here if row["name"] == name]) for name in others]
        print(verdict_table(over, here, size and f", {size}", seeds), flush=True)
        rows += here
        verdicts += [dict(size=size) | verdict for verdict in over]
    return dict(loss=rows, verdicts=verdicts, runs=all_runs, recipes=plan["recipes"], sizes=plan["sizes"])
