"""Secrets are not written down, and what is none stays readable."""

import pytest

from holter.redaction import without_secrets


@pytest.mark.parametrize(
    "secret",
    [
        ["--hf_token=abc"],
        ["--hf-token", "abc"],
        ["--api_key", "abc"],
        ["--wandb.api_key=abc"],
        ["WANDB_API_KEY=abc"],
        ["trainer.secret_key=abc"],
        ["--password", "abc"],
        ["--db", "postgresql://me:abc@host/runs"],
        ["--auth", "hf_abcdefghijklmnopqrstuvwxyzabc"],
        ["--header", "Bearer eyJhbGciOiJI.eyJzdWIiOiIxabc.abc"],
        ["--key", "0123456789abcdef0123456789abc" + "0" * 11],
    ],
)
def test_a_secret_is_left_out(secret: list[str]) -> None:
    shown = without_secrets(["train.py", *secret, "--lr", "1e-3"])
    assert "abc" not in " ".join(shown)
    assert ["train.py", "--lr", "1e-3"] == [shown[0], *shown[-2:]]


@pytest.mark.parametrize(
    "command",
    [
        ["--max_new_tokens", "512"],
        ["--num-tokens=4096"],
        ["--tokenizer", "gpt2"],
        ["--tokens_per_batch", "9"],
        ["--pad_token_id=0"],
        ["--hf_token_file", "/run/secrets/hf"],
        ["--keyboard", "x", "--monkey", "y"],
        ["--data", "s3://bucket/path:8/part"],
        ["--checkpoint", "runs/0123456789abcdef0123456789abcdef01234567/state"],
        ["--secret", "--lr", "3"],
    ],
)
def test_what_is_no_secret_stays(command: list[str]) -> None:
    assert command == without_secrets(command)
