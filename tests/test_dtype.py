"""--dtype auto: what decides, that it is decided once, and who takes it from there."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
import train_gpt
from conftest import TINY, final, flags_of, run_main, run_ranks
from runtime import dtype
from runtime.checkpoint import content_hash
from runtime.logger import SECTION
from runtime.ranks import DistContext
from train_gpt import PRESETS, Config, make_config, train

AUTO = TINY | dict(dtype="auto", max_steps=2)


@pytest.fixture
def cpu(monkeypatch):
    """Pretend that this CPU's matmuls reach so many TFLOP/s; the function returns the list of what was asked."""
    asked = []

    def pretend(fp32: float, bf16: float) -> list:
        def speeds(n_embd, tokens):
            asked.append((n_embd, tokens))
            return dict(fp32=1e12 * fp32, bf16=1e12 * bf16)

        monkeypatch.setattr(dtype, "matmul_speeds", speeds)
        return asked

    return pretend


def logged_flags(folder: Path) -> dict:
    """The flags of the last start in log.txt."""
    return json.loads((folder / "log.txt").read_text().rpartition(f"{SECTION} run\n")[2].partition("\n")[0])


def as_an_old_checkpoint(path: Path) -> None:
    """Make its config say auto."""
    content = torch.load(path, weights_only=True)
    content["config"]["dtype"] = "auto"
    content["sha256"] = content_hash(content)
    torch.save(content, path)


# ---------------------------------------------------------------------------------------------------------------------
# What decides


@pytest.mark.parametrize(
    "fp32, bf16, name", [(0.184, 0.912, "bf16"), (1.0, 1.2, "bf16"), (1.0, 1.19, "fp32"), (0.03, 0.009, "fp32")]
)
def test_bf16_must_be_faster_on_a_cpu(fp32, bf16, name, cpu):
    asked, cfg = cpu(fp32, bf16), make_config()
    said = f"dtype auto: {name}, matmuls of this model reach {bf16:.3f} TFLOP/s in bf16 and {fp32:.3f} in fp32"
    assert dtype.resolve_dtype(cfg, DistContext(torch.device("cpu"))) == (name, [said])
    again = dtype.resolve_dtype(make_config(dtype=name), DistContext(torch.device("cpu")))
    assert again == (name, []) and asked == [(128, 8192)]


