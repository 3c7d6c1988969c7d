"""The exceptions that callers may catch.

    HolterError
    ├── ConfigError      a setting has a value that cannot be used; the message names it as the user wrote it
    ├── UsageError       a command was called wrongly; the shell prints the sentence and exits 2
    ├── RecorderError    a rank's Flight Recorder could not be copied
    ├── SaveError        a halted run's state, or part of it, could not be saved; the message says what
    │   ├── PartlySavedError  all else was written and can be verified
    │   └── RewindError  it is not known how the step to be saved began
    ├── FlightError      a dump of PyTorch's Flight Recorder cannot be read
    ├── VaultError       a checkpoint cannot be started, sealed or read; what was named before is intact
    └── PageError        a shared page cannot be made, or is not one of ours
        └── TornPageError  it is ours, but what it holds does not add up

None of these reaches a training loop: hooks log once, count and carry on.
"""


class HolterError(Exception):
    """Base of everything that holter raises on purpose."""


class ConfigError(HolterError, ValueError):
    """A setting has a value that cannot be used."""


class UsageError(HolterError):
    """A command was called wrongly."""


class RecorderError(HolterError):
    """A rank's Flight Recorder could not be copied."""


class SaveError(HolterError):
    """A halted run's state, or part of it, could not be saved."""


class PartlySavedError(SaveError):
    """Everything was saved except what the message names."""


class RewindError(SaveError):
    """Nobody knows how the step to be saved began."""


class FlightError(HolterError, ValueError):
    """A dump of PyTorch's Flight Recorder cannot be read."""


class VaultError(HolterError):
    """A checkpoint cannot be started, sealed or read."""


class PageError(HolterError):
    """A shared page cannot be made, or is not one of ours."""


class TornPageError(PageError):
    """The page is ours, but what it holds does not add up."""
