"""Remove secrets from command lines and exceptions, which go to run.json, the journal, the page and chats.

An argument is hidden if its name says that it is a secret (`--hf_token=…`, `--api-key …`, `WANDB_API_KEY=…`), if it
looks like one (a prefix that services give their keys), or if it is the password in an address. What is hidden reads
`***`.
"""

import re
from collections.abc import Sequence

HIDDEN = "***"

_NAMES = re.compile(
    r"((?<![a-z])(pw|pwd|auth|cookie|sas|sig)(?![a-z])|token|secret|passw(or)?d|passphrase|credential|authorization|bearer|signature"
    r"|(api|access|private|secret|account|auth|encryption)[-_.]?key)s?(?![a-z])",
    re.IGNORECASE,
)
_COUNTS = re.compile(
    r"(?<![a-z])(max|min|num|n|new|per|total)[-_.](\w*[-_.])?tokens?|(?<![a-z])ntokens?|tokens?[-_.]?(per|id|ids|length|len|budget|count)|tokeni[sz]"
    r"|(special|pad|eos|bos|unk|mask|sep|cls|image|stop)[-_.]?tokens?(?![-_.]?(key|secret))",
    re.IGNORECASE,
)
"""Names that mention tokens but hold no secret: `--max_new_tokens 512`, `--pad_token "<pad>"`."""
_OTHERS = re.compile(r"((file|path|dir)s?|\.(weight|bias))$", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abpr]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|nvapi-[\w-]{16,}"
    r"|r8_[A-Za-z0-9]{20,}|gsk_[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}|dapi[0-9a-f]{32}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*"
    r"|(?<=/services/)\w+/\w+/\w{8,}|(?<=/webhooks/)\d+/[\w-]{16,}|(?<=bot)\d{8,}:[\w-]{30,}",
    re.DOTALL,
)
_VALUE = re.compile(r"""[\w.-]{0,24}["']?\]?\s{0,4}[:=]\s{0,4}(?!copying a param )["']?([^\s"'&,;}\])]{4,})""")
"""Value after a secret's name within an argument, as in JSON, a header, an address' query or a line of code; but not
torch's message about a parameter that does not fit."""
_NAME_BEFORE = re.compile(r"[\w.-]{0,40}$")
MAX_ARGUMENT = 8_192
"""Number of characters of an argument that are shown: nobody reads more, and looking for secrets takes time."""
_SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_LONG_KEY = re.compile(r"(?<![\w/.-])[0-9a-f]{40}(?![\w/.-])")
"""Form of wandb's API keys; a commit's hash looks the same, but hiding it is no loss."""


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with secrets replaced."""
    shown: list[str] = []
    is_value_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value_secret and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and _is_secret(name):
            shown.append(f"{cleaned(name)}={HIDDEN}")
        else:
            shown.append(cleaned(argument))
        is_value_secret = argument.startswith("-") and not equals and _is_secret(argument)
    return shown


def _is_secret(name: str) -> bool:
    # `--hf_token_file` is the path of a secret and not one itself, `embed_tokens.weight` is a parameter.
    return bool(_NAMES.search(name)) and not _COUNTS.search(name) and not _OTHERS.search(name)


def cleaned(text: str) -> str:
    """Return a text, such as an exception's, without the secrets in it."""
    text = text if len(text) <= MAX_ARGUMENT else f"{text[:MAX_ARGUMENT]}..."
    text = _PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", _SHAPES.sub(HIDDEN, text))
    return _LONG_KEY.sub(HIDDEN, _without_values(text))


def _without_values(text: str) -> str:
    shown, done = [], 0
    for found in _NAMES.finditer(text):
        value = _VALUE.match(text, found.end())
        if value is None or found.start() < done:
            continue
        before = _NAME_BEFORE.search(text, max(0, found.start() - 40), found.start())
        name = (before.group(0) if before else "") + text[found.start() : value.start(1)].rstrip(" \"'[]:=")
        if _is_secret(name):
            shown += [text[done : value.start(1)], HIDDEN]
            done = value.end(1)
    return "".join([*shown, text[done:]])
