"""Shapes of logs as people publish them, made anew: what tools and loggers write that no specification mentions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from holter import offline
from holter.cli import main
from holter.offline import lines

LAUNCHER = """Traceback (most recent call last):
  File "/opt/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/torch/distributed/launcher/api.py", line 269, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
WATCHDOG = "[rank{rank}]:[E419 10:42:28.85 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=46, NumelOut=46, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.\n"


def diagnosed(capsys: pytest.CaptureFixture[str], path: Path) -> list[dict[str, Any]]:
    main(["diagnose", str(path), "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def first(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> tuple[str, list[int], int]:
    """(cause, ranks, step) of the only diagnosis."""
    path = folder / "run.log"
    path.write_text(text)
    (diagnosis,) = diagnosed(capsys, path)
    return diagnosis["causes"][0]["cause"], diagnosis["causes"][0]["ranks"], diagnosis["first_step"]


@pytest.mark.parametrize(
    ("line", "step", "name", "value"),
    [
        ("iter 250: loss 2.5, time 55.12ms, mfu 1.20%", 250, "loss", 2.5),
        ("I0728 solver.cpp:218] Iteration 100 (4.7 iter/s, 21s/100 iters), loss = 0.25", 100, "loss", 0.25),
        ("| epoch 027 | loss 6.5 | nll_loss 4.5 | num_updates 10198 | gnorm 0.390 | clip 0% |", 10198, "grad_norm", 0.39),
        ("2020 | INFO | train_inner | epoch 003:  5 / 356 loss=9.5, num_updates=700, lr=0.1", 700, "loss", 9.5),
        ("2020 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 9.5 | num_updates 695", 695, "eval_loss", 9.5),
        ("Test set: Average loss: 0.5, Accuracy: 9800/10000 (98%)", None, "eval_average_loss", 0.5),
        (" validation loss at iteration 50 | lm loss value: 8.5E+00 | lm loss PPL: 5.9E+03 |", 50, "eval_lm_loss", 8.5),
        ("  Val    loss=0.5  acc=0.75", None, "eval_loss", 0.5),
        ("INFO ot_train.py:357 step:12K smpl:13K loss:2.5 grdn:49.5 lr:1.0e-05", 12_000, "grad_norm", 49.5),
        ("[Epoch 3] [Batch 20/100] [D loss: 0.5] [G loss: 0.75]", 20, "g_loss", 0.75),
        ("step: 10 - box loss: 0.5, cls loss: 0.25, total loss: 0.75", 10, "total_loss", 0.75),
        ("  1%| | 10/4854 [00:16<2:14, 1s/it]  1%| | 11/4854 [00:17<2:12, 1s/it]   {'loss': 1.5}", 11, "loss", 1.5),
    ],
)  # fmt: skip
def test_a_line_gives_its_step_and_its_numbers(line: str, step: int | None, name: str, value: float) -> None:
    row = lines.parse(line, lines.LineContext())

    assert row is not None
    assert (step, value) == (row.step, row.values[name])


def test_a_table_of_two_columns_is_one_row() -> None:
    context = lines.LineContext()
    table = ["-" * 30, "| rollout/       |        |", "|    ep_rew_mean | 22.5   |", "| train/         |        |", "|    loss        | 0.5    |", "|    n_updates   | 40     |"]  # fmt: skip
    for line in table:
        assert lines.parse(line, context) is None

    row = lines.parse("-" * 30, context)

    assert row is not None
    assert (40, {"rollout/ep_rew_mean": 22.5, "train/loss": 0.5}) == (row.step, row.values)


def test_rounded_steps_are_counted_on(tmp_path: Path) -> None:
    steps = [400, 600, 800, *range(1000, 6000, 200)]
    path = tmp_path / "train.log"
    path.write_text("".join(f"INFO step:{step if step < 1000 else f'{step / 1000:.0f}K'} loss:{3 - step / 4000:.3f} lr:1e-5\n" for step in steps))  # fmt: skip

    (run,) = offline.read([path]).runs

    assert steps == [step for step, _ in run.points("loss")]


@pytest.mark.parametrize(("code", "cause"), [("-9", "rank_dead"), ("1", "script_error")])
def test_a_launchers_one_line_names_the_rank(
    code: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {code}) local_rank: 3 (pid: 81) of binary: /opt/bin/python\n{LAUNCHER}"
    prefixed = "".join(f"stderr: {line}\n" for line in text.splitlines())

    assert (cause, [3], -1) == first(capsys, tmp_path, text)
    assert (cause, [3], -1) == first(capsys, tmp_path, prefixed)


def test_a_traceback_that_a_logger_passes_on_as_a_warning_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    trace = ["Traceback (most recent call last):", '  File "/opt/torch/_dynamo/convert_frame.py", line 12, in f', "    return g()", "RuntimeError: Cannot find a working compiler"]  # fmt: skip
    for prefix in ("W0530 14:48:26.433000 26 torch/_dynamo/convert_frame.py:1233] ", "2026-01-01 10:00:00 WARNING trainer: "):  # fmt: skip
        path.write_text("".join(f"{prefix}{line}\n" for line in trace) + "step 1: loss 2.5\n")
        assert not diagnosed(capsys, path)

    path.write_text("".join(f"2026-01-01 10:00:0{i} ERROR trainer: {line}\n" for i, line in enumerate(trace)))
    (diagnosis,) = diagnosed(capsys, path)

    assert diagnosis["causes"][0]["cause"] == "script_error"


def test_an_error_after_which_the_training_goes_on_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"step {i}: loss {3 - i / 50:.3f}\n" for i in range(60)]
    path = tmp_path / "train.log"
    error = "ImportError: no module named fused_adam, the slow one is used\n"

    path.write_text("".join([error, *rows]))
    assert not diagnosed(capsys, path)

    path.write_text("".join([*rows, error]))
    assert len(diagnosed(capsys, path)) == 1


def test_a_frame_of_lines_names_the_scripts_own_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "╭──────── Traceback (most recent call last) ────────╮\n│ /home/me/finetune.py:155 in <module>              │\n│ ❱ 155 │   main()                                  │\n"
        "╰───────────────────────────────────────────────────╯\nRuntimeError: expected scalar type Half but found Float\n"
    )

    (diagnosis,) = diagnosed(capsys, path)

    assert diagnosis["causes"][0]["cause"] == "script_error"
    assert any(one["values"].get("line") == 155 for one in diagnosis["causes"][0]["evidence"])