def test_hardware_decides_on_gpus(monkeypatch, cpu):
    asked = cpu(1.0, 9.0)
    for kind, has_bf16, name in (("cuda", True, "bf16"), ("cuda", False, "fp32"), ("mps", True, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        cfg = make_config()
        assert dtype.resolve_dtype(cfg, DistContext(torch.device(kind))) == (name, [])
    assert asked == []


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("fp32, bf16", [(0.2, 0.9), (0.2, 0.13), (0.03, 0.0007), (0.002, 0.002), (50.0, 200.0)])
@pytest.mark.parametrize("slower", [1.0, 1.7])
def test_timing_asks_for_bounded_work(preset, fp32, bf16, slower, monkeypatch):
    """On CPUs that reach so many TFLOP/s, less outside of their cache, by a clock of our own."""
    cfg, clock, work = Config(**PRESETS[preset]), [0.0], []
    monkeypatch.setattr(dtype, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def multiply(a, b):
        (rows, inner), columns, speed = a.shape, b.size(1), fp32 if a.dtype == torch.float32 else bf16
        work.append((rows, inner, columns))
        cached = rows * inner + inner * columns < 2**16
        clock[0] += 2e-12 * rows * inner * columns / speed * (1.0 if cached else slower)

    monkeypatch.setattr(torch, "mm", multiply)
    speeds = dtype.matmul_speeds(cfg.n_embd, 4096)
    assert speeds["bf16"] / speeds["fp32"] == pytest.approx(bf16 / fp32) and speeds["fp32"] <= 1.001e12 * fp32
    assert clock[0] < 0.1 and 2 * sum(rows * inner * columns for rows, inner, columns in work) <= 2 * dtype.MOST_FLOPS
    assert max(max(shape) for shape in work) <= max(4096, 4 * cfg.n_embd)
    if fp32 > 1:  # a large machine: the model's own sizes
        most = int(dtype.MOST_FLOPS / 2 / dtype.ROUNDS / sum(dtype.KINDS) / cfg.n_embd**2)
        assert work[-1] == (4 * cfg.n_embd, min(4096, most), cfg.n_embd)


def test_a_size_is_chosen_by_the_speed_of_long_matmuls(monkeypatch):
    """Each matmul waits 4 ms for a core that is busy."""
    clock = [0.0]

    def multiply(a, b):
        clock[0] += 0.004 + 2 * a.size(0) * a.size(1) * b.size(1) / 2e11

    monkeypatch.setattr(dtype, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(torch, "mm", multiply)
    assert dtype.matmul_speed(make_config(), torch.device("cpu")) > 1.4e11
    assert clock[0] < 2 * dtype.SIZING_S


def test_timing_draws_nothing_at_random():
    before = torch.get_rng_state()
    name, said = dtype.faster_dtype(64, 128)
    assert torch.equal(torch.get_rng_state(), before) and said.startswith(f"dtype auto: {name}, matmuls of this model")


# ---------------------------------------------------------------------------------------------------------------------
# Who takes it


def test_a_run_settles_its_dtype_once_and_keeps_it(data, tmp_path, cpu, capsys):
    asked, folder = cpu(0.1, 0.5), tmp_path / "run"
    cfg = make_config(**AUTO | dict(data=str(data), out_dir=str(folder)))
    summary = train(cfg)
    assert cfg.dtype == "auto" and len(asked) == 1 and asked[0] == (32, 8 * 32)
    assert summary["dtype"] == final(folder)["config"]["dtype"] == logged_flags(folder)["dtype"] == "bf16"
    log = (folder / "log.txt").read_text()
    assert "\ndtype auto: bf16, matmuls of this model reach 0.500 TFLOP/s in bf16 and 0.100 in fp32\n" in log
    cpu(0.5, 0.1)  # from the command line, and from Python
    assert run_main(["--resume", str(folder), "--max_steps", "3"], capsys)[0] == 0
    train(make_config(**AUTO | dict(data=str(data), out_dir=str(folder), resume="newest", max_steps=4)))
    log = (folder / "log.txt").read_text()
    assert len(asked) == 1 and log.count("dtype auto: ") == 1 and "--dtype" not in log
    assert final(folder)["step"] == 4 and final(folder)["config"]["dtype"] == logged_flags(folder)["dtype"] == "bf16"
    assert run_main(["--resume", str(folder), "--max_steps", "5", "--dtype", "fp32"], capsys)[0] == 0
    assert "flags that have changed: --dtype bf16 -> fp32" in (folder / "log.txt").read_text()
    assert final(folder)["config"]["dtype"] == "fp32"


def test_an_old_checkpoint_is_resumed_in_what_is_measured_now(data, tmp_path, cpu, capsys):
    asked, folder = cpu(0.5, 0.1), tmp_path / "run"
    train(make_config(**AUTO | dict(data=str(data), out_dir=str(folder))))
    as_an_old_checkpoint(folder / "ckpt_2.pt")
    cpu(0.1, 0.5)
    assert run_main(["--resume", str(folder), "--max_steps", "3"], capsys)[0] == 0
    assert len(asked) == 2 and final(folder)["config"]["dtype"] == "bf16"
    assert "--dtype" not in (folder / "log.txt").read_text()


def test_trials_share_the_first_ones_dtype(data, tmp_path, cpu, monkeypatch, capsys):
    asked, flags = cpu(0.1, 0.5), AUTO | dict(data=data, out_dir=tmp_path / "all", trials=2, resume="auto")
    train_one = train_gpt.train

    def train_then_slow(cfg):
        summary = train_one(cfg)
        cpu(0.5, 0.1)
        return summary

    monkeypatch.setattr(train_gpt, "train", train_then_slow)
    assert run_main(flags_of(flags), capsys)[0] == 0 and len(asked) == 1
    assert [logged_flags(tmp_path / "all" / f"seed_{seed}")["dtype"] for seed in range(2)] == ["bf16"] * 2
    assert run_main(flags_of(flags | dict(trials=3)), capsys)[0] == 0 and len(asked) == 1  # two are done
    assert logged_flags(tmp_path / "all" / "seed_2")["dtype"] == "bf16"
    code, err = run_main(flags_of(flags | dict(dtype="fp32")), capsys)
    assert code == 2 and "other values of dtype" in err


def test_samples_are_drawn_in_the_dtype_of_the_run(data, tmp_path, cpu, monkeypatch):
    asked, folder = cpu(0.1, 0.5), tmp_path / "run"
    train(make_config(**AUTO | dict(data=str(data), out_dir=str(folder))))
    cpu(0.5, 0.4)
    assert sample.load(sample.find_file(str(folder)), "cpu", "auto")[0].compute_dtype == torch.bfloat16
    assert sample.load(sample.find_file(str(folder)), "cpu", "fp32")[0].compute_dtype == torch.float32
    cpu(0.5, 0.2)  # as slow as that bf16 is emulated
    assert (
        sample.load(sample.find_file(str(folder)), "cpu", "auto")[0].compute_dtype == torch.float32
        and asked[0][0] == 32
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    for saved, kind, name in (
        ("bf16", "cuda", "fp32"),
        ("fp16", "cuda", "fp16"),
        ("bf16", "mps", "fp32"),
        ("fp32", "cpu", "fp32"),
        ("fp16", "cpu", "fp32"),
        ([], "cpu", "fp32"),
        (torch.zeros(3), "cpu", "fp32"),
    ):
        assert dtype.sampling_dtype("auto", dict(dtype=saved), 32, torch.device(kind)) == name
    assert dtype.sampling_dtype("bf16", {}, 32, torch.device("cuda")) == "bf16"  # as it was asked for


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def ranks_script(folder: Path) -> None:
    """What each of two ranks does: rank 0's matmuls are faster in bf16, those of rank 1 in fp32."""
    rank = os.environ["RANK"]
    dtype.matmul_speeds = lambda *_: dict(fp32=1.0, bf16=2.0) if rank == "0" else dict(fp32=2.0, bf16=1.0)
    flags = AUTO | dict(data=str(folder / "data"), out_dir=str(folder / "run"))
    summary, model = train(make_config(**flags), return_model=True)
    (folder / f"rank{rank}").write_text(f"{summary['dtype']} {model.compute_dtype}")
    torch.distributed.destroy_process_group()


def test_all_ranks_take_rank_0s_dtype(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    done = run_ranks(tmp_path, __file__, tmp_path)
    assert done.codes == [0, 0], done
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["bf16 torch.bfloat16"] * 2


if __name__ == "__main__":
    ranks_script(Path(sys.argv[1]))
