"""Diagnosis: findings become incidents, incidents get ranked causes, and causes are put into words.

correlate   findings -> incidents: what began it, what it brought about
rank_causes a finding -> the causes that fit, the surest first
explain     an incident -> the public record
report      the record -> a line, a terminal, Markdown, HTML
"""

from holter.diagnosis.correlate import Incident, correlate
from holter.diagnosis.explain import explain, rank_causes, top_cause
from holter.diagnosis.report import headline, to_fragment, to_html, to_markdown, to_text

__all__ = [
    "Incident",
    "correlate",
    "explain",
    "headline",
    "rank_causes",
    "to_fragment",
    "to_html",
    "to_markdown",
    "to_text",
    "top_cause",
]
