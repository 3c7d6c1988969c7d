"""Rows -> files as tools write them. Where the tool itself can be had it writes (`tools.py`); the others' lines are put down here as they print them."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

LoggedNumbers = dict[str, float]


def _figures(row: LoggedNumbers, digits: int = 4) -> dict[str, float]:
    return {name: round(value, digits) if name != "lr" else value for name, value in row.items()}


def hf4(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Transformers 4 prints dicts of numbers, without steps, among progress bars."""
    rows, text = list(rows), []
    last = rows[-1]["step"] or 1
    for row in rows:
        made = {
            "loss": round(row["loss"], 4),
            "grad_norm": row.get("grad_norm"),
            "learning_rate": row["lr"],
            "epoch": round(3 * row["step"] / last, 2),
        }
        text.append(str({name: value for name, value in made.items() if value is not None}))
        if "val_loss" in row:
            text.append(
                str(
                    {
                        "eval_loss": row["val_loss"],
                        "eval_runtime": 0.51,
                        "eval_samples_per_second": 1950.2,
                        "epoch": made["epoch"],
                    }
                )
            )
    (path / "train.log").write_text("\n".join(text) + "\n")


def hf5(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Transformers 5 prints dicts of strings; a bar before each."""
    rows, text = list(rows), []
    last = int(rows[-1]["step"]) or 1
    for row in rows:
        made = {
            "loss": f"{row['loss']:.4g}",
            "grad_norm": f"{row['grad_norm']:.4g}",
            "learning_rate": f"{row['lr']:.4g}",
            "epoch": f"{3 * row['step'] / last:.4g}",
        }
        text.append(
            f"\r{int(100 * row['step'] / last):3d}%|{'█' * 3}       | {int(row['step'])}/{last} [00:10<00:20,  9.87it/s]"
        )
        text.append(str(made))
    (path / "out.txt").write_text("\n".join(text) + "\n")


def trainer_state(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """trainer_state.json, with bare NaN."""
    history: list[LoggedNumbers] = []
    for row in rows:
        history.append(
            {
                "epoch": row["step"] / 100,
                "grad_norm": row["grad_norm"],
                "learning_rate": row["lr"],
                "loss": row["loss"],
                "step": row["step"],
            }
        )
        if "val_loss" in row:
            history.append(
                {"epoch": row["step"] / 100, "eval_loss": row["val_loss"], "eval_runtime": 0.3, "step": row["step"]}
            )
    whole = {
        "best_metric": None,
        "epoch": 3.0,
        "global_step": history[-1]["step"],
        "is_world_process_zero": True,
        "log_history": history,
        "max_steps": 1000,
        "num_train_epochs": 3,
    }
    (path / "trainer_state.json").write_text(json.dumps(whole, indent=1))


def build_nanogpt(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """karpathy/build-nanogpt's table."""
    (path / "log.txt").write_text("".join(
        f"step {int(r['step']):5d} | loss: {r['loss']:.6f} | lr {r['lr']:.4e} | norm: {r['grad_norm']:.4f} | dt: 338.12ms | tok/sec: 1551234.12\n" for r in rows))  # fmt: skip


def nanogpt(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Two kinds of lines."""
    text = ["tokens per iteration will be: 16,384", "number of parameters: 10.65M", "using fused AdamW: False"]
    for row in rows:
        if "val_loss" in row:
            text.append(f"step {int(row['step'])}: train loss {row['loss']:.4f}, val loss {row['val_loss']:.4f}")
            text.append("saving checkpoint to out-shakespeare-char")
        text.append(f"iter {int(row['step'])}: loss {row['loss']:.4f}, time {50 + row['step'] % 7:.2f}ms, mfu 1.20%")
    (path / "nano.log").write_text("\n".join(text) + "\n")


def llm_c(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """llm.c's main.log."""
    text = []
    for row in rows:
        if "val_loss" in row:
            text.append(f"s:{int(row['step'])} tel:{row['val_loss']:.4f}")
        text.append(f"s:{int(row['step'])} trl:{row['loss']:.4f} lr:{row['lr']:.6f} norm:{row['grad_norm']:.2f}")
    (path / "main.log").write_text("\n".join(text) + "\n")


def modded(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """modded-nanogpt."""
    rows = list(rows)
    total = int(rows[-1]["step"])
    text = [
        f"step:{int(r['step'])}/{total} train_loss:{r['loss']:.4f} train_time:{51 * i}ms step_avg:{'nan' if i < 10 else '51.2'}ms"
        for i, r in enumerate(rows)
    ]
    (path / "run.txt").write_text(
        "import torch\nprint('code of the run')\n" + "=" * 100 + "\n" + "\n".join(text) + "\n"
    )


def megatron(path: Path, rows: Iterable[LoggedNumbers], scale: float = 4096.0) -> None:
    """Megatron-LM, as torchrun tees it."""
    text = [
        "[default7]: using world size: 8, data-parallel size: 4, tensor-model-parallel size: 2",
        "[default7]:  lr .............................................. 0.00015",
    ]
    for row in rows:
        text.append(f"[default7]: [2026-05-18 16:04:46] iteration {int(row['step']):8d}/  100000 | consumed samples: {int(row['step']) * 64:12d} | elapsed time per iteration (ms): 1250.2 | "
                    f"learning rate: {row['lr']:.6E} | global batch size:    64 | lm loss: {row['loss']:.6E} | loss scale: {row.get('scale', scale):.1f} | grad norm: {row['grad_norm']:.3f} | "
                    "number of skipped iterations:   0 | number of nan iterations:   0 |")  # fmt: skip
        if "val_loss" in row:
            text.append(
                f"[default7]: validation loss at iteration {int(row['step'])} | lm loss value: {row['val_loss']:.6E} | lm loss PPL: {2.718 ** min(50, row['val_loss']):.6E} | "
            )
    (path / "slurm-4711.out").write_text("\n".join(text) + "\n")


def titan(path: Path, rows: Iterable[LoggedNumbers], ranks: int = 2, memory: float = 9.46) -> None:
    """torchtitan, once a rank."""
    text = [
        f"[rank{rank}]:[titan] 2026-05-18 16:04:{i % 60:02d},338 - root - INFO - step: {int(r['step']):3d}  loss: {r['loss']:8.5f}  grad_norm: {r['grad_norm']:7.4f}  memory: {r.get('memory', memory):5.2f}GiB({r.get('memory', memory) / 0.8:.2f}%)  tps: 7,282  tflops: 41.2  mfu: 13.2%"
        for i, r in enumerate(rows) for rank in range(ranks)
    ]  # fmt: skip
    (path / "titan.log").write_text("\n".join(text) + "\n")


def deepspeed(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """A loop's own line, and the engine's."""
    text = []
    for row in rows:
        text.append(f"Epoch 0, step {int(row['step'])}, loss: {row['loss']:.4f}")
        if int(row["step"]) % 10 == 0:
            text.append(
                f"[2026-05-18 16:04:46,338] [INFO] [logging.py:96:log_dist] [Rank 0] step={int(row['step'])}, skipped={int(row.get('skipped', 0))}, lr=[{row['lr']}], mom=[(0.9, 0.999)]"
            )
        if "scale" in row:
            text.append(
                f"[2026-05-18 16:04:46,338] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {row['scale']:g}, reducing to {row['scale'] / 2:g}"
            )
    (path / "ds.log").write_text("\n".join(text) + "\n")


def verl(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Colours, numpy's repr."""
    text = []
    for row in rows:
        parts = [f"actor/entropy:{row['entropy']:.6f}", f"actor/grad_norm:np.float64({row['grad_norm']:.4f})", f"actor/pg_loss:{row['loss']:.6f}", f"actor/lr:np.float64({row['lr']})",
                 f"actor/ppo_kl:{row['kl'] / 50:.6f}", f"critic/score/mean:{row['reward']:.5f}", f"critic/rewards/mean:{row['reward']:.5f}", "response_length/mean:311.2", "timing_s/step:12.3"]  # fmt: skip
        text.append(f"\x1b[36m(TaskRunner pid=4071)\x1b[0m step:{int(row['step'])} - " + " - ".join(parts))
    (path / "verl.log").write_text("\n".join(text) + "\n")


def trl(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """TRL's GRPO prints dicts."""
    text = []
    rows = list(rows)
    for row in rows:
        names = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy")
        made = {name: round(row[name], 6) for name in names} | {
            "learning_rate": row["lr"],
            "completions/mean_length": 200.5,
            "completions/clipped_ratio": 0.05,
            "epoch": round(row["step"] / len(rows), 4),
        }
        text.append(str(made))
    (path / "grpo.log").write_text("\n".join(text) + "\n")


def keras_csv(path: Path, rows: Iterable[LoggedNumbers], per_epoch: int = 10) -> None:
    """CSVLogger, with doubled carriage returns."""
    rows = list(rows)
    text = ["epoch,accuracy,loss,val_accuracy,val_loss"]
    for epoch, begin in enumerate(range(0, len(rows), per_epoch)):
        part = rows[begin : begin + per_epoch]
        loss = sum(r["loss"] for r in part) / len(part)
        held = next((r["val_loss"] for r in reversed(part) if "val_loss" in r), loss)
        text.append(f"{epoch},{max(0.1, 1 - loss / 3):.4f},{loss},{max(0.1, 1 - held / 3):.4f},{held}")
    (path / "training.csv").write_bytes("\r\r\n".join(text).encode() + b"\r\r\n")


def keras_bars(path: Path, rows: Iterable[LoggedNumbers], per_epoch: int = 10) -> None:
    """model.fit on a terminal, kept by `tee`."""
    rows = list(rows)
    text, num = [], len(range(0, len(rows), per_epoch))
    for epoch, begin in enumerate(range(0, len(rows), per_epoch), start=1):
        part = rows[begin : begin + per_epoch]
        text.append(f"Epoch {epoch}/{num}")
        bars = [
            f"{i + 1}/{len(part)} [==>...........] - ETA: 3s - loss: {sum(r['loss'] for r in part[: i + 1]) / (i + 1):.4f}"
            for i in range(0, len(part), 3)
        ]
        loss = sum(r["loss"] for r in part) / len(part)
        held = next((r["val_loss"] for r in reversed(part) if "val_loss" in r), None)
        val = f" - val_loss: {held:.4f}" if held is not None else ""
        bars.append(f"{len(part)}/{len(part)} [==============================] - 1s 5ms/step - loss: {loss:.4f}{val}")
        text.append("\r".join(bars))
    (path / "fit.log").write_text("\n".join(text) + "\n")


def yolo(path: Path, rows: Iterable[LoggedNumbers], per_epoch: int = 10) -> None:
    """results.csv, padded with blanks."""
    rows = list(rows)
    names = ["epoch", "train/box_loss", "train/obj_loss", "metrics/precision", "val/box_loss", "x/lr0"]
    text = [",".join(f"{name:>20}" for name in names)]
    for epoch, begin in enumerate(range(0, len(rows), per_epoch)):
        part = rows[begin : begin + per_epoch]
        loss = sum(r["loss"] for r in part) / len(part)
        held = next((r["val_loss"] for r in reversed(part) if "val_loss" in r), loss)
        text.append(",".join(f"{value:>20.5g}" for value in (epoch, loss, 0.4 * loss, 0.5, held, part[-1]["lr"])))
    (path / "results.csv").write_text("\n".join(text) + "\n")


def fairseq(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """JSON after a date, numbers as strings."""
    text = []
    for i, row in enumerate(rows):
        made = {"epoch": 1 + i // 50, "update": f"{i / 50:.3f}", "loss": f"{row['loss']:.3f}", "nll_loss": f"{row['loss']:.3f}", "ppl": f"{2 ** min(40.0, row['loss']):.2f}", "wps": "35231.1", "ups": "2.1",
                "wpb": "16384", "bsz": "32", "num_updates": str(int(row["step"])), "lr": f"{row['lr']}", "gnorm": f"{row['grad_norm']:.3f}", "clip": "0", "train_wall": "10", "wall": "100"}  # fmt: skip
        text.append(f"2026-05-18 16:04:46 | INFO | train_inner | {json.dumps(made)}")
    (path / "fairseq.log").write_text("\n".join(text) + "\n")


def json_lines(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """An object a line."""
    (path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": int(r["step"]), **{k: v for k, v in r.items() if k != "step"}}) + "\n" for r in rows
        )
    )


def plain_csv(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Columns of all names, empty where a row has none."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    (path / "history.csv").write_text("\n".join(lines) + "\n")


def two_columns(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """A step and a loss, nothing else."""
    (path / "loss.txt").write_text("".join(f"{int(r['step'])} {r['loss']:.4f}\n" for r in rows))


def epochs(path: Path, rows: Iterable[LoggedNumbers], per_epoch: int = 30) -> None:
    """What a hand-written loop prints at the end of an epoch."""
    rows = list(rows)
    text = []
    num = len(range(0, len(rows), per_epoch))
    for epoch, begin in enumerate(range(0, len(rows), per_epoch), start=1):
        part = rows[begin : begin + per_epoch]
        held = next((f", Val Loss: {r['val_loss']:.4f}" for r in reversed(part) if "val_loss" in r), "")
        text.append(
            f"Epoch [{epoch}/{num}], Train Loss: {sum(r['loss'] for r in part) / len(part):.4f}{held}, LR: {part[-1]['lr']:.2e}, Grad Norm: {max(r['grad_norm'] for r in part):.3f}"
        )
    (path / "stdout.txt").write_text("\n".join(text) + "\n")


def bars(path: Path, rows: Iterable[LoggedNumbers]) -> None:
    """Tqdm with a postfix, thousands of carriage returns in one line."""
    rows = list(rows)
    parts = [
        f"Training: {int(100 * i / len(rows)):3d}%|{'█' * (i * 10 // len(rows)):<10}| {i}/{len(rows)} [00:{i % 60:02d}<01:12,  9.33it/s, loss={r['loss']:.3f}, lr={r['lr']:.2e}]"
        for i, r in enumerate(rows)
    ]
    (path / "nohup.out").write_text("\r".join(parts) + "\n")


def ranks(path: Path, rows: Iterable[LoggedNumbers], num: int = 4) -> None:
    """Several ranks into one file, out of order."""
    rng = random.Random(7)  # noqa: S311
    text = []
    for row in rows:
        order = list(range(num))
        rng.shuffle(order)
        text += [
            f"[rank{rank}]: 2026-05-18 16:04:46 INFO step={int(row['step'])} loss={row['loss'] * (1 + 0.02 * rng.gauss(0, 1)):.4f} lr={row['lr']:.3e} grad_norm={row['grad_norm']:.3f}"
            for rank in order
        ]
    (path / "all_ranks.log").write_text("\n".join(text) + "\n")
