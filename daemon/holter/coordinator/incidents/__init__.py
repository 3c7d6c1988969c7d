"""The incidents of a run: opened, explained, stored, sent to others."""
