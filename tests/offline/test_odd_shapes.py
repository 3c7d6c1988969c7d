"""What public logs hold that no small job writes: joined lines, messages that end in the middle, losses that stop, norms that never were numbers; made anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from holter.cli import main
from holter.offline import lines

WATCHDOG = "[rank{rank}]:[E1206 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n"
OVERFLOW = "[INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {next}\n"


def diagnosed(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> list[dict[str, Any]]:
    path = folder / "run.log"
    path.write_text(text)
    main(["diagnose", str(path), "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def causes(found: list[dict[str, Any]]) -> list[str]:
    return [one["causes"][0]["cause"] for one in found]


def trainer(*rows: tuple[float, str]) -> str:
    return "".join(f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05, 'epoch': {0.1 * i:.1f}}}\n" for i, (loss, norm) in enumerate(rows, 1))  # fmt: skip


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (
            "epoch 0, total_step 250, total loss is 48.5 , reg_loss is 0.25, time 243.119 samples/sec",
            "total_loss",
            48.5,
        ),
        ("Epoch[0] Batch [50] Speed: 181.20 samples/sec Train-Accuracy=0.125000", "train-accuracy", 0.125),
    ],
)
def test_numbers_that_are_said_or_follow_a_unit(line: str, name: str, value: float) -> None:
    row = lines.parse(line, lines.LineContext())

    assert row is not None
    assert value == row.values[name]


def test_a_log_that_ends_while_ranks_speak_accuses_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = "".join(WATCHDOG.format(rank=rank) for rank in (0, 2, 3))

    (cut,) = diagnosed(capsys, tmp_path, whole + WATCHDOG.format(rank=4)[:150])
    assert [] == cut["causes"][0]["ranks"]
    assert cut["causes"][0]["confidence"] < 0.7
    (named,) = diagnosed(
        capsys, tmp_path, f"{whole}terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    assert [1] == named["causes"][0]["ranks"]
    assert named["causes"][0]["confidence"] >= 0.7
    # Nothing follows the watchdogs: rank 1 may only not have spoken yet.
    (unsure,) = diagnosed(capsys, tmp_path, whole)
    assert [1] == unsure["causes"][0]["ranks"]
    assert unsure["causes"][0]["confidence"] < 0.7
    # An operation that is cut off in its name is no other operation.
    (cut,) = diagnosed(capsys, tmp_path, whole + WATCHDOG.format(rank=1).partition("EDUCE")[0])
    assert "rank_missing_from_collective" == cut["causes"][0]["cause"]


def test_a_count_of_the_run_is_its_step_beside_samples_of_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(
        f"[Epoch 9 {4000 + 64 * i}/90000][Iteration {5100 + i}][Wall Clock 61.2s] Loss is {loss}. Current learning rate is 0.02.\n"
        for i, loss in enumerate((1.2, 1.3, "Infinity", 1.25, 1.2))
    )
    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("info", 5102) == (found["severity"], found["first_step"])


def test_an_overflow_before_the_first_bar_has_the_step_of_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(
        f"{OVERFLOW.format(scale=1, next=1)}  0%|    | {i}/900 [00:40<2:40:10,  2.50it/s]\r" for i in range(31, 36)
    )
    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("every_step_skipped", 31) == (found["causes"][0]["cause"], found["first_step"])


def test_a_message_says_its_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = diagnosed(
        capsys, tmp_path, "all is well\n[   21.09] NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:894)\n"
    )
    assert "device_fault" == found["causes"][0]["cause"]
    assert f"({tmp_path / 'run.log'}, line 2)" in found["causes"][0]["evidence"][0]["summary"]


def test_what_the_launcher_says_is_found_in_a_joined_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'Loading: 0%| | 0/2 [00:00<?, ?it/s]WARNING:api:Sending process 55 closing signal SIGTERM   ERROR:api:failed (exitcode: -9) local_rank: 4 (pid: 59) of binary: /opt/python   Traceback (most recent call last):   File "torchrun", line 33, in <module>\n'

    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("rank_dead", [4]) == (found["causes"][0]["cause"], found["causes"][0]["ranks"])


def test_a_scale_that_cannot_fall_any_more_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert causes(diagnosed(capsys, tmp_path, OVERFLOW.format(scale=1, next=1) * 3)) == ["every_step_skipped"]
    falling = "".join(OVERFLOW.format(scale=64 >> i, next=32 >> i) for i in range(6))
    assert causes(diagnosed(capsys, tmp_path, falling)) == ["every_step_skipped"]
    fairseq = "".join(f"| WARNING: overflow detected, setting loss scale to: {0.25 / 2**i}\n" for i in range(6))
    assert causes(diagnosed(capsys, tmp_path, fairseq)) == ["every_step_skipped"]


def test_a_search_for_a_scale_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = "".join(OVERFLOW.format(scale=2 ** (32 - i), next=2 ** (31 - i)) for i in range(8))
    assert [] == diagnosed(capsys, tmp_path, search)
    # A scale that was far too low once, in a run that has gone on since.
    rows = "".join(f"step {i}: loss {3.0 - 0.01 * i:.4f}\n" for i in range(1, 60))
    low = "".join(OVERFLOW.format(scale=64 >> i, next=32 >> i) for i in range(5))
    assert [] == diagnosed(capsys, tmp_path, low + rows)


def test_norms_that_were_never_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few are a question, many beside a loss that stands still are an answer, many beside one that falls are a logger's habit."""
    (few,) = diagnosed(capsys, tmp_path, trainer(*[(4.6, "nan")] * 4))
    assert ("nonfinite_backward", "info") == (few["causes"][0]["cause"], few["severity"])
    assert few["causes"][0]["missing"]
    (many,) = diagnosed(capsys, tmp_path, trainer(*[(4.6 + 0.01 * (i % 3), "nan") for i in range(30)]))
    assert ("nonfinite_backward", "warning") == (many["causes"][0]["cause"], many["severity"])
    assert [] == diagnosed(capsys, tmp_path, trainer(*[(4.6 - 0.05 * i, "nan") for i in range(30)]))


