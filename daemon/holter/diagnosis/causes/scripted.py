"""What only the script knows: reinforcement learning and generative models."""

from holter.diagnosis.causes.entry import CauseEntry

CAUSES: tuple[CauseEntry, ...] = ()
