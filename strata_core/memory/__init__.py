"""Host memory: regions, spans and who has how much."""
