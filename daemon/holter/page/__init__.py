"""The shared page between a rank and its sidecar: the rank writes and never waits, the sidecar reads and trusts nothing.

    rank     PageWriter   beat, write         ──heartbeat, ring──▶   heartbeat, read             PageReader   sidecar
                          publish_rewind      ──latches──────────▶   rewinds
                          control, notice     ◀──latches─────────    set_control, post_notice

The page outlives the rank: what a killed process last wrote can still be read. `layout` describes its fields.
"""

from holter.page.layout import CONTROL_NOTHING, CONTROL_THIN, PageIdentity
from holter.page.reader import PageHeartbeat, PageReader
from holter.page.writer import PageWriter

__all__ = ["CONTROL_NOTHING", "CONTROL_THIN", "PageHeartbeat", "PageIdentity", "PageReader", "PageWriter"]
