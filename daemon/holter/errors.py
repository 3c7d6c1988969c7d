"""What callers may catch.

    HolterError
    ├── ConfigError      a setting has a value that cannot be used; the message names it as the user wrote it
    ├── UsageError       a command was called wrongly; the shell prints the sentence and exits 2
    └── PageError        a shared page cannot be made, or is not one of ours
        └── TornPageError  it is ours, but what it holds does not add up

None of these crosses into a training loop: probes log once, count and carry on.
"""


class HolterError(Exception):
    """Base of everything that holter raises on purpose."""


class ConfigError(HolterError, ValueError):
    """A setting has a value that cannot be used."""


class UsageError(HolterError):
    """A command was called wrongly."""


class PageError(HolterError):
    """A shared page cannot be made, or is not one of ours."""


class TornPageError(PageError):
    """The page is ours, but what it holds does not add up."""