def test_a_log_that_ends_with_its_first_nan_norm_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = [(0.06, "0.6"), (0.19, "4.2"), (0.11, "1.3"), (0.10, "5.6"), (0.15, "5.3"), (0.21, "nan")]
    (found,) = diagnosed(capsys, tmp_path, trainer(*noisy))
    assert ("nonfinite_backward", "info") == (found["causes"][0]["cause"], found["severity"])
    # One skipped step before it, and the run went on: so will it here.
    assert [] == diagnosed(capsys, tmp_path, trainer(*[(2.0, "1.1"), (1.9, "inf"), (1.9, "1.0"), (1.8, "1.2"), (1.8, "nan")]))  # fmt: skip


def test_few_noisy_points_are_no_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [] == diagnosed(capsys, tmp_path, trainer((0.06, "0.6"), (0.19, "4.2"), (0.11, "1.3"), (0.10, "5.6"), (0.15, "5.3"), (0.2, "5.1")))  # fmt: skip
    epochs = [2.0, 1.5, 1.2, 1.0, 0.9, 0.85, 1.4, 2.6, 4.9, 9.5]
    text = "".join(f"Epoch {i}/10 loss: {loss}\n" for i, loss in enumerate(epochs, 1))
    assert [7] == [one["first_step"] for one in diagnosed(capsys, tmp_path, text)]


def test_a_loss_that_stops_at_once_is_not_one_that_has_converged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos = [0.6773, 2.4587, 5.3353, 1.0234, 9.6901, 1.9899, 3.5713, 0.6869]
    stopped = "".join(f"step: {i} loss: {loss} accuracy:0.6{i % 7}\n" for i, loss in enumerate([*chaos, *[0.6931] * 20]))  # fmt: skip
    (found,) = diagnosed(capsys, tmp_path, stopped)
    assert ("loss_plateau", 8) == (found["causes"][0]["cause"], found["first_step"])
    converged = [0.25 + 2.0 * 0.6**i for i in range(60)]
    assert [] == diagnosed(capsys, tmp_path, "".join(f"step: {i} loss: {loss:.4f}\n" for i, loss in enumerate(converged)))  # fmt: skip


def test_a_loss_at_the_logarithm_of_the_smallest_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"I1009 solver.cpp:229] Iteration {20 * i}, loss = {loss}\n" for i, loss in enumerate([21.4, 87.3365, 87.3365, 87.3365]))  # fmt: skip

    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("nonfinite_forward", 20) == (found["causes"][0]["cause"], found["first_step"])


def test_a_policys_kl_that_is_no_number_is_told_beside_a_loss_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = "{{'loss': 0.0, 'grad_norm': {nan}, 'reward': 1.{i}, 'reward_std': 0.7, 'kl': {kl}, 'epoch': 0.0{i}}}\n"

    (found,) = diagnosed(capsys, tmp_path, "".join(row.format(i=i, nan="nan", kl="nan") for i in range(1, 5)))
    assert "nonfinite_forward" == found["causes"][0]["cause"]
    assert [] == diagnosed(capsys, tmp_path, "".join(row.format(i=i, nan="0.1", kl="0.001") for i in range(1, 5)))


