"""What others scrape or receive: the last state, rendered on request, and incidents as alerts."""

from holter.exporters.alert_text import incident_info
from holter.exporters.prometheus import expose, families
from holter.exporters.snapshot import (
    CoordinatorSnapshot,
    IncidentInfo,
    JobFigures,
    ModuleFigures,
    RankSnapshot,
    StepHistogram,
)

__all__ = [
    "CoordinatorSnapshot",
    "IncidentInfo",
    "JobFigures",
    "ModuleFigures",
    "RankSnapshot",
    "StepHistogram",
    "expose",
    "families",
    "incident_info",
]
