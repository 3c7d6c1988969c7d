"""One process beside each rank: it reads the page, keeps a history, watches the process and reports to the coordinator. Imports no torch."""
