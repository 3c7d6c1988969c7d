"""One process beside each rank: reads the page, keeps a history, watches the process, tells the coordinator. Imports no torch."""