def test_a_framework_that_cannot_allocate_is_out_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "E tensorflow/stream_executor/cuda/cuda_driver.cc:903] failed to allocate 6.69M (7012352 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY\n"

    assert causes(diagnosed(capsys, tmp_path, line)) == ["out_of_memory"]
    # It tries again with less, and the training goes on.
    rows = "".join(f"step {i}: loss {3.0 - 0.01 * i:.4f}\n" for i in range(1, 60))
    assert [] == diagnosed(capsys, tmp_path, line + rows)


@pytest.mark.parametrize(
    "text",
    [
        "[rank2]:[E528 08:52:46 ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed with [pair.cc:144] no error\n",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.7, 29500).\n",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/4 clients joined.\n",
    ],
)
def test_hosts_that_do_not_reach_each_other(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = diagnosed(capsys, tmp_path, text)

    assert "host_unreachable" == found["causes"][0]["cause"]
    assert found["causes"][0]["confidence"] < 0.7
    assert "nc -vz" in " ".join(found["causes"][0]["missing"])


def test_a_launcher_cut_off_in_the_middle_says_nothing_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    text = (
        "[E socket.cpp:793] [c10d] The client socket has timed out after 60s while trying to connect to (head, 2222).\n"
    )
    text += 'Traceback (most recent call last):\n  File "/opt/lib/python3.11/site-packages/torch/distributed/run.py", line 15'

    assert ["host_unreachable"] == causes(diagnosed(capsys, tmp_path, text))


def test_a_nan_that_came_back_is_told_and_wakes_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"step {i}: loss {'nan' if i == 7 else 2.0 - 0.01 * i}" for i in range(1, 30)]
    (found,) = diagnosed(capsys, tmp_path, "\n".join(rows))
    assert ("info", 7) == (found["severity"], found["first_step"])
    assert {"nonfinite_input", "nonfinite_loss_function"} == {one["cause"] for one in found["causes"]}
    # The first log may be from before the first batch, and a column that is mostly NaN means nothing by it.
    assert [] == diagnosed(capsys, tmp_path, "\n".join(f"step {i}: loss {'nan' if i == 1 else 2.0}" for i in range(1, 9)))  # fmt: skip
    assert [] == diagnosed(capsys, tmp_path, "\n".join(f"step {i}: loss {'nan' if i % 3 else 2.0 - 0.01 * i}" for i in range(30)) + "\nstep 30: loss 1.5")  # fmt: skip


def test_a_norm_that_was_lost_first_dates_a_hidden_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = diagnosed(capsys, tmp_path, trainer((0.31, "0.8"), (0.3, "nan"), (0.0, "nan"), (0.0, "nan")))

    assert ("hidden_nonfinite_loss", 2) == (found["causes"][0]["cause"], found["first_step"])


def test_a_scale_of_next_to_nothing_is_a_warning_at_its_second_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    text = "| NOTE: overflow detected, setting loss scale to: 0.00048828125\n| NOTE: overflow detected, setting loss scale to: 0.000244140625\n"
    (found,) = diagnosed(capsys, tmp_path, text)

    assert ("warning", "exploding_gradients") == (found["severity"], found["causes"][0]["cause"])


def rollout(spread: float, norm: float) -> str:
    return f"{{'loss': 0.0, 'grad_norm': {norm}, 'reward': 3.0, 'reward_std': {spread}, 'frac_reward_zero_std': {float(not spread)}, 'kl': 0.0, 'epoch': 0.3}}\n"


def test_rollouts_of_which_a_log_has_one_or_a_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = diagnosed(capsys, tmp_path, rollout(0.0, 0.0))
    assert ("info", "no_learning_signal") == (one["severity"], one["causes"][0]["cause"])
    (few,) = diagnosed(capsys, tmp_path, rollout(0.0, 0.0) * 5)
    assert "warning" == few["severity"]
    assert [] == diagnosed(capsys, tmp_path, rollout(0.0, 0.0) + rollout(0.4, 0.2))


