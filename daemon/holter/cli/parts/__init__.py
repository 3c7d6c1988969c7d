"""What several commands share, or one command needs beside itself: run directories as records, the memory of a project, the checks before a run."""
