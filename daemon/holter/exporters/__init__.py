"""What others scrape or receive: the last state, rendered on request, and incidents as alerts."""