def test_columns_under_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "     Epoch   gpu_mem       box       obj       cls     total    labels  img_size\n"
    row = "    {epoch}/299     65.1G    {box}   0.015         0    {total}      1869       320: 100%|######| 729/729 [51:52<00:00,  4.27s/it]\n"
    lost = "".join(header + row.format(epoch=i, box="nan", total="nan") for i in range(41, 45))
    assert causes(diagnosed(capsys, tmp_path, lost)) == ["nonfinite_forward"]
    fine = "".join(header + row.format(epoch=i, box=0.05 - 0.001 * i, total=0.07 - 0.001 * i) for i in range(12))
    assert [] == diagnosed(capsys, tmp_path, fine)


def test_quotes_of_a_forum_and_tables_without_their_last_line() -> None:
    row = lines.parse(lines.plain("{\u2018loss\u2019: 1.25, \u2018grad_norm\u2019: 2.5}"), lines.LineContext())

    assert row is not None
    assert {"loss": 1.25, "grad_norm": 2.5} == row.values


def test_what_a_script_raises_over_its_loss_is_no_mistake_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    text = 'Traceback (most recent call last):\n  File "/work/loop.py", line 9, in check\n    raise FloatingPointError(\nFloatingPointError: Loss became infinite or NaN at iteration=2137!\n'
    text += "loss_dict = {'loss_cls': tensor(nan, device='cuda:0'), 'loss_mask': tensor(1265158.6, device='cuda:0')}\n"
    found = diagnosed(capsys, tmp_path, text)

    assert ["nonfinite_forward"] == causes(found)
    assert 2137 == found[0]["first_step"]


def test_a_term_that_is_cut_off_at_the_smallest_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(
        f"Iteration {100 * i}, loss = {20 * value}\n    Train net output #1: cross_entropy_loss = {value} (* 20 = {20 * value} loss)\n"
        for i, value in enumerate([9.2, 87.3365, 87.3365, 87.3365])
    )
    (found,) = diagnosed(capsys, tmp_path, rows)
    assert ("nonfinite_forward", 100) == (found["causes"][0]["cause"], found["first_step"])


def test_a_line_at_the_end_of_each_epoch_is_counted_in_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    losses = [1.2, 1.04, 0.99, 0.94, 0.89, 0.85, 0.81, 0.79, 0.76, 0.74, 13.4, 26.6, 26.65, 26.65, 26.65]
    bars = "".join(f"Epoch {i}\n61878/61878 [=====] - 5s - loss: {loss}\n" for i, loss in enumerate(losses))
    (found,) = diagnosed(capsys, tmp_path, bars)
    assert ("loss_divergence", 10) == (found["causes"][0]["cause"], found["first_step"])


def test_few_points_that_fall_and_then_rise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def log(*losses: float) -> str:
        return "".join(f"step={55 * i} loss={loss} gnorm=7.5\n" for i, loss in enumerate(losses))

    (found,) = diagnosed(capsys, tmp_path, log(15.5, 13.0, 3.8, 2.4, 1.4, 5.8, 7.1, 10.0))
    assert 275 == found["first_step"]
    # The same numbers that do not go up in one line are how far they scatter.
    assert [] == diagnosed(capsys, tmp_path, log(15.5, 13.0, 3.8, 2.4, 1.4, 5.8, 3.1, 4.0))


def test_a_turn_that_three_evaluations_show_is_told_and_alarms_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "epoch,accuracy,loss,val_accuracy,val_loss\n"
    (found,) = diagnosed(
        capsys, tmp_path, f"{head}0,0.81,0.44,0.84,0.35\n1,0.90,0.25,0.85,0.36\n2,0.95,0.14,0.84,0.47\n"
    )
    assert ("info", "overfitting") == (found["severity"], found["causes"][0]["cause"])
    assert "two more evaluations" in found["causes"][0]["evidence"][-1]["summary"] + str(found["causes"][0]["missing"])
    assert [] == diagnosed(
        capsys, tmp_path, f"{head}0,0.81,0.44,0.84,0.35\n1,0.90,0.25,0.85,0.41\n2,0.95,0.14,0.84,0.39\n"
    )


def test_two_epochs_that_are_nan_are_a_log_and_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"Epoch: {i}/2, train loss: nan, train accuracy: 0.11, valid loss: nan, valid accuracy: 0.1\n" for i in range(2))  # fmt: skip
    assert causes(diagnosed(capsys, tmp_path, text))[0].startswith("nonfinite")


