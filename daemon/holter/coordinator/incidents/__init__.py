"""The incidents of a run: opened, explained, kept, told to others."""
