"""A command line without its secrets: it is written to run.json and the journal, and shown on the page.

An argument is left out if its name says that it is a secret (`--hf_token=…`, `--api-key …`, `WANDB_API_KEY=…`), if it looks like one (a
prefix that services give their keys), or if it is the password in an address. What is left out reads `***`.
"""

import re
from collections.abc import Sequence

HIDDEN = "***"

_NAMES = re.compile(
    r"(token|secret|passw(or)?d|passphrase|credential|authorization|bearer|signature"
    r"|(api|access|private|secret|account|auth|encryption)[-_.]?key)s?(?![a-z])",
    re.IGNORECASE,
)
_COUNTS = re.compile(
    r"(max|min|num|n|new|per|total)[-_.]?\w*tokens?|tokens?[-_.]?(per|id|ids|length|len|budget|count)|tokeni[sz]",
    re.IGNORECASE,
)
"""`--max_new_tokens 512` is no secret."""
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abpr]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|nvapi-[\w-]{16,})"
)
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_LONG_KEY = re.compile(r"(?<![\w/.-])[0-9a-f]{40}(?![\w/.-])")
"""What wandb calls an API key; a commit's hash looks the same and is no loss."""


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The same arguments, secrets replaced."""
    shown: list[str] = []
    is_value_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value_secret and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and _is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_cleaned(argument))
        is_value_secret = argument.startswith("-") and not equals and _is_secret(argument)
    return shown


def _is_secret(name: str) -> bool:
    # `--hf_token_file` leads to a secret and is none.
    is_path = name.lower().rstrip("s").endswith(("file", "path", "dir"))
    return bool(_NAMES.search(name)) and not _COUNTS.search(name) and not is_path


def _cleaned(text: str) -> str:
    text = _PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _LONG_KEY.sub(HIDDEN, _SHAPES.sub(HIDDEN, text))
