"""Code that several commands share, or that one needs beside itself: run directories, the project's memory, checks before a run."""
