"""One process a host or pod, between its sidecars and the coordinator: it joins what they say and passes on what they are told."""