def test_each_group_counts_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 alone speaks of group 1, whose numbers are lower: nobody is behind in the group of all."""
    status = "[rank{rank}]:[E419 ProcessGroupNCCL.cpp:1785] [PG ID {group} PG GUID {group} Rank {rank}] Exception detected by watchdog at work: {number}, last enqueued NCCL work: {number}, last completed NCCL work: 5.\n"
    text = "".join(status.format(rank=rank, group=0, number=80 if rank != 2 else 79) for rank in range(4))
    text += status.format(rank=1, group=1, number=12)

    assert first(capsys, tmp_path, text)[:2] == ("rank_missing_from_collective", [2])


def test_one_ranks_log_says_nothing_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first(capsys, tmp_path, WATCHDOG.format(rank=1, number=9))[1] == []
    assert first(capsys, tmp_path, "".join(WATCHDOG.format(rank=rank, number=9) for rank in (1, 2, 3)))[1] == [0]


def test_norms_that_never_were_numbers_are_told_without_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f" iteration {i:8d}/ 250000 | learning rate: 2.999E-04 | loss scale: 1.0 | grad norm: nan | number of nan iterations:   0 |\n" for i in range(5, 20))  # fmt: skip

    assert first(capsys, tmp_path, text) == ("nonfinite_forward", [], 5)


def test_overflows_are_dated_by_the_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f" 14%|##   | {378 + i}/2724 [13:58:09<86:18:35, 132.44s/it][INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {64 >> i}, reducing to {32 >> i}\n" for i in range(6))  # fmt: skip
    text += "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"

    assert first(capsys, tmp_path, text) == ("every_step_skipped", [], 383)


def test_held_out_terms_that_rise_while_those_of_the_training_fall_are_overfitting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{i},{3 / (1 + i):.4f},{2 / (1 + i):.4f},{1.5 / (1 + i) + 0.03 * i:.4f},{1 / (1 + i) + 0.02 * i:.4f}\n" for i in range(1, 41)]  # fmt: skip
    text = "".join(["epoch,train/box_loss,train/cls_loss,val/box_loss,val/cls_loss\n", *rows])

    assert first(capsys, tmp_path, text)[0] == "overfitting"


def ppo(step: int, entropy: float, score: float) -> str:
    return str({"eps": 2, "objective/kl": 0.05 * step, "objective/scores": score, "policy/entropy_avg": entropy, "loss/policy_avg": -0.01, "loss/value_avg": 0.2, "val/ratio": 1.0, "episode": 64 * step, "epoch": 0.1})  # fmt: skip


def test_a_policys_numbers_are_known_by_the_names_that_tools_give_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = [0.05 * math.sin(5 * i) for i in range(120)]
    path = tmp_path / "ppo.log"
    path.write_text("\n".join(ppo(i, 2.6 + noise[i], 1.5 + noise[i]) for i in range(120)))
    assert not diagnosed(capsys, path)

    fallen = "\n".join(ppo(i, 2.6 + noise[i] if i < 60 else 0.005, 1.5 + noise[i]) for i in range(120))
    assert first(capsys, tmp_path, fallen)[0] == "entropy_collapse"

    lost = "\n".join(ppo(i, 2.6 + noise[i], (1.5 if i < 70 else -4.0) + noise[i]) for i in range(120))
    assert first(capsys, tmp_path, lost)[0] == "reward_collapse"


def test_a_preference_loss_is_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [str({"loss": 0.6931, "grad_norm": 0.0, "learning_rate": 5e-7, "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0}) for _ in range(60)]  # fmt: skip

    assert first(capsys, tmp_path, "\n".join(rows))[0] == "zero_gradients"


def test_a_score_beside_the_loss_makes_it_no_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i},{3 - 0.04 * i if i < 60 else 0.6 + 0.1 * (i - 60):.3f},{0.5 + 0.001 * i:.3f}\n" for i in range(120)]

    assert first(capsys, tmp_path, "".join(["step,loss,dice_score\n", *rows]))[2] in range(55, 66)


def test_what_the_interpreter_ignores_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    rows = "".join(f"step {i}: loss {3 - i / 50:.3f}\n" for i in range(60))
    trace = 'Traceback (most recent call last):\n  File "dataloader.py", line 9, in __del__\n    self._shutdown()\nAssertionError: can only test a child process\n'
    path.write_text(f"{rows}Exception ignored in: <function Iter.__del__ at 0x7f>\n{trace}")
    assert not diagnosed(capsys, path)

    path.write_text(rows + trace)
    assert len(diagnosed(capsys, path)) == 1


def test_a_kernel_that_failed_is_the_devices_before_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    loss.item()\nRuntimeError: CUDA error: an illegal memory access was encountered\n'

    assert first(capsys, tmp_path, text)[0] == "device_fault"


@pytest.mark.parametrize("first_epoch", [0, 1])
def test_epochs_are_counted_on_whatever_the_first_is_called(first_epoch: int, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"Epoch:[ {i // 50 + first_epoch}/25] [{i % 50:4d}/50] time: 9.3, loss: {3 - i / 100:.4f}\n" for i in range(200)))  # fmt: skip

    (run,) = offline.read([path]).runs

    assert list(range(200)) == [step for step, _ in run.points("loss")]


def test_settings_that_a_logger_prints_are_settings_and_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("INFO:__main__:  max_grad_norm: 1.0\nINFO:__main__:  warmup_steps: 100\nfound vocab_size = 65 (inside meta.pkl)\n" + "".join(f"epoch  {i}  loss {3 - i / 10:.4f}\n" for i in range(1, 9)))  # fmt: skip

    found = offline.read([path])

    assert ("epoch", ["loss"]) == (found.runs[0].counted_by, found.runs[0].names())
    assert {("max_grad_norm", "1.0"), ("warmup_steps", "100")} == {(name, value) for name, value, _ in found.settings()}
