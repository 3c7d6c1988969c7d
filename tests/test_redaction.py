"""Secrets are not written down, and what is none stays readable."""

import time

import pytest

from holter.redaction import cleaned, without_secrets


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
        ["--openai_token", "abc"],
        ["--neptune-api-token", "abc"],
        ["--pw=abc"],
        ["--auth", "abc"],
        ["--cookie=session=abc"],
        ["--header", "Authorization: Bearer abcdefgh"],
        ["--config", '{"lr": 0.1, "token": "abcd"}'],
        ["--url=https://x/y?access_token=abcd&page=2"],
        ["--sas", "https://x/c?sp=r&sig=abcd"],
        ["--env", "HF_TOKEN:abcd"],
        ["-c", "import os; os.environ['HF_TOKEN'] = 'abcd'"],
        ["--webhook", "https://hooks.example.com/services/T0/B0/abcdefgh"],
        ["--replicate", "r8_" + "abc" * 8],
        ["--key", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END"],
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
        ["--image_token_id=5", "--eos_token", "</s>", "--new_tokens=3", "--n_tokens", "1e9"],
        ["--author", "me", "--signal", "9", "--sigma=0.5", "--rope=theta:10000"],
        ["--args={'lr': 0.1, 'max_tokens': 4096}", "--port", "http://h:8080/x"],
    ],
)
def test_what_is_no_secret_stays(command: list[str]) -> None:
    assert command == without_secrets(command)


def test_a_long_argument_is_cut_and_takes_no_time() -> None:
    """It is looked at while a rank starts."""
    began_s = time.monotonic()
    for text in ("token" * 20_000, "a" * 100_000, "a." * 50_000, "token=" * 20_000, "-----BEGIN " * 10_000):
        assert len(without_secrets([text])[0]) < 10_000
    assert time.monotonic() - began_s < 20  # it was minutes


def test_an_exceptions_words_are_cleaned_of_every_secret_in_them() -> None:
    text = "RuntimeError: no login at https://joe:hunter2secret@hub.example with hf_abcdefghijklmnopqrstuv12, password=s3cr3tpass (token index 7 of 512)"
    assert (
        "RuntimeError: no login at https://joe:***@hub.example with ***, password=*** (token index 7 of 512)"
        == cleaned(text)
    )
    assert ["ftp://joe:***@h/?token=***"] == without_secrets(["ftp://joe:hunter2secret@h/?token=hunter2secret"])


def test_parameters_that_are_called_after_tokens_keep_their_errors() -> None:
    for text in (
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32000, 4096])",
        "size mismatch for class_token: copying a param with shape torch.Size([1, 1, 768])",
        "ValueError: token_embedding.bias: torch.float16 is not torch.float32",
    ):
        assert text == cleaned(text)
    assert "class_token: ***" == cleaned("class_token: copying-a-param-is-no-password")