def test_a_format_string_in_a_log_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "print0(f'step:{step}/{num} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms')\n"
    rows = "".join(f"step:{i * 125}/1480 val_loss:{loss} train_time:{i}ms step_avg:nanms\n" for i, loss in enumerate((7.7, 4.4, 4.0, 3.8, 3.7, 3.6)))  # fmt: skip
    assert [] == diagnosed(capsys, tmp_path, code + rows)


def test_a_loss_that_is_lost_now_and_then_in_a_short_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"Epoch [1][{50 * i}/5808] lr: 1.000e-02, loss_cls: 0.4, loss: {loss}\n" for i, loss in enumerate((1.6, 1.1, "nan", 1.06, "nan", 1.03), 1))  # fmt: skip
    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("info", 150) == (found["severity"], found["first_step"])


@pytest.mark.parametrize("rule", ["| {} |", "\u2502 {} \u2502"])
def test_a_table_with_bars_is_read_under_its_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    """As a notebook shows a Trainer's progress."""
    rows = [("Step", "Training Loss", "Validation Loss"), ("---", "---", "---"), (50, "No log", 2.4)]
    rows += [
        (50 * i, f"{2.2 - 0.15 * i:.3f}", f"{2.3 - 0.1 * i if i < 5 else 1.4 + 0.12 * i:.3f}") for i in range(2, 13)
    ]
    bar = f" {rule[0]} "
    text = "".join(rule.format(bar.join(map(str, row))) + "\n" for row in rows)
    (found,) = diagnosed(capsys, tmp_path, text)
    assert ("overfitting", 200) == (found["causes"][0]["cause"], found["first_step"])


def test_a_table_whose_rows_end_with_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "epoch     train_loss  valid_loss  accuracy  time    \n"
    text += "".join(f"{i:<10}{2.0 / (i + 1):<12.6f}{1.9 / (i + 1) if i < 6 else 0.2 * i:<12.6f}0.51      00:{i:02d}   \n" for i in range(14))  # fmt: skip
    (found,) = diagnosed(capsys, tmp_path, text)
    assert "overfitting" == found["causes"][0]["cause"]
    assert 4 <= found["first_step"] <= 6


MODEL = """import torch.nn as nn

class Block(nn.Module):
    def __init__(self, dim, wider=2):
        super().__init__()
        self.up = nn.Linear(dim, wider * dim)
        self.down = nn.Linear(wider * dim, dim)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8000, 100)
        self.blocks = nn.ModuleList([Block(100{more}) for _ in range(3)])
        self.head = nn.Linear(100, 8000)
"""


def test_shares_count_what_a_class_is_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = diagnosed(capsys, tmp_path, MODEL.replace("{more}", ""))
    assert "lopsided_architecture" == found["causes"][0]["cause"]
    total = found["causes"][0]["evidence"][0]["values"]["total"]
    assert 2 * 800_000 + 3 * 40_000 == total
    # Twenty times as wide, the blocks hold most.
    assert [] == diagnosed(capsys, tmp_path, MODEL.replace("{more}", ", wider=40"))
    # Of a part that nobody can count nothing is said.
    assert [] == diagnosed(capsys, tmp_path, MODEL.replace("{more}", "").replace("nn.Linear(dim, wider * dim)", "nn.Linear(dim, width_of(dim))"))  # fmt: skip


def test_a_report_writes_files_as_they_are_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("{more}", ""))
    main(["diagnose", str(tmp_path / "model.py")])
    assert "- table.weight (Embedding)" in capsys.readouterr().out


def test_constraints_of_a_package_are_handed_on_as_they_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").write_text("".join(f"step {i} loss {'nan' if i > 20 else 2.0}\n" for i in range(30)))
    told = {"artifacts": {"training_logs": ["run.log"]}, "constraints": {"may_rerun": False, "gpus": 2}}
    (tmp_path / "package.json").write_text(json.dumps(told))
    main(["diagnose", str(tmp_path / "package.json"), "--package"])
    assert told["constraints"] == json.loads(capsys.readouterr().out)["constraints"]


def test_a_folder_of_very_many_files_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holter.offline.reading.MAX_FILES", 60)
    (tmp_path / "a.log").write_text("".join(f"step {i} loss {'nan' if i > 20 else 2.0}\n" for i in range(40)))
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
        for number in range(50):
            (tmp_path / folder / f"{number}.txt").write_text("")
    assert 1 == main(["diagnose", str(tmp_path)])
    told = capsys.readouterr().err.splitlines()
    assert f"holter: {tmp_path} holds more than 60 files: the first 60 were read" in told
    assert "holter: and 39 more files that say nothing here" in told
    assert 22 == len(told)
