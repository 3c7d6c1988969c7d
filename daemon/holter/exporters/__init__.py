"""What others scrape: the last state, rendered on request."""

from holter.exporters.prometheus import expose, families
from holter.exporters.snapshot import CoordinatorSnapshot, RankSnapshot, StepHistogram

__all__ = ["CoordinatorSnapshot", "RankSnapshot", "StepHistogram", "expose", "families"]
