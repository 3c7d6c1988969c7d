"""Five things that people bring, each from its artifacts alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from holter.cli import main

TRAINER = """import torch
from torch.optim.lr_scheduler import LambdaLR


def build(model, config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 7 else 30.0)
    return optimizer, scheduler


def train_epoch(model, batches, optimizer):
    for inputs, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
"""
MODEL = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())
"""
LANGUAGE_MODEL = """import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, 8)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)


class TinyModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([Block(config.d_model) for _ in range(config.num_layers)])
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
"""
HALTING = """import torch
from torch import nn


class HaltingHead(nn.Module):
    def forward(self, states):
        confidence = states.mean(dim=-1)
        spread = confidence.var(dim=0)
        return torch.sigmoid(confidence.mean() - spread.mean())
"""


def diagnosed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["diagnose", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def told(cause: dict[str, Any]) -> str:
    return "\n".join(one["summary"] for one in cause["evidence"])


def test_ten_epochs_whose_loss_rises_from_the_seventh_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [2.31, 1.62, 1.21, 0.98, 0.84, 0.77, 1.46, 2.2, 2.9, 3.8]
    rows = [
        f"2026-05-18 16:0{e % 10}:46 INFO Epoch {e + 1}/10: train_loss={v:.3f} lr={3e-4 if e < 6 else 9e-3:.2e} grad_norm={1.2 if e < 6 else 38.5:.2f}"
        for e, v in enumerate(losses)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(
        "lr: 3.0e-4\nepochs: 10\nbatch_size: 64\nscheduler: lambda\nmax_grad_norm: 100.0\n"
    )
    _, (found,) = diagnosed(capsys, str(tmp_path))
    first = found["causes"][0]
    assert ("learning_rate_too_high", 7) == (first["cause"], found["first_step"])
    text = told(first)
    assert "learning rate 0.0003 before step 7, 0.009 from it on, 30 times as much" in text
    assert "gradient norm: usually 1.2 before, 38.5 at step 7" in text
    assert "lr = 3.0e-4" in text
    schedule = next(one for one in first["evidence"] if "LambdaLR" in one["summary"])
    assert (str(tmp_path / "trainer.py"), 7, "inference") == tuple(
        schedule["values"][n] for n in ("file", "line", "basis")
    )


def test_a_model_that_writes_one_token_with_79_percent_in_embeddings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ("What is the capital of France?", "Write a haiku.", "2 + 2 =", "Tell me a joke.", "Who are you?")
    (tmp_path / "samples.jsonl").write_text(
        "\n".join(json.dumps({"prompt": p, "completion": "the " * 40}) for p in prompts)
    )
    (tmp_path / "loss.csv").write_text(
        "step,loss\n" + "\n".join(f"{i},{7.1 + 2 * math.exp(-i / 9):.4f}" for i in range(60))
    )
    (tmp_path / "model.py").write_text(LANGUAGE_MODEL)
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 50257, "d_model": 256, "num_layers": 4, "lr": 3e-4})
    )
    page = tmp_path / "report.html"
    _, found = diagnosed(capsys, str(tmp_path), "--html", str(page))
    first = found[0]["causes"][0]
    assert "lopsided_architecture" == first["cause"]
    assert "Embedding 80%" in told(first)
    assert "a balance to try" in told(first)
    assert any("repeat one word" in json.dumps(one) for one in (first, *found[1:]))
    assert "shares of the parameters" in page.read_text()
    assert "<rect" in page.read_text()


def test_the_variance_warning_with_the_code_of_the_halting_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "halting.py").write_text(HALTING)
    (tmp_path / "stderr.txt").write_text(
        "/home/me/project/halting.py:8: UserWarning: var(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor (input numel divided by output numel). (Triggered internally at ReduceOps.cpp:1861.)\n"
        "  spread = confidence.var(dim=0)\n"
        'Traceback (most recent call last):\n  File "/home/me/project/train.py", line 31, in <module>\n    main()\n  File "/home/me/project/train.py", line 22, in main\n    steps = int(head(states) * 8)\n'
        "ValueError: cannot convert float NaN to integer\n"
    )
    _, found = diagnosed(capsys, str(tmp_path))
    first = found[0]["causes"][0]
    assert "variance_without_samples" == first["cause"]
    assert "halting.py:8" in told(first)
    code = [one for one in first["evidence"] if one["kind"] == "code"]
    assert [(str(tmp_path / "halting.py"), 8)] == [(one["values"]["file"], one["values"]["line"]) for one in code]
    assert "correction=0" in first["fix"]["do"]


@pytest.mark.parametrize("is_exploding", [True, False])
def test_gradients_by_layer(is_exploding: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for step in range(40):
        growth = (1.8 if is_exploding else 1.0) ** max(0, step - 20)
        norms = {
            f"grad_norm/layers.{i}.weight": (0.1 * growth * (3 ** (8 - i) if is_exploding and step > 20 else 1))
            if is_exploding
            else 10.0 ** (-1.4 * (8 - i))
            for i in range(9)
        }
        rows.append({"step": step, "loss": 2.3 if not is_exploding else 2.3 - 0.02 * step + 0.02 * growth, **norms})
    (tmp_path / "grads.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = tmp_path / "report.html"
    _, found = diagnosed(capsys, str(tmp_path), "--html", str(page))
    first = found[0]["causes"][0]
    assert ("exploding_gradients" if is_exploding else "vanishing_gradients") == first["cause"]
    assert "gradient norm by layer" in page.read_text()
    assert 'class="h6"' in page.read_text()
    if not is_exploding:
        assert "layers.0.weight" in first["modules"]


def test_half_of_the_artifacts_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "package.json").write_text(
        json.dumps({
            "task": "why does the loss go up?",
            "artifacts": {"training_logs": "tail.log", "model_code": "model.py", "config": None},
            "symptoms": ["loss goes up after a while"],
            "constraints": ["no restart before Friday"],
        })
    )  # fmt: skip
    (tmp_path / "tail.log").write_text(
        "\n".join(f"step {i} loss {1.0 + (0.04 * (i - 460) if i > 460 else 0):.3f}" for i in range(400, 500))
    )
    assert 0 == main(["diagnose", str(tmp_path / "package.json"), "--package"])
    answer = json.loads(capsys.readouterr().out)
    (cause,) = answer["root_causes"]
    assert "loss_divergence" == cause["issue"]
    assert 0.7 > cause["confidence"] or cause["missing"]
    assert "not_enough_evidence" == answer["status"]
    questions = " ".join(answer["questions"])
    assert "learning rate" in questions
    assert "clip_grad_norm_" in questions
    assert "model.py" in questions
    assert ["no restart before Friday"] == answer["constraints"]


def test_symptoms_without_anything_to_judge_are_answered_by_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("lr: 0.1\nepochs: 10\nbatch_size: 64\n")
    (tmp_path / "package.json").write_text(
        json.dumps({"artifacts": {"config": "config.yaml"}, "symptoms": "the loss is NaN"})
    )
    assert 0 == main(["diagnose", str(tmp_path / "package.json"), "--package"])
    answer = json.loads(capsys.readouterr().out)
    assert ("not_enough_evidence", []) == (answer["status"], answer["root_causes"])
    assert any("log" in question for question in answer["questions"])
