"""The host agent: one process per host or pod that joins its sidecars' reports for the coordinator and passes orders back."""
