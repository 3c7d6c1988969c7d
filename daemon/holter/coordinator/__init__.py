"""The coordinator, the one process that sees all ranks: it takes in reports, judges across ranks, and keeps incidents."""
