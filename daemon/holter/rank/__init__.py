"""The part that runs in the training process: it observes and writes to the shared page. It never raises, never blocks, never changes a number."""
