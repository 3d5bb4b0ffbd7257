"""What the worked edits are held to, in a process of its own that imports the edited copies one after the other.

`python tests/edit_cases.py FOLDER TITLE ...` trains each copy FOLDER/<title>/repo in many ways and leaves what is wrong
in FOLDER/alone.json; two ranks do the same, in ranks.json, and compare with what the first run left.
"""

import contextlib
import importlib
import json
import math
import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

OURS = ("train_gpt", "model", "ops", "generation", "evaluation", "sample", "export", "int8", "data", "runtime")
TINY = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    seq_len=32,
    batch_tokens=512,
    micro_batch=16,
    max_steps=4,
    device="cpu",
    dtype="fp32",
    ngram=3,
    ngram_rows=512,
    loss_chunk=0,
    eval_every=2,
    eval_tokens=1024,
    log_every=1,
    save_every=2,
    keep=0,
    muon_lr=0.02,
    adam_lr=0.004,
    cooldown_frac=0.5,
    attn="sdpa",
)
UNWATCHED = dict(eval_every=0, save_every=0)  # evaluated and saved at the end alone, which must not change the rest


def plain_loss(model, x, y):
    """The mean loss by autograd alone."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def smoothed(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


def with_z_loss(model, x, y):
    return plain_loss(model, x, y) + 1e-2 * model(x).logsumexp(-1).square().mean()


def weighted(model, x, y):
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * (1 - 0.5 * (y.flatten() == 32).float())).mean()


def with_second_head(model, x, y):
    caught = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    loss = plain_loss(model, x, y)
    hook.remove()
    second = (caught[0][:, :-1] @ model.second.weight.T).flatten(0, 1)
    return loss + 0.3 * F.cross_entropy(second, y[:, 1:].flatten(), reduction="sum") / y.numel()


# What else must hold of a copy, after its first run: each returns whether it does.


def layers_have_their_rates(copy) -> bool:
    groups = copy.state.optimizer.param_groups
    rates = {name: group["initial_lr"] for group in groups for name in group["names"]}
    return all(math.isclose(rates[n.replace(".0.", ".1.")], 0.9 * lr) for n, lr in rates.items() if ".0." in n)


def lion_is_lion(copy) -> bool:
    """Chen et al. 2023, algorithm 2; a step that is skipped leaves parameter and state alone."""
    torch.manual_seed(0)
    p, ours = torch.nn.Parameter(torch.randn(4, 3)), copy.ours.model
    w, m = p.detach().clone(), torch.zeros(4, 3)
    group = dict(params=[p], names=["p"], kind="lion", lr=0.1, betas=(0.9, 0.99), weight_decay=0.2, split=())
    optimizer = ours.Optimizer([group])
    for step in range(4):
        p.grad = torch.randn(4, 3) if step != 2 else torch.full((4, 3), math.nan)
        optimizer.step(torch.tensor(step == 2))
        if step != 2:
            w = w - 0.1 * ((0.9 * m + 0.1 * p.grad).sign() + 0.2 * w)
            m = 0.99 * m + 0.01 * p.grad
    return torch.allclose(p, w, atol=1e-6) and torch.allclose(optimizer.state[p]["momentum"], m, atol=1e-6)


def average_is_evaluated(copy) -> bool:
    average, best = copy.checkpoint["extra"]["eval_weights"], torch.load(copy.folder / "plain" / "ckpt_best.pt")
    other = all(not torch.equal(average[name], w) for name, w in copy.checkpoint["model"].items())
    return other and best["step"] == 4 and all(torch.equal(average[name], w) for name, w in best["model"].items())


def tokens_are_counted(copy) -> bool:
    return [row["tokens"] for row in copy.plain["rows"] if "train_loss" in row] == [256, 512, 1024, 1536]


def embedding_stays(copy) -> bool:
    start = noise("wte.weight", (320, 32), None, copy.ours.train_gpt.derive_seed(0, "wte.weight") >> 1, None)
    state, weight = copy.checkpoint["optimizer"], copy.checkpoint["model"]["wte.weight"]
    return torch.equal(weight, start) and not state["wte.weight"] and bool(state["head.weight"])


def base_stays(copy) -> bool:
    base = torch.load(copy.folder.parent / "base.pt", weights_only=True)["model"]
    model = copy.checkpoint["model"]
    moved = [name for name in model if "lora_b" in name and model[name].any()]
    kept = all(torch.equal(model[name], w) for name, w in base.items() if name.endswith("qkv.weight"))
    said = (copy.folder / "plain" / "log.txt").read_text()
    return kept and len(moved) == 9 and "not there: blocks.0.attn.qkv.lora_a" in said and "frozen: " in said


def buffers_are_kept(copy) -> bool:
    return all(copy.checkpoint["model"][f"blocks.{i}.mlp.mean"].any() for i in range(2))


def figure_is_logged(copy) -> bool:
    rows = [json.loads(line) for line in (copy.folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    norms = [row["head_norm"] for row in rows if "train_loss" in row]
    return len(norms) == 4 and "| head_norm " in (copy.folder / "plain" / "log.txt").read_text()


def heads_are_shared(copy) -> bool:
    model, _ = copy.ours.sample.load(copy.folder / "plain" / "ckpt_4.pt", "cpu", "fp32")
    cache = copy.ours.generation.KVCache(model, torch.tensor([5]))
    model.next_logits(torch.arange(5)[None], cache)
    split = {g["split"] for g in copy.state.optimizer.param_groups if g["role"] == "qkv"}
    return cache.layers[0].k.shape[1] == 1 and split == {(32, 16, 16)}


def head_counts_as_a_matmul(copy) -> bool:
    names = {"wte.weight", "head.weight"}
    untied = copy.ours.model.GPTConfig(**copy.checkpoint["model_config"])
    weights = sum(p.numel() for name, p in copy.state.raw_model.named_parameters() if name.startswith("blocks."))
    attended = untied.n_layer * (untied.seq_len + 1) / 2
    flops = 6 * (weights + 320 * 32) + 12 * 32 * attended
    return names < copy.checkpoint["model"].keys() and copy.state.raw_model.flops_per_token() == flops


def kernel_steps_aside(copy) -> bool:
    return "loss: edited" in (copy.folder / "plain" / "log.txt").read_text()


@dataclass
class Case:
    """How an edit is used, and what it is compared with."""

    flags: dict = field(default_factory=dict)
    loss: object = plain_loss
    cut: bool = True  # the same for any micro-batches and ranks
    fine_tuned: bool = False  # starts from a run of the unedited page; else from noise: zeros hide gradients
    compiled: dict = field(default_factory=dict)  # flags; none: it is not compiled, which takes long
    holds: object = None


CASES = {
    "A flag": Case(dict(min_lr_frac=0.5)),
    "A learning-rate schedule": Case(),
    "A parameter": Case(),
    "Dropout": Case(dict(dropout=0.2), cut=False, compiled=dict(checkpointing="full")),
    "Dropout for any cut": Case(),
    "Layers left out": Case(dict(n_layer=4)),
    "A buffer": Case(cut=False, compiled=dict(checkpointing="none"), holds=buffers_are_kept),
    "Label smoothing": Case(loss=smoothed, holds=kernel_steps_aside),
    "A loss term": Case(loss=with_z_loss, holds=kernel_steps_aside),
    "Weights of tokens": Case(loss=weighted, holds=kernel_steps_aside),
    "An auxiliary head": Case(loss=with_second_head),
    "Tied embeddings": Case(holds=head_counts_as_a_matmul),
    "Grouped queries": Case(holds=heads_are_shared),
    "ALiBi": Case(dict(alibi=True)),
    "Learned positions": Case(),
    "The token before": Case(dict(doc_mask=True)),
    "Another optimizer": Case(holds=lion_is_lion),
    "A learning rate by layer": Case(holds=layers_have_their_rates),
    "An average of the weights": Case(holds=average_is_evaluated),
    "Shorter sequences first": Case(holds=tokens_are_counted),
    "Frozen parameters": Case(holds=embedding_stays),
    "Fine-tuning by LoRA": Case(fine_tuned=True, holds=base_stays),
    "A figure of your own": Case(holds=figure_is_logged),
}


def name_of(title: str) -> str:
    return title.lower().replace(" ", "_")


def imported(repo: Path) -> SimpleNamespace:
    """The modules of an edited copy."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[0] = str(repo)
    importlib.invalidate_caches()
    names = "train_gpt model generation sample export ops.params runtime.start runtime.checkpoint data.shards".split()
    return SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in names})


def noise(name: str, shape, table, seed: int, made) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


class Copy:
    """An edited copy, its data and the folder of its runs."""

    def __init__(self, folder: Path, title: str):
        self.folder, self.case, self.title = folder / name_of(title), CASES[title], title
        self.ours = imported(self.folder / "repo")
        self.ours.train_gpt.sample_text = lambda *_: ""
        self.flags = TINY | dict(data=str(folder / "data")) | self.case.flags
        if self.case.fine_tuned:
            self.flags |= dict(init_from=str(folder / "base.pt"), init_partial=True)
        else:
            self.ours.params.initial_weight = noise

    def train(self, name: str, **flags) -> dict:
        """A run; returns its rows and first gradients."""
        ours, grads = self.ours.train_gpt, {}
        make_optimizer = ours.make_optimizer

        def noting(cfg, model):
            optimizer = make_optimizer(cfg, model)
            step = optimizer.step

            def noted(skip=None):
                if skip is not None and not grads:  # as when warming up
                    grads.update({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
                step(skip)

            optimizer.step = noted
            return optimizer

        ours.make_optimizer = noting
        try:
            cfg = ours.make_config(**self.flags | flags, out_dir=self.out(name))
            ours.train(cfg, on_step=lambda state, loss: setattr(self, "state", state))
        finally:
            ours.make_optimizer = make_optimizer
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines() if rank() == 0 else []
        keys = ("step", "train_loss", "grad_norm", "val_loss", "tokens", "head_norm")
        return dict(rows=[{k: row[k] for k in keys if k in row} for row in map(json.loads, lines)], grads=grads)

    def refused(self, name: str, **flags) -> str:
        """What a run is refused with."""
        try:
            self.train(name, **flags)
        except self.ours.shards.UserError as error:
            return str(error)
        return "not refused"

    def out(self, name: str) -> str:
        return str(self.folder / name)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def full(t: torch.Tensor) -> torch.Tensor:
    return t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach().clone()


def compare(got: dict, want: dict, rtol: float = 2e-5) -> list[str]:
    """What differs between two runs: rows, exactly with rtol=0, and first gradients."""
    wrong = []
    if len(got["rows"]) != len(want["rows"]):
        return [f"{len(got['rows'])} rows, not {len(want['rows'])}"]
    for ours, theirs in zip(got["rows"], want["rows"]):
        for key in theirs:
            if not math.isclose(ours[key], theirs[key], rel_tol=rtol):
                wrong.append(f"{key} of step {theirs['step']}: {ours[key]}, not {theirs[key]}")
    return wrong + compare_grads(got["grads"], want["grads"])


def unwatched(run: dict) -> dict:
    """The run as one with the flags UNWATCHED leaves it."""
    return run | dict(rows=[row for row in run["rows"] if "val_loss" not in row or row["step"] == TINY["max_steps"]])


def compare_grads(got: dict, want: dict) -> list[str]:
    wrong = [f"gradients of {got.keys() ^ want.keys()}"] if got.keys() != want.keys() else []
    for name in got.keys() & want.keys():
        apart = (got[name] - want[name]).norm() / (want[name].norm() + 1e-12)
        if not apart < 1e-4:
            wrong.append(f"gradient of {name} is {apart:.1e} off")
    return wrong


def reference_grads(copy: Copy) -> dict:
    """The first gradients by autograd through the model as it is called, in one piece."""
    ours, cfg = copy.ours.train_gpt, copy.ours.train_gpt.make_config(**copy.flags, out_dir=copy.out("reference"))
    dist_ctx = copy.ours.start.launch(cfg)
    stream = copy.ours.start.open_stream(cfg, dist_ctx)
    state = ours.build(cfg, dist_ctx, stream.meta["vocab_size"], stream.meta["eot"])
    state.raw_model.ngram_dropout = ours.get_ngram_dropout(cfg, stream)
    if cfg.init_from:
        checkpoint = copy.ours.checkpoint.read_checkpoint(Path(cfg.init_from))
        copy.ours.checkpoint.load_weights(state.raw_model, checkpoint, cfg.init_from, (), True)
    ours.reseed_step(state)
    batch = ours.get_batch(stream, dist_ctx, 0)
    if copy.title == "Shorter sequences first":
        batch = batch[:, :17]
    copy.case.loss(state.raw_model, batch[:, :-1], batch[:, 1:]).backward()
    return {name: p.grad for name, p in state.raw_model.named_parameters() if p.grad is not None}


def sampled(copy: Copy) -> list[str]:
    """The model of the last checkpoint, as sample.py has it: its loss, and texts with and without a KV cache."""
    wrong, sample = [], copy.ours.sample
    path = copy.folder / "plain" / "ckpt_4.pt"
    model, tokenizer = sample.load(path, "cpu", "fp32")
    model.doc_eot = 256 if copy.flags.get("doc_mask") else None
    cfg = copy.ours.train_gpt.make_config(**copy.flags)
    stream = copy.ours.start.open_stream(cfg, copy.ours.start.launch(cfg))
    ((x, y),) = stream.eval_batches(cfg.eval_tokens, 32, 0, 1)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    loss = (weighted if copy.case.loss is weighted else plain_loss)(model, x, y).item()
    rows = [json.loads(line) for line in (copy.folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    want = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    if not math.isclose(loss, want, rel_tol=2e-5):
        wrong.append(f"loss {loss} of the checkpoint, not {want}")
    prompts = [x[0, :n].long() for n in (9, 4)]
    for prompt in prompts:
        drawn = [
            torch.cat(list(sample.generate(model, [prompt], 20, 257, temperature=0.7, seeds=[3], use_cache=cached)))
            for cached in (True, False)
        ]
        if not torch.equal(*drawn):
            wrong.append("another text with a KV cache")
    if len(list(sample.generate(model, [prompts[0]], 60, 257))) != 60:
        wrong.append("no text beyond the context")
    rounded, _ = sample.load(path, "cpu", "fp32", int8=True)
    if not torch.allclose(plain_loss(rounded, x, y), plain_loss(model, x, y), rtol=1e-2):
        wrong.append("another loss in int8")
    return wrong


def exported(copy: Copy) -> list[str]:
    """The exported program gives the checkpoint's logits, or it is refused in a sentence.

    One layer and one step: tracing costs by the layer, and those of a model differ in their weights alone.
    """
    copy.train("small", n_layer=1, ngram=2, max_steps=1, **UNWATCHED)
    run, out = copy.folder / "small" / "ckpt_1.pt", copy.folder / "program.pt2"
    with contextlib.redirect_stdout(None), open(copy.folder / "export.txt", "w") as said:
        with contextlib.redirect_stderr(said):
            code = copy.ours.export.main([str(run), "--to", "torch-export", "--out", str(out)])
    if code:
        text = (copy.folder / "export.txt").read_text()
        return [] if code == 2 and text.count("\n") == 1 else [f"export ended with {code}: {text}"]
    kinds = {"int8": "int8.pt"} | ({"safetensors": "model.safetensors"} if find_spec("safetensors") else {})
    for kind, name in kinds.items():
        with contextlib.redirect_stdout(None):
            if copy.ours.export.main([str(run), "--to", kind, "--out", str(copy.folder / name)]):
                return [f"not exported to {kind}"]
    model, _ = copy.ours.sample.load(run, "cpu", "fp32")
    if "safetensors" in kinds:
        from safetensors.torch import load_file

        copy.ours.model.GPT(model.cfg).load_state_dict(load_file(copy.folder / "model.safetensors"))
    idx = torch.randint(0, 257, (3, 11), generator=torch.Generator().manual_seed(0))
    apart = (torch.export.load(out).module()(idx) - model(idx)).abs().max().item()
    return [] if apart < 1e-4 else [f"exported logits are {apart} off"]


def check_alone(folder: Path, title: str) -> dict[str, list[str]]:
    """What is wrong with an edit in one process, by what was tried."""
    copy = Copy(folder, title)
    copy.plain = plain = copy.train("plain")
    torch.save(plain, copy.folder / "plain.pt")
    copy.checkpoint = torch.load(copy.folder / "plain" / "ckpt_4.pt", weights_only=True)
    found = {"gradients": compare_grads(plain["grads"], reference_grads(copy))}
    if copy.case.holds and not copy.case.holds(copy):
        found["holds"] = [f"{copy.case.holds.__name__} is false"]
    ways = dict(full=dict(checkpointing="full"), selective=dict(checkpointing="selective"), chunks=dict(loss_chunk=100))
    if copy.case.cut:
        ways["micro_batch 4"] = dict(micro_batch=4, loss_chunk=100)
    for name, flags in ways.items():
        found[name] = compare(copy.train(name, **flags, **UNWATCHED), unwatched(plain))
    half = copy.folder / "half"
    half.mkdir()
    (half / "ckpt_2.pt").write_bytes((copy.folder / "plain" / "ckpt_2.pt").read_bytes())
    (half / "metrics.jsonl").write_text("")
    rest = copy.train("half", resume="newest", init_from="", init_partial=False)
    at = next(i for i, row in enumerate(plain["rows"]) if row["step"] == 2 and "val_loss" in row)
    found["resume"] = compare(rest | dict(grads={}), dict(rows=plain["rows"][at:], grads={}), rtol=0)
    found["sample"], found["export"] = sampled(copy), exported(copy)
    if copy.case.compiled:  # dropout draws other numbers there, the same with and without recomputation
        compiled = copy.train("compiled", compile="default", **copy.case.compiled)
        draws = title == "Dropout"
        found["compiled"] = compare(compiled, copy.train("again", compile="default") if draws else plain)
        refused = copy.refused("budget", compile="default", checkpointing="0.3")
        found["budget"] = [] if re.search("draw random numbers|with buffers as", refused) else [refused]
    return found


def held_by(state) -> list[torch.Tensor]:
    """All that a rank holds, whole: parameters, buffers, and an average of the weights."""
    kept = state.extra.get("eval_weights", {})
    held = [*map(full, state.raw_model.parameters()), *state.raw_model.buffers()]
    return held + [full(kept[name]) for name in sorted(kept)]


def check_ranks(folder: Path, title: str) -> dict[str, list[str]]:
    """What is wrong with an edit on two ranks; on rank 0."""
    copy, found = Copy(folder, title), {}
    want = torch.load(copy.folder / "plain.pt")
    for parallel in ("ddp", "fsdp"):
        flags = dict(parallel=parallel, micro_batch=4)
        got = copy.train(parallel, **flags, save_every=0)
        again = copy.train(f"{parallel} full", **flags, checkpointing="full", **UNWATCHED)
        state = torch.cat([t.detach().double().flatten() for t in held_by(copy.state)])
        everyones = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, state)
        if rank() == 0:
            found[f"{parallel} alike"] = (
                [] if all(torch.equal(state, other) for other in everyones) else ["the ranks hold other values"]
            )
            if copy.case.cut or parallel == "fsdp":  # what depends on how the batch is cut is the same for both
                found[parallel] = compare(got, want)
            found[f"{parallel} full"] = compare(again, unwatched(got))
            want = want if copy.case.cut else got
    return found


def main(folder: Path, titles: list[str]) -> None:
    report, check = {}, check_ranks if "RANK" in os.environ else check_alone
    for title in titles:
        try:
            report[title] = check(folder, title)
        except Exception as error:
            if "RANK" in os.environ:
                raise
            report[title] = {"error": [f"{type(error).__name__}: {error}", traceback.format_exc()]}
    if rank() == 0:
        (folder / "report").write_text(json.dumps(report))
        (folder / "report").rename(folder / f"{check.__name__.removeprefix('check_')}.json")  # there when it is whole


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.dont_write_bytecode = False  # two ranks take what the first process has compiled
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
